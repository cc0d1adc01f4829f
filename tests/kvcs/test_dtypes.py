"""Every dtype goes from publisher to subscriber bit for bit, whatever the bits mean (kvsp 2.4)."""

from __future__ import annotations

import asyncio
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvcs.identity import Descriptor
from kvcs.layout import NUMPY_DTYPES, Tensor
from tests.kvcs.stage import Cache, check_layers, descriptor, put_layers, stage

pytestmark = pytest.mark.virtual

TOKENS = list(range(1024))
"""With 1 head of dimension 64: 65536 elements, so all patterns of 16 bits."""

SPECIAL = {
    "float16": [0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF],
    "bfloat16": [0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFC1, 0xFFFF],
    "float32": [0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF],
    "float8_e4m3fn": [0x80, 0x01, 0x87, 0x7F, 0xFF, 0x7E],
    "float8_e5m2": [0x80, 0x01, 0x83, 0x7C, 0xFC, 0x7D, 0x7E, 0x7F, 0xFF],
    "int8": [0x80, 0x7F, 0xFF, 0x00],
}
"""-0, denormals, infinities, quiet and signalling NaNs with payloads."""


def patterns(dtype: np.dtype[Any], seed: int) -> Tensor:
    """65536 elements: every pattern of the dtype's bits where there are no more, in some order; for 32 bits
    random ones, and the special ones.
    """
    bits = np.dtype(f"u{dtype.itemsize}")
    generator = np.random.default_rng(seed)
    if dtype.itemsize == 4:
        values = generator.integers(0, 2**32, 65536, np.uint32)
        values[: len(SPECIAL["float32"])] = SPECIAL["float32"]
    else:
        values = generator.permutation(np.arange(65536) % 2 ** (8 * dtype.itemsize)).astype(bits)
    return values.view(dtype).reshape(len(TOKENS), 1, 64)


def model_of(dtype: str) -> Descriptor:
    return descriptor(layers=2, kv_heads=1, head_dim=64, block_tokens=128, dtype=dtype)


def cache_of(dtype: str) -> Cache:
    return [
        (patterns(NUMPY_DTYPES[dtype], 2 * layer), patterns(NUMPY_DTYPES[dtype], 2 * layer + 1))
        for layer in (0, 1)
    ]


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    "encoding",
    [
        {"codecs": ["raw"]},
        {"codecs": ["x-shuffle-zlib"]},
        {"codecs": [], "joint_codecs": ["raw"]},
        {"codecs": [], "joint_codecs": ["x-shuffle-zlib"]},
    ],
)
@pytest.mark.parametrize("dtype", list(NUMPY_DTYPES))
async def test_all_bits_arrive(dtype: str, encoding: dict[str, list[str]], live: bool) -> None:
    model, cache = model_of(dtype), cache_of(dtype)
    async with stage() as scene:
        segment = scene.publisher(model, **encoding).publish(TOKENS).segment
        if not live:
            await put_layers(segment, cache)
        task = asyncio.create_task(scene.receive(TOKENS, model=model))
        await asyncio.sleep(1)
        if live:
            await put_layers(segment, cache)
        layers = await task
    check_layers(layers, cache, model)
    expected = {*SPECIAL[dtype]}
    for layer in layers:
        assert layer.k.dtype == NUMPY_DTYPES[dtype]
        assert layer.v is not None
        for tensor in (layer.k, layer.v):
            assert expected <= set(tensor.view(f"u{tensor.dtype.itemsize}").reshape(-1).tolist())
        # The caller may do with them as it likes.
        assert layer.k.flags.writeable
        assert layer.k.flags.c_contiguous


@pytest.mark.parametrize("dtype", ["float16", "float32"])
async def test_arrays_in_the_other_byte_order(dtype: str) -> None:
    """What is sent is little-endian all the same, and the bits of the elements are kept."""
    model, cache = model_of(dtype), cache_of(dtype)
    async with stage() as scene:
        segment = scene.publisher(model).publish(TOKENS).segment
        for layer, (k, v) in enumerate(cache):
            await segment.put_layer(layer, *(swapped(tensor) for tensor in (k, v)))
        check_layers(await scene.receive(TOKENS, model=model), cache, model)


def swapped(tensor: Tensor) -> Tensor:
    """The same elements, big-endian."""
    return tensor.byteswap().view(tensor.dtype.newbyteorder(">"))


async def test_nan_payloads_of_bfloat16() -> None:
    """As a test by itself, since this is where casts show."""
    model = model_of("bfloat16")
    bits = np.full((len(TOKENS), 1, 64), 0x7FC0, np.uint16)
    bits[..., ::2] = 0xFFA5
    bits[0, 0, :4] = (0x7F81, 0xFF81, 0x8000, 0x0001)
    k = bits.view(ml_dtypes.bfloat16)
    async with stage() as scene:
        await put_layers(scene.publisher(model).publish(TOKENS).segment, [(k, k), (k, k)])
        for layer in await scene.receive(TOKENS, model=model):
            assert np.array_equal(layer.k.view(np.uint16), bits)
