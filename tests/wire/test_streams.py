"""Data streams beyond the vectors: what is refused, what is never done."""

from __future__ import annotations

import pytest

from moqt.errors import ProtocolError, SessionCode, UsageError
from moqt.filters import GroupOrder, Location
from moqt.wire import (
    DataStreamDecoder,
    EndOfRange,
    Event,
    FetchEncoder,
    FetchHeader,
    ObjectHeader,
    ObjectStatus,
    PaddingHeader,
    PayloadChunk,
    RangeStatus,
    StreamKind,
    SubgroupEncoder,
    SubgroupHeader,
    encode_vi64,
    stream_kind,
)

MAX = 2**64 - 1
TOP = "ff" * 9  # the vi64 2^64-1
VALID_SUBGROUP_TYPES = [0x10, 0x18, 0x30, 0x38, 0x50, 0x58, 0x70, 0x78]


def feed(text: str, order: GroupOrder = GroupOrder.ASCENDING) -> list[Event]:
    decoder = DataStreamDecoder()
    decoder.order = order
    return list(decoder.feed(bytes.fromhex(text)))


def feed_bytewise(text: str) -> None:
    decoder = DataStreamDecoder()
    for byte in bytes.fromhex(text):
        list(decoder.feed(bytes((byte,))))


def test_subgroup_types_are_those_of_the_table() -> None:
    valid = {base + low for base in VALID_SUBGROUP_TYPES for low in range(6)}
    for stream_type in range(0x100):
        data = encode_vi64(stream_type)
        if stream_type in valid | {0x05}:
            assert stream_kind(data) is StreamKind.DATA
            assert feed(data.hex()) == []
        else:
            for look in stream_kind, lambda data: feed(data.hex()):
                with pytest.raises(ProtocolError) as caught:
                    look(data)
                assert caught.value.code is SessionCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", None),
        ("af", None),
        ("f0132b3e", None),
        ("af00", StreamKind.CONTROL),
        ("af000003", StreamKind.CONTROL),
        ("f0132b3e28", StreamKind.DATA),
        ("8050", StreamKind.DATA),
        ("05", StreamKind.DATA),
    ],
)
def test_stream_kind_needs_the_whole_type(text: str, kind: StreamKind | None) -> None:
    assert stream_kind(bytes.fromhex(text)) is kind


@pytest.mark.parametrize("text", ["8000", "9234", "f0132b3e29", "d0f000"])
def test_unknown_stream_types(text: str) -> None:
    with pytest.raises(ProtocolError, match="stream type"):
        stream_kind(bytes.fromhex(text))


@pytest.mark.parametrize("base", VALID_SUBGROUP_TYPES)
@pytest.mark.parametrize("low", range(6))
def test_every_valid_subgroup_type_round_trips(base: int, low: int) -> None:
    flags = base + low
    mode = (flags >> 1) & 3
    header = SubgroupHeader(
        track_alias=300,
        group=70000,
        subgroup=(0, None, 9)[mode],
        priority=None if flags & 0x20 else 200,
        end_of_group=bool(flags & 0x08),
        first_object=bool(flags & 0x40),
        has_properties=bool(flags & 0x01),
    )
    encoded = SubgroupEncoder(header).header()
    assert encoded[0] == flags
    assert feed(encoded.hex()) == [header]


def test_non_minimal_type_flags_are_accepted() -> None:
    assert feed("80500500" + "80") == [SubgroupHeader(5, 0, 0, 128, first_object=True)]


SUBGROUP = "300103"
SUBGROUP_PROPERTIES = "310103"
FETCH = "0508"
FIRST = "1c04000500"  # Object {4,0}, priority 5, empty


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (SUBGROUP + TOP + "0000" + "00", "Object ID is above"),
        (SUBGROUP + "000001", "unknown Object Status 1"),
        (SUBGROUP + "000002", "unknown Object Status 2"),
        (SUBGROUP + "000005", "unknown Object Status 5"),
        (SUBGROUP_PROPERTIES + "00020201" + "0003", "END_OF_GROUP has properties"),
        (SUBGROUP_PROPERTIES + "00020201" + "0004", "END_OF_TRACK has properties"),
        (SUBGROUP_PROPERTIES + "00c10001", "65537 octets"),
        (SUBGROUP_PROPERTIES + "00010205", "cut off"),
        (FETCH + "18040500", "no Group ID or no Object ID"),
        (FETCH + "14040500", "no Group ID or no Object ID"),
        (FETCH + "10050500", "no Group ID or no Object ID"),
        (FETCH + "1d04000500", "prior subgroup"),
        (FETCH + "1e04000500", "prior subgroup"),
        (FETCH + "0c040000", "prior priority"),
        (FETCH + "808c0400" + "1d000500", "prior subgroup"),
        (FETCH + "808c0400" + "0000", "prior priority"),
        (FETCH + "8080", "unknown Serialization Flags 0x80"),
        (FETCH + "80cc", "unknown Serialization Flags 0xcc"),
        (FETCH + "830c", "unknown Serialization Flags 0x30c"),
        (FETCH + FIRST + "0c" + TOP, "Group ID is outside"),
        (FETCH + f"1c04{TOP}0500" + "0000", "Object ID is above"),
        (FETCH + FIRST + "04" + TOP + "00" + "0000", "Object ID is above"),
        (FETCH + f"1f04{TOP}000500" + "0200", "Subgroup ID is above"),
        (FETCH + "3c0400" + "05" + "c10001", "65537 octets"),
    ],
)
def test_breaches(text: str, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason) as caught:
        feed(text)
    assert caught.value.code is SessionCode.PROTOCOL_VIOLATION
    with pytest.raises(ProtocolError, match=reason):
        feed_bytewise(text)


def test_descending_group_below_zero() -> None:
    with pytest.raises(ProtocolError, match="Group ID is outside"):
        feed(FETCH + FIRST + "0c040000", GroupOrder.DESCENDING)
    events = feed(FETCH + FIRST + "0c030000", GroupOrder.DESCENDING)
    assert isinstance(events[-1], ObjectHeader)
    assert events[-1].location == Location(0, 0)


def test_the_highest_locations_are_legal() -> None:
    events = feed(FETCH + f"1f{TOP}{TOP}{TOP}0000")
    assert isinstance(events[1], ObjectHeader)
    assert (events[1].location, events[1].subgroup) == (Location(MAX, MAX), MAX)


def test_group_without_object_field_goes_on_counting() -> None:
    """0x08 without 0x04: the Object ID is the prior one + 1, in the new group (moqt 12.4)."""
    events = feed(FETCH + FIRST + "080000")
    assert isinstance(events[-1], ObjectHeader)
    assert events[-1].location == Location(5, 1)


def test_order_may_be_set_after_the_header_was_taken() -> None:
    decoder = DataStreamDecoder()
    events = decoder.feed(bytes.fromhex(FETCH + FIRST + "0c000000"))
    assert next(events) == FetchHeader(8)
    decoder.order = GroupOrder.DESCENDING
    *_, last = events
    assert isinstance(last, ObjectHeader)
    assert last.location == Location(3, 0)


def test_prior_subgroup_skips_datagram_objects() -> None:
    """After {4,0} in subgroup 7 and a Datagram Object, "prior" is still 7."""
    events = feed(FETCH + "1f0407000500" + "4000" + "0100")
    headers = [event for event in events if isinstance(event, ObjectHeader)]
    assert [(header.subgroup, header.datagram) for header in headers] == [(7, False), (0, True), (7, False)]


def test_encoder_never_refers_to_the_subgroup_of_a_datagram_object() -> None:
    encoder = FetchEncoder(8)
    encoder.object(Location(0, 0), 0, subgroup=7)
    encoder.object(Location(0, 1), 0, subgroup=7, datagram=True)
    assert encoder.object(Location(0, 2), 0, subgroup=7).hex() == "030700"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "30",
        "3001",
        SUBGROUP + "00",
        SUBGROUP + "0000",
        SUBGROUP + "000241",
        SUBGROUP_PROPERTIES + "000202",
        FETCH + "1c04",
        FETCH + "808c02",
        "f0132b",
    ],
)
def test_fin_inside_something(text: str) -> None:
    decoder = DataStreamDecoder()
    list(decoder.feed(bytes.fromhex(text)))
    with pytest.raises(ProtocolError, match="the stream ended"):
        decoder.finish()


def test_payload_is_never_copied() -> None:
    payload = bytes(range(256)) * 128
    encoder = SubgroupEncoder(SubgroupHeader(1, 2))
    data = encoder.header() + encoder.object(0, 3 * len(payload))
    decoder = DataStreamDecoder()
    assert len(list(decoder.feed(data))) == 2
    for index in range(3):
        [chunk] = decoder.feed(payload)
        assert isinstance(chunk, PayloadChunk)
        assert chunk.data.obj is payload
        assert chunk.last is (index == 2)
    decoder.finish()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_takes_any_octets(kind: type) -> None:
    encoder = SubgroupEncoder(SubgroupHeader(1, 2))
    data = encoder.header() + encoder.object(0, 3) + b"abc" + encoder.object(1, 1) + b"d"
    decoder = DataStreamDecoder()
    events = [event for half in (data[:5], data[5:]) for event in decoder.feed(kind(half))]
    payload = b"".join(bytes(event.data) for event in events if isinstance(event, PayloadChunk))
    assert payload == b"abcd"


def test_padding_is_discarded_without_events() -> None:
    decoder = DataStreamDecoder()
    assert list(decoder.feed(bytes.fromhex("f0132b3e28") + b"anything")) == [PaddingHeader()]
    assert list(decoder.feed(bytes(100000))) == []
    decoder.finish()


def test_a_header_with_the_longest_properties_arrives_in_any_pieces() -> None:
    properties = b"\x0d" + encode_vi64(65532) + bytes(65532)
    assert len(properties) == 65536
    encoder = SubgroupEncoder(SubgroupHeader(MAX, MAX, MAX, 0, has_properties=True))
    data = encoder.header() + encoder.object(MAX, 5, properties=properties) + b"abcde"
    for step in (1, 100, 1400, 40000, len(data)):
        decoder = DataStreamDecoder()
        events = [event for at in range(0, len(data), step) for event in decoder.feed(data[at : at + step])]
        header = events[1]
        assert isinstance(header, ObjectHeader)
        assert header.raw_properties == properties
        assert header.size == 5
        decoder.finish()
    with pytest.raises(UsageError, match="65537 octets"):
        SubgroupEncoder(SubgroupHeader(1, 1, has_properties=True)).object(0, 5, properties=bytes(65537))


def test_subgroup_encoder_refuses_what_the_protocol_does() -> None:
    encoder = SubgroupEncoder(SubgroupHeader(1, 2))
    encoder.object(4, 10)
    for object_id in (3, 4, MAX + 1):
        with pytest.raises(UsageError, match="cannot follow"):
            encoder.object(object_id, 10)
    with pytest.raises(UsageError, match="no properties"):
        encoder.object(5, 10, properties=b"\x02\x01")
    with pytest.raises(UsageError, match="no payload"):
        encoder.object(5, 10, status=ObjectStatus.END_OF_GROUP)
    with pytest.raises(UsageError, match="no properties"):
        SubgroupEncoder(SubgroupHeader(1, 2, has_properties=True)).object(
            0, 0, status=ObjectStatus.END_OF_GROUP, properties=b"\x02\x01"
        )
    assert encoder.object(5, 10).hex() == "000a"  # what was refused has changed nothing
    with pytest.raises(UsageError, match="priority 256"):
        SubgroupEncoder(SubgroupHeader(1, 2, priority=256)).header()


@pytest.mark.parametrize(
    ("order", "location"),
    [
        (GroupOrder.ASCENDING, Location(4, 2)),
        (GroupOrder.ASCENDING, Location(4, 1)),
        (GroupOrder.ASCENDING, Location(3, 9)),
        (GroupOrder.DESCENDING, Location(5, 0)),
        (GroupOrder.DESCENDING, Location(4, 2)),
    ],
)
def test_fetch_encoder_refuses_to_go_back(order: GroupOrder, location: Location) -> None:
    encoder = FetchEncoder(1, order)
    encoder.object(Location(4, 2), 1)
    with pytest.raises(UsageError, match="does not follow"):
        encoder.object(location, 1)
    with pytest.raises(UsageError, match="does not follow"):
        encoder.end_of_range(RangeStatus.UNKNOWN, location)


@pytest.mark.parametrize("location", [Location(0, MAX + 1), Location(MAX + 1, 0)])
def test_fetch_encoder_refuses_impossible_locations(location: Location) -> None:
    encoder = FetchEncoder(1)
    encoder.object(Location(0, MAX), 1)
    with pytest.raises(UsageError):
        encoder.object(location, 1)
    with pytest.raises(UsageError):
        encoder.end_of_range(RangeStatus.UNKNOWN, location)


def test_marker_then_objects() -> None:
    encoder = FetchEncoder(8)
    data = (
        encoder.header()
        + encoder.end_of_range(RangeStatus.TIMED_OUT, Location(2, 4))
        + encoder.object(Location(2, 5), 1, subgroup=3, priority=9)
        + b"x"
        + encoder.object(Location(2, 6), 0, subgroup=3, priority=9)
    )
    assert data[2:].hex() == "820c0204" + "1303090178" + "0100"
    events = feed(data.hex())
    assert events[1] == EndOfRange(RangeStatus.TIMED_OUT, Location(2, 4))
    assert [event.location for event in events if isinstance(event, ObjectHeader)] == [
        Location(2, 5),
        Location(2, 6),
    ]
