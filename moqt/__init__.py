"""Media over QUIC Transport (draft-ietf-moq-transport-22) for asyncio.

`connect` and `serve` make a `Session`; a `Track` in `Tracks` is what it offers, `subscribe` and `fetch` are
what it asks for. `publish` offers a Track unasked.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moqt.client import connect
from moqt.errors import (
    ConnectionLost,
    DeadlineExceeded,
    DoneCode,
    LocationTaken,
    MalformedTrack,
    MoqtError,
    ProtocolError,
    RequestCode,
    RequestRejected,
    ResetCode,
    SessionClosed,
    SessionCode,
    StreamReset,
    StreamStopped,
    UsageError,
)
from moqt.filters import GroupOrder, Location, LocationFilter, RangeFilter, RangeKind
from moqt.limits import Limits
from moqt.names import FullTrackName, TrackNamespace
from moqt.namespaces import Announcement, NamespaceEvent, NamespaceWatch
from moqt.quic.api import QuicOptions
from moqt.quic.udp import ListenLimits
from moqt.server import Server, serve
from moqt.session import Session
from moqt.stats import Stats
from moqt.track import StoredObject, Track
from moqt.tracks import Tracks
from moqt.uri import MoqtUri, Served
from moqt.wire import ObjectStatus, RangeStatus, Token

if TYPE_CHECKING:
    from moqt.offers import Offer, TracksWatch, publish
    from moqt.subscribing import (
        FetchStream,
        Fill,
        Item,
        RangeNotice,
        ReceivedObject,
        StreamEnd,
        Subscription,
        TrackStatusResult,
    )

__all__ = [
    "Announcement",
    "ConnectionLost",
    "DeadlineExceeded",
    "DoneCode",
    "FetchStream",
    "Fill",
    "FullTrackName",
    "GroupOrder",
    "Item",
    "Limits",
    "ListenLimits",
    "Location",
    "LocationFilter",
    "LocationTaken",
    "MalformedTrack",
    "MoqtError",
    "MoqtUri",
    "NamespaceEvent",
    "NamespaceWatch",
    "ObjectStatus",
    "Offer",
    "ProtocolError",
    "QuicOptions",
    "RangeFilter",
    "RangeKind",
    "RangeNotice",
    "RangeStatus",
    "ReceivedObject",
    "RequestCode",
    "RequestRejected",
    "ResetCode",
    "Served",
    "Server",
    "Session",
    "SessionClosed",
    "SessionCode",
    "Stats",
    "StoredObject",
    "StreamEnd",
    "StreamReset",
    "StreamStopped",
    "Subscription",
    "Token",
    "Track",
    "TrackNamespace",
    "TrackStatusResult",
    "Tracks",
    "TracksWatch",
    "UsageError",
    "connect",
    "publish",
    "serve",
]

_ON_FIRST_USE = {
    "moqt.offers": ("Offer", "TracksWatch", "publish"),
    "moqt.subscribing": (
        "FetchStream",
        "Fill",
        "Item",
        "RangeNotice",
        "ReceivedObject",
        "StreamEnd",
        "Subscription",
        "TrackStatusResult",
    ),
}


if not TYPE_CHECKING:  # A checker would take any name for one that is here.

    def __getattr__(name: str) -> Any:
        """What takes Objects in, and PUBLISH, is imported with its first use: a publisher lives beside an
        engine, and does without.
        """
        for module, names in _ON_FIRST_USE.items():
            if name in names:
                return getattr(import_module(module), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
