"""Tensors <-> K and V sections: how arrays are cut into blocks, and put together again (kvsp 2.4).

A section is [block_tokens][kv_heads][head_dim] in C order, little-endian elements, without padding or header.
Elements are moved as bits, never cast: NaN payloads, -0 and denormals arrive as they left. Arrays have the
dtypes that torch knows by name, bfloat16 and fp8 being those of ml_dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias, assert_never

import ml_dtypes
import numpy as np

from kvcs.errors import Check, InvalidTensor, ObjectRejected
from kvcs.identity import Descriptor
from kvcs.names import Component

Buffer: TypeAlias = bytes | bytearray | memoryview
Tensor: TypeAlias = np.ndarray[Any, np.dtype[Any]]

NUMPY_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
SMALL_OBJECT: Final = 16 * 1024  # octets, kvcs 9
LARGE_OBJECT: Final = 1024 * 1024


class Order(Enum):
    """The axes of an array, outermost first."""

    TOKENS_HEADS_DIM = "thd"
    """[tokens, kv_heads, head_dim]: vLLM's NHD, and the order of sections."""
    HEADS_TOKENS_DIM = "htd"
    """[kv_heads, tokens, head_dim]: head-major."""
    HF = "1htd"
    """[1, kv_heads, tokens, head_dim]: a layer of a Hugging Face cache for one sequence."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of one block in one layer, from a Compatibility Descriptor."""

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    """Dimension of a value head; 0 where V is part of K ("mla")."""
    block_tokens: int
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, descriptor: Descriptor) -> Geometry:
        """The geometry that a descriptor states."""
        return cls(
            layers=descriptor.layers,
            kv_heads=descriptor.kv_heads,
            head_dim=descriptor.head_dim,
            v_head_dim=descriptor.v_head_dim,
            block_tokens=descriptor.block_tokens,
            dtype=NUMPY_DTYPES[descriptor.dtype],
        )

    def dim(self, component: Component) -> int:
        """Elements per head and token of K or V; of KV: both."""
        match component:
            case Component.K:
                return self.head_dim
            case Component.V:
                return self.v_head_dim
            case Component.KV:
                return self.head_dim + self.v_head_dim
            case _:
                assert_never(component)

    def section_size(self, component: Component) -> int:
        """Octets of the raw Data of one Object."""
        return self.block_tokens * self.kv_heads * self.dim(component) * self.dtype.itemsize


def wire_bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The unsigned integers, little-endian, that carry the bits of one element."""
    return np.dtype(f"<u{dtype.itemsize}")


def to_blocks(
    array: Tensor, geometry: Geometry, order: Order, component: Component = Component.K
) -> tuple[list[memoryview], int]:
    """Cut the K or V of one layer into the sections of its complete blocks.

    `array` has the axes of `order` and the dtype of `geometry`, in any byte order and with any strides. The
    result is a read-only view of octets per complete block, and the number of tokens after the last one.
    Where `array` is C-contiguous, little-endian and in the order of sections, the views are into its own
    memory: it must not be written to as long as they are in use. Otherwise complete blocks are copied once.
    Raises InvalidTensor.
    """
    check_tensor(array, geometry, order, component)
    by_token = _by_token(array, order)
    blocks, tail = divmod(by_token.shape[0], geometry.block_tokens)
    # Same bits as unsigned integers: a change of byte order below is then no cast of what they mean.
    bits = by_token.view(_bits_of(by_token.dtype))[: blocks * geometry.block_tokens]
    octets = (
        np.ascontiguousarray(bits, wire_bits(geometry.dtype)).reshape(-1).view(np.uint8).data.toreadonly()
    )
    size = geometry.section_size(component)
    return [octets[block * size : (block + 1) * size] for block in range(blocks)], tail


def check_tensor(array: Tensor, geometry: Geometry, order: Order, component: Component) -> None:
    """Raise InvalidTensor unless `array` can be the K or V of a layer: axes, and dtype in any byte order."""
    if component is Component.KV:
        raise InvalidTensor("K and V are two arrays; a kv Object is a K section and a V section")
    if not isinstance(array, np.ndarray):
        raise InvalidTensor(f"expected a numpy array, got {type(array).__name__}")
    heads, dim = geometry.kv_heads, geometry.dim(component)
    match order:
        case Order.TOKENS_HEADS_DIM:
            fits = array.ndim == 3 and array.shape[1:] == (heads, dim)
            expected = f"[tokens, {heads}, {dim}]"
        case Order.HEADS_TOKENS_DIM:
            fits = array.ndim == 3 and (array.shape[0], array.shape[2]) == (heads, dim)
            expected = f"[{heads}, tokens, {dim}]"
        case Order.HF:
            fits = array.ndim == 4 and (*array.shape[:2], array.shape[3]) == (1, heads, dim)
            expected = f"[1, {heads}, tokens, {dim}]"
        case _:
            assert_never(order)
    dtype = geometry.dtype
    if not fits or array.dtype.type is not dtype.type:
        raise InvalidTensor(
            f"{component.text} tensor in order {order.value}: expected {expected} of {dtype.name}, "
            f"got {list(array.shape)} of {array.dtype.name}{_hint(array.dtype, dtype) if fits else ''}"
        )


def in_native_order(array: Tensor) -> Tensor:
    """`array` itself, or a copy with the same elements in the byte order of this machine."""
    if array.dtype.isnative:
        return array
    bits = _bits_of(array.dtype)
    native: Tensor = array.view(bits).astype(bits.newbyteorder("="))  # integers: no element is interpreted
    return native.view(np.dtype(array.dtype.type))


def split_kv(data: Buffer, geometry: Geometry) -> tuple[memoryview, memoryview]:
    """The K section and the V section of the raw Data of a "kv" Object: views (kvcs 4).

    Raises ObjectRejected if `data` has another length than both together.
    """
    expected = geometry.section_size(Component.KV)
    if len(data) != expected:
        raise ObjectRejected(Check.SECTION_LENGTH, expected, len(data))
    boundary = geometry.section_size(Component.K)
    view = memoryview(data)
    return view[:boundary], view[boundary:]


def arrange(array: Tensor, order: Order) -> Tensor:
    """[tokens, kv_heads, head_dim] with the axes of `order` instead: a view, without a copy."""
    match order:
        case Order.TOKENS_HEADS_DIM:
            return array
        case Order.HEADS_TOKENS_DIM:
            return array.transpose(1, 0, 2)
        case Order.HF:
            return array.transpose(1, 0, 2)[np.newaxis]
        case _:
            assert_never(order)


class LayerBuffer:
    """The K or V of one layer, allocated for `blocks` blocks and filled in any order.

    `array` is [blocks x block_tokens, kv_heads, head_dim] of the geometry's dtype. What has not been placed
    yet is undefined.
    """

    __slots__ = ("_bits", "_size", "_wire_bits", "array", "blocks")

    def __init__(self, geometry: Geometry, component: Component, blocks: int) -> None:
        if component is Component.KV:
            raise ValueError("K and V have a LayerBuffer each: split_kv() takes a kv section apart")
        shape = (blocks, geometry.block_tokens, geometry.kv_heads, geometry.dim(component))
        self.blocks = blocks
        self.array: Tensor = np.empty((blocks * shape[1], *shape[2:]), geometry.dtype)
        self._bits = self.array.view(_bits_of(geometry.dtype)).reshape(blocks, math.prod(shape[1:]))
        self._wire_bits = wire_bits(geometry.dtype)
        self._size = geometry.section_size(component)

    def place(self, block: int, data: Buffer) -> None:
        """Copy the raw section of block `block` (0..blocks-1) to its place.

        Raises IndexError for another block, and ObjectRejected if `data` has not the length of a section.
        """
        if not 0 <= block < self.blocks:
            raise IndexError(f"block {block} of {self.blocks}")
        if len(data) != self._size:
            raise ObjectRejected(Check.SECTION_LENGTH, self._size, len(data))
        self._bits[block] = np.frombuffer(data, self._wire_bits)


def object_size_advice(geometry: Geometry) -> str | None:
    """A sentence for the operator when Objects fall outside 16 KiB to 1 MiB, else None."""  # kvcs 9
    components = (Component.K, Component.V) if geometry.v_head_dim else (Component.KV,)
    advice = []
    for component in components:
        size = geometry.section_size(component)
        if not SMALL_OBJECT <= size <= LARGE_OBJECT:
            per_token = size // geometry.block_tokens
            least, most = -(-SMALL_OBJECT // per_token), LARGE_OBJECT // per_token
            remedy = f"choose block_tokens {least} to {most}" if most else "one token alone is larger"
            advice.append(
                f"{component.text} Objects of {geometry.block_tokens} tokens hold {size} octets, outside the "
                f"16 KiB to 1 MiB that balance overhead and granularity: {remedy}"
            )
    return "; ".join(advice) or None


def _by_token(array: Tensor, order: Order) -> Tensor:
    """`array`, which has the axes of `order`, with the axes of a section: a view."""
    match order:
        case Order.TOKENS_HEADS_DIM:
            return array
        case Order.HEADS_TOKENS_DIM:
            return array.transpose(1, 0, 2)
        case Order.HF:
            one: Tensor = array[0]
            return one.transpose(1, 0, 2)
        case _:
            assert_never(order)


def _hint(got: np.dtype[Any], expected: np.dtype[Any]) -> str:
    if (got.kind in "ui" or got.type is np.void) and got.itemsize == expected.itemsize:
        of = "numpy" if expected.type.__module__ == "numpy" else "ml_dtypes"
        return (
            f" (if these are the bits of {expected.name} elements, say so: array.view({of}.{expected.name}))"
        )
    return " (no dtype is converted here, as that would change the cache)"


def _bits_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Unsigned integers of the width and byte order of `dtype`."""
    return np.dtype(f"u{dtype.itemsize}").newbyteorder(dtype.byteorder)
