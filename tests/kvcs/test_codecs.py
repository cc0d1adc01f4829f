"""The codecs: lossless, self-contained, and bounded against hostile data."""

from __future__ import annotations

import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.codecs import CODECS, Raw, ShuffleZlib
from kvcs.errors import Check, ObjectRejected
from kvcs.identity import DTYPES, KVSP_LP1
from kvcs.layout import NUMPY_DTYPES, Buffer, Geometry
from kvcs.names import Component, DataTrack


def geometry(dtype: str = "bfloat16", dim: int = 6, v_dim: int = 4) -> Geometry:
    return Geometry(1, 2, dim, v_dim, 3, NUMPY_DTYPES[dtype])


def joined(data: Buffer | list[Buffer] | tuple[Buffer, ...] | object) -> bytes:
    assert isinstance(data, bytes | bytearray | memoryview | list | tuple)
    return bytes(data) if isinstance(data, bytes | bytearray | memoryview) else b"".join(data)


def test_registry_agrees_with_the_profile_and_with_track_names() -> None:
    assert set(CODECS) == {"raw", "x-shuffle-zlib"}
    for name, codec in CODECS.items():
        assert codec.name == name
        assert codec.value == KVSP_LP1.codec_values[name]
        assert DataTrack.parse(f"k.{name}.s0").codec == name
    assert len({codec.value for codec in CODECS.values()}) == len(CODECS)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_there_and_back_bit_for_bit(name: str, dtype: str, data: st.DataObject) -> None:
    shape, codec = geometry(dtype), CODECS[name]
    component = data.draw(st.sampled_from(Component))
    size = shape.section_size(component)
    section = data.draw(st.binary(min_size=size, max_size=size))
    assert joined(codec.decode(component, joined(codec.encode(component, section, shape)), shape)) == section
    pieces = (section[:8], memoryview(section)[8:])
    assert joined(codec.decode(component, joined(codec.encode(component, pieces, shape)), shape)) == section


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_survives(dtype: str) -> None:
    """All patterns of 16 bits: every NaN payload, -0 and denormal of the dtypes of one and two octets."""
    section = np.arange(2**16, dtype="<u2").tobytes()
    elements = len(section) // NUMPY_DTYPES[dtype].itemsize
    shape = Geometry(1, 1, elements, elements, 1, NUMPY_DTYPES[dtype])
    for codec in CODECS.values():
        encoded = joined(codec.encode(Component.K, section, shape))
        assert joined(codec.decode(Component.K, encoded, shape)) == section


def test_raw_copies_nothing() -> None:
    shape, codec = geometry(), Raw()
    section = bytearray(shape.section_size(Component.K))
    assert codec.encode(Component.K, section, shape) is section
    assert codec.decode(Component.K, section, shape) is section


@pytest.mark.parametrize("length", [0, 71, 73])
def test_raw_of_another_length(length: int) -> None:
    with pytest.raises(ObjectRejected) as caught:
        Raw().decode(Component.K, bytes(length), geometry())
    assert (caught.value.check, caught.value.expected, caught.value.got) == (Check.SECTION_LENGTH, 72, length)


def test_planes_are_those_of_the_text() -> None:
    shape = geometry("float32", dim=1, v_dim=1)
    k = b"".join(bytes([index, 100 + index, 200, 7]) for index in range(6))
    v = b"".join(bytes([50 + index, 1, 2, 3]) for index in range(6))
    planes = zlib.decompress(joined(ShuffleZlib().encode(Component.KV, (k, v), shape)))
    whole = k + v
    assert planes == whole[0::4] + whole[1::4] + whole[2::4] + whole[3::4]


def test_shuffling_helps() -> None:
    values = np.random.default_rng(0).normal(size=16384).astype("float16")
    shape = Geometry(1, 8, 128, 128, 16, NUMPY_DTYPES["float16"])
    section = values.tobytes()
    assert len(joined(ShuffleZlib().encode(Component.K, section, shape))) < len(zlib.compress(section, 1))


def raw_planes(length: int) -> bytes:
    return zlib.compress(bytes(length))


@pytest.mark.parametrize(
    ("data", "got"),
    [
        (b"", "0 octets"),
        (b"not zlib", "incorrect header"),
        (raw_planes(71), "71 octets"),
        (raw_planes(73), "more"),
        (raw_planes(0), "0 octets"),
        (raw_planes(72)[:-1], "no end"),
        (raw_planes(72)[:-4], "no end"),
        (raw_planes(72) + b"\x00", "more after it"),
        (raw_planes(72) + raw_planes(72), "more after it"),
        (raw_planes(72)[:-1] + b"\x00", "incorrect data check"),
        (zlib.compressobj(zdict=b"dictionary").compress(bytes(72)), ""),
    ],
)
def test_zlib_that_is_no_section(data: bytes, got: str) -> None:
    with pytest.raises(ObjectRejected) as caught:
        ShuffleZlib().decode(Component.K, data, geometry())
    assert caught.value.check is Check.ENCODING
    assert got in str(caught.value.got)


def test_bomb_stays_small() -> None:
    bomb = zlib.compress(bytes(64 * 1024 * 1024), 9)
    tracemalloc.start()
    try:
        with pytest.raises(ObjectRejected):
            ShuffleZlib().decode(Component.K, bomb, geometry())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1024 * 1024
