"""The options of `python -m moqt.relay`: one field each makes the flag, the variable and the key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from moqt.console import Connecting, host_and_port, options_of
from moqt.limits import Limits
from moqt.options import REQUIRED, option
from moqt.quic.api import QuicOptions
from moqt.quic.udp import ListenLimits
from moqt.relay.cache import CACHE_DIR_BYTES, LEAST_BYTES
from moqt.relay.relay import CACHE_BYTES
from moqt.uri import Served

__all__ = ["PREFIX", "Settings"]

PREFIX: Final = "MOQT_RELAY_"
"""Of the variables of the environment."""

REFUSALS: Final = 16
"""Request streams beyond --max-requests, so that one request too many is answered and not left to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Connecting):
    """What the relay was told. Sizes are bytes, times are seconds."""

    listen: str = option(
        REQUIRED, "HOST:PORT", "wait for sessions here", check=host_and_port, section="sessions"
    )
    cert: Path = option(REQUIRED, "FILE", "the certificate chain, PEM")
    key: Path = option(REQUIRED, "FILE", "its private key, PEM")
    served_host: tuple[str, ...] = option(
        (), "NAME", "serve URIs with this host alone, else INVALID_AUTHORITY; may be repeated (default: any)"
    )
    served_path: tuple[str, ...] = option(
        (), "PATH", "serve URIs with this path alone, else INVALID_PATH; may be repeated (default: any)"
    )
    policy: Path | None = option(
        None, "FILE", "who may do what, TOML; without one everybody may, so that only loopback is listened on"
    )
    upstream: tuple[str, ...] = option(
        (), "URI", "a relay to ask for what is not here; may be repeated: they are tried in order"
    )
    drain: float = option(
        5.0, "SECONDS", "go on so long with what is open when told to go, until the peers have left", least=0
    )
    cache_bytes: int = option(CACHE_BYTES, "N", "most bytes of Objects to keep", least=0, section="cache")
    cache_dir: Path | None = option(
        None, "DIR", "keep Objects on disk, too, and what is complete there across restarts"
    )
    cache_dir_bytes: int = option(
        CACHE_DIR_BYTES, "N", "most bytes that the files in DIR may have", least=LEAST_BYTES
    )
    linger: float = option(
        10.0, "SECONDS", "keep an upstream subscription so long when its last subscriber has left", least=0
    )

    metrics_port: int | None = option(
        None,
        "PORT",
        "serve /metrics (Prometheus), /status (JSON) and /healthz by HTTP at this TCP port; 0: a free one",
        least=0,
        most=65535,
        section="watching",
    )
    metrics_host: str = option(
        "127.0.0.1", "HOST", "address of that port; the pages are for whoever can reach it"
    )

    max_connections: int = option(
        1000,
        "N",
        "most connections; who comes then gets no answer",
        least=1,
        section="limits of all sessions",
    )
    max_connections_per_address: int = option(
        64,
        "N",
        "most connections from one IP address (IPv6: one /64); who comes then gets no answer",
        least=1,
    )
    retry: Literal["always", "load", "never"] = option(
        "always",
        "WHEN",
        "have clients prove their address first, which costs a round trip: always, under load (32 handshakes "
        "under way), or never",
    )
    handshake_deadline: float = option(5.0, "SECONDS", "for the QUIC and TLS handshake", least=0.1)
    max_buffered_total: int = option(
        1 << 30,
        "BYTES",
        "most bytes held for all sessions; then the one for which most is held pays, as for --max-buffered",
        least=1 << 20,
    )

    setup_deadline: float = option(
        Limits().setup_deadline,
        "SECONDS",
        "for the peer's SETUP, then the session ends with CONTROL_MESSAGE_TIMEOUT",
        least=0.1,
        section="limits of each session",
    )
    max_requests: int = option(
        Limits().max_requests,
        "N",
        "most requests open at once; more get EXCESSIVE_LOAD",
        least=1,
        most=1 << 16,
    )
    max_request_rate: float = option(
        200.0,
        "N",
        "most requests a second, beyond as many at once as may be open; more get EXCESSIVE_LOAD",
        least=1,
    )
    max_announcements: int = option(
        Limits().max_announcements,
        "N",
        "most namespaces that a peer announces (a relay: all that is below it); more get EXCESSIVE_LOAD",
        least=0,
    )
    max_prefixes: int = option(
        Limits().max_prefixes, "N", "most namespace prefixes watched; more get EXCESSIVE_LOAD", least=0
    )
    max_fetches: int = option(
        Limits().max_fetches, "N", "most fetches at once; more get EXCESSIVE_LOAD", least=0
    )
    max_fills: int = option(
        Limits().max_fills, "N", "most fills at once of one subscription; more get EXCESSIVE_LOAD", least=1
    )
    max_data_streams: int = option(
        QuicOptions().max_uni_streams,
        "N",
        "most data streams that a peer has open; it waits then",
        least=3,
        most=1 << 16,
    )
    max_object_size: int = option(
        16 << 20,
        "BYTES",
        "largest Object; the stream of a larger one is stopped with EXCESSIVE_LOAD",
        least=1,
    )
    receive_window: int = option(
        QuicOptions().max_data,
        "BYTES",
        "most bytes that arrived and were not read yet, a quarter of it for each stream; the peer waits then",
        least=1 << 16,
        most=1 << 30,
    )
    max_behind: int = option(
        Limits().max_behind,
        "BYTES",
        "most bytes that wait for a subscriber that is slow; then its subscription ends with TOO_FAR_BEHIND",
        least=1 << 16,
    )

    max_partial: int = option(
        Limits().max_partial,
        "BYTES",
        "most bytes of Objects that came in part; streams that bring more are stopped with EXCESSIVE_LOAD",
        least=1 << 20,
    )
    max_buffered: int = option(
        192 << 20,
        "BYTES",
        "most bytes held to be sent, of Objects in part, or unread; then the subscription most behind ends "
        "with TOO_FAR_BEHIND or, if it is the peer's sending, the session with INTERNAL_ERROR",
        least=1 << 20,
    )

    @property
    def served(self) -> Served:
        """Which URIs."""
        return Served(frozenset(map(str.lower, self.served_host)), frozenset(self.served_path))

    @property
    def limits(self) -> Limits:
        """For each session."""
        return Limits(
            setup_deadline=self.setup_deadline,
            max_requests=self.max_requests,
            request_rate=self.max_request_rate,
            max_announcements=self.max_announcements,
            max_prefixes=self.max_prefixes,
            max_fetches=self.max_fetches,
            max_fills=self.max_fills,
            max_object_size=self.max_object_size,
            max_behind=self.max_behind,
            max_partial=self.max_partial,
        )

    @property
    def listening(self) -> ListenLimits:
        """For all connections that come to us."""
        return ListenLimits(
            connections=self.max_connections,
            connections_per_address=self.max_connections_per_address,
            handshake_seconds=self.handshake_deadline,
            retry=self.retry,
        )

    @property
    def options(self) -> QuicOptions:
        """For each connection. Raises UsageError."""
        return replace(
            options_of(self),
            max_data=self.receive_window,
            max_stream_data=self.receive_window // 4,
            max_uni_streams=self.max_data_streams,
            max_bidi_streams=self.max_requests + REFUSALS,
        )
