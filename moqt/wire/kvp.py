"""Key-Value-Pairs: Setup Options, Track Properties and Object Properties (moqt 2.4)."""

from __future__ import annotations

from typing import Final

from moqt.errors import ProtocolError, SessionCode, UsageError
from moqt.filters import MAX_VARINT, Properties
from moqt.wire.vi64 import Octets, Reader, encode_prefixed, encode_vi64

MAX_VALUE_LENGTH: Final = 65535  # moqt 2.4, 18


def encode_pairs(pairs: Properties) -> bytes:
    """Encode (type, value) pairs, sorted by type: numbers for even types, bytes for odd ones.

    Repeats of a type keep their order. Raises UsageError for a value of the wrong form or size.
    """
    encoded = bytearray()
    previous = 0
    for kind, value in sorted(pairs, key=lambda pair: pair[0]):
        encoded += encode_vi64(kind - previous)
        previous = kind
        if isinstance(value, int) and kind % 2 == 0:
            encoded += encode_vi64(value)
        elif isinstance(value, bytes) and kind % 2 == 1:
            if len(value) > MAX_VALUE_LENGTH:
                raise UsageError(f"the value of type 0x{kind:x} has {len(value)} bytes, more than 65535")
            encoded += encode_prefixed(value)
        else:
            raise UsageError(f"type 0x{kind:x} takes {'bytes' if kind % 2 else 'a number'}: {type(value)}")
    return bytes(encoded)


def decode_pairs(data: Octets, what: str) -> Properties:
    """Decode a list that fills `data`; `what` names it in errors.

    Raises ProtocolError for a type above 2^64-1, a value above 65535 bytes, or a cut (moqt 20 #9).
    """
    reader = Reader(data, what=what)
    pairs: list[tuple[int, int | bytes]] = []
    kind = 0
    while reader.remaining:
        kind += reader.vi64()
        if kind > MAX_VARINT:
            raise reader.fault("a type is above 2^64-1")
        if kind % 2 == 0:
            pairs.append((kind, reader.vi64()))
            continue
        length = reader.vi64()
        if length > MAX_VALUE_LENGTH:
            raise reader.fault(f"the value of type 0x{kind:x} has {length} bytes, more than 65535")
        pairs.append((kind, reader.bytes(length)))
    return tuple(pairs)


def malformed(what: str, reason: str) -> ProtocolError:
    """A known type whose value has not the form of that type (moqt 20 #10)."""
    return ProtocolError(SessionCode.KEY_VALUE_FORMATTING_ERROR, f"{what}: {reason}")
