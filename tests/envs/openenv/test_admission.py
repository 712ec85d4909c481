"""Allowed host names and origins, and connections without a complete request, on a real socket."""

import asyncio
import contextlib
import socket

import pytest

uvicorn = pytest.importorskip("uvicorn")

from starlette.responses import PlainTextResponse  # noqa: E402

from trial_envs.openenv import admission  # noqa: E402
from trial_envs.openenv.admission import AllowedNames, TimedRequests  # noqa: E402

UPGRADE = (
    "GET /ws HTTP/1.1\r\n{}Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


async def answering(scope, receive, send):
    await receive()
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        await receive()
    else:
        await PlainTextResponse("ok")(scope, receive, send)


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


@contextlib.asynccontextmanager
async def sent(port, text):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text.encode())
    try:
        yield reader
    finally:
        writer.close()


ALLOWED = [
    "Host: localhost:{port}",
    "Host: [::1]:80",
    "Host: Games.Example",
    "Host: localhost\r\nOrigin: http://localhost:3000",
    "Host: localhost\r\nOrigin: https://page.example",
    "Host: games.example:7\r\nOrigin: http://games.example:7",
]
REFUSED = [
    "Host: evil.example",
    "Host: localhost.evil.example",
    "Host: [::1",
    "Host: ",
    "Host: localhost\r\nOrigin: https://evil.example",
    "Host: localhost\r\nOrigin: https://page.example.evil.example",
    "Host: localhost\r\nOrigin: http://games.example",
    "Host: localhost\r\nOrigin: null",
]


def test_only_named_hosts_and_origins_are_answered():
    async def conversation(port):
        for head in [*ALLOWED, *REFUSED]:
            for form in ("GET / HTTP/1.1\r\n{}\r\n", UPGRADE):
                async with sent(port, form.format(f"{head.format(port=port)}\r\n")) as reader:
                    statuses.append(int((await reader.readline()).split()[1]))

    statuses = []
    talk(conversation)
    assert statuses == [200, 101] * len(ALLOWED) + [403, 403] * len(REFUSED)


# Nothing, half of the head, half of the body, and half of a second request.
PARTS = [
    "",
    "GET / HTTP/1.1\r\nHost: loc",
    "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhal",
    "GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT",
]


def test_a_connection_without_a_complete_request_is_closed(monkeypatch):
    monkeypatch.setattr(admission, "REQUEST_SECONDS", 0.3)

    async def left(port, part):
        async with sent(port, part) as reader:
            await reader.read()  # until the server closes

    async def conversation(port):
        await asyncio.gather(*(left(port, part) for part in PARTS))
        async with sent(port, UPGRADE.format("Host: localhost\r\n")) as reader:
            await reader.readuntil(b"\r\n\r\n")
            with pytest.raises(TimeoutError):  # the session ends an open WebSocket
                await asyncio.wait_for(reader.read(), 1)

    talk(conversation)
    assert TimedRequests._waiting == {}
