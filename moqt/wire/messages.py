"""Control messages (moqt 4): one dataclass each, whose fields stand in the order of the wire.

`encode` and `MessageDecoder` know messages only by their fields: each field name has one codec in `_FIELDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, get_args

from moqt.errors import RequestCode, UsageError
from moqt.filters import MAX_VARINT, Location, Properties
from moqt.names import FullTrackName, TrackNamespace
from moqt.wire.parameters import NO_PARAMETERS, Parameters, decode_parameters, encode_parameters
from moqt.wire.profile import DRAFT_22, Profile, Scope
from moqt.wire.properties import decode_properties, encode_properties, track_property_fault
from moqt.wire.setup import NO_OPTIONS, SetupOptions, decode_setup_options, encode_setup_options
from moqt.wire.vi64 import (
    Octets,
    Reader,
    encode_location,
    encode_namespace,
    encode_prefixed,
    encode_vi64,
)

# moqt 18
MAX_BODY_LENGTH: Final = 65535
MAX_REASON_LENGTH: Final = 1024
MAX_URI_LENGTH: Final = 8192

UNKNOWN_STREAM_COUNT: Final = MAX_VARINT
"""Stream Count of a PUBLISH_DONE whose sender does not know it (moqt 4.2)."""


@dataclass(frozen=True, slots=True)
class Setup:
    """SETUP: first on each control stream, and the type of that stream."""

    TYPE: ClassVar = 0x2F00
    options: SetupOptions = NO_OPTIONS


@dataclass(frozen=True, slots=True)
class Goaway:
    """GOAWAY; `timeout` in ms, 0: none stated."""

    TYPE: ClassVar = 0x10
    uri: str = ""
    timeout: int = 0


@dataclass(frozen=True, slots=True)
class Subscribe:
    """SUBSCRIBE."""

    TYPE: ClassVar = 0x03
    request_id: int
    track: FullTrackName
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class SubscribeOk:
    """SUBSCRIBE_OK."""

    TYPE: ClassVar = 0x04
    track_alias: int
    parameters: Parameters = NO_PARAMETERS
    properties: Properties = ()


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """REQUEST_UPDATE; parameters that are absent keep their value."""

    TYPE: ClassVar = 0x02
    request_id: int
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class RequestOk:
    """REQUEST_OK; properties only in reply to TRACK_STATUS."""

    TYPE: ClassVar = 0x07
    parameters: Parameters = NO_PARAMETERS
    properties: Properties = ()


@dataclass(frozen=True, slots=True)
class Redirect:
    """Where to ask instead; an empty URI is that of this session."""

    uri: str
    track: FullTrackName


@dataclass(frozen=True, slots=True)
class RequestError:
    """REQUEST_ERROR; `retry_interval` is 1 + the ms to wait, 0: do not retry."""

    TYPE: ClassVar = 0x05
    code: int
    retry_interval: int = 0
    reason: str = ""
    redirect: Redirect | None = None

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait before another try; None: do not retry."""
        return (self.retry_interval - 1) / 1000 if self.retry_interval else None


@dataclass(frozen=True, slots=True)
class Publish:
    """PUBLISH."""

    TYPE: ClassVar = 0x1D
    request_id: int
    track: FullTrackName
    track_alias: int
    parameters: Parameters = NO_PARAMETERS
    properties: Properties = ()


@dataclass(frozen=True, slots=True)
class PublishDone:
    """PUBLISH_DONE; `stream_count` is the number of data streams opened, or UNKNOWN_STREAM_COUNT."""

    TYPE: ClassVar = 0x0B
    status: int
    stream_count: int = UNKNOWN_STREAM_COUNT
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PublishStateNotify:
    """PUBLISH_STATE_NOTIFY."""

    TYPE: ClassVar = 0x22
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class Fetch:
    """FETCH."""

    TYPE: ClassVar = 0x16
    request_id: int
    track: FullTrackName
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class FetchOk:
    """FETCH_OK; `end` is inclusive."""

    TYPE: ClassVar = 0x18
    end_of_track: bool
    end: Location
    parameters: Parameters = NO_PARAMETERS
    properties: Properties = ()


@dataclass(frozen=True, slots=True)
class TrackStatus:
    """TRACK_STATUS."""

    TYPE: ClassVar = 0x0D
    request_id: int
    track: FullTrackName
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class PublishNamespace:
    """PUBLISH_NAMESPACE."""

    TYPE: ClassVar = 0x06
    request_id: int
    namespace: TrackNamespace
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class SubscribeNamespace:
    """SUBSCRIBE_NAMESPACE."""

    TYPE: ClassVar = 0x50
    request_id: int
    prefix: TrackNamespace
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class SubscribeTracks:
    """SUBSCRIBE_TRACKS."""

    TYPE: ClassVar = 0x51
    request_id: int
    prefix: TrackNamespace
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class Namespace:
    """NAMESPACE; `suffix` is what follows the prefix that was asked for."""

    TYPE: ClassVar = 0x08
    suffix: TrackNamespace


@dataclass(frozen=True, slots=True)
class NamespaceDone:
    """NAMESPACE_DONE."""

    TYPE: ClassVar = 0x0E
    suffix: TrackNamespace


@dataclass(frozen=True, slots=True)
class PublishSkipped:
    """PUBLISH_SKIPPED."""

    TYPE: ClassVar = 0x0F
    suffix: TrackNamespace
    name: bytes


Request: TypeAlias = (
    Subscribe | Publish | Fetch | TrackStatus | PublishNamespace | SubscribeNamespace | SubscribeTracks
)
Message: TypeAlias = (
    Setup
    | Goaway
    | SubscribeOk
    | RequestUpdate
    | RequestOk
    | RequestError
    | PublishDone
    | PublishStateNotify
    | FetchOk
    | Namespace
    | NamespaceDone
    | PublishSkipped
    | Request
)

REQUESTS: Final[tuple[type[Request], ...]] = get_args(Request)
MESSAGES: Final[dict[int, type[Message]]] = {message.TYPE: message for message in get_args(Message)}


class Context(NamedTuple):
    """What the meaning of a message depends on besides its bytes: the draft, and the request of its stream.

    `scope` is where the parameters stand; None when only the receiver can know (encoding).
    """

    profile: Profile
    scope: Scope | None
    request: type[Request] | None = None


def encode(message: Message, profile: Profile = DRAFT_22) -> bytes:
    """Type, 16-bit length and body.

    Reason Phrases are cut to 1024 bytes. Raises UsageError: a body above 65535 bytes, a value out of range.
    """
    context = Context(profile, SCOPES.get(type(message)))
    body = bytearray()
    for name in _FIELDS_OF[type(message)]:
        body += _FIELDS[name].write(getattr(message, name), message, context)
    if len(body) > MAX_BODY_LENGTH:
        raise UsageError(
            f"{type(message).__name__} would have {len(body)} bytes, more than {MAX_BODY_LENGTH}"
        )
    return encode_vi64(message.TYPE) + len(body).to_bytes(2) + body


def decode_body(message_type: type[Message], body: Octets, context: Context) -> Message:
    """Decode the body of one message. Raises ProtocolError."""
    reader = Reader(body, what=message_type.__name__)
    values: dict[str, Any] = {}
    for name in _FIELDS_OF[message_type]:
        values[name] = _FIELDS[name].read(reader, values, context)
    reader.end()  # moqt 20 #2
    return message_type(**values)


class _Field(NamedTuple):
    """How a field is read, given the fields before it, and written."""

    read: Callable[[Reader, Mapping[str, Any], Context], Any]
    write: Callable[[Any, Message, Context], bytes]


def _simple(read: Callable[[Reader], Any], write: Callable[[Any], bytes]) -> _Field:
    """A field that stands for itself."""
    return _Field(
        lambda reader, _values, _context: read(reader), lambda value, _message, _context: write(value)
    )


def _read_full_name(reader: Reader) -> FullTrackName:
    name = FullTrackName(reader.namespace(), reader.prefixed())
    reader.check_names(name.namespace, name.name)
    return name


def _encode_full_name(name: FullTrackName) -> bytes:
    return encode_namespace(name.namespace, name.name) + encode_prefixed(name.name)


def _read_text(reader: Reader, limit: int, errors: str) -> str:
    length = reader.vi64()
    if length > limit:
        raise reader.fault(f"a text has {length} bytes, more than {limit}")
    try:
        return reader.bytes(length).decode("utf-8", errors)
    except UnicodeDecodeError:
        raise reader.fault("a URI is not UTF-8") from None


def _encode_uri(uri: str) -> bytes:
    encoded = uri.encode("utf-8", "replace")
    if len(encoded) > MAX_URI_LENGTH:
        raise UsageError(f"a URI has {len(encoded)} bytes, more than {MAX_URI_LENGTH}")
    return encode_prefixed(encoded)


def _read_reason(reader: Reader) -> str:
    """A text for people: bytes that are not UTF-8 must not hide it (moqt 2.6)."""
    return _read_text(reader, MAX_REASON_LENGTH, "replace")


def _encode_reason(reason: str) -> bytes:
    encoded = reason.encode("utf-8", "replace")
    if len(encoded) > MAX_REASON_LENGTH:
        encoded = encoded[:MAX_REASON_LENGTH].decode("utf-8", "ignore").encode()
    return encode_prefixed(encoded)


def _read_uri(reader: Reader) -> str:
    return _read_text(reader, MAX_URI_LENGTH, "strict")


def _read_name(reader: Reader, values: Mapping[str, Any], _context: Context) -> bytes:
    name = reader.prefixed()
    reader.check_names(values["suffix"], name)
    return name


def _encode_name(name: bytes, message: Message, _context: Context) -> bytes:
    assert isinstance(message, PublishSkipped)
    encode_namespace(message.suffix, name)  # for the limits of both together
    return encode_prefixed(name)


def _read_redirect(reader: Reader, values: Mapping[str, Any], context: Context) -> Redirect | None:
    if values["code"] != RequestCode.REDIRECT:
        return None
    redirect = Redirect(_read_uri(reader), _read_full_name(reader))
    if redirect.track.name and context.request in (PublishNamespace, SubscribeNamespace, SubscribeTracks):
        raise reader.fault("a Redirect of a namespace has a Track Name")  # moqt 20 #14
    return redirect


def _encode_redirect(redirect: Redirect | None, message: Message, _context: Context) -> bytes:
    assert isinstance(message, RequestError)
    if (redirect is not None) != (message.code == RequestCode.REDIRECT):
        raise UsageError("a Redirect belongs to code REDIRECT, and to no other")
    return b"" if redirect is None else _encode_uri(redirect.uri) + _encode_full_name(redirect.track)


def _read_parameters(reader: Reader, _values: Mapping[str, Any], context: Context) -> Parameters:
    assert context.scope is not None
    return decode_parameters(reader, context.profile, context.scope)


def _encode_parameters(parameters: Parameters, _message: Message, context: Context) -> bytes:
    return encode_parameters(parameters, context.profile, context.scope)


def _read_properties(reader: Reader, _values: Mapping[str, Any], context: Context) -> Properties:
    properties = decode_properties(reader.rest())
    if properties and context.scope in (Scope.PUBLISH_OK, Scope.NAMESPACE_OK, Scope.UPDATE_OK):
        raise reader.fault("Track Properties in a REQUEST_OK that has none")  # moqt 20 #19
    fault = track_property_fault(properties)
    if fault is not None:
        raise fault
    return properties


def _encode_properties(properties: Properties) -> bytes:
    fault = track_property_fault(properties)
    if fault is not None:
        raise UsageError(fault.reason)
    return encode_properties(properties)


_VARINT = _simple(Reader.vi64, encode_vi64)
_NAMESPACE = _simple(Reader.namespace, encode_namespace)

_FIELDS: Final[dict[str, _Field]] = {
    "options": _simple(lambda reader: decode_setup_options(reader.rest()), encode_setup_options),
    "uri": _simple(_read_uri, _encode_uri),
    "timeout": _VARINT,
    "request_id": _VARINT,
    "track": _simple(_read_full_name, _encode_full_name),
    "track_alias": _VARINT,
    "code": _VARINT,
    "retry_interval": _VARINT,
    "reason": _simple(_read_reason, _encode_reason),
    "redirect": _Field(_read_redirect, _encode_redirect),
    "status": _VARINT,
    "stream_count": _VARINT,
    "end_of_track": _simple(lambda reader: reader.flag("End Of Track"), lambda value: bytes((bool(value),))),
    "end": _simple(Reader.location, encode_location),
    "namespace": _NAMESPACE,
    "prefix": _NAMESPACE,
    "suffix": _NAMESPACE,
    "name": _Field(_read_name, _encode_name),
    "parameters": _Field(_read_parameters, _encode_parameters),
    "properties": _Field(_read_properties, lambda value, _message, _context: _encode_properties(value)),
}
_FIELDS_OF: Final[dict[type[Message], tuple[str, ...]]] = {
    message: tuple(field.name for field in fields(message)) for message in MESSAGES.values()
}

# Messages with one scope; that of REQUEST_UPDATE and REQUEST_OK depends on the stream (moqt 5.2).
SCOPES: Final[dict[type[Message], Scope]] = {
    Subscribe: Scope.SUBSCRIBE,
    SubscribeOk: Scope.SUBSCRIBE_OK,
    Publish: Scope.PUBLISH,
    PublishStateNotify: Scope.PUBLISH_STATE_NOTIFY,
    Fetch: Scope.FETCH,
    FetchOk: Scope.FETCH_OK,
    TrackStatus: Scope.TRACK_STATUS,
    PublishNamespace: Scope.PUBLISH_NAMESPACE,
    SubscribeNamespace: Scope.SUBSCRIBE_NAMESPACE,
    SubscribeTracks: Scope.SUBSCRIBE_TRACKS,
}
