"""Track Properties and Object Properties (moqt 13)."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Final

from moqt.errors import MalformedTrack, ProtocolError, SessionCode
from moqt.filters import MAX_PRIORITY, GroupOrder, Properties
from moqt.wire.kvp import decode_pairs, encode_pairs, malformed
from moqt.wire.vi64 import Octets

MANDATORY_TRACK_PROPERTIES: Final = range(0x4000, 0x8000)


class PropertyType(IntEnum):
    """The property types that this implementation understands."""

    OBJECT_DELIVERY_TIMEOUT = 0x02
    MAX_CACHE_DURATION = 0x04
    SUBGROUP_DELIVERY_TIMEOUT = 0x06
    IMMUTABLE_PROPERTIES = 0x0B
    DEFAULT_PUBLISHER_PRIORITY = 0x0E
    DEFAULT_PUBLISHER_GROUP_ORDER = 0x22
    DYNAMIC_GROUPS = 0x30
    PRIOR_GROUP_ID_GAP = 0x3C
    PRIOR_OBJECT_ID_GAP = 0x3E


_ONCE_PER_OBJECT = PropertyType.PRIOR_GROUP_ID_GAP, PropertyType.PRIOR_OBJECT_ID_GAP


def encode_properties(properties: Properties) -> bytes:
    """The Key-Value-Pairs, without a length. Raises UsageError for a value of the wrong form."""
    return encode_pairs(properties)


def decode_properties(data: Octets) -> Properties:
    """Decode Key-Value-Pairs that fill `data`. Raises ProtocolError as moqt 2.4 says."""
    return decode_pairs(data, "properties")


def get(properties: Properties, property_type: int) -> int | bytes | None:
    """The first value of a type, or None; IMMUTABLE_PROPERTIES are looked into as well (moqt 13)."""
    for kind, value in _with_immutable(properties):
        if kind == property_type:
            return value
    return None


def track_property_fault(properties: Properties) -> ProtocolError | None:
    """What is wrong with the values of Track Properties so that the session must close (moqt 20 #10, #30)."""
    for kind, value in _with_immutable(properties):
        if kind == PropertyType.DEFAULT_PUBLISHER_GROUP_ORDER and value not in tuple(GroupOrder):
            return ProtocolError(
                SessionCode.PROTOCOL_VIOLATION, f"DEFAULT_PUBLISHER_GROUP_ORDER is {value!r}, not 1 or 2"
            )
        if kind == PropertyType.DYNAMIC_GROUPS and value not in (0, 1):
            return ProtocolError(SessionCode.PROTOCOL_VIOLATION, f"DYNAMIC_GROUPS is {value!r}, not 0 or 1")
        if kind == PropertyType.DEFAULT_PUBLISHER_PRIORITY and value not in range(MAX_PRIORITY + 1):
            return malformed("DEFAULT_PUBLISHER_PRIORITY", f"{value!r} is not 0 … 255")
    return None


def check_track_properties(properties: Properties) -> None:
    """Check the Track Properties of a track that this endpoint is going to use.

    Raises ProtocolError (as the message decoder has done already) or MalformedTrack. Mandatory properties
    that are not understood are another matter: see `unknown_mandatory_properties`.
    """
    fault = track_property_fault(properties)
    if fault is not None:
        raise fault
    _check_immutable(properties)


def check_object_properties(properties: Properties) -> None:
    """Check the properties of one Object. Raises MalformedTrack (moqt 20.1)."""
    kinds = [kind for kind, _ in _with_immutable(properties)]
    for kind in kinds:
        if kind in MANDATORY_TRACK_PROPERTIES:
            raise MalformedTrack(f"mandatory Track Property 0x{kind:x} on an Object")
    for once in _ONCE_PER_OBJECT:
        if kinds.count(once) > 1:
            raise MalformedTrack(f"{once.name} is repeated on an Object")
    _check_immutable(properties)


def unknown_mandatory_properties(properties: Properties) -> tuple[int, ...]:
    """The mandatory Track Properties among these; we understand none of them (moqt 13.1)."""
    return tuple(kind for kind, _ in _with_immutable(properties) if kind in MANDATORY_TRACK_PROPERTIES)


def _with_immutable(properties: Properties) -> Iterator[tuple[int, int | bytes]]:
    """These properties, then those inside IMMUTABLE_PROPERTIES."""
    yield from properties
    for block in _immutable_blocks(properties):
        yield from block or ()


def _immutable_blocks(properties: Properties) -> Iterator[Properties | None]:
    """What each IMMUTABLE_PROPERTIES holds; None for one that cannot be parsed."""
    for kind, value in properties:
        if kind == PropertyType.IMMUTABLE_PROPERTIES and isinstance(value, bytes):
            try:
                yield decode_properties(value)
            except ProtocolError:
                yield None


def _check_immutable(properties: Properties) -> None:
    for block in _immutable_blocks(properties):
        if block is None:
            raise MalformedTrack("IMMUTABLE_PROPERTIES cannot be parsed")
        if any(kind == PropertyType.IMMUTABLE_PROPERTIES for kind, _ in block):
            raise MalformedTrack("IMMUTABLE_PROPERTIES inside IMMUTABLE_PROPERTIES")
