"""Allowed host names and origins, and connections without a complete request, on a real socket."""

from __future__ import annotations

import asyncio
import socket

import pytest

uvicorn = pytest.importorskip("uvicorn")

from trial_envs.openenv import admission  # noqa: E402
from trial_envs.openenv.admission import AllowedNames, TimedRequests  # noqa: E402

GET = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPGRADE = (
    "GET /ws HTTP/1.1\r\n{}Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


async def answering(scope, receive, send):
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
    elif scope["type"] == "http":
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


def talk(conversation):
    """Run ``conversation(port)`` while the server runs."""

    async def main():
        app = AllowedNames(answering, hosts=["games.example"], origins=["https://page.example"])
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", http=TimedRequests))
            serving = asyncio.create_task(server.serve([listener]))
            try:
                return await asyncio.wait_for(conversation(listener.getsockname()[1]), 60)
            finally:
                server.should_exit = True
                await serving

    return asyncio.run(main())


async def status(port: int, request: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])


CALLS = [
    ({"Host": "localhost:{port}"}, True),
    ({"Host": "[::1]:80"}, True),
    ({"Host": "Games.Example"}, True),
    ({"Host": "evil.example"}, False),
    ({"Host": "localhost.evil.example"}, False),
    ({"Host": "[::1"}, False),
    ({"Host": ""}, False),
    ({"Host": "localhost", "Origin": "http://localhost:3000"}, True),
    ({"Host": "localhost", "Origin": "https://page.example"}, True),
    ({"Host": "games.example:7", "Origin": "http://games.example:7"}, True),
    ({"Host": "localhost", "Origin": "https://evil.example"}, False),
    ({"Host": "localhost", "Origin": "https://page.example.evil.example"}, False),
    ({"Host": "localhost", "Origin": "http://games.example"}, False),
    ({"Host": "localhost", "Origin": "null"}, False),
]


def test_only_named_hosts_and_origins_are_answered():
    async def conversation(port):
        statuses = []
        for headers, _ in CALLS:
            head = "".join(f"{name}: {value.format(port=port)}\r\n" for name, value in headers.items())
            statuses.append(
                [await status(port, f"GET / HTTP/1.1\r\n{head}\r\n"), await status(port, UPGRADE.format(head))]
            )
        return statuses

    assert talk(conversation) == [[200, 101] if allowed else [403, 403] for _, allowed in CALLS]


PARTS = {
    "nothing": "",
    "half of the head": "GET / HTTP/1.1\r\nHost: loc",
    "half of the body": "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhal",
    "half of a second request": GET + "GET / HT",
}


def test_a_connection_without_a_complete_request_is_closed(monkeypatch):
    monkeypatch.setattr(admission, "REQUEST_SECONDS", 0.3)

    async def left(port, sent):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent.encode())
        await reader.read()  # until the server closes
        writer.close()

    async def conversation(port):
        await asyncio.gather(*(left(port, sent) for sent in PARTS.values()))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(UPGRADE.format("Host: localhost\r\n").encode())
        await reader.readuntil(b"\r\n\r\n")
        with pytest.raises(TimeoutError):  # the session ends an open WebSocket
            await asyncio.wait_for(reader.read(), 1)
        writer.close()

    talk(conversation)
    assert TimedRequests._waiting == {}
