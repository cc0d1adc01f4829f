"""Tensors to sections and back, bit for bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvcs.errors import Check, InvalidTensor, ObjectRejected
from kvcs.identity import DTYPES, Descriptor, layer_digest
from kvcs.layout import (
    NUMPY_DTYPES,
    Geometry,
    LayerBuffer,
    Order,
    Tensor,
    arrange,
    in_native_order,
    object_size_advice,
    split_kv,
    to_blocks,
)
from kvcs.names import Component
from kvcs.payload import RAW, data_digest, seal

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors/kvsp-lp1.json").read_text())

F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
THD, HTD = Order.TOKENS_HEADS_DIM, Order.HEADS_TOKENS_DIM

# Bit patterns that a cast would change: quiet and signalling NaNs with payloads, -NaN, -0, infinities,
# denormals.
SPECIAL: dict[str, list[int]] = {
    "float16": [0x7E01, 0x7C01, 0xFE55, 0x8000, 0x7C00, 0xFC00, 0x0001, 0x83FF],
    "bfloat16": [0x7FC1, 0x7F81, 0xFFAA, 0x8000, 0x7F80, 0xFF80, 0x0001, 0x807F],
    "float32": [
        0x7FC00001,
        0x7F800001,
        0xFFC12345,
        0x80000000,
        0x7F800000,
        0xFF800000,
        0x00000001,
        0x807FFFFF,
    ],
    "float8_e4m3fn": [0x7F, 0xFF, 0x80, 0x01, 0x87, 0x7E],
    "float8_e5m2": [0x7D, 0x7E, 0x7F, 0xFD, 0x80, 0x7C, 0x01, 0x83],
    "int8": [0x80, 0xFF, 0x7F, 0x00],
}


def geometry(
    dtype: str = "bfloat16", heads: int = 3, dim: int = 5, tokens: int = 4, v_dim: int = 7
) -> Geometry:
    return Geometry(2, heads, dim, v_dim, tokens, NUMPY_DTYPES[dtype])


def random_tensor(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Tensor:
    """Any bits, special ones among them."""
    size = NUMPY_DTYPES[dtype].itemsize
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, size), np.uint8)
    words: NDArray[Any] = bits.view(f"<u{size}")[..., 0].copy()
    flat = words.reshape(-1)
    special = np.array(SPECIAL[dtype], words.dtype)[: flat.size]
    flat[: special.size] = special
    return words.astype(f"=u{size}").view(NUMPY_DTYPES[dtype])


def section(array: Tensor) -> bytes:
    """The section of kvsp 2.4 of a [tokens, heads, dim] array, element by element."""
    size = array.dtype.itemsize
    words = array.view(f"=u{size}").tolist()
    return b"".join(word.to_bytes(size, "little") for token in words for head in token for word in head)


all_dtypes_and_orders = pytest.mark.parametrize(
    ("dtype", "order"), [(dtype, order) for dtype in DTYPES for order in Order]
)


@all_dtypes_and_orders
def test_blocks_are_the_sections_of_the_text(dtype: str, order: Order) -> None:
    shape = geometry(dtype)
    array = random_tensor((10, 3, 5), dtype)
    blocks, tail = to_blocks(np.ascontiguousarray(arrange(array, order)), shape, order)
    assert tail == 2
    assert [bytes(block) for block in blocks] == [section(array[:4]), section(array[4:8])]
    assert all(block.readonly and block.format == "B" and len(block) == block.nbytes for block in blocks)
    assert len(blocks[0]) == shape.section_size(Component.K)


@all_dtypes_and_orders
@given(data=st.data())
def test_blocks_there_and_back(dtype: str, order: Order, data: st.DataObject) -> None:
    heads, dim, block_tokens, blocks, tail = (
        data.draw(st.integers(low, high)) for low, high in ((1, 4), (1, 6), (1, 5), (0, 4), (0, 4))
    )
    shape = geometry(dtype, heads, dim, block_tokens, dim)
    tokens = blocks * block_tokens + min(tail, block_tokens - 1)
    array = random_tensor((tokens, heads, dim), dtype, data.draw(st.integers(0, 100)))
    given_array = arrange(array, order)
    if data.draw(st.booleans()):
        given_array = np.ascontiguousarray(given_array)
    cut, rest = to_blocks(given_array, shape, order, Component.V)
    assert (len(cut), rest) == (blocks, tokens - blocks * block_tokens)
    buffer = LayerBuffer(shape, Component.V, blocks)
    for block in data.draw(st.permutations(range(blocks))):
        buffer.place(block, cut[block])
    assert buffer.array.dtype == shape.dtype
    assert buffer.array.shape == (blocks * block_tokens, heads, dim)
    assert buffer.array.tobytes() == array[: blocks * block_tokens].tobytes()
    assert arrange(buffer.array, order).shape == arrange(array[: blocks * block_tokens], order).shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_contiguous_array_is_not_copied(dtype: str) -> None:
    array = random_tensor((8, 3, 5), dtype)
    blocks, _ = to_blocks(array, geometry(dtype), Order.TOKENS_HEADS_DIM)
    assert all(np.shares_memory(np.frombuffer(block, np.uint8), array) for block in blocks)
    one_head = random_tensor((1, 8, 5), dtype)
    blocks, _ = to_blocks(one_head, geometry(dtype, heads=1), Order.HEADS_TOKENS_DIM)
    assert np.shares_memory(np.frombuffer(blocks[0], np.uint8), one_head)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_big_endian_array(dtype: str) -> None:
    array = random_tensor((8, 3, 5), dtype)
    size = array.dtype.itemsize
    swapped = array.view(f"=u{size}").astype(f">u{size}").view(NUMPY_DTYPES[dtype].newbyteorder(">"))
    assert swapped.tobytes() != array.tobytes()
    blocks, _ = to_blocks(swapped, geometry(dtype), Order.TOKENS_HEADS_DIM)
    assert [bytes(block) for block in blocks] == [section(array[:4]), section(array[4:])]
    native = in_native_order(swapped)
    assert native.dtype == array.dtype
    assert native.tobytes() == array.tobytes()
    assert in_native_order(array) is array


@pytest.mark.parametrize("dtype", DTYPES)
def test_array_with_strides(dtype: str) -> None:
    whole = random_tensor((16, 2, 3, 10), dtype)  # K and V of a token side by side, twice the head dimension
    array = whole[::-2, 1, :, ::2]
    blocks, _ = to_blocks(array, geometry(dtype), Order.TOKENS_HEADS_DIM)
    assert [bytes(block) for block in blocks] == [section(array[:4]), section(array[4:])]
    fortran = np.asfortranarray(whole[:8, 0, :, :5])
    assert b"".join(to_blocks(fortran, geometry(dtype), Order.TOKENS_HEADS_DIM)[0]) == section(
        whole[:8, 0, :, :5]
    )


@pytest.mark.parametrize(
    ("array", "order", "says"),
    [
        (np.zeros((8, 3, 5), F16), THD, "expected [tokens, 3, 5] of bfloat16, got [8, 3, 5] of float16"),
        (np.zeros((3, 8, 5), BF16), THD, "expected [tokens, 3, 5] of bfloat16, got [3, 8, 5] of bfloat16"),
        (np.zeros((8, 3, 5), BF16), HTD, "expected [3, tokens, 5] of bfloat16, got [8, 3, 5] of bfloat16"),
        (np.zeros((3, 8, 5), BF16), Order.HF, "expected [1, 3, tokens, 5] of bfloat16, got [3, 8, 5]"),
        (np.zeros((2, 3, 8, 5), BF16), Order.HF, "expected [1, 3, tokens, 5] of bfloat16, got [2, 3, 8, 5]"),
        (np.zeros((8, 3, 5), "u2"), THD, "uint16 (if these are the bits of bfloat16 elements"),
        (np.zeros((8, 3, 5), "V2"), THD, "if these are the bits of bfloat16 elements"),
        (np.zeros((8, 3, 5), "f4"), THD, "no dtype is converted"),
        (np.zeros((8, 3, 5), object), THD, "of object"),
        ([[[0.0]]], THD, "expected a numpy array, got list"),
    ],
)
def test_wrong_array(array: Any, order: Order, says: str) -> None:
    with pytest.raises(InvalidTensor) as caught:
        to_blocks(array, geometry(), order)
    assert says in str(caught.value)
    with pytest.raises(InvalidTensor, match="two arrays"):
        to_blocks(array, geometry(), order, Component.KV)


def test_value_heads_have_their_own_dimension() -> None:
    array = random_tensor((8, 3, 7), "bfloat16")
    blocks, _ = to_blocks(array, geometry(), Order.TOKENS_HEADS_DIM, Component.V)
    assert b"".join(blocks) == section(array)
    with pytest.raises(InvalidTensor, match=r"v tensor in order thd: expected \[tokens, 3, 7\]"):
        to_blocks(array[:, :, :5], geometry(), Order.TOKENS_HEADS_DIM, Component.V)


def test_geometry_of_a_descriptor() -> None:
    shape = Geometry.of(Descriptor.parse(VECTORS["descriptor"]))
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.v_head_dim, shape.block_tokens) == (
        2,
        8,
        128,
        128,
        4,
    )
    assert shape.dtype == np.dtype(ml_dtypes.bfloat16)
    assert shape.section_size(Component.K) == 8192  # kvcs 13
    assert shape.section_size(Component.KV) == 16384
    mla = Geometry.of(
        Descriptor.parse({**VECTORS["descriptor"], "attention": "mla", "kv_heads": 1, "head_dim": 576})
    )
    assert (mla.section_size(Component.K), mla.section_size(Component.V)) == (4 * 576 * 2, 0)
    blocks, tail = to_blocks(
        np.empty((9, 1, 0), ml_dtypes.bfloat16), mla, Order.TOKENS_HEADS_DIM, Component.V
    )
    assert ([bytes(block) for block in blocks], tail) == ([b"", b""], 1)
    buffer = LayerBuffer(mla, Component.V, 2)
    buffer.place(1, b"")
    assert buffer.array.shape == (8, 1, 0)


@pytest.mark.requirement("R4e")
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_digest_is_that_of_k_and_v_and_of_kv(dtype: str) -> None:
    shape = geometry(dtype)
    ks, _ = to_blocks(random_tensor((4, 3, 5), dtype, 1), shape, Order.TOKENS_HEADS_DIM)
    vs, _ = to_blocks(random_tensor((4, 3, 7), dtype, 2), shape, Order.TOKENS_HEADS_DIM, Component.V)
    header_k, *data_k = seal(Component.K, 0, 0, 0, 4, RAW, ks[0])
    header_v, *data_v = seal(Component.V, 0, 0, 0, 4, RAW, vs[0])
    header_kv, *pieces = seal(Component.KV, 0, 0, 0, 4, RAW, (ks[0], vs[0]))
    digest = hashlib.sha256(b"".join(data_k + data_v)).digest()
    assert data_digest(header_kv) == digest
    assert layer_digest(ks[0], vs[0]) == digest
    assert data_digest(header_k) == hashlib.sha256(ks[0]).digest()
    assert data_digest(header_v) == hashlib.sha256(vs[0]).digest()
    k, v = split_kv(b"".join(pieces), shape)
    assert (bytes(k), bytes(v)) == (bytes(ks[0]), bytes(vs[0]))


def test_split_of_a_wrong_length() -> None:
    with pytest.raises(ObjectRejected) as caught:
        split_kv(bytes(7), geometry())
    assert (caught.value.check, caught.value.got) == (Check.SECTION_LENGTH, 7)


def test_layer_buffer_takes_sections_only() -> None:
    buffer = LayerBuffer(geometry(), Component.K, 2)
    size = geometry().section_size(Component.K)
    for length in (0, size - 1, size + 1):
        with pytest.raises(ObjectRejected) as caught:
            buffer.place(0, bytes(length))
        assert (caught.value.check, caught.value.expected, caught.value.got) == (
            Check.SECTION_LENGTH,
            size,
            length,
        )
    for block in (-1, 2):
        with pytest.raises(IndexError):
            buffer.place(block, bytes(size))
    with pytest.raises(ValueError, match="split_kv"):
        LayerBuffer(geometry(), Component.KV, 2)


def test_arrange_is_a_view() -> None:
    array = random_tensor((8, 3, 5), "bfloat16")
    for order, shape in (
        (Order.TOKENS_HEADS_DIM, (8, 3, 5)),
        (Order.HEADS_TOKENS_DIM, (3, 8, 5)),
        (Order.HF, (1, 3, 8, 5)),
    ):
        view = arrange(array, order)
        assert view.shape == shape
        assert np.shares_memory(view, array)


@pytest.mark.requirement("R9a")
@pytest.mark.parametrize(
    ("heads", "dim", "tokens", "v_dim", "says"),
    [
        (8, 128, 16, 128, None),  # 32 KiB, the example of kvcs 9
        (8, 128, 8, 128, None),  # 16 KiB: the least
        (8, 128, 512, 128, None),  # 1 MiB: the most
        (8, 128, 7, 128, "k Objects of 7 tokens hold 14336 octets"),
        (8, 128, 4, 128, "choose block_tokens 8 to 512"),
        (8, 128, 513, 128, "v Objects of 513 tokens"),
        (8, 128, 16, 32, "v Objects of 16 tokens hold 8192 octets"),
        (1, 576, 16, 0, None),  # "mla": one kv Object of 18 KiB
        (1, 576, 8, 0, "kv Objects of 8 tokens hold 9216 octets"),
        (1024, 1024, 1, 1024, "one token alone is larger"),
    ],
)
def test_object_size_advice(heads: int, dim: int, tokens: int, v_dim: int, says: str | None) -> None:
    advice = object_size_advice(geometry("bfloat16", heads, dim, tokens, v_dim))
    assert (advice is None) if says is None else (advice is not None and says in advice)
