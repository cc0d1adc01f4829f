"""Key-Value-Pairs and properties (moqt 2.4, 13)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.errors import MalformedTrack, ProtocolError, SessionCode, UsageError
from moqt.filters import Properties
from moqt.wire import (
    PropertyType,
    check_object_properties,
    check_track_properties,
    decode_properties,
    encode_properties,
    get,
    unknown_mandatory_properties,
)

MAX = 2**64 - 1


def immutable(*pairs: tuple[int, int | bytes]) -> tuple[int, bytes]:
    return PropertyType.IMMUTABLE_PROPERTIES, encode_properties(pairs)


def test_example() -> None:
    pairs: Properties = ((0x04, 600000), (0x0B, b"ab"), (0x0B, b""), (0x22, 2))
    data = bytes.fromhex("04c927c00702616200001702")
    assert encode_properties(pairs) == data
    assert decode_properties(data) == pairs


def test_encoding_sorts_and_keeps_the_order_of_repeats() -> None:
    encoded = encode_properties(((0x22, 2), (0x0B, b"x"), (0x0B, b"a"), (0x02, 1)))
    assert decode_properties(encoded) == ((0x02, 1), (0x0B, b"x"), (0x0B, b"a"), (0x22, 2))


@given(
    st.lists(
        st.integers(0, MAX).flatmap(
            lambda kind: st.tuples(st.just(kind), st.binary(max_size=20) if kind % 2 else st.integers(0, MAX))
        )
    )
)
def test_round_trip(pairs: list[tuple[int, int | bytes]]) -> None:
    ascending = tuple(sorted(pairs, key=lambda pair: pair[0]))
    assert decode_properties(encode_properties(ascending)) == ascending


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("02", "cut off"),
        ("0b0561", "announced"),
        ("0bc10000" + "61" * 65536, "more than 65535"),
        ("0200ffffffffffffffffff00", "above 2\\^64-1"),
    ],
)
def test_broken_lists_close_the_session(text: str, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason) as caught:
        decode_properties(bytes.fromhex(text))
    assert caught.value.code is SessionCode.PROTOCOL_VIOLATION


def test_the_longest_value_is_legal() -> None:
    pairs: Properties = ((0x0D, bytes(65535)),)
    assert decode_properties(encode_properties(pairs)) == pairs
    with pytest.raises(UsageError):
        encode_properties(((0x0D, bytes(65536)),))


@pytest.mark.parametrize("pair", [(0x02, b"1"), (0x0B, 1), (0x02, -1), (0x02, MAX + 1), (-2, 1)])
def test_refuses_to_encode_wrong_forms(pair: tuple[int, int | bytes]) -> None:
    with pytest.raises(UsageError):
        encode_properties((pair,))


def test_get_looks_inside_immutable_properties() -> None:
    properties: Properties = ((0x02, 5), immutable((0x02, 6), (0x3C, 7)), (0x0D, b"x"))
    assert get(properties, 0x02) == 5
    assert get(properties, 0x3C) == 7
    assert get(properties, 0x0D) == b"x"
    assert get(properties, 0x3E) is None
    assert get(((PropertyType.IMMUTABLE_PROPERTIES, b"\x02"),), 0x02) is None


@pytest.mark.parametrize(
    ("pair", "code"),
    [
        ((PropertyType.DEFAULT_PUBLISHER_GROUP_ORDER, 0), SessionCode.PROTOCOL_VIOLATION),
        ((PropertyType.DEFAULT_PUBLISHER_GROUP_ORDER, 3), SessionCode.PROTOCOL_VIOLATION),
        ((PropertyType.DYNAMIC_GROUPS, 2), SessionCode.PROTOCOL_VIOLATION),
        ((PropertyType.DEFAULT_PUBLISHER_PRIORITY, 256), SessionCode.KEY_VALUE_FORMATTING_ERROR),
    ],
)
def test_track_properties_out_of_range_close_the_session(pair: tuple[int, int], code: SessionCode) -> None:
    for properties in (pair,), (immutable(pair),):
        with pytest.raises(ProtocolError) as caught:
            check_track_properties(properties)
        assert caught.value.code is code


def test_track_properties_in_range() -> None:
    check_track_properties(((0x0E, 255), (0x22, 1), (0x22, 2), (0x30, 0), (0x30, 1), (0x9D, b"grease")))


@pytest.mark.parametrize(
    "bad", [(PropertyType.IMMUTABLE_PROPERTIES, b"\x02"), immutable(immutable((0x02, 1)))]
)
def test_immutable_properties_broken_or_nested_make_a_malformed_track(bad: tuple[int, bytes]) -> None:
    with pytest.raises(MalformedTrack):
        check_track_properties((bad,))
    with pytest.raises(MalformedTrack):
        check_object_properties((bad,))


@pytest.mark.parametrize(
    "properties",
    [
        ((0x4000, 1),),
        ((0x7FFF, b""),),
        (immutable((0x4000, 1)),),
        ((PropertyType.PRIOR_GROUP_ID_GAP, 1), (PropertyType.PRIOR_GROUP_ID_GAP, 1)),
        ((PropertyType.PRIOR_OBJECT_ID_GAP, 1), immutable((PropertyType.PRIOR_OBJECT_ID_GAP, 1))),
    ],
)
def test_object_properties_that_make_a_malformed_track(properties: Properties) -> None:
    with pytest.raises(MalformedTrack):
        check_object_properties(properties)


def test_object_properties_that_are_fine() -> None:
    check_object_properties(((0x3C, 1), (0x3E, 2), (0x3FFF, b""), (0x8000, 0)))


def test_mandatory_track_properties_are_found() -> None:
    properties: Properties = ((0x3FFE, 1), (0x4000, 1), (0x8000, 1), immutable((0x7FFF, b"")))
    assert unknown_mandatory_properties(properties) == (0x4000, 0x7FFF)
