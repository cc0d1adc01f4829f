"""The strict CBOR decoder and the deterministic encoder."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.cbor import MAX_DEPTH, Cbor, CborError, decode, encode

INTEGERS = st.integers(-(2**64), 2**64 - 1)
KEYS = INTEGERS | st.text(max_size=8)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | INTEGERS
    | st.binary()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_what_is_encoded_is_decoded(value: Cbor) -> None:
    decoded = decode(encode(value))
    assert decoded == value
    assert encode(decoded) == encode(value)


# RFC 8949, appendix A, and its section 4.2.1 for the order of keys.
@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (1000, "1903e8"),
        (1000000, "1a000f4240"),
        (18446744073709551615, "1bffffffffffffffff"),
        (-1, "20"),
        (-1000, "3903e7"),
        (-18446744073709551616, "3bffffffffffffffff"),
        (1.5, "f93e00"),
        (-0.0, "f98000"),
        (65504.0, "f97bff"),
        (100000.0, "fa47c35000"),
        (1.1, "fb3ff199999999999a"),
        (1.0e300, "fb7e37e43c8800759c"),
        (False, "f4"),
        (True, "f5"),
        (None, "f6"),
        (b"\x01\x02\x03\x04", "4401020304"),
        ("IETF", "6449455446"),
        ("水", "63e6b0b4"),
        ((1, (2, 3), (4, 5)), "8301820203820405"),
        ({"a": 1, "b": (2, 3)}, "a26161016162820203"),
        ({-1: 0, "z": 1, 10: 2, 100: 3}, "a40a021864032000617a01"),
    ],
)
def test_encodings_of_the_standard(value: Cbor, encoded: str) -> None:
    assert encode(value).hex() == encoded
    assert decode(bytes.fromhex(encoded)) == value


@pytest.mark.parametrize(
    ("encoded", "complaint"),
    [
        ("", "cut off"),
        ("18", "cut off"),
        ("5bffffffffffffffff00", "cut off"),
        ("9bffffffffffffffff00", "cut off"),
        ("bbffffffffffffffff00", "cut off"),
        ("a10102f6"[:4], "cut off"),
        ("0000", "1 octets follow"),
        ("1817", "shortest"),
        ("1900ff", "shortest"),
        ("1a0000ffff", "shortest"),
        ("1b00000000ffffffff", "shortest"),
        ("5801ff", "shortest"),
        ("1c", "indefinite or reserved"),
        ("5f4100ff", "indefinite"),
        ("9f00ff", "indefinite"),
        ("bf0000ff", "indefinite"),
        ("ff", "break"),
        ("f7", "simple"),
        ("f0", "simple"),
        ("f8ff", "simple"),
        ("c074", "tag 0"),
        ("c249010000000000000000", "tag 2"),
        ("c4821a3b9aca0001", "tag 4"),
        ("d81c80", "tag 28"),
        ("d9d9f700", "tag 55799"),
        ("a201000100", "stands twice"),
        ("a2616100616100", "stands twice"),
        ("a1f500", "key of a map"),
        ("a14000", "key of a map"),
        ("a18000", "key of a map"),
        ("a1a000", "key of a map"),
        ("a1f93c0000", "key of a map"),
        ("a1f600", "key of a map"),
        ("f97e00", "not finite"),
        ("f97c00", "not finite"),
        ("fb7ff8000000000001", "not finite"),
        ("faff800000", "not finite"),
        ("61ff", "UTF-8"),
        ("63eda080", "UTF-8"),
    ],
)
def test_refused(encoded: str, complaint: str) -> None:
    with pytest.raises(CborError, match=complaint):
        decode(bytes.fromhex(encoded))


def test_depth() -> None:
    assert decode(b"\x81" * MAX_DEPTH + b"\x00") is not None
    for nesting in (b"\x81", b"\xa1\x00"):
        for depth in (MAX_DEPTH + 1, 100_000):
            with pytest.raises(CborError, match="nested"):
                decode(nesting * depth + b"\x00")


def test_a_length_that_lies_costs_no_memory() -> None:
    tracemalloc.start()
    try:
        for head in ("5b", "7b", "9b", "bb"):
            with pytest.raises(CborError):
                decode(bytes.fromhex(head + "0000ffffffffffff") + bytes(1000))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=64))
def test_any_octets_decode_or_raise_the_one_error(data: bytes) -> None:
    try:
        value = decode(data)
    except CborError:
        return
    assert decode(encode(value)) == value


@pytest.mark.parametrize("value", [2**64, -(2**64) - 1, float("nan"), float("inf")])
def test_what_cannot_be_encoded(value: Cbor) -> None:
    with pytest.raises(CborError):
        encode(value)
