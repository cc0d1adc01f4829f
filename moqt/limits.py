"""How much one session may use. Each bound names the section of spec/moqt.md that asks for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Limits", "Pace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one session. Sizes are bytes, times are seconds."""

    setup_deadline: float = 5.0
    """For the peer's SETUP (moqt 21: CONTROL_MESSAGE_TIMEOUT)."""
    reply_deadline: float = 10.0
    """For a request and its reply (moqt 21)."""
    linger: float = 5.0
    """How long a request that is over waits for the peer's FIN, before its stream is stopped (moqt 3.4)."""
    data_deadline: float = 10.0
    """How long the data stream of a fetch may stay away once the peer has said all about the fetch: then it
    was reset before its header arrived.
    """
    suspicion: float = 0.5
    """The same, for any data stream that is due, when a stream was reset before it said whose it is."""
    max_announcements: int = 256
    """PUBLISH_NAMESPACEs of the peer that may stand at once; more are answered EXCESSIVE_LOAD (moqt 21). A
    relay that dials us announces what is below it.
    """
    max_prefixes: int = 64
    """SUBSCRIBE_NAMESPACEs of the peer that may stand at once; more are answered EXCESSIVE_LOAD."""
    max_namespaces: int = 65536
    """Namespaces that a SUBSCRIBE_NAMESPACE of ours may bring; at more it is cancelled (moqt 21)."""
    max_object_size: int = 64 * 1024 * 1024
    """A larger Object is refused by STOP_SENDING before any of it is buffered (moqt 18)."""
    receive_buffer: int = 8 * 1024 * 1024
    """Objects received and not yet taken by the application, for each subscription and fetch; beyond it,
    reading stops.
    """
    max_partial: int = 64 * 1024 * 1024
    """Bytes of Objects that have come in part, over all data streams; a stream that brings more is refused
    by STOP_SENDING, but for the one whose Object began first (moqt 21).
    """
    max_known_objects: int = 1 << 20
    """Locations remembered for each subscription, to find duplicates and contradictions (moqt 20.1)."""
    parked_streams: int = 64
    """Data streams that may wait for the SUBSCRIBE_OK that names their Track Alias (moqt 9)."""
    parked_deadline: float = 5.0
    """How long such a stream waits."""
    done_deadline: float = 5.0
    """How long to wait for streams that PUBLISH_DONE counts and that never came (moqt 4.2)."""
    max_filter_ranges: int = 32
    """Advertised MAX_FILTER_RANGES (moqt 8)."""
    max_request_updates: int = 16
    """Advertised MAX_REQUEST_UPDATES (moqt 3.2)."""
    max_auth_token_cache_size: int = 4096
    """Advertised MAX_AUTH_TOKEN_CACHE_SIZE (moqt 2.7)."""
    max_requests: int = 512
    """Requests of the peer that may be open at once; more are answered EXCESSIVE_LOAD (moqt 21)."""
    request_rate: float | None = None
    """Requests a second of the peer, once it has made as many as may be open; more are answered
    EXCESSIVE_LOAD (moqt 21). None: any.
    """
    max_fetches: int = 32
    """Fetches of the peer that may run at once (kvcs 10, R10e); more are answered EXCESSIVE_LOAD."""
    max_fills: int = 8
    """Fills of one subscription that may run at once; an update that asks for one more fails."""
    max_rendezvous: float = 30.0
    """How long a request may wait for a publisher, whatever its RENDEZVOUS_TIMEOUT says (moqt 5.1): meanwhile
    those who may have the Track are asked again and again.
    """
    max_behind: int = 64 * 1024 * 1024
    """Bytes of a relayed Track that may wait for one subscription of the peer; at more it is ended with
    TOO_FAR_BEHIND (moqt 9).
    """
    retry_after: float = 1.0
    """What EXCESSIVE_LOAD tells the peer to wait."""


class Pace:
    """How often something may happen: `rate` times a second, and `burst` times at once."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._left = self._burst
        self._at = -math.inf

    def take(self, now: float) -> bool:
        """Whether it may happen at the time `now`, in seconds; then it has."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
