"""An event loop whose clock jumps: a test that waits an hour takes no time and gives the same result each
run.

`loop.time()` starts at 0.0 and moves only when nothing is ready to run: then it jumps to the next timer. When
there is no next timer either, everything waits for ever, and `EverythingWaits` says who waits where. Sockets
don't know of this time: use the loop with `moqt.quic.link` and the like.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

__all__ = ["EverythingWaits", "VirtualLoop", "run_virtual"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

DAY = 86400.0


class EverythingWaits(RuntimeError):
    """No task can go on and no timer is set, or a virtual day has passed: the test hangs."""


class _JumpingSelector(selectors.DefaultSelector):
    """Where an ordinary selector would wait for a timer, it moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.limit = DAY
        self.threads = 0
        self.loop: asyncio.AbstractEventLoop | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self.threads:
            return super().select(None)
        if timeout is None:
            raise EverythingWaits(f"everything waits for ever at {self.now:.6f} s:\n{_who_waits(self.loop)}")
        self.now += timeout
        if self.now > self.limit:
            self.limit = self.now + DAY
            raise EverythingWaits(f"a virtual day has passed; these still wait:\n{_who_waits(self.loop)}")
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop with the jumping clock."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._jumping.loop = self

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        # A thread works in real time: the clock stands still until it is done.
        future = super().run_in_executor(executor, func, *args)
        self._jumping.threads += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._jumping.threads += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._jumping.threads -= 1

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._jumping.threads -= 1


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a VirtualLoop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def _who_waits(loop: asyncio.AbstractEventLoop | None) -> str:
    lines = []
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        where = []
        step: Any = task.get_coro()
        while step is not None:
            frame = getattr(step, "cr_frame", None) or getattr(step, "gi_frame", None)
            if frame is None:
                break
            code = frame.f_code
            where.append(f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})")
            step = getattr(step, "cr_await", None) or getattr(step, "gi_yieldfrom", None)
        lines.append(f"  {task.get_name()}: " + " > ".join(where))
    return "\n".join(lines) or "  no task at all"
