"""Media over QUIC Transport (draft-ietf-moq-transport-22) for asyncio.

`connect` and `serve` make a `Session`; a `Track` in `Tracks` is what it offers, `subscribe` and `fetch` are
what it asks for. `publish` offers a Track unasked.
"""

from moqt.client import connect
from moqt.errors import (
    ConnectionLost,
    DeadlineExceeded,
    DoneCode,
    LocationTaken,
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
from moqt.ledger import MalformedTrack
from moqt.limits import Limits
from moqt.names import FullTrackName, TrackNamespace
from moqt.offers import Offer, TracksWatch, publish
from moqt.quic.api import QuicOptions
from moqt.quic.udp import ListenLimits
from moqt.server import Server, serve
from moqt.session import Session
from moqt.stats import Stats
from moqt.subscribing import (
    Announcement,
    FetchStream,
    Fill,
    Item,
    NamespaceEvent,
    NamespaceWatch,
    RangeNotice,
    ReceivedObject,
    StreamEnd,
    Subscription,
    TrackStatusResult,
)
from moqt.track import StoredObject, Track, Tracks
from moqt.uri import MoqtUri, Served
from moqt.wire import ObjectStatus, RangeStatus, Token

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
