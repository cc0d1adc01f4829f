"""Properties of the codecs: values round trip, feeding in pieces changes nothing, mutations never crash."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moqt.errors import ProtocolError
from moqt.filters import FIELD_COUNT, FilterType, GroupOrder, Location, LocationFilter, RangeFilter, RangeKind
from moqt.names import FullTrackName
from moqt.wire import (
    DRAFT_22,
    REQUESTS,
    AliasType,
    DataStreamDecoder,
    EndOfRange,
    Event,
    Fetch,
    FetchEncoder,
    FetchHeader,
    FetchOk,
    Goaway,
    Message,
    MessageDecoder,
    Namespace,
    NamespaceDone,
    ObjectHeader,
    ObjectStatus,
    Parameters,
    ParameterType,
    PayloadChunk,
    Publish,
    PublishDone,
    PublishNamespace,
    PublishSkipped,
    PublishStateNotify,
    RangeStatus,
    Redirect,
    Request,
    RequestError,
    RequestOk,
    RequestUpdate,
    Scope,
    Setup,
    SetupOptions,
    SubgroupEncoder,
    SubgroupHeader,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    Token,
    TrackStatus,
    encode,
    encode_properties,
    stream_kind,
)

Ready: TypeAlias = Callable[[type[Message], type[Request]], MessageDecoder]

MAX = 2**64 - 1
IDS = st.integers(0, MAX) | st.integers(0, 200)
OCTETS = st.integers(0, 255)
LOCATIONS = st.builds(Location, IDS, IDS)
NAMESPACES = st.lists(st.binary(min_size=1, max_size=12), max_size=32).map(tuple)
TRACKS = st.builds(FullTrackName, NAMESPACES, st.binary(max_size=40))
TOKENS = st.one_of(
    st.builds(Token, st.just(AliasType.DELETE), IDS),
    st.builds(Token, st.just(AliasType.USE_ALIAS), IDS),
    st.builds(Token, st.just(AliasType.REGISTER), IDS, IDS, st.binary(max_size=40)),
    st.builds(Token, st.just(AliasType.USE_VALUE), st.none(), IDS, st.binary(max_size=40)),
)


@st.composite
def location_filters(draw: st.DrawFn) -> LocationFilter:
    kind = draw(st.sampled_from(FilterType))
    fields = [draw(IDS) for _ in range(FIELD_COUNT[kind])]
    if len(fields) > 2:
        fields[2] = draw(st.integers(0, MAX - fields[0]))
    return LocationFilter(kind, *fields)


@st.composite
def range_filters(draw: st.DrawFn, kind: RangeKind) -> RangeFilter:
    largest = 255 if kind is RangeKind.PRIORITY else MAX
    bounds = sorted(draw(st.lists(st.integers(0, largest), max_size=8)))
    starts: list[int] = bounds[::2]
    ends: list[int | None] = [*bounds[1::2], *([None] if len(bounds) % 2 else [])]
    if not starts:
        return RangeFilter(kind)
    property_type = draw(st.integers(0, 2**63 - 1)) * 2 if kind.has_property_type else None
    return RangeFilter(kind, tuple(zip(starts, ends, strict=True)), draw(OCTETS), property_type)


VALUES: dict[ParameterType, tuple[str, st.SearchStrategy[Any]]] = {
    ParameterType.OBJECT_DELIVERY_TIMEOUT: ("object_delivery_timeout", IDS),
    ParameterType.RENDEZVOUS_TIMEOUT: ("rendezvous_timeout", IDS),
    ParameterType.SUBGROUP_DELIVERY_TIMEOUT: ("subgroup_delivery_timeout", IDS),
    ParameterType.EXPIRES: ("expires", IDS),
    ParameterType.LARGEST_OBJECT: ("largest", LOCATIONS),
    ParameterType.FILL_TIMEOUT: ("fill_timeout", IDS),
    ParameterType.FORWARD: ("forward", st.booleans()),
    ParameterType.SUBSCRIBER_PRIORITY: ("subscriber_priority", OCTETS),
    ParameterType.LOCATION_FILTER: ("location_filter", location_filters()),
    ParameterType.GROUP_ORDER: ("group_order", st.sampled_from(GroupOrder)),
    ParameterType.FILL_PARAMETERS: ("fill", st.deferred(lambda: parameters(Scope.FILL))),
    ParameterType.NEW_GROUP_REQUEST: ("new_group_request", IDS),
    ParameterType.TRACK_NAMESPACE_PREFIX: ("prefix", NAMESPACES),
    ParameterType.INCLUDE_PROPERTIES: ("include_properties", st.booleans()),
}


def parameters(scope: Scope) -> st.SearchStrategy[Parameters]:
    allowed = DRAFT_22.scopes[scope]
    fields: dict[str, st.SearchStrategy[Any]] = {
        name: st.none() | value for kind, (name, value) in VALUES.items() if kind in allowed
    }
    if ParameterType.AUTHORIZATION_TOKEN in allowed:
        fields["tokens"] = st.lists(TOKENS, max_size=3).map(tuple)
    kinds = [kind for kind in RangeKind if ParameterType(kind) in allowed]
    if kinds:
        filters = st.lists(st.sampled_from(kinds).flatmap(range_filters), max_size=4)
        fields["range_filters"] = filters.map(lambda items: tuple(sorted(items, key=lambda item: item.kind)))
    return st.builds(Parameters, **fields)


PROPERTIES = st.lists(
    st.sampled_from([0x02, 0x04, 0x06, 0x3C, 0x78, 0x4000]).flatmap(
        lambda kind: st.tuples(st.just(kind), IDS)
    )
    | st.tuples(st.just(0x0E), OCTETS)
    | st.tuples(st.just(0x22), st.integers(1, 2))
    | st.tuples(st.just(0x30), st.integers(0, 1))
    | st.tuples(st.just(0x0B), st.sampled_from([b"", b"\x02", b"\x02\x07", b"\x0d\x01a"]))
    | st.tuples(st.sampled_from([0x0D, 0x9D]), st.binary(max_size=20)),
    max_size=5,
).map(lambda pairs: tuple(sorted(pairs, key=lambda pair: pair[0])))
TEXTS = st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace").decode())
SETUP_OPTIONS = st.builds(
    SetupOptions,
    path=st.sampled_from([None, "", "/", "/moq", "/a/b%20c?x=1&y=2", "?q"]),
    authority=st.sampled_from([None, "h", "relay.example.com:4443", "[::1]:9", "127.0.0.1"]),
    tokens=st.lists(TOKENS, max_size=3).map(tuple),
    max_auth_token_cache_size=IDS,
    max_filter_ranges=IDS,
    implementation=TEXTS,
    max_request_updates=IDS,
)
UPDATES: dict[type[Request], Scope] = {
    Subscribe: Scope.UPDATE_SUBSCRIPTION,
    Publish: Scope.UPDATE_SUBSCRIPTION,
    Fetch: Scope.UPDATE_FETCH,
    PublishNamespace: Scope.UPDATE_PUBLISH_NAMESPACE,
    SubscribeNamespace: Scope.UPDATE_SUBSCRIBE_NAMESPACE,
    SubscribeTracks: Scope.UPDATE_SUBSCRIBE_TRACKS,
}
REPLIES: dict[type[Request], Scope] = {
    Subscribe: Scope.UPDATE_OK,
    Publish: Scope.PUBLISH_OK,
    Fetch: Scope.UPDATE_OK,
    PublishNamespace: Scope.NAMESPACE_OK,
    SubscribeNamespace: Scope.NAMESPACE_OK,
    SubscribeTracks: Scope.NAMESPACE_OK,
}


OnStream: TypeAlias = tuple[type[Request], Message]


def on(request: type[Request], messages: st.SearchStrategy[Any]) -> st.SearchStrategy[OnStream]:
    return st.tuples(st.just(request), messages)


def errors(request: type[Request]) -> st.SearchStrategy[Message]:
    codes = IDS.filter(lambda code: code != 0x34)
    tracks = TRACKS
    if request in (PublishNamespace, SubscribeNamespace, SubscribeTracks):
        tracks = st.builds(FullTrackName, NAMESPACES, st.just(b""))
    return st.builds(RequestError, codes, IDS, TEXTS) | st.builds(
        RequestError, st.just(0x34), IDS, TEXTS, st.builds(Redirect, TEXTS, tracks)
    )


MESSAGES: st.SearchStrategy[OnStream] = st.one_of(
    on(
        Subscribe,
        st.one_of(
            st.builds(Setup, SETUP_OPTIONS),
            st.builds(Goaway, TEXTS, IDS),
            st.builds(Subscribe, IDS, TRACKS, parameters(Scope.SUBSCRIBE)),
            st.builds(SubscribeOk, IDS, parameters(Scope.SUBSCRIBE_OK), PROPERTIES),
            st.builds(Publish, IDS, TRACKS, IDS, parameters(Scope.PUBLISH), PROPERTIES),
            st.builds(PublishDone, IDS, IDS, TEXTS),
            st.builds(PublishStateNotify, parameters(Scope.PUBLISH_STATE_NOTIFY)),
            st.builds(Fetch, IDS, TRACKS, parameters(Scope.FETCH)),
            st.builds(FetchOk, st.booleans(), LOCATIONS, st.just(Parameters()), PROPERTIES),
            st.builds(TrackStatus, IDS, TRACKS, parameters(Scope.TRACK_STATUS)),
            st.builds(PublishNamespace, IDS, NAMESPACES, parameters(Scope.PUBLISH_NAMESPACE)),
            st.builds(SubscribeNamespace, IDS, NAMESPACES, parameters(Scope.SUBSCRIBE_NAMESPACE)),
            st.builds(SubscribeTracks, IDS, NAMESPACES, parameters(Scope.SUBSCRIBE_TRACKS)),
            st.builds(Namespace, NAMESPACES),
            st.builds(NamespaceDone, NAMESPACES),
            st.builds(PublishSkipped, NAMESPACES, st.binary(max_size=40)),
        ),
    ),
    on(TrackStatus, st.builds(RequestOk, parameters(Scope.TRACK_STATUS_OK), PROPERTIES)),
    *(on(kind, st.builds(RequestOk, parameters(scope))) for kind, scope in REPLIES.items()),
    *(on(kind, st.builds(RequestUpdate, IDS, parameters(scope))) for kind, scope in UPDATES.items()),
    *(on(kind, errors(kind)) for kind in REQUESTS),
)

thorough = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def bytewise(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


@thorough
@given(MESSAGES)
def test_messages_round_trip(ready: Ready, pair: OnStream) -> None:
    request, message = pair
    data = encode(message)
    decoder = ready(type(message), request)
    assert decoder.feed(data) == [message]
    decoder.finish()
    decoder = ready(type(message), request)
    assert messages_of(decoder, bytewise(data)) == [message]


def mutated(draw: Callable[[st.SearchStrategy[Any]], Any], data: bytes) -> bytes:
    """`data` with a few bytes changed, left out, doubled or cut."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(out) - 1, 0)))
        match draw(st.sampled_from(["change", "drop", "double", "insert", "cut"])):
            case "change":
                out[at : at + 1] = bytes((draw(OCTETS),))
            case "drop":
                del out[at]
            case "double":
                out[at:at] = out[at : at + 8]
            case "insert":
                out[at:at] = draw(st.binary(max_size=9))
            case _:
                del out[at + 1 :]
        if not out:
            break
    return bytes(out)


@thorough
@given(MESSAGES, st.data())
def test_mutated_messages_decode_or_break_the_protocol(
    ready: Ready, pair: OnStream, data: st.DataObject
) -> None:
    request, message = pair
    octets = mutated(data.draw, encode(message))
    decoder = ready(type(message), request)
    whole = messages_of(decoder, [octets])
    assert (
        messages_of(ready(type(message), request), [octets[at : at + 1] for at in range(len(octets))])
        == whole
    )


def messages_of(decoder: MessageDecoder, pieces: Sequence[bytes]) -> list[Message | str]:
    """What comes out of each feed, with the error that ends it; only ProtocolError may."""
    out: list[Message | str] = []
    try:
        for piece in pieces:
            out += decoder.feed(piece)
        decoder.finish()
    except ProtocolError as error:
        # A feed that fails hands out nothing, so messages before the fault depend on how it was cut.
        return [str(error)]
    return out


@thorough
@given(st.binary(max_size=200), st.sampled_from([None, *REQUESTS]), st.booleans())
def test_noise_never_crashes_a_message_decoder(
    data: bytes, request: type[Request] | None, control: bool
) -> None:
    decoder = MessageDecoder(control=control, request=None if control else request)
    assert messages_of(decoder, [data]) is not None


# --- data streams ---


@st.composite
def subgroup_streams(draw: st.DrawFn) -> tuple[bytes, list[Event]]:
    header = draw(
        st.builds(
            SubgroupHeader,
            track_alias=IDS,
            group=IDS,
            subgroup=st.none() | IDS,
            priority=st.none() | OCTETS,
            end_of_group=st.booleans(),
            first_object=st.booleans(),
            has_properties=st.booleans(),
        )
    )
    ids = sorted(draw(st.sets(IDS, max_size=6)))
    encoder = SubgroupEncoder(header, explicit_subgroup=draw(st.booleans()))
    data = encoder.header()
    events: list[Event] = [header]
    for object_id in ids:
        payload = draw(st.binary(max_size=80))
        status = ObjectStatus.NORMAL if payload else draw(st.sampled_from(ObjectStatus))
        properties = draw(PROPERTIES) if header.has_properties and status is ObjectStatus.NORMAL else ()
        raw = encode_properties(properties)
        data += encoder.object(object_id, len(payload), status=status, properties=raw) + payload
        subgroup = ids[0] if header.subgroup is None else header.subgroup
        location = Location(header.group, object_id)
        events.append(
            ObjectHeader(location, subgroup, header.priority, properties, raw, status, len(payload))
        )
        if payload:
            events.append(PayloadChunk(memoryview(payload), True))
    return data, events


@st.composite
def fetch_streams(draw: st.DrawFn) -> tuple[GroupOrder, bytes, list[Event]]:
    order = draw(st.sampled_from(GroupOrder))
    near = st.builds(Location, st.integers(0, 3), st.integers(0, 6))
    locations = sorted(
        draw(st.sets(near | LOCATIONS, max_size=8)),
        key=lambda at: (at.group if order is GroupOrder.ASCENDING else -at.group, at.object),
    )
    header = FetchHeader(draw(IDS))
    encoder = FetchEncoder(header.request_id, order)
    data = encoder.header()
    events: list[Event] = [header]
    for location in locations:
        if draw(st.integers(0, 3)) == 0:
            kind = draw(st.sampled_from(RangeStatus))
            data += encoder.end_of_range(kind, location)
            events.append(EndOfRange(kind, location))
            continue
        payload = draw(st.binary(max_size=80))
        properties = draw(PROPERTIES)
        raw = encode_properties(properties)
        datagram = draw(st.booleans())
        subgroup = draw(st.integers(0, 3) | IDS)
        priority = draw(st.sampled_from([0, 128, 255]))
        data += encoder.object(
            location, len(payload), subgroup=subgroup, priority=priority, properties=raw, datagram=datagram
        )
        data += payload
        events.append(
            ObjectHeader(
                location,
                0 if datagram else subgroup,
                priority,
                properties,
                raw,
                ObjectStatus.NORMAL,
                len(payload),
                datagram,
            )
        )
        if payload:
            events.append(PayloadChunk(memoryview(payload), True))
    return order, data, events


def pieces(draw: Callable[[st.SearchStrategy[Any]], Any], data: bytes) -> list[bytes]:
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=6)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def events_of(data: Iterable[bytes], order: GroupOrder = GroupOrder.ASCENDING) -> list[Event | str]:
    """The events with payloads gathered, and at the end the text of the error; only ProtocolError may be."""
    decoder = DataStreamDecoder()
    out: list[Event | str] = []
    try:
        for piece in data:
            for event in decoder.feed(piece):
                previous = out[-1] if out else None
                if isinstance(event, FetchHeader):
                    decoder.order = order
                if isinstance(event, PayloadChunk):
                    assert len(event.data)
                    if isinstance(previous, PayloadChunk) and not previous.last:
                        gathered = bytes(previous.data) + bytes(event.data)
                        out[-1] = PayloadChunk(memoryview(gathered), event.last)
                        continue
                out.append(event)
        decoder.finish()
    except ProtocolError as error:
        out.append(str(error))
    return out


@thorough
@given(subgroup_streams(), st.data())
def test_subgroup_streams_round_trip_in_any_pieces(
    stream: tuple[bytes, list[Event]], data: st.DataObject
) -> None:
    octets, events = stream
    assert events_of([octets]) == events
    assert events_of(bytewise(octets)) == events
    assert events_of(pieces(data.draw, octets)) == events


@thorough
@given(fetch_streams(), st.data())
def test_fetch_streams_round_trip_in_any_pieces(
    stream: tuple[GroupOrder, bytes, list[Event]], data: st.DataObject
) -> None:
    order, octets, events = stream
    assert events_of([octets], order) == events
    assert events_of(bytewise(octets), order) == events
    assert events_of(pieces(data.draw, octets), order) == events


@thorough
@given(subgroup_streams() | fetch_streams().map(lambda stream: stream[1:]), st.data())
def test_mutated_streams_decode_or_break_the_protocol(
    stream: tuple[bytes, list[Event]], data: st.DataObject
) -> None:
    octets = mutated(data.draw, stream[0])
    whole = events_of([octets])
    assert events_of(bytewise(octets)) == whole
    assert events_of(pieces(data.draw, octets)) == whole


@thorough
@given(st.sampled_from(["", "10", "31", "0508", "7d"]), st.binary(max_size=200))
def test_noise_never_crashes_a_stream_decoder(start: str, noise: bytes) -> None:
    octets = bytes.fromhex(start) + noise
    assert events_of(bytewise(octets)) == events_of([octets])
    with suppress(ProtocolError):
        assert stream_kind(octets) is not None or len(octets) < 9
