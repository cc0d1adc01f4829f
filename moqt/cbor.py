"""The CBOR of tokens and signatures (RFC 8949): a strict decoder, and a deterministic encoder.

General decoders resolve tags into cyclic lists, regular expressions and numbers of a gigabyte, and let the
last of two equal keys win (security 4.3). This one knows integers, octets, text, arrays, maps, true, false,
null and finite floats, and nothing else.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final, TypeAlias

__all__ = ["MAX_DEPTH", "Cbor", "CborError", "decode", "encode"]

Cbor: TypeAlias = "int | float | bool | bytes | str | tuple[Cbor, ...] | Mapping[int | str, Cbor] | None"

MAX_DEPTH: Final = 16  # security 4.3

_UINT, _NINT, _BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE = range(8)
_SIMPLE_VALUES: Final = {20: False, 21: True, 22: None}
_FLOATS: Final = {25: ">e", 26: ">f", 27: ">d"}


class CborError(ValueError):
    """Octets that this decoder does not take."""


def decode(data: bytes) -> Cbor:
    """The one value that fills `data`. Arrays come as tuples.

    Raises CborError for tags, indefinite lengths, lengths that are not the shortest, equal keys in a map,
    keys other than integers and text, NaN and infinities, nesting beyond MAX_DEPTH, text that is not
    UTF-8, and octets that are left over.
    """
    decoder = _Decoder(data)
    value = decoder.value(MAX_DEPTH)
    if decoder.position != len(data):
        raise CborError(f"{len(data) - decoder.position} octets follow the value")
    return value


def encode(value: Cbor) -> bytes:
    """The deterministic encoding (RFC 8949 4.2.1): shortest forms, keys in the order of their encodings."""
    match value:
        case None:
            return b"\xf6"
        case bool():
            return b"\xf5" if value else b"\xf4"
        case int():
            return _head(_UINT, value) if value >= 0 else _head(_NINT, -1 - value)
        case float():
            return _encode_float(value)
        case bytes():
            return _head(_BYTES, len(value)) + value
        case str():
            text = value.encode()
            return _head(_TEXT, len(text)) + text
        case tuple():
            return _head(_ARRAY, len(value)) + b"".join(map(encode, value))
        case _:
            pairs = sorted((encode(key), encode(item)) for key, item in value.items())
            return _head(_MAP, len(pairs)) + b"".join(key + item for key, item in pairs)


class _Decoder:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def value(self, depth: int) -> Cbor:
        first = self._take(1)[0]
        major, info = first >> 5, first & 0x1F
        if major == _SIMPLE:
            return self._simple(info)
        argument = self._argument(info)
        if major == _UINT:
            return argument
        if major == _NINT:
            return -1 - argument
        if major == _BYTES:
            return self._take(argument)
        if major == _TEXT:
            return self._text(argument)
        if major == _TAG:
            raise CborError(f"tag {argument}")
        if depth == 0:
            raise CborError(f"nested deeper than {MAX_DEPTH}")
        self._expect(argument if major == _ARRAY else 2 * argument)
        if major == _MAP:
            return self._map(argument, depth - 1)
        return tuple(self.value(depth - 1) for _ in range(argument))

    def _map(self, size: int, depth: int) -> Mapping[int | str, Cbor]:
        result: dict[int | str, Cbor] = {}
        for _ in range(size):
            key = self.value(depth)
            if isinstance(key, bool) or not isinstance(key, int | str):
                raise CborError("a key of a map is neither an integer nor text")
            if key in result:
                raise CborError("a key stands twice in a map")
            result[key] = self.value(depth)
        return result

    def _text(self, size: int) -> str:
        try:
            return self._take(size).decode()
        except UnicodeDecodeError:
            raise CborError("text that is not UTF-8") from None

    def _simple(self, info: int) -> float | bool | None:
        if info in _SIMPLE_VALUES:
            return _SIMPLE_VALUES[info]
        if info not in _FLOATS:
            raise CborError(f"simple value or break, additional information {info}")
        form = _FLOATS[info]
        number: float = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        if not math.isfinite(number):
            raise CborError("a number that is not finite")
        return number

    def _argument(self, info: int) -> int:
        if info < 24:
            return info
        if info > 27:
            raise CborError("an indefinite or reserved length")
        size = 1 << (info - 24)
        argument = int.from_bytes(self._take(size))
        if argument < (24 if size == 1 else 1 << (4 * size)):
            raise CborError("a length or an integer that is not in its shortest form")
        return argument

    def _expect(self, items: int) -> None:
        """Each item takes an octet at least: no work for a length that cannot be true."""
        if items > len(self._data) - self.position:
            raise CborError("the value is cut off")

    def _take(self, size: int) -> bytes:
        self._expect(size)
        start, self.position = self.position, self.position + size
        return self._data[start : self.position]


def _head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes([major << 5 | argument])
    for info, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if argument < 1 << (8 * size):
            return bytes([major << 5 | info]) + argument.to_bytes(size)
    raise CborError("an integer outside of 64 bits")


def _encode_float(value: float) -> bytes:
    if not math.isfinite(value):
        raise CborError("a number that is not finite")
    info, packed = next(_float_forms(value))
    return bytes([_SIMPLE << 5 | info]) + packed


def _float_forms(value: float) -> Iterator[tuple[int, bytes]]:
    """The encodings that keep all of `value`, the shortest first."""
    for info, form in _FLOATS.items():
        with suppress(OverflowError):
            packed = struct.pack(form, value)
            if struct.unpack(form, packed)[0] == value:
                yield info, packed
