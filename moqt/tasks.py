"""The tasks of one session, and what becomes of the session when one fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from moqt.errors import (
    ConnectionLost,
    ProtocolError,
    SessionClosed,
    SessionCode,
    StreamReset,
    StreamStopped,
)
from moqt.quic.api import ConnectionClosed

__all__ = ["Tasks"]

logger = logging.getLogger(__name__)


class Tasks:
    """Those of the session `name`, which `abort` closes with a code and a reason."""

    def __init__(self, name: str, abort: Callable[[int, str], None]) -> None:
        self._name = name
        self._abort = abort
        self._all: set[asyncio.Task[None]] = set()
        self._readers: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many run."""
        return len(self._all)

    def spawn(self, coroutine: Coroutine[Any, Any, None], what: str, *, reads: bool) -> asyncio.Task[None]:
        """Run `coroutine`; `reads` tells that it reads what the peer sends."""
        task = asyncio.create_task(self._guard(coroutine, what), name=f"{self._name} {what}")
        # One that is cancelled before its first step never came to awaiting `coroutine`.
        task.add_done_callback(lambda _: coroutine.close())
        for known in (self._all, self._readers) if reads else (self._all,):
            known.add(task)
            task.add_done_callback(known.discard)
        return task

    def discard(self, task: asyncio.Task[None]) -> None:
        """It ends by itself."""
        self._all.discard(task)

    def cancel(self, *, readers: bool = True) -> list[asyncio.Task[None]]:
        """Cancel all, or all but those that read, and return them."""
        tasks = list(self._all if readers else self._all - self._readers)
        for task in tasks:
            task.cancel()
        return tasks

    async def _guard(self, coroutine: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await coroutine
        except (ConnectionClosed, SessionClosed, ConnectionLost):
            pass  # The session tells everyone.
        except (StreamReset, StreamStopped) as error:
            logger.debug("%s: %s: %s", self._name, what, error)
        except ProtocolError as error:
            self._abort(error.code, error.reason)
        except Exception:
            logger.exception("%s: %s failed", self._name, what)
            self._abort(SessionCode.INTERNAL_ERROR, "internal error")
