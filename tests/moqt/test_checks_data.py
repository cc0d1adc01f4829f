"""What a hostile peer says on data streams and in datagrams, and how the session takes it:
checks 23 to 29, 33 and 36 of moqt 20.

Each test has its number of the table in its name. The peer is raw: it writes bytes.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from moqt.errors import (
    MalformedTrack,
    RequestCode,
    RequestRejected,
    ResetCode,
    SessionClosed,
)
from moqt.filters import GroupOrder, Location, LocationFilter
from moqt.subscribing import StreamEnd
from moqt.wire import (
    FetchEncoder,
    FetchOk,
    ObjectStatus,
    PropertyType,
    Publish,
    PublishDone,
    SubscribeOk,
    encode_properties,
    encode_vi64,
)
from tests.moqt.ends import NAME, WHOLE, collect, hostile
from tests.moqt.raw import (
    TOP,
    V,
    check_closed,
    check_lives,
    check_refused,
    fetching,
    make_request,
    subgroup,
    subscribe_at,
    subscribed,
)

pytestmark = pytest.mark.virtual

# 23: flags of a subgroup stream.


@pytest.mark.parametrize(
    "flags",
    [kind for kind in range(0x80) if kind & 0x06 == 0x06 and kind & 0x10]
    + [kind for kind in range(0x10) if kind != 0x05]
    + [0x20, 0x2F, 0x40, 0x6A, 0x80, 0x90, 0xD0, 0x1050],
)
async def test_23_flags(flags: int) -> None:
    """S15 too. No subscription is needed for it."""
    async with hostile() as (session, peer):
        await peer.send(encode_vi64(flags) + b"\x01\x00\x00\x80")
        await check_closed(session, peer, V)


async def test_23_every_valid_type() -> None:
    valid = [kind for kind in range(0x80) if kind & 0x10 and kind & 0x06 != 0x06]
    assert len(valid) == 48
    async with hostile() as (_, peer):
        for kind in valid:
            await peer.send(encode_vi64(kind) + b"\x01\x00\x00\x80")
        await check_lives(peer)


# 24: datagrams.


@pytest.mark.parametrize(
    "data",
    [
        *(bytes((kind, 5, 1, 0, 128)) + b"hi" for kind in (0x22, 0x23, 0x26, 0x27, 0x2A, 0x2B, 0x2E, 0x2F)),
        *(bytes((kind, 5, 1, 0, 128)) + b"hi" for kind in (0x10, 0x1F, 0x30, 0x3F)),
        bytes.fromhex("0105010280006869"),  # Properties of Length 0
        bytes.fromhex("2105010280023e0103"),  # properties on End of Group
        bytes.fromhex("200501028007"),  # unknown status
        bytes.fromhex("20050102800300"),  # something behind the status
        bytes.fromhex("000501"),  # cut
        b"",
    ],
)
async def test_24_datagrams(data: bytes) -> None:
    async with hostile() as (session, peer):
        peer.connection.send_datagram(data)
        await check_closed(session, peer, V)


# 25 to 29: data streams.


@pytest.mark.parametrize(
    "objects",
    [
        pytest.param("ff" * 9 + "0141" + "000142", id="25 Object ID overflow"),
        pytest.param("000141" + "ff" * 9 + "0142", id="25 Object ID overflow by its delta"),
        pytest.param("000001", id="27 status 1"),
        pytest.param("000002", id="27 status 2"),
        pytest.param("000005", id="27 status 5"),
        pytest.param("0000809d", id="27 status 0x9D"),
        pytest.param("0000ff" + "ff" * 8, id="27 status 2^64-1"),
    ],
)
async def test_25_27_subgroup_objects(objects: str) -> None:
    async with subscribed(filter=LocationFilter.none()) as (session, peer, subscription, _talk):
        await peer.send(bytes.fromhex("300100") + bytes.fromhex(objects))
        await check_closed(session, peer, V)
        with pytest.raises(SessionClosed):
            await collect(subscription)


async def test_25_the_largest_object_id_is_legal() -> None:
    async with subscribed(filter=LocationFilter.none()) as (_, peer, subscription, _talk):
        await peer.send(bytes.fromhex("300100" + "ff" * 9 + "0141"), fin=True)
        item = await anext(subscription)
        assert getattr(item, "location", None) == Location(0, TOP)
        await check_lives(peer)


@pytest.mark.parametrize(
    ("order", "records"),
    [
        (GroupOrder.ASCENDING, "1cff" + "ff" * 8 + "00800141" + "0c00000142"),
        (GroupOrder.ASCENDING, "1c0000800141" + "0cff" + "ff" * 8 + "000142"),
        (GroupOrder.DESCENDING, "1c0200800141" + "0c02000142"),
        (GroupOrder.ASCENDING, "1c00ff" + "ff" * 8 + "800141" + "000142"),
        (GroupOrder.ASCENDING, "1c0001800141" + "04ff" + "ff" * 8 + "0142"),
        (GroupOrder.ASCENDING, "1f00ff" + "ff" * 8 + "00800141" + "02" + "0142"),
    ],
)
async def test_25_fetch_arithmetic(order: GroupOrder, records: str) -> None:
    async with fetching(order) as (session, peer, fetch, number):
        await peer.send(b"\x05" + encode_vi64(number) + bytes.fromhex(records))
        await check_closed(session, peer, V)
        with pytest.raises(SessionClosed):
            await collect(fetch)


@pytest.mark.parametrize(
    "records",
    [
        pytest.param("80a0", id="flags 0xA0"),
        pytest.param("8080", id="flags 0x80"),
        pytest.param("840c0204", id="flags 0x40C"),
        pytest.param("140000800141", id="first without group"),
        pytest.param("180000800141", id="first without object"),
        pytest.param("00", id="first with nothing"),
        pytest.param("1d0000800141", id="first with prior subgroup"),
        pytest.param("1e0000800141", id="first with prior subgroup + 1"),
        pytest.param("0c00000141", id="first with prior priority"),
        pytest.param("808c0204" + "010141", id="prior subgroup behind a marker"),
        pytest.param("808c0204" + "000141", id="prior priority behind a marker"),
    ],
)
async def test_26_fetch_records(records: str) -> None:
    async with fetching() as (session, peer, fetch, number):
        await peer.send(b"\x05" + encode_vi64(number) + bytes.fromhex(records))
        await check_closed(session, peer, V)
        with pytest.raises(SessionClosed):
            await collect(fetch)


async def test_26_markers_are_legal() -> None:
    async with fetching() as (_, peer, fetch, number):
        records = "1c0200800158" + "808c0204" + "00015a" + "810c0300" + "820c0400"
        await peer.send(b"\x05" + encode_vi64(number) + bytes.fromhex(records), fin=True)
        items = await collect(fetch)
        assert [type(item).__name__ for item in items] == [
            "ReceivedObject",
            "RangeNotice",
            "ReceivedObject",
            "RangeNotice",
            "RangeNotice",
            "StreamEnd",
        ]
        await check_lives(peer)


@pytest.mark.parametrize("status", ["03", "04"])
async def test_28_properties_on_a_status(status: str) -> None:
    async with subscribed(filter=LocationFilter.none()) as (session, peer, _subscription, _talk):
        await peer.send(bytes.fromhex("310100" + "00" + "023e01" + "00" + status))
        await check_closed(session, peer, V)


@pytest.mark.parametrize("cut", range(1, 12))
async def test_29_fin_inside_a_subgroup_stream(cut: int) -> None:
    whole = subgroup((0, b"abcd"), subgroup=300)
    assert len(whole) == 12
    async with subscribed(filter=LocationFilter.none()) as (session, peer, _subscription, _talk):
        await peer.send(whole[:cut], fin=True)
        if cut == 6:  # The header, whole: an empty subgroup.
            await check_lives(peer)
        else:
            await check_closed(session, peer, V)


@pytest.mark.parametrize("cut", range(3, 9))
async def test_29_fin_inside_a_fetch_stream(cut: int) -> None:
    async with fetching() as (session, peer, _fetch, number):
        encoder = FetchEncoder(number)
        whole = encoder.header() + encoder.object(Location(0, 0), 2) + b"ab"
        assert len(whole) == 9
        await peer.send(whole[:cut], fin=True)
        await check_closed(session, peer, V)


# 33: more streams than PUBLISH_DONE counts: a MAY, which we do not use.


async def test_33_more_streams_than_counted() -> None:
    async with subscribed(filter=LocationFilter.none()) as (_, peer, subscription, talk):
        await peer.send(subgroup((0, b"a")), fin=True)
        await asyncio.sleep(0.1)
        await talk.say(PublishDone(2, 1), fin=True)
        assert len(await collect(subscription)) == 2
        late = await peer.send(subgroup((0, b"b"), group=1))
        await check_lives(peer)
        assert late.stopped is not None


# 36: malformed tracks (moqt 20.1).

END_OF_GROUP, END_OF_TRACK = ObjectStatus.END_OF_GROUP, ObjectStatus.END_OF_TRACK
MANDATORY = encode_properties(((0x4000, 1),))
OBJECT_GAP = encode_properties(((PropertyType.PRIOR_OBJECT_ID_GAP, 1),))
GROUP_GAP = encode_properties(((PropertyType.PRIOR_GROUP_ID_GAP, 1),))
NESTED = encode_properties(((PropertyType.IMMUTABLE_PROPERTIES, bytes.fromhex("0b00")),))
UNPARSABLE = encode_properties(((PropertyType.IMMUTABLE_PROPERTIES, b"\xff"),))
Stream = tuple[bytes, bool]
"""What is on a subgroup stream, and whether it ends with FIN (else it is reset)."""


@pytest.mark.parametrize(
    "streams",
    [
        pytest.param(
            [(subgroup((0, b"a")), False), (subgroup((1, b"b"), priority=7), True)],
            id="another priority in a subgroup",
        ),
        pytest.param(
            [(subgroup((0, b"a")), True), (subgroup((1, b"b")), True)], id="beyond the end of a subgroup"
        ),
        pytest.param([(subgroup((5, b"a")), True), (subgroup((3, b"b")), True)], id="two ends of a subgroup"),
        pytest.param(
            [(subgroup((0, b"a"), status=(1, END_OF_GROUP)), True), (subgroup((1, b"b"), subgroup=1), True)],
            id="beyond End of Group",
        ),
        pytest.param(
            [(subgroup((5, b"a")), False), (subgroup(status=(5, END_OF_GROUP), subgroup=1), True)],
            id="End of Group before what came",
        ),
        pytest.param(
            [(subgroup((3, b"a"), end_of_group=True), True), (subgroup((4, b"b"), subgroup=1), True)],
            id="beyond END_OF_GROUP and FIN",
        ),
        pytest.param(
            [(subgroup((4, b"b"), subgroup=1), True), (subgroup((3, b"a"), end_of_group=True), True)],
            id="END_OF_GROUP and FIN before what came",
        ),
        pytest.param(
            [(subgroup(group=2, status=(0, END_OF_TRACK)), True), (subgroup((0, b"a"), group=2), True)],
            id="beyond End of Track",
        ),
        pytest.param(
            [(subgroup((0, b"a"), group=3), True), (subgroup(group=2, status=(0, END_OF_TRACK)), True)],
            id="End of Track before what came",
        ),
        pytest.param([(subgroup((0, b"a")), False), (subgroup((0, b"b")), True)], id="another payload"),
        pytest.param(
            [(subgroup((0, b"a")), False), (subgroup((0, b"a"), subgroup=1), True)], id="another subgroup"
        ),
        pytest.param([(subgroup((0, b"a"), properties=MANDATORY), True)], id="mandatory property"),
        pytest.param(
            [(subgroup((0, b"a")), False), (subgroup((1, b"b"), properties=OBJECT_GAP), True)],
            id="object gap over what came",
        ),
        pytest.param([(subgroup((0, b"a"), properties=OBJECT_GAP), True)], id="object gap below 0"),
        pytest.param(
            [(subgroup((0, b"a")), True), (subgroup((0, b"b"), group=1, properties=GROUP_GAP), True)],
            id="group gap over what came",
        ),
        pytest.param([(subgroup((0, b"a"), properties=GROUP_GAP), True)], id="group gap below 0"),
        pytest.param([(subgroup((5, b"a"), properties=OBJECT_GAP + b"\x00\x01"), True)], id="gap repeated"),
        pytest.param([(subgroup((0, b"a"), properties=NESTED), True)], id="nested immutable properties"),
        pytest.param(
            [(subgroup((0, b"a"), properties=UNPARSABLE), True)], id="unparsable immutable properties"
        ),
    ],
)
async def test_36_malformed_track(streams: list[Stream]) -> None:
    async with subscribed(filter=LocationFilter.none()) as (session, peer, subscription, talk):
        opened = []
        for data, fin in streams:
            stream = await peer.send(data, fin=fin)
            opened.append(stream)
            await asyncio.sleep(0.1)
            if not fin:
                stream.reset(1)
            await asyncio.sleep(0.1)
        with pytest.raises(MalformedTrack):
            await collect(subscription)
        assert talk.stream.stopped == ResetCode.MALFORMED_TRACK
        await check_lives(peer)
        assert not session.closed


@pytest.mark.parametrize(
    "streams",
    [
        pytest.param([(subgroup((0, b"a")), False), (subgroup((0, b"a"), (1, b"b")), True)], id="repeated"),
        pytest.param(
            [(subgroup((0, b"a"), status=(7, END_OF_GROUP), end_of_group=True), True)], id="status and bit"
        ),
        pytest.param(
            [
                (subgroup((0, b"a"), end_of_group=True), True),
                (subgroup(status=(7, END_OF_GROUP), subgroup=1), True),
            ],
            id="bit, then status",
        ),
        pytest.param(
            [(subgroup((5, b"a"), properties=OBJECT_GAP), False), (subgroup((4, b"b")), False)],
            id="seen after it was recorded absent",
        ),
        pytest.param([(subgroup(), True)], id="empty subgroup"),
    ],
)
async def test_36_what_is_not_malformed(streams: list[Stream]) -> None:
    async with subscribed(filter=LocationFilter.none()) as (_, peer, subscription, talk):
        for data, fin in streams:
            stream = await peer.send(data, fin=fin)
            await asyncio.sleep(0.1)
            if not fin:
                stream.reset(1)
            await asyncio.sleep(0.1)
        await talk.say(PublishDone(2, len(streams)), fin=True)
        items = await collect(subscription)
        assert sum(isinstance(item, StreamEnd) for item in items) == len(streams)
        await check_lives(peer)


async def test_36_another_delivery_mode() -> None:
    """By a fill, which says Datagram of an Object that came in a Subgroup."""
    async with hostile() as (session, peer):
        talk, subscription = await subscribe_at(
            session, peer, filter=LocationFilter.none(), fill=WHOLE, largest=Location(0, 5)
        )
        assert subscription.expects_fill
        await peer.send(subgroup((0, b"a")), fin=True)
        await asyncio.sleep(0.1)
        encoder = FetchEncoder(0 if session.connection.is_client else 1)
        record = encoder.object(Location(0, 0), 1, datagram=True)
        await peer.send(encoder.header() + record + b"a", fin=True)
        with pytest.raises(MalformedTrack):
            await collect(subscription)
        await asyncio.sleep(0.1)
        assert talk.stream.stopped == ResetCode.MALFORMED_TRACK
        await check_lives(peer)


@pytest.mark.parametrize("reply", ["mandatory", "mandatory immutable", "nested"])
@pytest.mark.parametrize("kind", ["subscribe", "fetch"])
async def test_36_and_13_1_track_properties(kind: str, reply: str) -> None:
    """A mandatory Track Property that we do not know, and malformed ones, cancel the request."""
    properties: dict[str, tuple[tuple[int, int | bytes], ...]] = {
        "mandatory": ((0x4000, 1),),
        "mandatory immutable": ((PropertyType.IMMUTABLE_PROPERTIES, encode_properties(((0x7FFF, b""),))),),
        "nested": ((PropertyType.IMMUTABLE_PROPERTIES, bytes.fromhex("0b00")),),
    }
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(make_request(session, kind))
        talk, _ = await peer.request()
        ok = SubscribeOk(1) if kind == "subscribe" else FetchOk(False, Location(0, 5))
        await talk.say(replace(ok, properties=properties[reply]))
        with pytest.raises(MalformedTrack if reply == "nested" else RequestRejected) as caught:
            await asking
        if isinstance(caught.value, RequestRejected):
            assert caught.value.code == RequestCode.UNSUPPORTED_EXTENSION
        await check_lives(peer)
        assert talk.stream.stopped is not None
        assert not session._requests


async def test_13_1_publish_with_a_mandatory_property() -> None:
    async with hostile() as (_, peer):
        talk = await peer.ask(Publish(peer.id(), NAME, 1, properties=((0x4000, 1),)))
        await check_refused(talk, RequestCode.UNSUPPORTED_EXTENSION)
