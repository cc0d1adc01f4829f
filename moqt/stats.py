"""What the sessions of an endpoint are doing and have done: plain counters, for whoever watches."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from moqt.errors import SessionClosed, SessionCode, meaning

if TYPE_CHECKING:
    from moqt.session import Session

__all__ = ["Stats"]


class Stats:
    """Shared by sessions. What is counted only grows.

    `requests` are those of peers, by type, and `refused` those of them that were answered REQUEST_ERROR, by
    type and code; `done` are the PUBLISH_DONEs that were sent, by code; `ended` the sessions that have ended,
    by code.
    """

    def __init__(self) -> None:
        self.sessions: dict[Session, float] = {}
        """Those that live, and since when (of the event loop's clock)."""
        self.started = 0
        self.ended: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.done: Counter[str] = Counter()
        self._received = 0
        self._sent = 0

    @property
    def received(self) -> int:
        """UDP payload bytes, in all sessions, those that have ended included."""
        return self._received + sum(session.connection.traffic.received for session in self.sessions)

    @property
    def sent(self) -> int:
        """UDP payload bytes, in all sessions, those that have ended included."""
        return self._sent + sum(session.connection.traffic.sent for session in self.sessions)

    def begin(self, session: Session) -> None:
        """A session begins."""
        self.sessions[session] = asyncio.get_running_loop().time()
        self.started += 1

    def end(self, session: Session) -> None:
        """It has ended."""
        if self.sessions.pop(session, None) is None:
            return
        traffic = session.connection.traffic
        self._received += traffic.received
        self._sent += traffic.sent
        error = session.error
        # A code that a peer made up counts as what it means, so that there are few of them.
        name = "CONNECTION_LOST"
        if isinstance(error, SessionClosed):
            name = meaning(SessionCode, error.code).name
        self.ended[name] += 1
