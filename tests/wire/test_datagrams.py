"""Datagrams beyond the vectors (moqt 12.5, 20 #24)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.errors import ProtocolError, SessionCode, UsageError
from moqt.filters import Location
from moqt.wire import (
    ObjectDatagram,
    ObjectStatus,
    PaddingDatagram,
    decode_datagram,
    encode_datagram,
    encode_vi64,
)

MAX = 2**64 - 1
IDS = st.integers(0, MAX)


def test_types_are_those_of_the_table() -> None:
    """Fields that fit every valid type: alias 1, group 2, object 3, priority 4, one property."""
    valid = set(range(0x10)) | {kind for kind in range(0x20, 0x30) if not kind & 0x02}
    for kind in range(0x100):
        data = (
            encode_vi64(kind)
            + b"\x01\x02"
            + (b"" if kind & 0x04 else b"\x03")
            + (b"" if kind & 0x08 else b"\x04")
            + (b"\x02\x02\x07" if kind & 0x01 else b"")
            + (b"\x00" if kind & 0x20 else b"payload")
        )
        if kind in valid:
            datagram = decode_datagram(data)
            assert isinstance(datagram, ObjectDatagram)
            assert datagram.location == Location(2, 0 if kind & 0x04 else 3)
            assert datagram.priority == (None if kind & 0x08 else 4)
            assert datagram.properties == (((2, 7),) if kind & 0x01 else ())
            assert datagram.end_of_group is bool(kind & 0x02)
            assert datagram.payload == (b"" if kind & 0x20 else b"payload")
        else:
            with pytest.raises(ProtocolError, match="unknown type"):
                decode_datagram(data)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cut off"),
        ("00", "cut off"),
        ("000501", "cut off"),
        ("00050102", "announced"),
        ("0105010280" + "00", "Length 0"),
        ("0105010280" + "05", "announced"),
        ("0d0501" + "c10001" + "00" * 65537, "65537 octets"),
        ("200501038001", "unknown Object Status 1"),
        ("20050103800300", "left over"),
        ("210501038002020103", "has properties"),
        ("f0132b3e28", "unknown type"),
    ],
)
def test_breaches(text: str, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason) as caught:
        decode_datagram(bytes.fromhex(text))
    assert caught.value.code is SessionCode.PROTOCOL_VIOLATION


def test_a_normal_status_is_an_empty_object() -> None:
    assert decode_datagram(bytes.fromhex("2c050100")) == ObjectDatagram(5, Location(1, 0))


@pytest.mark.parametrize(
    "extra", [{"payload": b"x"}, {"end_of_group": True}, {"properties": ((2, 1),)}], ids=str
)
def test_a_status_carries_nothing_else(extra: dict[str, object]) -> None:
    datagram = ObjectDatagram(1, Location(0, 0), status=ObjectStatus.END_OF_TRACK, **extra)  # type: ignore[arg-type]  # options of any kind
    with pytest.raises(UsageError):
        encode_datagram(datagram)


OBJECTS = st.builds(
    ObjectDatagram,
    track_alias=IDS,
    location=st.builds(Location, IDS, IDS | st.just(0)),
    priority=st.none() | st.integers(0, 255),
    properties=st.just(()) | st.tuples(st.tuples(st.just(0x3E), IDS), st.tuples(st.just(0x41), st.binary())),
    end_of_group=st.booleans(),
    payload=st.binary(max_size=50),
) | st.builds(
    ObjectDatagram,
    track_alias=IDS,
    location=st.builds(Location, IDS, IDS),
    priority=st.none() | st.integers(0, 255),
    status=st.sampled_from(ObjectStatus),
)


@given(OBJECTS | st.builds(PaddingDatagram, st.integers(0, 2000)))
def test_round_trip(datagram: ObjectDatagram | PaddingDatagram) -> None:
    assert decode_datagram(encode_datagram(datagram)) == datagram


@given(OBJECTS, st.data())
def test_mutations_decode_or_break_the_protocol(datagram: ObjectDatagram, data: st.DataObject) -> None:
    encoded = bytearray(encode_datagram(datagram))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    del encoded[data.draw(st.integers(0, len(encoded))) :]
    try:
        decoded = decode_datagram(encoded)
    except ProtocolError:
        return
    assert isinstance(decoded, ObjectDatagram | PaddingDatagram)
    if isinstance(decoded, ObjectDatagram):
        assert decode_datagram(encode_datagram(decoded)) == decoded
