"""The payload of an Object: 68 octets of header, then Data (kvcs 4). Sealing, opening, and every check."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvcs.errors import Check, InvalidValue, ObjectRejected
from kvcs.identity import KVSP_LP1
from kvcs.layout import Buffer, Geometry
from kvcs.names import Component

MAGIC: Final = 0x4B564F31  # "KVO1"
VERSION: Final = 1
RAW: Final = KVSP_LP1.codec_values["raw"]

# Magic, Version, Component, Flags, Layer, Block Index, Token Start, Token Count, Codec, Reserved,
# Data Length, Data Digest.
_HEADER: Final = struct.Struct(">IBBHIIQIHHI32s")
HEADER_SIZE: Final = _HEADER.size

Data: TypeAlias = Buffer | Sequence[Buffer]
"""Data in one piece, or in pieces that follow one another (the K and the V section of a raw "kv" Object)."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the header of one Object must say, by its track, its Location and the manifest."""

    component: Component
    layer: int
    block: int
    token_start: int
    token_count: int
    codec: int
    section_length: int | None = None
    """Octets of Data, where the codec does not change its length (raw)."""
    listed_digest: bytes | None = None
    """The Data Digest that the manifest lists for this Object, if any."""

    @classmethod
    def at(
        cls,
        layer: int,
        block: int,
        *,
        component: Component,
        codec: int,
        first_block: int,
        geometry: Geometry,
        listed_digest: bytes | None = None,
    ) -> Expected:
        """What is expected at Group `layer`, Object `block` of a segment that starts at `first_block`."""
        return cls(
            component=component,
            layer=layer,
            block=block,
            token_start=token_start(first_block, block, geometry.block_tokens),
            token_count=geometry.block_tokens,
            codec=codec,
            section_length=geometry.section_size(component) if codec == RAW else None,
            listed_digest=listed_digest,
        )


def token_start(first_block: int, block: int, block_tokens: int) -> int:
    """The absolute position of the first token of block `block` of a segment (kvcs 3.4, 14 #3)."""
    return (first_block + block) * block_tokens


def seal(
    component: Component,
    layer: int,
    block: int,
    token_start: int,
    token_count: int,
    codec: int,
    data: Data,
) -> tuple[bytes, *tuple[memoryview, ...]]:
    """The pieces of one Object's payload: the header, then views of `data`, which is not copied.

    `data` is what goes over the wire, that is: already encoded by `codec`. It must not change afterwards.
    Raises InvalidValue for a field that does not fit its width.
    """
    pieces = (data,) if isinstance(data, bytes | bytearray | memoryview) else data
    views = tuple(memoryview(piece).cast("B") for piece in pieces)
    digest = hashlib.sha256()
    for view in views:
        digest.update(view)
    try:
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            component,
            0,  # kvcs 4: Flags are set to zero
            layer,
            block,
            token_start,
            token_count,
            codec,
            0,  # Reserved
            sum(map(len, views)),
            digest.digest(),
        )
    except struct.error as error:
        raise InvalidValue(
            f"Object of layer {layer}, block {block}: token start {token_start}, token count {token_count}, "
            f"codec {codec} or {sum(map(len, views))} octets of Data does not fit the header: {error}"
        ) from None
    return header, *views


def open_object(payload: Buffer, expected: Expected) -> memoryview:
    """The Data of a received payload, a view into it, once every check has passed (kvcs 4).

    Raises ObjectRejected naming the check that failed first. Flags and Reserved are ignored.
    """
    view = memoryview(payload)
    if len(view) < HEADER_SIZE:
        raise ObjectRejected(Check.HEADER, f"{HEADER_SIZE} octets or more", len(view))
    magic, version, component, _flags, layer, block, start, count, codec, _reserved, length, digest = (
        _HEADER.unpack_from(view)
    )
    if magic != MAGIC:
        raise ObjectRejected(Check.MAGIC, MAGIC.to_bytes(4), magic.to_bytes(4))
    if version != VERSION:
        raise ObjectRejected(Check.VERSION, VERSION, version)
    if component != expected.component:
        raise ObjectRejected(Check.COMPONENT, expected.component.value, component)
    if layer != expected.layer:
        raise ObjectRejected(Check.LAYER, expected.layer, layer)
    if block != expected.block:
        raise ObjectRejected(Check.BLOCK_INDEX, expected.block, block)
    if start != expected.token_start:
        raise ObjectRejected(Check.TOKEN_START, expected.token_start, start)
    if count != expected.token_count:
        raise ObjectRejected(Check.TOKEN_COUNT, expected.token_count, count)
    if codec != expected.codec:
        raise ObjectRejected(Check.CODEC, expected.codec, codec)
    if length != len(view) - HEADER_SIZE:
        raise ObjectRejected(Check.DATA_LENGTH, len(view) - HEADER_SIZE, length)
    if expected.section_length is not None and length != expected.section_length:
        raise ObjectRejected(Check.SECTION_LENGTH, expected.section_length, length)
    data = view[HEADER_SIZE:]
    computed = hashlib.sha256(data).digest()
    if computed != digest:
        raise ObjectRejected(Check.DATA_DIGEST, digest, computed)
    if expected.listed_digest is not None and computed != expected.listed_digest:
        raise ObjectRejected(Check.LISTED_DIGEST, expected.listed_digest, computed)
    return data


def data_digest(payload: Buffer) -> bytes:
    """The Data Digest as the header states it: what the manifest lists for the Object (kvcs 5)."""
    return bytes(payload[HEADER_SIZE - 32 : HEADER_SIZE])
