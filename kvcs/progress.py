"""What the tasks of one reception share: news, times, the tasks themselves, and how to try again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from moqt.errors import ConnectionLost, MoqtError, RequestRejected, SessionClosed

__all__ = ["ATTEMPTS", "LEAST_PAUSE", "LayerTimes", "Progress", "insist"]

logger = logging.getLogger(__name__)

ATTEMPTS: Final = 3
"""How often something may fail in a row, without bringing anything, before a publication is given up."""

LEAST_PAUSE: Final = 0.1
"""Seconds before a request is repeated, at least, however soon the peer allows it."""


@dataclass(slots=True)
class LayerTimes:
    """When a layer came, in seconds of the event loop's clock."""

    first_object: float
    usable: float | None = None


class Progress:
    """What the tasks of one reception share: `news` is set when something happened that the consumer may wait
    for, `last` is when something came last, in seconds of the event loop's clock.
    """

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.last = asyncio.get_running_loop().time()
        self.rejected = 0
        self.reason = ""
        """Why something does not come, as far as it is known."""
        self.cause: Exception | None = None
        """What was raised then, if anything was."""
        self.left = False
        """Whether the publisher has left: all that fails afterwards follows from that."""
        self.times: dict[tuple[int, int], LayerTimes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._bug: BaseException | None = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` until `close`, or until the task is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel all tasks and wait for their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raise what no task should have raised."""
        if self._bug is not None:
            raise self._bug

    def came(self) -> float:
        """Something came; the time."""
        self.last = asyncio.get_running_loop().time()
        return self.last

    def placed(self, segment: int, layer: int, usable: bool) -> None:
        """An Object was verified and placed."""
        now = self.came()
        times = self.times.setdefault((segment, layer), LayerTimes(now))
        if usable:
            times.usable = now
            self.news.set()

    def note(self, error: Exception) -> None:
        """An error of the network or the peer: something else may still bring what is missing."""
        logger.info("%s", error)
        if not self.left:
            self.because(str(error), error)

    def note_leaving(self) -> None:
        """The publisher has left: PUBLISH_DONE with GOING_AWAY."""
        self.because("the publisher left before all was published (PUBLISH_DONE GOING_AWAY)")
        self.left = True

    def because(self, reason: str, cause: Exception | None = None) -> None:
        """Take this for the reason."""
        self.reason, self.cause = reason, cause

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._bug = error
            self.news.set()


async def insist(
    attempt: Callable[[], Coroutine[Any, Any, bool]],
    brought: Callable[[], int],
    note: Callable[[Exception], None],
) -> None:
    """Await `attempt` until it returns True, and again when it returns False or was broken off, unless
    ATTEMPTS in a row brought nothing: `brought` grows when something came.

    A peer that is busy (RequestRejected with a time to retry) is asked again without being counted, so bound
    the time. `note` gets what went wrong. Raises what the last attempt raised; at once where trying again is
    of no use.
    """
    failures = 0
    while True:
        before = brought()
        error: MoqtError | None = None
        try:
            if await attempt():
                return
        except RequestRejected as rejection:
            if rejection.retry_after is None:
                raise
            note(rejection)
            await asyncio.sleep(max(rejection.retry_after, LEAST_PAUSE))
            continue
        except (SessionClosed, ConnectionLost):
            raise
        except MoqtError as broken:
            error = broken
            note(broken)
        failures = 1 if brought() > before else failures + 1
        if failures >= ATTEMPTS:
            if error is not None:
                raise error
            return
