"""MOQT draft-22 between bytes and values: no asyncio, no clock, no I/O.

Values are frozen dataclasses. Encoders raise UsageError for a value that the protocol does not allow;
decoders take bytes as they arrive and raise ProtocolError for what a peer must not send.
"""

from moqt.filters import Properties
from moqt.wire.decoder import MessageDecoder
from moqt.wire.messages import (
    REQUESTS,
    UNKNOWN_STREAM_COUNT,
    Fetch,
    FetchOk,
    Goaway,
    Message,
    Namespace,
    NamespaceDone,
    Publish,
    PublishDone,
    PublishNamespace,
    PublishSkipped,
    PublishStateNotify,
    Redirect,
    Request,
    RequestError,
    RequestOk,
    RequestUpdate,
    Setup,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    TrackStatus,
    encode,
)
from moqt.wire.parameters import Parameters
from moqt.wire.profile import DRAFT_22, FillForm, ParameterType, Profile, Scope
from moqt.wire.properties import (
    PropertyType,
    check_object_properties,
    check_track_properties,
    decode_properties,
    encode_properties,
    get,
    unknown_mandatory_properties,
)
from moqt.wire.setup import SetupOptions
from moqt.wire.tokens import AliasType, Token
from moqt.wire.vi64 import Reader, encode_vi64, read_vi64, size

__all__ = [
    "DRAFT_22",
    "REQUESTS",
    "UNKNOWN_STREAM_COUNT",
    "AliasType",
    "Fetch",
    "FetchOk",
    "FillForm",
    "Goaway",
    "Message",
    "MessageDecoder",
    "Namespace",
    "NamespaceDone",
    "ParameterType",
    "Parameters",
    "Profile",
    "Properties",
    "PropertyType",
    "Publish",
    "PublishDone",
    "PublishNamespace",
    "PublishSkipped",
    "PublishStateNotify",
    "Reader",
    "Redirect",
    "Request",
    "RequestError",
    "RequestOk",
    "RequestUpdate",
    "Scope",
    "Setup",
    "SetupOptions",
    "Subscribe",
    "SubscribeNamespace",
    "SubscribeOk",
    "SubscribeTracks",
    "Token",
    "TrackStatus",
    "check_object_properties",
    "check_track_properties",
    "decode_properties",
    "encode",
    "encode_properties",
    "encode_vi64",
    "get",
    "read_vi64",
    "size",
    "unknown_mandatory_properties",
]
