"""The commands `status` and `logs`: what they say where no cluster is, and what they make of what one tells."""

from __future__ import annotations

import io
import json
import socket
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from rich.console import Console

from trial_ray.cli import main
from trial_ray.cli.cluster import runs_table
from trial_ray.errors import ClusterError, InfrastructureError, UserInputError
from trial_ray.runs import dashboard
from trial_ray.runs.cluster_runs import ActorState, ClusterRun, choose_run, log_name
from trial_ray.runs.dashboard import Dashboard
from trial_ray.runs.status import LOSS, RunStatus


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def answering():
    """Start an HTTP server that answers every request so; returns its address."""
    servers = []

    def start(status: int, body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("command", [["status"], ["logs", "run"]])
@pytest.mark.parametrize(
    ("environment", "address", "told"),
    [
        ({}, [], "Expected the address of a Ray dashboard"),
        ({}, ["127.0.0.1:8265"], "such as http://127.0.0.1:8265; found '127.0.0.1:8265'"),
        ({}, ["http://127.0.0.1:1"], "no Ray dashboard answers at http://127.0.0.1:1"),
        ({}, ["http://"], "no Ray dashboard"),
        ({}, ["http://[:1"], "no Ray dashboard"),
        ({}, ["http://\x1b ü:1/\n"], "no Ray dashboard"),
        ({"RAY_ADDRESS": "auto"}, [], "found 'auto'"),
        ({"RAY_ADDRESS": "127.0.0.1:6379"}, [], "found '127.0.0.1:6379'"),
        ({"RAY_ADDRESS": "http://127.0.0.1:1"}, [], "http://127.0.0.1:1"),
        ({"RAY_ADDRESS": "127.0.0.1:6379", "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:2"}, [], "http://127.0.0.1:2"),
    ],
)
def test_without_a_cluster_a_sentence_says_what_is_missing(command, environment, address, told, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([*command, *address]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("status", "body"), [(200, b"hello"), (200, b"[1]"), (200, b"\xff"), (404, b""), (200, b'{"ray_version')]
)
def test_another_program_is_no_dashboard(answering, status, body):
    with pytest.raises(ClusterError, match="is no Ray dashboard"):
        Dashboard(answering(status, body)).version()


def test_what_the_cluster_cannot_answer_is_said_in_a_line(answering):
    body = json.dumps({"result": False, "msg": "Failed to query\n the node", "data": None}).encode()
    with pytest.raises(InfrastructureError, match="cannot answer: Failed to query the node"):
        Dashboard(answering(500, body)).rows("actors", job_id="01000000")


def test_a_server_that_never_answers_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(dashboard, "ANSWER_S", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ClusterError, match="no Ray dashboard answers"):
            Dashboard(address).version()


ODD = "[bold]run\x1b[31m"
RUNS = [
    ClusterRun("01000000", "", "10.0.0.1", "7", RunStatus("/a/run", state="ended", total=3)),
    ClusterRun("02000000", "second", "10.0.0.1", "8", RunStatus("/b/run", state="done", done=3, total=3)),
    ClusterRun("03000000", "", "10.0.0.1", "9", RunStatus("/b/run", state="running", restarts=2, faults="a\x1bb")),
    ClusterRun(
        "04000000",
        "",
        "10.0.0.1",
        "10",
        RunStatus(f"/c/{ODD}", "running", done=1, total=3, seconds=120.0, metrics={LOSS: 0.25}),
        (
            ActorState("engine 0", "ALIVE", "10.0.0.2", 5, ""),
            ActorState("engine 1", "ALIVE", "10.0.0.2", 6, ""),
            ActorState("engine 2", "DEAD", "10.0.0.3", 7, "its node died"),
            ActorState("learner 0", "PENDING_CREATION", "", 0, ""),
        ),
    ),
]


def test_a_run_is_chosen_by_name_folder_job_or_submission():
    assert choose_run(RUNS, "/b/run").job == "03000000"  # the newest of those that went on in it
    assert choose_run(RUNS, "second").job == "02000000"
    assert choose_run(RUNS, "01000000").status.run == "/a/run"
    assert choose_run(RUNS, ODD).job == "04000000"
    for wanted in ("run", "nothing"):
        with pytest.raises(UserInputError, match="/a/run, /b/run"):
            choose_run(RUNS, wanted)
    with pytest.raises(UserInputError, match="Runs there: none"):
        choose_run([], "run")


def test_the_table_shows_names_as_they_are_and_actors_by_node():
    shown = io.StringIO()
    Console(file=shown, width=160, force_terminal=False).print(runs_table(RUNS))
    lines = shown.getvalue().splitlines()
    [row] = [line for line in lines if "[bold]run␛[31m" in line]
    for part in ("running", "1 of 3 iterations", "120.0 s", "4 min", "loss 0.25", "engine: 2 on 10.0.0.2"):
        assert part in row
    assert "learner" not in shown.getvalue()


def test_actors_that_do_not_live_and_what_was_replaced_are_warnings():
    assert RUNS[3].warnings() == ["engine 2 is dead: its node died", "learner 0 is pending creation"]
    assert RUNS[2].warnings() == ["restarts from a checkpoint: 2", "a\x1bb"]
    known = json.loads(json.dumps(RUNS[3].to_dict()))
    assert (known["name"], known["job"], known["seconds_left"], known["done"]) == (ODD, "04000000", 240.0, 1)
    assert [actor["name"] for actor in known["actors"]] == ["engine 0", "engine 1", "engine 2", "learner 0"]


def test_names_that_other_machines_give_become_no_path():
    assert log_name("engine 0", "10.0.0.1", "12", suffix="out") == "engine-0-10.0.0.1-12.out"
    for word in ("../../etc/passwd", "/etc/passwd", "a\0b\n", "ü/.."):
        assert "/" not in log_name(word, word, suffix=word)
        assert log_name(word, "", suffix="err").isprintable()
