"""The bound on the bytes that sessions make a relay hold: in each and in all (spec/moqt.md 21).

Counted is what waits to be sent (it is in the cache, and pinned there), what has come of Objects that are not
whole yet, and what has arrived and could not be read.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from moqt.errors import SessionCode
from moqt.stats import Stats

__all__ = ["PERIOD", "keep_within", "relieve"]

logger = logging.getLogger(__name__)

PERIOD: Final = 0.25
"""Seconds between looks: what comes meanwhile may be more than is allowed."""


async def keep_within(stats: Stats, *, each: int, total: int) -> None:
    """Look for ever, and `relieve`."""
    while True:
        await asyncio.sleep(PERIOD)
        relieve(stats, each=each, total=total)


def relieve(stats: Stats, *, each: int, total: int) -> None:
    """While a session holds more than `each` bytes, or all together more than `total`: the session that holds
    most loses the subscription that is furthest behind (TOO_FAR_BEHIND). If it is no slow reader, but sends
    what can't be completed, it is closed.
    """
    while sizes := {session: session.buffered for session in stats.sessions if not session.closed}:
        session = max(sizes, key=lambda session: sizes[session])
        size = sizes[session]
        if size <= each and sum(sizes.values()) <= total:
            return
        logger.warning("%s: %d bytes are held for the session: too many", session.connection.id, size)
        slow = session.scheduler.weight * 2 >= size
        if not (slow and session.publishing.shed()):
            session.abort(SessionCode.INTERNAL_ERROR, f"{size} bytes of what is not complete are held here")
