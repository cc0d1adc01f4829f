"""Keeps a relay connected to an upstream relay: several addresses, tried in order, and again when it is lost
(moqt 16 for GOAWAY).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from moqt.errors import MoqtError
from moqt.relay.relay import Relay
from moqt.session import Session

__all__ = ["BACK_OFF", "Upstream", "keep_upstream"]

logger = logging.getLogger(__name__)

BACK_OFF = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts to reach any upstream; the last is repeated."""

STEADY = 10.0
"""Seconds that a session must last; else the next upstream of the list is tried before this one again: a peer
may accept a connection and then deny us a session.
"""

LEAVING = 10.0
"""Seconds that a session which the upstream asked us to leave may live after the next one is up."""

Dial = Callable[[str], AbstractAsyncContextManager[Session]]
"""Connects to a URI; the session must offer `Relay.upward` and announce it."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """What happened: connected to `uri`, or, with an `error`, lost or not reached."""

    uri: str
    error: Exception | None = None


async def keep_upstream(
    relay: Relay, uris: Sequence[str], dial: Dial, tell: Callable[[Upstream], None]
) -> None:
    """Have one upstream session at a time, for ever. An upstream that says GOAWAY is left when the next
    session is up: at the URI that it names, or by the list.
    """
    relay.reconnecting = True
    tasks: set[asyncio.Task[None]] = set()
    old: asyncio.Task[None] | None = None
    named = ""
    attempt = first = 0
    loop = asyncio.get_running_loop()
    try:
        while True:
            in_turn = [*uris[first:], *uris[:first]]
            for uri in [named, *in_turn] if named else in_turn:
                current = _Connection(relay, uri, dial, tell)
                task = asyncio.create_task(current.run(), name=f"upstream {uri}")
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                if await current.up:
                    break
            else:
                named = ""
                await asyncio.sleep(BACK_OFF[min(attempt, len(BACK_OFF) - 1)])
                attempt += 1
                continue
            if old is not None:
                loop.call_later(LEAVING, old.cancel)
                old = None
            began = loop.time()
            named = await current.leave
            steady = loop.time() >= began + STEADY
            first = 0 if steady or uri not in uris else (uris.index(uri) + 1) % len(uris)
            if current.lost:
                attempt = 0 if steady else attempt
                await asyncio.sleep(BACK_OFF[min(attempt, len(BACK_OFF) - 1)])
                attempt += 1
            else:
                old = task  # It lives on until its successor is up.
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Connection:
    """One session with an upstream. `up` tells whether it was reached, `leave` where to go next ("": by the
    list) once it is `lost` or asks us to leave.
    """

    def __init__(self, relay: Relay, uri: str, dial: Dial, tell: Callable[[Upstream], None]) -> None:
        loop = asyncio.get_running_loop()
        self.up: asyncio.Future[bool] = loop.create_future()
        self.leave: asyncio.Future[str] = loop.create_future()
        self.lost = False
        self._relay = relay
        self._uri = uri
        self._dial = dial
        self._tell = tell

    async def run(self) -> None:
        error: Exception | None = None
        try:
            async with self._dial(self._uri) as session, self._relay.upstream(session):
                self._tell(Upstream(self._uri))
                self.up.set_result(True)
                asked = asyncio.ensure_future(session.goaway_received.wait())
                ended = asyncio.ensure_future(session.wait_closed())
                try:
                    await asyncio.wait((asked, ended), return_when=asyncio.FIRST_COMPLETED)
                    if not ended.done():
                        goaway = session.peer_goaway
                        self.leave.set_result(goaway.uri if goaway else "")
                    error = await ended
                finally:
                    asked.cancel()
                    ended.cancel()
        except MoqtError as failure:
            error = failure
        finally:
            if not self.up.done():
                self.up.set_result(False)
            self.lost = True
            if not self.leave.done():
                self.leave.set_result("")
        self._tell(Upstream(self._uri, error))
