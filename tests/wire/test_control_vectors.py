"""Vectors of moqt 26.2 (control messages), 26.4 (KVCS) and 26.6 (negative)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from moqt.errors import DoneCode, ProtocolError, RequestCode, SessionCode
from moqt.filters import GroupOrder, Location, LocationFilter, RangeFilter, RangeKind
from moqt.names import FullTrackName
from moqt.wire import (
    UNKNOWN_STREAM_COUNT,
    AliasType,
    Fetch,
    FetchOk,
    Goaway,
    Message,
    MessageDecoder,
    Namespace,
    NamespaceDone,
    Parameters,
    PropertyType,
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
    SetupOptions,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    Token,
    TrackStatus,
    encode,
)

Ready: TypeAlias = Callable[[type[Message], type[Request]], MessageDecoder]

VECTORS = Path(__file__).parent.parent / "vectors"
CONTROL: dict[str, str] = {
    vector["id"]: vector["hex"]
    for name in ("moqt22.json", "moqt22-kvcs.json")
    for vector in json.loads((VECTORS / name).read_text())
    if not vector["id"].startswith("D")
}
NEGATIVE: dict[str, dict[str, Any]] = {
    vector["id"]: vector for vector in json.loads((VECTORS / "moqt22-negative.json").read_text())
}

SCOPE = (b"kvcs-1", b"scope")
K0 = FullTrackName(SCOPE, b"k0")
KVCS = (
    b"kvcs-1",
    bytes.fromhex("6d1c6481cd428737da312c089db3832a"),
    bytes.fromhex("5ed5c2f238839655d7c4029e12b7f31caf9e7421f4edb4057feee6dab760ee0f"),
    bytes.fromhex("653275884ca44f8945fd4c902611c467394b73656e64c78d8522648cb75aefc1"),
    bytes.fromhex("0123456789abcdef0123456789abcdef"),
)
NEXT = LocationFilter.next_object()
ALL = LocationFilter.absolute_start(0, 0)
FIRST_16 = RangeFilter(RangeKind.OBJECTID, ((0, 15),))
CACHE = PropertyType.MAX_CACHE_DURATION
P = Parameters


def subscribe(parameters: Parameters) -> Subscribe:
    return Subscribe(8, K0, parameters)


def filtered(location_filter: LocationFilter) -> Subscribe:
    return subscribe(P(location_filter=location_filter))


FILL_ALL = subscribe(P(location_filter=NEXT, fill=P(location_filter=ALL)))
FILL_EMPTY = subscribe(P(location_filter=NEXT, fill=P()))

EXPECTED: dict[str, Message] = {
    "C01": Setup(SetupOptions(path="/moq", authority="relay.example.com")),
    "C02": Setup(
        SetupOptions(
            path="/",
            authority="h:4443",
            max_auth_token_cache_size=4096,
            max_filter_ranges=16,
            implementation="x/1",
            max_request_updates=4,
        )
    ),
    "C03": Setup(SetupOptions(max_filter_ranges=16, max_request_updates=4)),
    "C04": Setup(),
    "C05": Setup(SetupOptions(tokens=(Token(AliasType.USE_VALUE, type=0, value=b"tok"),))),
    "C06": Setup(),
    "C07": Goaway("", 5000),
    "C08": Goaway("moqt://b.example/", 0),
    "C09": PublishNamespace(0, SCOPE),
    "C10": PublishNamespace(2, SCOPE, P(tokens=(Token(AliasType.REGISTER, 7, 0, b"secret"),))),
    "C11": SubscribeNamespace(4, (b"kvcs-1",)),
    "C12": SubscribeNamespace(6, ()),
    "C13": Namespace((b"scope",)),
    "C14": NamespaceDone((b"scope",)),
    "C15": RequestOk(),
    "C16": RequestOk(P(expires=30000)),
    "C17": RequestOk(P(largest=Location(3, 7))),
    "C18": RequestError(RequestCode.DOES_NOT_EXIST, 0, "nope"),
    "C19": RequestError(RequestCode.EXCESSIVE_LOAD, 1001, ""),
    "C20": RequestError(RequestCode.REDIRECT, 0, "", Redirect("moqt://r2/", K0)),
    "C21": subscribe(P()),
    "C22": filtered(LocationFilter.none()),
    "C23": filtered(LocationFilter.relative_start(1)),
    "C24": filtered(LocationFilter.absolute_start(12, 5)),
    "C25": filtered(LocationFilter.absolute_start(0, 0)),
    "C26": filtered(LocationFilter(LocationFilter.groups(12, 15).type, 12, 5, 3)),
    "C27": filtered(LocationFilter.absolute_range(Location(12, 5), Location(15, 7))),
    "C28": filtered(NEXT),
    "C29": filtered(LocationFilter.absolute_start(300, 20000)),
    "C30": FILL_ALL,
    "C31": subscribe(P(location_filter=NEXT, fill=P(location_filter=LocationFilter.relative_start(1)))),
    "C32": FILL_ALL,
    "C33": FILL_ALL,
    "C34": FILL_EMPTY,
    "C35": FILL_EMPTY,
    "C36": subscribe(
        P(
            location_filter=NEXT,
            fill=P(
                fill_timeout=2000,
                subscriber_priority=10,
                location_filter=ALL,
                group_order=GroupOrder.ASCENDING,
                range_filters=(RangeFilter(RangeKind.OBJECTID, ((0, 3),)),),
            ),
        )
    ),
    "C37": subscribe(
        P(
            object_delivery_timeout=500,
            rendezvous_timeout=3000,
            subgroup_delivery_timeout=900,
            forward=False,
            subscriber_priority=7,
            location_filter=NEXT,
            group_order=GroupOrder.DESCENDING,
            new_group_request=0,
            include_properties=False,
        )
    ),
    "C38": SubscribeOk(2),
    "C39": SubscribeOk(
        5,
        P(expires=60000, largest=Location(3, 7)),
        ((CACHE, 600000), (PropertyType.DEFAULT_PUBLISHER_PRIORITY, 64)),
    ),
    "C40": Publish(1, K0, 9, P(largest=Location(0, 4), forward=False), ((CACHE, 1000),)),
    "C41": PublishDone(DoneCode.TRACK_ENDED, 17, ""),
    "C42": PublishDone(DoneCode.TRACK_ENDED, UNKNOWN_STREAM_COUNT, "done"),
    "C43": PublishStateNotify(P(largest=Location(3, 7), forward=False)),
    "C44": RequestUpdate(10, P(forward=True, fill=P(location_filter=ALL))),
    "C45": RequestUpdate(12, P(location_filter=LocationFilter.none())),
    "C46": RequestUpdate(14),
    "C47": RequestUpdate(16, P(range_filters=(RangeFilter(RangeKind.OBJECTID),))),
    "C48": Fetch(18, K0, P(location_filter=LocationFilter.groups(4, 7), group_order=GroupOrder.ASCENDING)),
    "C49": Fetch(
        18,
        K0,
        P(
            subscriber_priority=128,
            location_filter=LocationFilter.groups(4, 7),
            group_order=GroupOrder.ASCENDING,
            range_filters=(FIRST_16,),
        ),
    ),
    "C50": Fetch(20, K0, P(location_filter=LocationFilter.absolute_range(Location(3, 2), Location(3, 2)))),
    "C51": Fetch(22, K0),
    "C52": FetchOk(True, Location(7, 15), P(), ((CACHE, 600000),)),
    "C53": TrackStatus(24, FullTrackName(SCOPE, b"manifest")),
    "C54": SubscribeTracks(
        26,
        SCOPE,
        P(
            forward=False,
            range_filters=(RangeFilter(RangeKind.TRACK_PROPERTY, ((1, 2),), property_type=0x78),),
        ),
    ),
    "C55": PublishSkipped((), b"k0"),
    "C56": subscribe(P(range_filters=(RangeFilter(RangeKind.OBJECTID, ((3, 5), (10, 15))),))),
    "C57": subscribe(
        P(
            range_filters=(
                RangeFilter(RangeKind.OBJECTID, ((0, 3),)),
                RangeFilter(RangeKind.OBJECTID, ((8, None),), set_id=1),
            )
        )
    ),
    "C58": RequestUpdate(28, P(prefix=(b"kvcs-1",))),
    "C59": subscribe(P(tokens=(Token(AliasType.USE_ALIAS, 7),))),
    "C60": RequestUpdate(30, P(tokens=(Token(AliasType.DELETE, 7),))),
    "K01": PublishNamespace(0, KVCS),
    "K02": SubscribeNamespace(0, KVCS[:4]),
    "K03": Namespace(KVCS[4:]),
    "K04": Subscribe(
        2, FullTrackName(KVCS, b"k.raw.s0"), P(location_filter=NEXT, fill=P(location_filter=ALL))
    ),
    "K05": Subscribe(
        4,
        FullTrackName(KVCS, b"manifest.cose"),
        P(location_filter=NEXT, fill=P(location_filter=LocationFilter.relative_start(1))),
    ),
    "K06": Fetch(
        6,
        FullTrackName(KVCS, b"k.raw.s0"),
        P(
            location_filter=LocationFilter.groups(4, 7),
            group_order=GroupOrder.ASCENDING,
            range_filters=(FIRST_16,),
        ),
    ),
    "K07": SubscribeOk(1, P(largest=Location(4, 63)), ((CACHE, 86400000),)),
}
# Forms that a receiver must take and that we do not send.
ACCEPTED_ONLY = {"C06", "C32", "C33", "C35"}
# The request of the stream, where it is not SUBSCRIBE.
STREAMS: dict[str, type[Request]] = {
    "C16": PublishNamespace,
    "C58": SubscribeNamespace,
    "X16": Publish,
    "X17": Fetch,
}


def test_every_vector_has_an_expectation() -> None:
    assert len(CONTROL) == 60 + 7
    assert CONTROL.keys() == EXPECTED.keys()
    assert NEGATIVE.keys() == BREACHES.keys() | LEGAL.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_decodes(name: str, ready: Ready) -> None:
    expected = EXPECTED[name]
    data = bytes.fromhex(CONTROL[name])
    stream = STREAMS.get(name, Subscribe)
    assert ready(type(expected), stream).feed(data) == [expected]
    decoder = ready(type(expected), stream)
    bytewise = [decoder.feed(data[at : at + 1]) for at in range(len(data))]
    assert bytewise == [[]] * (len(data) - 1) + [[expected]]
    decoder.finish()


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - ACCEPTED_ONLY))
def test_encodes(name: str) -> None:
    assert encode(EXPECTED[name]).hex() == CONTROL[name]


@pytest.mark.parametrize("name", sorted(ACCEPTED_ONLY))
def test_forms_that_are_only_accepted_are_sent_otherwise(name: str) -> None:
    assert encode(EXPECTED[name]).hex() == CONTROL[{"C06": "C04", "C35": "C34"}.get(name, "C30")]


# Negative vectors: the type of message, and words of the reason, so that none fails for another cause.
BREACHES: dict[str, tuple[type[Message], str]] = {
    "X01": (Subscribe, "unknown Location Filter Type 6"),
    "X02": (Subscribe, "end group"),
    "X03": (Subscribe, "cut off inside a number"),
    "X05": (Subscribe, "FORWARD does not belong into FILL_PARAMETERS"),
    "X06": (Subscribe, "TRACK_PROPERTY_FILTER does not belong into FILL_PARAMETERS"),
    "X07": (Fetch, "FILL_PARAMETERS does not belong into FETCH"),
    "X08": (Subscribe, "GROUP_ORDER is 0"),
    "X09": (Subscribe, "GROUP_ORDER is 3"),
    "X10": (Subscribe, "FORWARD is 2"),
    "X11": (Subscribe, "INCLUDE_PROPERTIES is 2"),
    "X12": (Subscribe, "unknown parameter 0x7e"),
    "X13": (Subscribe, "FORWARD is given twice"),
    "X14": (Subscribe, "LARGEST_OBJECT does not belong into SUBSCRIBE"),
    "X15": (Subscribe, "EXPIRES does not belong into SUBSCRIBE"),
    "X16": (RequestOk, "FORWARD does not belong into PUBLISH_OK"),
    "X17": (FetchOk, "EXPIRES does not belong into FETCH_OK"),
    "X18": (SubscribeNamespace, "at most 32 fields"),
    "X19": (SubscribeNamespace, "a field of a Track Namespace is empty"),
    "X20": (Subscribe, "4097 bytes in sum"),
    "X22": (Subscribe, "a parameter type is above 2^64-1"),
    "X23": (Setup, "a type is above 2^64-1"),
    "X24": (Setup, "PATH is repeated"),
    "X26": (Subscribe, "1 bytes are left over"),
    "X27": (RequestError, "1025 bytes"),
    "X28": (Goaway, "8193 bytes"),
    "X29": (Subscribe, "unknown Alias Type 9"),
    "X30": (SubscribeOk, "DEFAULT_PUBLISHER_GROUP_ORDER is 0"),
    "X31": (SubscribeOk, "DYNAMIC_GROUPS is 2"),
    "X33": (Subscribe, "1 bytes are left over"),
}
LEGAL: dict[str, Message] = {
    "X04": filtered(LocationFilter.absolute_start(0, 0)),
    "X21": Subscribe(8, FullTrackName((b"n" * 4000,), b"k" * 96)),
    "X25": Setup(),
    "X32": Subscribe(8, K0),
    "X34": SubscribeTracks(2, (b"a",), P(subscriber_priority=1)),
    "X35": subscribe(
        P(range_filters=(RangeFilter(RangeKind.OBJECT_PROPERTY, ((1, 2),), property_type=0x79),))
    ),
}


def negative(name: str) -> bytes:
    return b"".join(bytes.fromhex(text) * count for text, count in NEGATIVE[name]["parts"])


@pytest.mark.parametrize("name", BREACHES)
def test_breaches_close_the_session(name: str, ready: Ready) -> None:
    kind, reason = BREACHES[name]
    decoder = ready(kind, STREAMS.get(name, Subscribe))
    with pytest.raises(ProtocolError) as caught:
        decoder.feed(negative(name))
    assert reason in caught.value.reason
    expected = SessionCode.KEY_VALUE_FORMATTING_ERROR if name == "X29" else SessionCode.PROTOCOL_VIOLATION
    assert caught.value.code is expected
    assert NEGATIVE[name]["expect"].startswith(f"close 0x{expected:x}")


@pytest.mark.parametrize("name", LEGAL)
def test_what_looks_wrong_and_is_legal(name: str, ready: Ready) -> None:
    assert ready(type(LEGAL[name]), Subscribe).feed(negative(name)) == [LEGAL[name]]


def test_the_odd_property_type_costs_the_request_only(ready: Ready) -> None:
    [message] = ready(Subscribe, Subscribe).feed(negative("X35"))
    assert isinstance(message, Subscribe)
    assert "odd" in message.parameters.range_filters[0].fault


# What the aiomoqt relay sent (moqt 26.7).
OBSERVED: dict[str, tuple[Message, type[Request]]] = {
    "af0000120610010e61696f6d6f71742f302e31332e33": (
        Setup(SetupOptions(max_filter_ranges=16, implementation="aiomoqt/0.13.3")),
        Subscribe,
    ),
    "040009050109010104c927c0": (SubscribeOk(5, P(largest=Location(1, 1)), ((CACHE, 600000),)), Subscribe),
    "1800080002010004c927c0": (FetchOk(False, Location(2, 1), P(), ((CACHE, 600000),)), Fetch),
    "0700080109020004c927c0": (RequestOk(P(largest=Location(2, 0)), ((CACHE, 600000),)), TrackStatus),
    "0b000e02050b747261636b20656e646564": (PublishDone(DoneCode.TRACK_ENDED, 5, "track ended"), Subscribe),
    "07000401090101": (RequestOk(P(largest=Location(1, 1))), Subscribe),
}


@pytest.mark.parametrize("text", OBSERVED)
def test_observed_on_the_wire(text: str, ready: Ready) -> None:
    message, stream = OBSERVED[text]
    assert ready(type(message), stream).feed(bytes.fromhex(text)) == [message]
