"""The 68-octet header: sealing, opening, and each check by its name."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import Check, InvalidValue, ObjectRejected
from kvcs.layout import Geometry
from kvcs.names import Component
from kvcs.payload import HEADER_SIZE, RAW, Expected, data_digest, open_object, seal, token_start

EXAMPLE = bytes.fromhex(  # kvcs 13
    """
    4b 56 4f 31 01 01 00 00 00 00 00 00 00 00 00 01
    00 00 00 00 00 00 00 04 00 00 00 04 00 01 00 00
    00 00 00 10 be 45 cb 26 05 bf 36 be bd e6 84 84
    1a 28 f0 fd 43 c6 98 50 a3 dc e5 fe db a6 99 28
    ee 3a 89 91
    """
)
DATA = bytes(range(16))
EXPECTED = Expected(Component.K, 0, 1, 4, 4, RAW, section_length=16)


@pytest.mark.requirement("R4a", "R13")
def test_encoding_example_of_the_header() -> None:
    header, *data = seal(Component.K, 0, 1, 4, 4, RAW, DATA)
    assert header == EXAMPLE
    assert data == [DATA]
    assert len(header) == HEADER_SIZE == 68
    assert open_object(EXAMPLE + DATA, EXPECTED) == DATA
    assert data_digest(header) == hashlib.sha256(DATA).digest()


def changed(offset: int, octets: bytes) -> bytes:
    payload = bytearray(EXAMPLE + DATA)
    payload[offset : offset + len(octets)] = octets
    return bytes(payload)


OTHER = hashlib.sha256(b"other").digest()


@pytest.mark.requirement("R4b")
@pytest.mark.parametrize(
    ("payload", "check", "expected", "got"),
    [
        (b"", Check.HEADER, "68 octets or more", 0),
        (EXAMPLE[:67], Check.HEADER, "68 octets or more", 67),
        (changed(0, b"KVO2"), Check.MAGIC, b"KVO1", b"KVO2"),
        (changed(0, b"1OVK"), Check.MAGIC, b"KVO1", b"1OVK"),
        (changed(4, b"\x02"), Check.VERSION, 1, 2),
        (changed(4, b"\x00"), Check.VERSION, 1, 0),
        (changed(5, b"\x00"), Check.COMPONENT, 1, 0),
        (changed(5, b"\x02"), Check.COMPONENT, 1, 2),
        (changed(8, b"\x00\x00\x00\x01"), Check.LAYER, 0, 1),
        (changed(8, b"\x80\x00\x00\x00"), Check.LAYER, 0, 2**31),
        (changed(12, b"\x00\x00\x00\x00"), Check.BLOCK_INDEX, 1, 0),
        (changed(16, b"\xff"), Check.TOKEN_START, 4, 0xFF00000000000004),
        (changed(23, b"\x05"), Check.TOKEN_START, 4, 5),
        (changed(24, b"\x00\x00\x00\x03"), Check.TOKEN_COUNT, 4, 3),
        (changed(28, b"\xff\x01"), Check.CODEC, 1, 0xFF01),
        (changed(32, b"\x00\x00\x00\x0f"), Check.DATA_LENGTH, 16, 15),
        (changed(32, b"\x00\x00\x00\x11"), Check.DATA_LENGTH, 16, 17),
        (changed(32, b"\xff\xff\xff\xff"), Check.DATA_LENGTH, 16, 2**32 - 1),
        (EXAMPLE + DATA + b"\x00", Check.DATA_LENGTH, 17, 16),
        (EXAMPLE + DATA[:-1], Check.DATA_LENGTH, 15, 16),
        (b"".join(seal(Component.K, 0, 1, 4, 4, RAW, DATA[:8])), Check.SECTION_LENGTH, 16, 8),
        (b"".join(seal(Component.K, 0, 1, 4, 4, RAW, b"")), Check.SECTION_LENGTH, 16, 0),
        (changed(36, OTHER), Check.DATA_DIGEST, OTHER, hashlib.sha256(DATA).digest()),
        (changed(68, b"\x01"), Check.DATA_DIGEST, hashlib.sha256(DATA).digest(), None),
    ],
)
def test_each_check_has_its_own_reason(payload: bytes, check: Check, expected: Any, got: Any) -> None:
    with pytest.raises(ObjectRejected) as caught:
        open_object(payload, EXPECTED)
    assert (caught.value.check, caught.value.expected) == (check, expected)
    assert got is None or caught.value.got == got
    assert str(caught.value).startswith(f"{check}: expected ")


@pytest.mark.requirement("R4b")
def test_digest_listed_in_the_manifest() -> None:
    payload = EXAMPLE + DATA
    assert open_object(payload, replace(EXPECTED, listed_digest=hashlib.sha256(DATA).digest())) == DATA
    with pytest.raises(ObjectRejected) as caught:  # data and digest swapped by a relay, consistently
        open_object(payload, replace(EXPECTED, listed_digest=OTHER))
    assert caught.value.check is Check.LISTED_DIGEST


@pytest.mark.requirement("R4b")
@given(st.integers(0, 83), st.integers(0, 7))
def test_every_flipped_bit_is_noticed_except_in_flags_and_reserved(position: int, bit: int) -> None:
    payload = bytearray(EXAMPLE + DATA)
    payload[position] ^= 1 << bit
    if position in (6, 7, 30, 31):
        assert open_object(payload, EXPECTED) == DATA
    else:
        with pytest.raises(ObjectRejected):
            open_object(payload, EXPECTED)


@pytest.mark.requirement("R4d")
def test_flags_and_reserved() -> None:
    header = seal(Component.V, 3, 2, 1, 4, RAW, DATA)[0]
    assert (header[6:8], header[30:32]) == (bytes(2), bytes(2))
    for offset in (6, 30):
        for octets in (b"\x00\x01", b"\xff\xff"):
            assert open_object(changed(offset, octets), EXPECTED) == DATA


@given(
    st.sampled_from(Component),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16 - 1),
    st.binary(max_size=200),
    st.integers(0, 200),
)
def test_seal_and_open(
    component: Component, layer: int, block: int, start: int, count: int, codec: int, data: bytes, cut: int
) -> None:
    whole = b"".join(seal(component, layer, block, start, count, codec, data))
    pieces = b"".join(
        seal(component, layer, block, start, count, codec, (data[:cut], memoryview(data)[cut:]))
    )
    assert whole == pieces
    expected = Expected(component, layer, block, start, count, codec)
    for payload in (whole, bytearray(whole), memoryview(b"x" + whole)[1:]):
        opened = open_object(payload, expected)
        assert opened == data
        assert opened.obj is (
            payload.obj if isinstance(payload, memoryview) else payload
        )  # a view, not a copy


@pytest.mark.requirement("R3.4a")
def test_what_is_expected_at_a_location() -> None:
    geometry = Geometry(2, 8, 128, 64, 16, np.dtype(ml_dtypes.bfloat16))
    expected = Expected.at(1, 3, component=Component.V, codec=RAW, first_block=64, geometry=geometry)
    assert expected == Expected(Component.V, 1, 3, (64 + 3) * 16, 16, RAW, section_length=16 * 8 * 64 * 2)
    # The header of Object 3 of a segment that starts at block 64 says so.
    payload = b"".join(seal(Component.V, 1, 3, token_start(64, 3, 16), 16, RAW, bytes(16 * 8 * 64 * 2)))
    open_object(payload, expected)
    with pytest.raises(ObjectRejected, match="Token Start: expected 1056, got 1072"):
        open_object(
            payload, Expected.at(1, 3, component=Component.V, codec=RAW, first_block=63, geometry=geometry)
        )
    compressed = Expected.at(1, 3, component=Component.V, codec=0xFF01, first_block=64, geometry=geometry)
    assert compressed.section_length is None


@pytest.mark.parametrize(
    "fields",
    [
        (2**32, 0, 0, 4, 1),
        (0, 2**32, 0, 4, 1),
        (0, 0, 2**64, 4, 1),
        (0, 0, 0, 2**32, 1),
        (0, 0, 0, 4, 2**16),
        (-1, 0, 0, 4, 1),
    ],
)
def test_field_that_does_not_fit(fields: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(InvalidValue, match="does not fit the header"):
        seal(Component.K, *fields, b"")


def test_data_is_not_copied() -> None:
    data = bytearray(DATA)
    _, *views = seal(Component.K, 0, 0, 0, 4, RAW, data)
    assert views[0].obj is data
