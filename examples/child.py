"""A process that the demo started, as the demo sees it. What it says on its standard output is events, one
JSON object a line; what it is told on its standard input is orders, likewise. `examples.role` is the other
end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
LONGEST_LINE = 1 << 20  # octets
LAST_WORDS = 12  # lines of standard error that are kept
LEAVING = 3.0  # seconds that a process gets to leave, and again to end when it is terminated


class ChildFailed(Exception):
    """The process could not do its work, or ended before it was done: the message says why, and quotes its
    last words.
    """


class Child:
    """One process. `on_event` is called with each event before `until` looks at it, `on_line` with each line
    of standard error.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        on_event: Callable[[str, Event], None],
        on_line: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._on_event = on_event
        self._on_line = on_line
        self._last_words: deque[str] = deque(maxlen=LAST_WORDS)
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        threads: int = 1,
        on_event: Callable[[str, Event], None] = lambda _name, _event: None,
        on_line: Callable[[str, str], None] = lambda _name, _line: None,
    ) -> Child:
        """Run examples.`module` in a Python of its own, whose arithmetic uses `threads` threads."""
        # With more than its share of the processors it would take time from the other one and the network.
        variables = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", f"examples.{module}", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict.fromkeys(variables, str(threads)) | os.environ | {"PYTHONPATH": path},
            limit=LONGEST_LINE,
            start_new_session=True,  # so that Ctrl-C reaches the demo alone, and the demo ends its processes
        )
        return cls(name, process, on_event, on_line)

    def order(self, **order: object) -> None:
        """Tell the process what to do. That it has ended is for `until` to find out."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def until(self, *names: str) -> Event:
        """Take events up to the first that has one of `names`. Raises ChildFailed."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            event = _event(line)
            if event is None:
                self._last_words.append(_text(line))
                continue
            if event["event"] == "failed":
                raise ChildFailed(event["text"])
            self._on_event(self.name, event)
            if event["event"] in names:
                return event
        code = await self._process.wait()
        await self._listener
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        words = "".join(f"\n    {line}" for line in self._last_words)
        raise ChildFailed(
            f"the {self.name} (process {self.pid}) {how}" + (f"; its last words:{words}" if words else "")
        )

    async def __aenter__(self) -> Child:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the process: gently, but by force after an exception, or where it does not leave. Returns when
        it is gone.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        ends = [self._process.terminate, self._process.kill]
        if kind is not None:
            self._end(ends.pop(0))
        for end in ends:
            try:
                await asyncio.wait_for(self._process.wait(), LEAVING)
            except TimeoutError:
                self._end(end)
        await self._process.wait()
        await self._listener

    def _end(self, how: Callable[[], None]) -> None:
        with contextlib.suppress(ProcessLookupError):
            how()

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._last_words.append(_text(line))
            self._on_line(self.name, _text(line))


def _event(line: bytes) -> Event | None:
    """The event in a line; None for anything else, which some library must have printed."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip()
