"""What the aiomoqt peer scripts share: their output, their arguments, and when they stop.

The scripts run inside a virtual environment of their own (Python 3.12 or newer, aiomoqt 0.13.3), as
processes that a test starts: nothing here imports moqt or kvcs. On stdout there is one JSON object a line,
each with an "event"; what aiomoqt logs goes to stderr. A peer ends with its work, with SIGTERM, or when its
stdin is closed, so that no peer outlives the test that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import stat
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from aiomoqt.client import MOQTClient
from aiomoqt.utils.logger import set_log_level
from aiomoqt.utils.url import parse_relay_url

DRAFT = 22

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_INCOMPLETE = 3


def emit(event: str, **fields: Any) -> None:
    """One line on stdout."""
    print(json.dumps({"event": event, **fields}), flush=True)


def emit_object(source: str, item: Any, group: int, subgroup: int | None) -> None:
    """An Object as aiomoqt hands it over; a status Object has length 0."""
    payload = bytes(item.payload or b"")
    emit(
        "object",
        source=source,
        group=group,
        object=item.object_id,
        subgroup=subgroup,
        status=int(item.status or 0),
        priority=item.publisher_priority,
        length=len(payload),
        sha256=hashlib.sha256(payload).hexdigest(),
    )


def namespace(text: str) -> tuple[bytes, ...]:
    """A Track Namespace from its fields in hex, separated by commas."""
    return tuple(bytes.fromhex(field) for field in text.split(",")) if text else ()


def in_hex(fields: tuple[bytes, ...]) -> list[str]:
    """A Track Namespace as JSON."""
    return [field.hex() for field in fields]


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """What every peer takes."""
    parser.add_argument("--debug", action="store_true", help="aiomoqt's log, on stderr")


def client_arguments(parser: argparse.ArgumentParser) -> None:
    """What every peer that dials takes."""
    common_arguments(parser)
    parser.add_argument("uri", help="moqt://host:port/path")
    parser.add_argument("--ca", required=True, help="the authority that signed the server's certificate")
    parser.add_argument(
        "--namespace", required=True, type=namespace, help="fields in hex, separated by commas"
    )
    parser.add_argument("--name", required=True, help="the Track Name, as text")
    parser.add_argument(
        "--timeout", type=float, default=30.0, help="seconds for everything (default: %(default)s)"
    )


@contextlib.asynccontextmanager
async def connect(options: argparse.Namespace) -> AsyncIterator[Any]:
    """A session over raw QUIC at draft-22, with the server's certificate verified."""
    target = parse_relay_url(options.uri)
    client = MOQTClient(
        target.host, target.port, path=target.path, use_quic=True, ca_file=options.ca, supported_drafts=DRAFT
    )
    async with client.connect() as session:
        await session.client_session_init()
        emit("connected", draft=session.negotiated_draft)
        yield session


async def _until_stopped(work: Coroutine[Any, Any, int]) -> int:
    """The work's status; EXIT_DONE when SIGTERM or the end of stdin came first and it has cleaned up."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)

    def read_stdin() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        loop.add_reader(0, read_stdin)
    await asyncio.wait({task})
    return EXIT_DONE if task.cancelled() else task.result()


def run(work: Coroutine[Any, Any, int], *, debug: bool) -> int:
    """Runs a peer and returns its exit status; an exception is a line on stdout too."""
    set_log_level(logging.DEBUG if debug else logging.WARNING)
    try:
        return asyncio.run(_until_stopped(work))
    except Exception as error:
        emit(
            "error",
            kind=type(error).__name__,
            code=int(getattr(error, "error_code", -1)),
            reason=str(getattr(error, "reason", "") or error),
        )
        return EXIT_FAILED
