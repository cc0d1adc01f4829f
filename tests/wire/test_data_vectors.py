"""Vectors of moqt 26.3: data streams and datagrams."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moqt.filters import GroupOrder, Location, Properties
from moqt.wire import (
    DataStreamDecoder,
    EndOfRange,
    Event,
    FetchEncoder,
    FetchHeader,
    ObjectDatagram,
    ObjectHeader,
    ObjectStatus,
    PaddingDatagram,
    PaddingHeader,
    PayloadChunk,
    RangeStatus,
    SubgroupEncoder,
    SubgroupHeader,
    decode_datagram,
    encode_datagram,
    encode_properties,
    encode_vi64,
)
from moqt.wire.streams import PADDING_STREAM_TYPE

VECTORS: dict[str, str] = {
    vector["id"]: vector["hex"]
    for vector in json.loads((Path(__file__).parent.parent / "vectors" / "moqt22.json").read_text())
    if vector["id"].startswith("D")
}


@dataclass
class Obj:
    """An Object as a test writes it."""

    group: int
    object: int
    payload: bytes = b""
    subgroup: int = 0
    priority: int | None = None
    properties: Properties = ()
    status: ObjectStatus = ObjectStatus.NORMAL
    datagram: bool = False

    def events(self) -> list[Event]:
        raw = encode_properties(self.properties)
        header = ObjectHeader(
            Location(self.group, self.object),
            self.subgroup,
            self.priority,
            self.properties,
            raw,
            self.status,
            len(self.payload),
            self.datagram,
        )
        return [header, PayloadChunk(memoryview(self.payload), True)] if self.payload else [header]


@dataclass
class Subgroup:
    header: SubgroupHeader
    objects: list[Obj]
    explicit: bool = False

    def encode(self) -> bytes:
        encoder = SubgroupEncoder(self.header, explicit_subgroup=self.explicit)
        encoded = encoder.header()
        for item in self.objects:
            properties = encode_properties(item.properties)
            encoded += encoder.object(
                item.object, len(item.payload), status=item.status, properties=properties
            )
            encoded += item.payload
        return encoded


@dataclass
class Fetched:
    """A record of a fetch stream, `after` others, which are not in the vector."""

    record: Obj | EndOfRange
    after: list[Obj | EndOfRange] = field(default_factory=list)
    order: GroupOrder = GroupOrder.ASCENDING

    def encoder(self) -> tuple[FetchEncoder, bytes]:
        encoder = FetchEncoder(8, self.order)
        return encoder, encoder.header() + b"".join(self.encode(encoder, item) for item in self.after)

    def encode(self, encoder: FetchEncoder, item: Obj | EndOfRange) -> bytes:
        if isinstance(item, EndOfRange):
            return encoder.end_of_range(item.kind, item.location)
        assert item.priority is not None
        return (
            encoder.object(
                Location(item.group, item.object),
                len(item.payload),
                subgroup=item.subgroup,
                priority=item.priority,
                properties=encode_properties(item.properties),
                datagram=item.datagram,
            )
            + item.payload
        )


def coalesced(events: Iterable[Event]) -> list[Event]:
    """The same events with the payload of each Object in one chunk."""
    out: list[Event] = []
    for event in events:
        previous = out[-1] if out else None
        if isinstance(event, PayloadChunk) and isinstance(previous, PayloadChunk) and not previous.last:
            out[-1] = PayloadChunk(memoryview(bytes(previous.data) + bytes(event.data)), event.last)
        else:
            out.append(event)
    return out


def decode(data: bytes, step: int, order: GroupOrder = GroupOrder.ASCENDING) -> list[Event]:
    decoder = DataStreamDecoder()
    events: list[Event] = []
    for at in range(0, len(data), step):
        for event in decoder.feed(data[at : at + step]):
            events.append(event)
            if isinstance(event, FetchHeader):
                decoder.order = order
    decoder.finish()
    return coalesced(events)


SUBGROUPS = {
    "D01": Subgroup(
        SubgroupHeader(2, 0, 0, 0),
        [Obj(0, 0, b"abcd", priority=0), Obj(0, 1, b"efgh", priority=0)],
        explicit=True,
    ),
    "D02": Subgroup(
        SubgroupHeader(2, 0, 0, has_properties=True),
        [
            Obj(0, 0, b"abcd", properties=((4, 2186796243), (77, b"traceID:123456-------"))),
            Obj(0, 1, b"efgh"),
        ],
        explicit=True,
    ),
    "D03": Subgroup(
        SubgroupHeader(5, 12, 0, 128, first_object=True),
        [Obj(12, 0, b"A", priority=128), Obj(12, 1, b"B", priority=128), Obj(12, 5, b"F", priority=128)],
    ),
    "D04": Subgroup(
        SubgroupHeader(5, 12, None, end_of_group=True, first_object=True), [Obj(12, 3, subgroup=3)]
    ),
    "D05": Subgroup(
        SubgroupHeader(5, 12, 0, 128, first_object=True),
        [Obj(12, 0, b"A", priority=128), Obj(12, 1, priority=128, status=ObjectStatus.END_OF_GROUP)],
    ),
    "D06": Subgroup(
        SubgroupHeader(5, 13, 0, 128, first_object=True),
        [Obj(13, 0, priority=128, status=ObjectStatus.END_OF_TRACK)],
    ),
    "D07": Subgroup(SubgroupHeader(1, 3), []),
    "D08": Subgroup(SubgroupHeader(5, 0, 0, 128, first_object=True), [Obj(0, 0, bytes(range(200)), 0, 128)]),
}
FIRST = Obj(4, 0, b"A", 0, 128)
SECOND = Obj(4, 1, b"B", 0, 128)
MARKER = Location(2, 4)
FETCHES = {
    "D10": Fetched(FIRST),
    "D11": Fetched(SECOND, [FIRST]),
    "D12": Fetched(Obj(4, 5, b"F", 0, 128), [FIRST, SECOND]),
    "D13": Fetched(Obj(5, 0, b"G", 0, 128), [FIRST, SECOND]),
    "D14": Fetched(Obj(9, 0, b"H", 7, 10)),
    "D15": Fetched(
        Obj(7, 2, b"I", 8, 10, properties=((0x3E, 2),)), [Obj(9, 0, b"H", 7, 10)], GroupOrder.DESCENDING
    ),
    "D16": Fetched(Obj(4, 1, b"", 0, 128), [FIRST]),
    "D17": Fetched(Obj(1, 0, b"x", 0, 128, datagram=True)),
    "D18": Fetched(EndOfRange(RangeStatus.NON_EXISTENT, MARKER)),
    "D19": Fetched(EndOfRange(RangeStatus.UNKNOWN, MARKER)),
    "D20": Fetched(EndOfRange(RangeStatus.TIMED_OUT, MARKER)),
    "D21": Fetched(
        Obj(2, 5, b"Z", 0, 128), [Obj(1, 0, b"A", 0, 128), EndOfRange(RangeStatus.UNKNOWN, MARKER)]
    ),
}
# DEFAULT_PRIORITY is set in D24 only.
DATAGRAMS: dict[str, ObjectDatagram | PaddingDatagram] = {
    "D23": ObjectDatagram(5, Location(1, 2), 128, payload=b"hi"),
    "D24": ObjectDatagram(5, Location(1, 0), None, payload=b"hi"),
    "D25": ObjectDatagram(5, Location(1, 3), 128, status=ObjectStatus.END_OF_GROUP),
    "D27": PaddingDatagram(2),
}
HEADERS = {"D09": 8, "D22": 18}


def test_every_vector_has_an_expectation() -> None:
    assert len(VECTORS) == 27
    assert VECTORS.keys() == SUBGROUPS.keys() | FETCHES.keys() | DATAGRAMS.keys() | HEADERS.keys() | {"D26"}


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
@pytest.mark.parametrize("name", SUBGROUPS)
def test_decodes_subgroups(name: str, step: int) -> None:
    stream = SUBGROUPS[name]
    expected: list[Event] = [stream.header]
    for item in stream.objects:
        expected += item.events()
    assert decode(bytes.fromhex(VECTORS[name]), step) == expected


@pytest.mark.parametrize("name", SUBGROUPS)
def test_encodes_subgroups(name: str) -> None:
    assert SUBGROUPS[name].encode().hex() == VECTORS[name]


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
@pytest.mark.parametrize("name", FETCHES)
def test_decodes_fetch_records(name: str, step: int) -> None:
    case = FETCHES[name]
    _, start = case.encoder()
    expected: list[Event] = [FetchHeader(8)]
    for item in [*case.after, case.record]:
        expected += [item] if isinstance(item, EndOfRange) else item.events()
    assert decode(start + bytes.fromhex(VECTORS[name]), step, case.order) == expected


@pytest.mark.parametrize("name", FETCHES)
def test_encodes_fetch_records(name: str) -> None:
    case = FETCHES[name]
    encoder, _ = case.encoder()
    assert case.encode(encoder, case.record).hex() == VECTORS[name]


@pytest.mark.parametrize("name", HEADERS)
def test_fetch_headers(name: str) -> None:
    data = bytes.fromhex(VECTORS[name])
    assert decode(data, 1) == [FetchHeader(HEADERS[name])]
    assert FetchEncoder(HEADERS[name]).header() == data


@pytest.mark.parametrize("name", DATAGRAMS)
def test_datagrams(name: str) -> None:
    assert decode_datagram(bytes.fromhex(VECTORS[name])) == DATAGRAMS[name]
    assert encode_datagram(DATAGRAMS[name]).hex() == VECTORS[name]


@pytest.mark.parametrize("step", [1, 2, 1000])
def test_padding_stream(step: int) -> None:
    data = bytes.fromhex(VECTORS["D26"])
    assert decode(data, step) == [PaddingHeader()]
    assert encode_vi64(PADDING_STREAM_TYPE) + bytes(4) == data


@pytest.mark.parametrize(
    ("text", "order", "expected"),
    [
        (
            "05021c0000800467306f30000467306f310c00000467316f30000467316f31",
            GroupOrder.ASCENDING,
            [
                Obj(0, 0, b"g0o0", 0, 128),
                Obj(0, 1, b"g0o1", 0, 128),
                Obj(1, 0, b"g1o0", 0, 128),
                Obj(1, 1, b"g1o1", 0, 128),
            ],
        ),
        (
            "05061c0100800467316f300c00010467306f31",
            GroupOrder.DESCENDING,
            [Obj(1, 0, b"g1o0", 0, 128), Obj(0, 1, b"g0o1", 0, 128)],
        ),
    ],
)
def test_fill_streams_seen_on_the_wire(text: str, order: GroupOrder, expected: list[Obj]) -> None:
    """Bytes of S04 and S11 in moqt 26.7."""
    events = decode(bytes.fromhex(text), 7, order)
    assert events[1:] == [event for item in expected for event in item.events()]
