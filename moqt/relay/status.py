"""What a relay is doing, as one JSON object: its sessions, Tracks and cache."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from moqt.names import format_namespace, printable
from moqt.relay.feed import Feed
from moqt.relay.pages import Page
from moqt.relay.relay import Relay
from moqt.server import Server
from moqt.session import Session
from moqt.stats import Stats

__all__ = ["Status"]

MOST: Final = 1000
"""Sessions, Tracks and namespaces that are listed; beyond it they are only counted."""


@dataclass(slots=True)
class Status:
    """The relay of this process and how it is reached. `stats` is shared by the sessions of both sides."""

    relay: Relay
    server: Server
    stats: Stats
    connects: int = 0
    """How often an upstream was reached."""
    losses: int = 0
    """How often one was lost, or not reached."""
    draining: bool = False
    """Told to go."""
    started: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def page(self) -> Page:
        """The page /status."""
        return Page(json.dumps(self.report(), indent=1).encode(), "application/json")

    def health(self) -> Page:
        """The page /healthz: 200 while sessions are taken, and 503 from when the relay was told to go."""
        if self.draining:
            return Page(b"draining\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
        return Page(b"ok\n")

    def report(self) -> dict[str, Any]:
        """Times are in seconds, sizes in bytes. What a peer has said is escaped."""
        relay, sessions = self.relay, list(self.stats.sessions)
        cache, store = relay.cache, relay.store
        return {
            "draining": self.draining,
            "uptime": round(self._since(self.started), 1),
            "listening": self.server.addresses,
            "cache": {
                "bytes": cache.bytes,
                "limit": cache.limit,
                "objects": len(cache),
                "evicted": cache.evicted,
                "hits": cache.hits,
                "misses": cache.misses,
            },
            "cache_dir": None
            if store is None
            else {
                "bytes": store.bytes,
                "limit": store.limit,
                "unwritten": store.unwritten,
                "skipped": store.skipped,
            },
            "session_count": len(sessions),
            "sessions": [self._session(session) for session in sessions[:MOST]],
            "namespaces": [format_namespace(known) for known in relay.tracks.namespaces[:MOST]],
            "track_count": len(relay.feeds),
            "tracks": [_track(feed) for feed in list(relay.feeds.values())[:MOST]],
        }

    def _since(self, time: float) -> float:
        return asyncio.get_running_loop().time() - time

    def _session(self, session: Session) -> dict[str, Any]:
        traffic = session.connection.traffic
        return {
            "id": session.connection.id,
            "peer": session.connection.peer,
            "implementation": printable(session.peer_setup.implementation),
            "upstream": self.relay.is_upstream(session),
            "age": round(self._since(self.stats.sessions[session]), 1),
            "received": traffic.received,
            "sent": traffic.sent,
            "rtt": traffic.rtt and round(traffic.rtt, 6),
            "backlog": session.scheduler.weight,
            "buffered": session.buffered,
            "requests": session.serving,
            "subscriptions": session.publishing.subscriptions,
            "fetches": session.publishing.fetches,
            "announced": len(session.peer_namespaces),
        }


def _track(feed: Feed) -> dict[str, Any]:
    largest = feed.track.largest
    return {
        "name": str(feed.name),
        "largest": largest and [largest.group, largest.object],
        "subscribers": feed.track.subscribers,
        "publishers": [session.connection.id for session in feed.publishers],
        "fetching": feed.fetching,
    }
