"""The pages for those who watch a relay: a small HTTP server, for GET and HEAD only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

__all__ = ["Page", "serve_pages"]

logger = logging.getLogger(__name__)

MAX_HEAD: Final = 8192
"""Bytes of a request: its line and headers. A body is not read."""

DEADLINE: Final = 5.0
"""Seconds for a request and its answer."""

MAX_CONNECTIONS: Final = 16


@dataclass(frozen=True, slots=True)
class Page:
    """What is answered."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


@asynccontextmanager
async def serve_pages(host: str, port: int, pages: Mapping[str, Callable[[], Page]]) -> AsyncIterator[str]:
    """Serve `pages`, made anew each time, by their paths while the block runs; gives HOST:PORT. Raises
    OSError.
    """
    handler = _Handler(pages)
    try:
        server = await asyncio.start_server(handler.accept, host, port, limit=MAX_HEAD)
    except OSError as error:
        raise OSError(error.errno, f"the pages at {host}:{port}: {error.strerror}") from error
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        server.close()
        for task in list(handler.tasks):
            task.cancel()
        await asyncio.gather(*handler.tasks, return_exceptions=True)


class _Handler:
    def __init__(self, pages: Mapping[str, Callable[[], Page]]) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._pages = pages

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A client has connected."""
        if len(self.tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._run(reader, writer), name="page")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close."""
        try:
            async with asyncio.timeout(DEADLINE):
                writer.write(await self._answer(reader))
                await writer.drain()
                writer.write_eof()
                # The client closes first: if we did with bytes unread, it might not get to see the answer.
                while await reader.read(MAX_HEAD):
                    pass
        except (OSError, TimeoutError) as error:
            logger.debug("a request for a page broke: %s", error)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        except asyncio.IncompleteReadError:
            return _response(_error(HTTPStatus.BAD_REQUEST))
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response(_error(HTTPStatus.BAD_REQUEST))
        method, target, _ = words
        if method not in (b"GET", b"HEAD"):
            return _response(_error(HTTPStatus.METHOD_NOT_ALLOWED), "Allow: GET, HEAD\r\n")
        page = self._page(target.split(b"?", 1)[0].decode("latin-1"))
        return _response(page, with_body=method == b"GET")

    def _page(self, path: str) -> Page:
        make = self._pages.get(path)
        if make is None:
            return _error(HTTPStatus.NOT_FOUND)
        try:
            return make()
        except Exception:
            logger.exception("the page %s failed", path)
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR)


def _error(status: HTTPStatus) -> Page:
    return Page(f"{status.phrase}\n".encode(), status=status)


def _response(page: Page, headers: str = "", *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {page.status.value} {page.status.phrase}\r\n{headers}Content-Type: {page.kind}\r\n"
        f"Content-Length: {len(page.body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (page.body if with_body else b"")
