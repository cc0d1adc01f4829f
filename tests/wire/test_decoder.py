"""Control messages: framing, what may stand where, and what each field refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, get_args

import pytest

from moqt.errors import DoneCode, ProtocolError, RequestCode, SessionCode, UsageError
from moqt.filters import GroupOrder, Location, LocationFilter, RangeFilter, RangeKind
from moqt.names import FullTrackName
from moqt.wire import (
    DRAFT_22,
    REQUESTS,
    AliasType,
    Fetch,
    FetchOk,
    FillForm,
    Goaway,
    Message,
    MessageDecoder,
    Namespace,
    NamespaceDone,
    Parameters,
    ParameterType,
    Profile,
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
    Scope,
    Setup,
    SetupOptions,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    Token,
    TrackStatus,
    encode,
    encode_vi64,
    size,
)

Ready: TypeAlias = Callable[[type[Message], type[Request]], MessageDecoder]
Openers: TypeAlias = dict[type[Request], Request]
P = Parameters

TRACK = FullTrackName((b"a",), b"t")
EXAMPLES: dict[type[Message], Message] = {
    type(message): message
    for message in (
        Setup(),
        Goaway(),
        Subscribe(0, TRACK),
        SubscribeOk(0),
        RequestUpdate(0),
        RequestOk(),
        RequestError(0),
        Publish(0, TRACK, 0),
        PublishDone(0),
        PublishStateNotify(),
        Fetch(0, TRACK),
        FetchOk(False, Location(0, 0)),
        TrackStatus(0, TRACK),
        PublishNamespace(0, ()),
        SubscribeNamespace(0, ()),
        SubscribeTracks(0, ()),
        Namespace(()),
        NamespaceDone(()),
        PublishSkipped((), b""),
    )
}


def test_examples_are_complete() -> None:
    assert EXAMPLES.keys() == set(get_args(Message))


# --- framing ---


def test_several_messages_in_one_feed_and_one_message_in_many() -> None:
    messages: list[Message] = [
        SubscribeNamespace(0, (b"a",)),
        RequestUpdate(2),
        RequestUpdate(4, P(prefix=(b"b" * 300,))),
        Goaway(timeout=7),
    ]
    data = b"".join(map(encode, messages))
    assert MessageDecoder().feed(data) == messages
    for step in range(1, len(data)):
        decoder = MessageDecoder()
        pieces = [decoder.feed(data[at : at + step]) for at in range(0, len(data), step)]
        assert [message for piece in pieces for message in piece] == messages
        decoder.finish()


UNKNOWN_TYPES = "8099 01 20 21 40 41 1e 8080 af01 f0132b3e28 ffffffffffffffffff"


@pytest.mark.parametrize("text", UNKNOWN_TYPES.split())
@pytest.mark.parametrize("control", [False, True])
def test_unknown_types_are_refused_before_their_body(text: str, control: bool) -> None:
    with pytest.raises(ProtocolError, match="unknown message type") as caught:
        MessageDecoder(control=control).feed(bytes.fromhex(text))
    assert caught.value.code is SessionCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize("kind", EXAMPLES)
def test_length_must_be_used_up(kind: type[Message], ready: Ready) -> None:
    data = encode(EXAMPLES[kind])
    start = size(EXAMPLES[kind].TYPE)
    body = data[start + 2 :]
    longer = data[:start] + (len(body) + 1).to_bytes(2) + body + b"\x00"
    with pytest.raises(ProtocolError) as caught:
        ready(kind, Subscribe).feed(longer)
    assert caught.value.code is SessionCode.PROTOCOL_VIOLATION
    if body:
        shorter = data[:start] + (len(body) - 1).to_bytes(2) + body[:-1]
        with pytest.raises(ProtocolError):
            ready(kind, Subscribe).feed(shorter)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_fin_inside_a_message(kind: type[Message], ready: Ready) -> None:
    data = encode(EXAMPLES[kind])
    for length in range(1, len(data)):
        decoder = ready(kind, Subscribe)
        assert decoder.feed(data[:length]) == []
        with pytest.raises(ProtocolError, match="ended inside"):
            decoder.finish()


def test_fin_between_messages_is_fine() -> None:
    decoder = MessageDecoder()
    decoder.finish()
    decoder.feed(encode(Subscribe(0, TRACK)))
    decoder.finish()


def test_longest_body_is_legal_and_the_next_is_not() -> None:
    tokens = tuple(Token(AliasType.USE_VALUE, type=0, value=bytes(30000)) for _ in range(2))
    room = 65535 - (len(encode(Subscribe(0, TRACK, P(tokens=tokens)))) - 3)
    last = Token(AliasType.USE_VALUE, type=0, value=bytes(room - 5))
    message = Subscribe(0, TRACK, P(tokens=(*tokens, last)))
    data = encode(message)
    assert data[1:3] == b"\xff\xff"
    assert MessageDecoder().feed(data) == [message]
    with pytest.raises(UsageError, match="65536 bytes"):
        encode(Subscribe(200, TRACK, P(tokens=(*tokens, last))))


# --- what may stand where (moqt 3.1, 4.1) ---

# From the table of moqt 4.1: what may come to the sender of a request on its stream.
TO_SENDER: dict[type[Request], set[type[Message]]] = {
    Subscribe: {SubscribeOk, RequestError, RequestOk, PublishStateNotify, PublishDone, Goaway},
    Publish: {RequestOk, RequestError, RequestUpdate, Goaway},
    Fetch: {FetchOk, RequestError, RequestOk, Goaway},
    TrackStatus: {RequestOk, RequestError, Goaway},
    PublishNamespace: {RequestOk, RequestError, Goaway},
    SubscribeNamespace: {RequestOk, RequestError, Goaway},
    SubscribeTracks: {RequestOk, RequestError, Goaway},
}
ONLY_AFTER_THE_REPLY: dict[type[Request], set[type[Message]]] = {
    SubscribeNamespace: {Namespace, NamespaceDone},
    SubscribeTracks: {PublishSkipped},
}
# And to its receiver.
TO_RECEIVER: dict[type[Request], set[type[Message]]] = {
    Subscribe: {RequestUpdate, Goaway},
    Publish: {RequestUpdate, RequestOk, RequestError, PublishStateNotify, PublishDone, Goaway},
    Fetch: {RequestUpdate, Goaway},
    TrackStatus: {Goaway},
    PublishNamespace: {RequestUpdate, Goaway},
    SubscribeNamespace: {RequestUpdate, Goaway},
    SubscribeTracks: {RequestUpdate, Goaway},
}


def accepts(decoder: MessageDecoder, message: Message) -> bool:
    """Whether the message passes, and is refused with PROTOCOL_VIOLATION otherwise."""
    try:
        messages = decoder.feed(encode(message))
    except ProtocolError as error:
        code = error.code
    else:
        assert messages == [message]
        return True
    assert code is SessionCode.PROTOCOL_VIOLATION
    return False


@pytest.mark.parametrize("kind", EXAMPLES)
@pytest.mark.parametrize("request_type", REQUESTS)
def test_every_message_on_the_stream_of_every_request(
    request_type: type[Request], kind: type[Message], openers: Openers
) -> None:
    message = EXAMPLES[kind]
    assert accepts(MessageDecoder(request=request_type), message) is (kind in TO_SENDER[request_type])
    replied = MessageDecoder(request=request_type)
    if accepts(replied, RequestOk()):
        later = TO_SENDER[request_type] | ONLY_AFTER_THE_REPLY.get(request_type, set())
        assert accepts(replied, message) is (kind in later)
    receiver = MessageDecoder()
    assert receiver.feed(encode(openers[request_type])) == [openers[request_type]]
    assert receiver.request is request_type
    assert accepts(receiver, message) is (kind in TO_RECEIVER[request_type])


@pytest.mark.parametrize("kind", EXAMPLES)
def test_every_message_first_on_a_stream_and_on_control_streams(kind: type[Message]) -> None:
    message = EXAMPLES[kind]
    assert accepts(MessageDecoder(), message) is (kind in REQUESTS)
    control = MessageDecoder(control=True)
    assert accepts(control, message) is (kind is Setup)
    control = MessageDecoder(control=True)
    control.feed(encode(Setup()))
    assert accepts(control, message) is (kind is Goaway)


def test_second_goaway(openers: Openers) -> None:
    control = MessageDecoder(control=True)
    control.feed(encode(Setup()) + encode(Goaway()))
    request = MessageDecoder(request=Subscribe)
    request.feed(encode(Goaway()))
    received = MessageDecoder()
    received.feed(encode(openers[Fetch]) + encode(Goaway()))
    for decoder in control, request, received:
        with pytest.raises(ProtocolError, match="second GOAWAY"):
            decoder.feed(encode(Goaway()))


# --- parameters (moqt 5) ---

SAMPLES: dict[ParameterType, Parameters] = {
    ParameterType.OBJECT_DELIVERY_TIMEOUT: P(object_delivery_timeout=1),
    ParameterType.AUTHORIZATION_TOKEN: P(tokens=(Token(AliasType.USE_ALIAS, 1),)),
    ParameterType.RENDEZVOUS_TIMEOUT: P(rendezvous_timeout=1),
    ParameterType.SUBGROUP_DELIVERY_TIMEOUT: P(subgroup_delivery_timeout=1),
    ParameterType.EXPIRES: P(expires=1),
    ParameterType.LARGEST_OBJECT: P(largest=Location(1, 2)),
    ParameterType.FILL_TIMEOUT: P(fill_timeout=1),
    ParameterType.FORWARD: P(forward=True),
    ParameterType.SUBSCRIBER_PRIORITY: P(subscriber_priority=1),
    ParameterType.LOCATION_FILTER: P(location_filter=LocationFilter.next_object()),
    ParameterType.GROUP_ORDER: P(group_order=GroupOrder.DESCENDING),
    ParameterType.FILL_PARAMETERS: P(fill=P()),
    ParameterType.SUBGROUP_FILTER: P(range_filters=(RangeFilter(RangeKind.SUBGROUP, ((1, 2),)),)),
    ParameterType.OBJECTID_FILTER: P(range_filters=(RangeFilter(RangeKind.OBJECTID, ((1, 2),)),)),
    ParameterType.PRIORITY_FILTER: P(range_filters=(RangeFilter(RangeKind.PRIORITY, ((1, 2),)),)),
    ParameterType.OBJECT_PROPERTY_FILTER: P(
        range_filters=(RangeFilter(RangeKind.OBJECT_PROPERTY, ((1, 2),), property_type=2),)
    ),
    ParameterType.TRACK_PROPERTY_FILTER: P(
        range_filters=(RangeFilter(RangeKind.TRACK_PROPERTY, ((1, 2),), property_type=2),)
    ),
    ParameterType.NEW_GROUP_REQUEST: P(new_group_request=1),
    ParameterType.TRACK_NAMESPACE_PREFIX: P(prefix=(b"a",)),
    ParameterType.INCLUDE_PROPERTIES: P(include_properties=False),
}

LAX = Profile("test", 0, {scope: frozenset(ParameterType) for scope in Scope}, DRAFT_22.fill_forms)


def sent(request: type[Request], *, replied: bool = False) -> Callable[[], MessageDecoder]:
    """The decoder of the sender of a request."""

    def make() -> MessageDecoder:
        decoder = MessageDecoder(request=request)
        if replied:
            reply = SubscribeOk(0) if request is Subscribe else RequestOk()
            decoder.feed(encode(FetchOk(False, Location(0, 0)) if request is Fetch else reply))
        return decoder

    return make


def received(opener: Request) -> Callable[[], MessageDecoder]:
    """The decoder of the receiver of a request."""

    def make() -> MessageDecoder:
        decoder = MessageDecoder()
        decoder.feed(encode(opener))
        return decoder

    return make


SCOPES: dict[str, tuple[Callable[[], MessageDecoder], Callable[[Parameters], Message], str]] = {
    "SUBSCRIBE": (
        MessageDecoder,
        lambda p: Subscribe(0, TRACK, p),
        "02 03 04 06 10 20 21 22 23 25 26 27 28 32 35",
    ),
    "SUBSCRIBE_OK": (sent(Subscribe), lambda p: SubscribeOk(0, p), "08 09"),
    "PUBLISH": (MessageDecoder, lambda p: Publish(0, TRACK, 0, p), "02 03 06 08 09 10 20 21 22"),
    "PUBLISH_OK": (sent(Publish), RequestOk, "08"),
    "FETCH": (MessageDecoder, lambda p: Fetch(0, TRACK, p), "03 0A 20 21 22 25 26 27 28 35"),
    "FETCH_OK": (sent(Fetch), lambda p: FetchOk(False, Location(0, 0), p), ""),
    "TRACK_STATUS": (MessageDecoder, lambda p: TrackStatus(0, TRACK, p), "03 35"),
    "TRACK_STATUS_OK": (sent(TrackStatus), RequestOk, "09"),
    "PUBLISH_NAMESPACE": (MessageDecoder, lambda p: PublishNamespace(0, (), p), "03"),
    "PUBLISH_NAMESPACE_OK": (sent(PublishNamespace), RequestOk, "08"),
    "SUBSCRIBE_NAMESPACE": (MessageDecoder, lambda p: SubscribeNamespace(0, (), p), "03"),
    "SUBSCRIBE_NAMESPACE_OK": (sent(SubscribeNamespace), RequestOk, "08"),
    "SUBSCRIBE_TRACKS": (
        MessageDecoder,
        lambda p: SubscribeTracks(0, (), p),
        "02 03 04 06 10 20 21 22 23 25 26 27 28 29 32 35",
    ),
    "SUBSCRIBE_TRACKS_OK": (sent(SubscribeTracks), RequestOk, "08"),
    "update of SUBSCRIBE": (
        received(Subscribe(0, TRACK)),
        lambda p: RequestUpdate(2, p),
        "02 03 06 10 20 21 23 25 26 27 28 32",
    ),
    "update by the subscriber of PUBLISH": (
        sent(Publish),
        lambda p: RequestUpdate(2, p),
        "02 03 06 10 20 21 23 25 26 27 28 32",
    ),
    "update of FETCH": (received(Fetch(0, TRACK)), lambda p: RequestUpdate(2, p), "03 20"),
    "update of PUBLISH_NAMESPACE": (received(PublishNamespace(0, ())), lambda p: RequestUpdate(2, p), "03"),
    "update of SUBSCRIBE_NAMESPACE": (
        received(SubscribeNamespace(0, ())),
        lambda p: RequestUpdate(2, p),
        "03 34",
    ),
    "update of SUBSCRIBE_TRACKS": (
        received(SubscribeTracks(0, ())),
        lambda p: RequestUpdate(2, p),
        "03 10 29 34",
    ),
    "update_ok of SUBSCRIBE": (sent(Subscribe, replied=True), RequestOk, "08 09"),
    "update_ok of FETCH": (sent(Fetch, replied=True), RequestOk, "08 09"),
    "update_ok of PUBLISH, to the publisher": (sent(Publish, replied=True), RequestOk, "08 09"),
    "update_ok of PUBLISH, to the subscriber": (received(Publish(0, TRACK, 0)), RequestOk, "08 09"),
    "PUBLISH_STATE_NOTIFY": (sent(Subscribe), PublishStateNotify, "09 10 21"),
    "FILL_PARAMETERS": (MessageDecoder, lambda p: Subscribe(0, TRACK, P(fill=p)), "0A 20 21 22 25 26 27 28"),
}


@pytest.mark.parametrize("kind", ParameterType)
@pytest.mark.parametrize("scope", SCOPES)
def test_every_parameter_in_every_scope(scope: str, kind: ParameterType) -> None:
    """The table of moqt 5.2."""
    make, build, allowed = SCOPES[scope]
    message = build(SAMPLES[kind])
    data = encode(message, LAX)
    if kind in [int(number, 16) for number in allowed.split()]:
        assert make().feed(data) == [message]
        assert encode(message) == data
    else:
        with pytest.raises(ProtocolError, match="does not belong into") as caught:
            make().feed(data)
        assert caught.value.code is SessionCode.PROTOCOL_VIOLATION
        if not isinstance(message, RequestOk | RequestUpdate):  # only the receiver knows their scope
            with pytest.raises(UsageError, match="does not belong into"):
                encode(message)


REPEATABLE = {0x03, 0x25, 0x26, 0x27, 0x28, 0x29}


@pytest.mark.parametrize("kind", ParameterType)
def test_only_repeatable_parameters_repeat(kind: ParameterType) -> None:
    once = encode(SubscribeTracks(0, (), SAMPLES[kind]), LAX)[3:]  # Request ID, empty prefix, 1, parameter
    parameter = once[3:]
    assert once[:3] == b"\x00\x00\x01"
    assert parameter[0] == kind
    body = b"\x00\x00\x02" + parameter + b"\x00" + parameter[1:]
    data = b"\x51" + len(body).to_bytes(2) + body
    if kind in REPEATABLE:
        [message] = MessageDecoder(profile=LAX).feed(data)
        assert isinstance(message, SubscribeTracks)
        values = message.parameters.tokens + message.parameters.range_filters
        assert len(values) == 2
        assert values[0] == values[1]
    else:
        with pytest.raises(ProtocolError, match="given twice"):
            MessageDecoder(profile=LAX).feed(data)


def test_repr_of_parameters_shows_what_is_there() -> None:
    parameters = P(prefix=(), tokens=(Token(AliasType.USE_VALUE, type=0, value=b"secret"),), forward=False)
    text = repr(parameters)
    assert text.startswith("Parameters(tokens=(Token(")
    assert text.endswith("forward=False, prefix=())")
    assert "secret" not in text


def test_many_repeats_cost_linear_time() -> None:
    """A body full of empty filters: quadratic work would take minutes."""
    count = (65535 - 8) // 2
    body = b"\x00\x00" + encode_vi64(count + 1) + b"\x26\x00" + b"\x00\x00" * count
    [message] = MessageDecoder().feed(b"\x51" + len(body).to_bytes(2) + body)
    assert isinstance(message, SubscribeTracks)
    assert len(message.parameters.range_filters) == count + 1


@pytest.mark.parametrize(
    "parameters",
    [
        P(subscriber_priority=256),
        P(subscriber_priority=-1),
        P(new_group_request=2**64),
        P(range_filters=(RangeFilter(RangeKind.PRIORITY, ((0, 256),)),)),
        P(range_filters=(RangeFilter(RangeKind.OBJECTID, ((5, 4),)),)),
    ],
)
def test_encoding_refuses_values_out_of_range(parameters: Parameters) -> None:
    with pytest.raises(UsageError):
        encode(Subscribe(0, TRACK, parameters))


# --- FILL_PARAMETERS in its three forms (moqt 7.1) ---

FILLS = [
    P(),
    P(location_filter=LocationFilter.absolute_start(0, 0)),
    P(fill_timeout=0),
    P(fill_timeout=32, subscriber_priority=35),
    P(fill_timeout=5, subscriber_priority=1, location_filter=LocationFilter.groups(300, 70000)),
    P(range_filters=(RangeFilter(RangeKind.OBJECTID, ((0, 3), (9, None))),)),
    P(
        subscriber_priority=2,
        range_filters=tuple(RangeFilter(RangeKind.SUBGROUP, ((i, i),), i) for i in range(12)),
    ),
]


@pytest.mark.parametrize("after", [P(), P(new_group_request=0), P(include_properties=True)], ids=repr)
@pytest.mark.parametrize("fill", FILLS, ids=repr)
@pytest.mark.parametrize("form", FillForm)
def test_every_form_of_fill_is_understood(form: FillForm, fill: Parameters, after: Parameters) -> None:
    profile = Profile(DRAFT_22.alpn, DRAFT_22.draft, DRAFT_22.scopes, (form,))
    parameters = P(
        location_filter=LocationFilter.next_object(),
        fill=fill,
        new_group_request=after.new_group_request,
        include_properties=after.include_properties,
    )
    message = Subscribe(0, TRACK, parameters)
    data = encode(message, profile)
    assert MessageDecoder().feed(data) == [message]
    assert MessageDecoder(profile=profile).feed(data) == [message]


def test_a_fill_may_end_its_message_nowhere_else(ready: Ready) -> None:
    """What follows must fit as well; the fault told is that of the form that we send."""
    data = bytes.fromhex("020009" + "02" + "01" + "23" + "0401200155" + "66")
    with pytest.raises(ProtocolError, match="1 bytes are left over"):
        ready(RequestUpdate, Subscribe).feed(data)


# --- range filters that cost their request only (moqt 8) ---


@pytest.mark.parametrize(
    ("kind", "value", "fault"),
    [
        (RangeKind.OBJECTID, "00", "no Range"),
        (RangeKind.OBJECT_PROPERTY, "0002", "no Range"),
        (RangeKind.OBJECT_PROPERTY, "00030001", "odd"),
        (RangeKind.PRIORITY, "00008100", "above 255"),
        (RangeKind.PRIORITY, "008100", "above 255"),
        (RangeKind.OBJECTID, "00" + "01" + "ff" * 9, "above"),
        (RangeKind.SUBGROUP, "00" + "0001" + "ff" * 9, "above"),
    ],
)
def test_faulty_range_filters_decode(kind: RangeKind, value: str, fault: str) -> None:
    content = bytes.fromhex(value)
    body = encode(Subscribe(0, TRACK))[3:-1] + b"\x01" + encode_vi64(kind) + bytes((len(content),)) + content
    [message] = MessageDecoder().feed(b"\x03" + len(body).to_bytes(2) + body)
    assert isinstance(message, Subscribe)
    [filter_] = message.parameters.range_filters
    assert filter_.kind is kind
    assert fault in filter_.fault
    assert not filter_.removes
    with pytest.raises(UsageError):
        encode(message)


def test_a_range_filter_that_is_cut_closes_the_session() -> None:
    body = encode(Subscribe(0, TRACK))[3:-1] + bytes.fromhex("01" + "26" + "02" + "0080")
    with pytest.raises(ProtocolError, match="OBJECTID filter: cut off"):
        MessageDecoder().feed(b"\x03" + len(body).to_bytes(2) + body)


# --- fields ---


def test_reason_phrase_limits() -> None:
    longest = RequestError(0, 0, "ü" * 512)
    assert MessageDecoder(request=Subscribe).feed(encode(longest)) == [longest]
    [cut] = MessageDecoder(request=Subscribe).feed(encode(RequestError(0, 0, "x" + "ü" * 600)))
    assert cut == RequestError(0, 0, "x" + "ü" * 511)
    [odd] = MessageDecoder(request=Subscribe).feed(encode(RequestError(0, 0, "\ud800")))
    assert odd == RequestError(0, 0, "?")


def test_a_reason_that_is_not_utf8_is_still_told() -> None:
    assert MessageDecoder(request=Subscribe).feed(bytes.fromhex("0500051000" + "02ff41")) == [
        RequestError(RequestCode.DOES_NOT_EXIST, 0, "\ufffdA")
    ]


def test_uri_limits() -> None:
    longest = Goaway("u" * 8192, 1)
    decoder = MessageDecoder(request=Subscribe)
    assert decoder.feed(encode(longest)) == [longest]
    with pytest.raises(UsageError, match="8193"):
        encode(Goaway("u" * 8193))
    with pytest.raises(ProtocolError, match="not UTF-8"):
        MessageDecoder(request=Subscribe).feed(bytes.fromhex("100003" + "01ff00"))


def test_retry_after_is_in_seconds() -> None:
    assert RequestError(0, 0).retry_after is None
    assert RequestError(0, 1).retry_after == 0.0
    assert RequestError(0, 1501).retry_after == 1.5


REDIRECT = RequestError(RequestCode.REDIRECT, 0, "", Redirect("moqt://b/", FullTrackName((b"a",), b"t")))
REDIRECT_NAMESPACE = RequestError(RequestCode.REDIRECT, 0, "", Redirect("", FullTrackName((b"a",), b"")))


@pytest.mark.parametrize("request_type", REQUESTS)
def test_redirect_of_a_namespace_has_no_track_name(request_type: type[Request]) -> None:
    """Moqt 20 #14."""
    named = request_type in (Subscribe, Publish, Fetch, TrackStatus)
    assert accepts(MessageDecoder(request=request_type), REDIRECT_NAMESPACE)
    assert accepts(MessageDecoder(request=request_type), REDIRECT) is named


def test_redirect_belongs_to_its_code() -> None:
    with pytest.raises(UsageError):
        encode(RequestError(RequestCode.REDIRECT))
    with pytest.raises(UsageError):
        encode(RequestError(RequestCode.TIMEOUT, redirect=REDIRECT.redirect))
    with pytest.raises(ProtocolError, match="cut off"):
        MessageDecoder(request=Subscribe).feed(bytes.fromhex("050003340000"))


@pytest.mark.parametrize("request_type", REQUESTS)
@pytest.mark.parametrize("replied", [False, True])
def test_track_properties_in_request_ok(request_type: type[Request], replied: bool) -> None:
    """Moqt 20 #19: only in the reply to TRACK_STATUS."""
    decoder = sent(request_type, replied=replied)()
    message = RequestOk(P(), ((0x04, 1),))
    assert accepts(decoder, message) is (request_type is TrackStatus and not replied)


@pytest.mark.parametrize("value", [2, 255])
def test_end_of_track_is_a_flag(value: int) -> None:
    with pytest.raises(ProtocolError, match="End Of Track"):
        MessageDecoder(request=Fetch).feed(bytes.fromhex("180004") + bytes((value, 0, 0, 0)))


def test_namespace_and_name_of_publish_skipped_count_together() -> None:
    longest = PublishSkipped((b"a" * 4000,), b"b" * 96)
    decoder = sent(SubscribeTracks, replied=True)()
    assert decoder.feed(encode(longest)) == [longest]
    with pytest.raises(UsageError, match="4097"):
        encode(PublishSkipped((b"a" * 4000,), b"b" * 97))
    body = encode(longest)[3:-97] + encode_vi64(97) + b"b" * 97
    with pytest.raises(ProtocolError, match="4097"):
        decoder.feed(b"\x0f" + len(body).to_bytes(2) + body)


def test_encoding_refuses_track_properties_that_close_the_session() -> None:
    with pytest.raises(UsageError, match="DYNAMIC_GROUPS"):
        encode(SubscribeOk(0, P(), ((0x30, 2),)))


def test_unknown_codes_pass() -> None:
    for message in RequestError(0x7F, 0), PublishDone(0x9D, 0, "grease"), PublishDone(DoneCode.EXPIRED):
        assert MessageDecoder(request=Subscribe).feed(encode(message)) == [message]


# --- SETUP (moqt 3.2) ---


def setup(body: str) -> list[Message]:
    data = bytes.fromhex(body)
    return MessageDecoder(control=True).feed(b"\xaf\x00" + len(data).to_bytes(2) + data)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("0103666f6f", SessionCode.MALFORMED_PATH),
        ("01042f612062", SessionCode.MALFORMED_PATH),
        ("01042f25717a", SessionCode.MALFORMED_PATH),
        ("0500", SessionCode.MALFORMED_AUTHORITY),
        ("0503613a62", SessionCode.MALFORMED_AUTHORITY),
        ("0503754068", SessionCode.MALFORMED_AUTHORITY),
        ("0101ff", SessionCode.KEY_VALUE_FORMATTING_ERROR),
        ("0701ff", SessionCode.KEY_VALUE_FORMATTING_ERROR),
        ("030109", SessionCode.KEY_VALUE_FORMATTING_ERROR),
        ("04010001", SessionCode.PROTOCOL_VIOLATION),
        ("04", SessionCode.PROTOCOL_VIOLATION),
    ],
)
def test_broken_setup_options(body: str, code: SessionCode) -> None:
    with pytest.raises(ProtocolError) as caught:
        setup(body)
    assert caught.value.code is code


def test_empty_and_query_paths_are_legal() -> None:
    assert setup("0100") == [Setup(SetupOptions(path=""))]
    assert setup("01033f613d") == [Setup(SetupOptions(path="?a="))]
    for options in SetupOptions(path="a b"), SetupOptions(authority=""), SetupOptions(authority="::1"):
        with pytest.raises(UsageError):
            encode(Setup(options))


def test_defaults_may_be_written_out() -> None:
    assert setup("0400020001000100") == [Setup()]
