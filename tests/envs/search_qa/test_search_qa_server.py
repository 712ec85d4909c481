"""A server with Search-R1's protocol: its passages are shown, and a fault ends the episode with an error that names it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trial_envs.errors import RemoteEnvError, ServerAnswerError, ServerConnectionError, ServerTimeoutError
from trial_envs.search_qa.corpus import write_corpus
from trial_envs.search_qa.env import SearchQAEnv
from trial_envs.search_qa.server import MAX_BYTES, RetrievalServer
from trial_envs.search_qa.world import Question

DOCUMENTS = [{"id": str(n), "contents": f'"Title {n}"\nText {n}.\nMore.'} for n in range(3)]
SHOWN = "[1] Title 0: Text 0.\nMore.\n[2] Title 1: Text 1.\nMore."


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        server.requests.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        if server.answer is None or (server.stall == "silent" and server.ended.wait(60)):
            return
        self.send_response(server.status)
        self.end_headers()
        while server.stall == "slow" and not server.ended.wait(0.02):
            self.wfile.write(b" ")
        self.wfile.write(server.answer)


@pytest.fixture
def server():
    """A server that gives every request the same answer, and keeps the requests.

    If ``answer``, the bytes of the body, is ``None``, the connection is closed without an answer. If ``stall`` is ``"silent"``,
    nothing is sent until the test ends; if it is ``"slow"``, single bytes are sent until then.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.answer, server.status, server.stall = b'{"result": [[]]}', 200, ""
        server.requests, server.ended = [], threading.Event()
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        yield server
        server.ended.set()
        server.shutdown()


@pytest.fixture
def env(server, tmp_path):
    """Questions without a corpus."""
    folder = write_corpus(tmp_path / "index", (), {"train": [Question("Which?", ("red",), "nq")]}, {})
    env = SearchQAEnv(data=folder, retriever=server.url, top_k=2, timeout_s=10.0)
    env.reset(seed=0)
    return env


@pytest.mark.parametrize("documents", [DOCUMENTS, [{"document": document, "score": 1.5} for document in DOCUMENTS]])
def test_passages_of_the_server_are_shown(server, env, documents):
    server.answer = json.dumps({"result": [documents]}).encode()
    assert env.step("search[red lamps]")[0] == SHOWN
    assert server.requests == [("/retrieve", {"queries": ["red lamps"], "topk": 2, "return_scores": True})]
    assert env.step("answer[red]")[1] == 1.0


def test_an_address_with_the_path_is_not_extended(server):
    assert RetrievalServer(f"{server.url}/retrieve/", 10.0).search("x", 1) == []
    assert server.requests[0][0] == "/retrieve"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{}",
        b'{"result": []}',
        b'{"result": [[], []]}',
        b'{"result": [[{}]]}',
        b'{"result": [7]}',
        b'{"result": [[{"document": {"contents": 3}}]]}',
        b'{"result": [{"a": 1}]}',
        b"\xff",
        b"[" * 10**6,
        b" " * (MAX_BYTES + 1),
    ],
    ids=lambda answer: ascii(answer[:40]),
)
def test_wrong_answers_are_refused(server, env, answer):
    server.answer = answer
    with pytest.raises(ServerAnswerError, match=server.url):
        env.step("search[x]")
    server.answer = b'{"result": [[]]}'
    env.reset(seed=0)
    assert env.step("search[x]")[0] == "No passage has any of these words."


def test_an_error_of_the_server_is_shown(server, env):
    server.answer, server.status = b"no index is loaded", 500
    with pytest.raises(RemoteEnvError, match="500: b'no index is loaded'"):
        env.step("search[x]")


@pytest.mark.parametrize("stall", ["silent", "slow"])
def test_a_request_ends_at_its_deadline(server, env, stall):
    """The server answers only after the test, so that a request without a deadline would never end."""
    server.stall = stall
    hurried = SearchQAEnv(data=env._data, retriever=server.url, timeout_s=0.2)
    hurried.reset(seed=0)
    with pytest.raises(ServerTimeoutError, match=r"within 0\.2 s"):
        hurried.step("search[x]")


def test_a_lost_connection_is_reported(server, env):
    server.answer = None
    with pytest.raises(ServerConnectionError):
        env.step("search[x]")
    with pytest.raises(ServerConnectionError):  # nothing listens there
        RetrievalServer("http://127.0.0.1:1", 10.0).search("x", 1)
