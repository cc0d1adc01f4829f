"""The HTTP server of the pages: what it answers, and that nobody can keep it busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from moqt.relay import pages
from moqt.relay.pages import Page, serve_pages


def broken() -> Page:
    raise ZeroDivisionError("a mistake")


PAGES: dict[str, Callable[[], Page]] = {"/page": lambda: Page(b"text\n"), "/broken": broken}


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    async with serve_pages("127.0.0.1", 0, PAGES) as address:
        yield int(address.rpartition(":")[2])


async def ask(port: int, request: bytes, *, eof: bool = False) -> tuple[str, dict[str, str], bytes]:
    """Status line, headers and body of the answer to these bytes; all empty if there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        if eof:
            writer.write_eof()
        async with asyncio.timeout(10):
            answer = await reader.read()
    except ConnectionResetError:
        return "", {}, b""
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return status, dict(line.split(": ", 1) for line in lines), body


def get(path: str, method: str = "GET", more: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode()


@pytest.mark.parametrize("path", ["/page", "/page?x=1"])
async def test_a_page(path: str) -> None:
    async with served() as port:
        status, headers, body = await ask(port, get(path))
        assert status == "HTTP/1.1 200 OK"
        assert body == b"text\n"
        assert headers["Content-Length"] == "5"
        assert headers["Content-Type"] == "text/plain; charset=utf-8"
        _, headers, body = await ask(port, get(path, "HEAD"))
        assert (headers["Content-Length"], body) == ("5", b"")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/"), 404),
        (get("/page/"), 404),
        (get("/\x1b[2J"), 404),
        (get("/page", "POST", "Content-Length: 5\r\n") + b"12345", 405),
        (get("/broken"), 500),
        (b"\r\n\r\n", 400),
        (b"GET /page\r\n\r\n", 400),
        (b"GET /page SPDY/1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (get("/page", more="A: " + "a" * 10_000 + "\r\n"), 431),
        (b"G" * 10_000, 431),
    ],
)
async def test_what_is_no_page(request_: bytes, status: int, caplog: pytest.LogCaptureFixture) -> None:
    async with served() as port:
        line, headers, _ = await ask(port, request_)
        assert line.split()[1] == str(status)
        assert headers["Connection"] == "close"
        assert ("a mistake" in caplog.text) == (status == 500)
        assert (await ask(port, get("/page")))[2] == b"text\n"


async def test_a_request_that_breaks_off() -> None:
    async with served() as port:
        assert (await ask(port, b"GET /page HT", eof=True))[0].split()[1] == "400"


async def test_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "DEADLINE", 600.0)
    async with served() as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(pages.MAX_CONNECTIONS)]
        assert await ask(port, get("/page")) == ("", {}, b"")
        for _, writer in idle:
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(10):
            while (await ask(port, get("/page")))[2] != b"text\n":
                pass


async def test_who_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "DEADLINE", 0.2)
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()


async def test_the_port_is_taken() -> None:
    async with served() as port:
        with pytest.raises(OSError, match="in use"):
            async with serve_pages("127.0.0.1", port, PAGES):
                pass


async def test_ipv6() -> None:
    async with serve_pages("::1", 0, PAGES) as address:
        assert address.startswith("[::1]:")
