"""The codecs that this project has: how a raw section is turned into Data and back (kvsp 2.5).

A decoder knows the exact length of the section beforehand and never produces more than that. Whatever cannot
be decoded to it is a bad Object: `ObjectRejected`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np

from kvcs.errors import Check, ObjectRejected
from kvcs.identity import KVSP_LP1
from kvcs.layout import Buffer, Geometry
from kvcs.names import Component
from kvcs.payload import Data


class Codec(Protocol):
    """What a codec does; `components` are those that it may carry."""

    @property
    def name(self) -> str:
        """The name in track names."""

    @property
    def value(self) -> int:
        """The number in Object headers."""

    def encode(self, component: Component, sections: Data, geometry: Geometry) -> Data:
        """The Data of an Object from the raw section of `component` ("kv": K, then V), whole or in pieces."""

    def decode(self, component: Component, data: Buffer, geometry: Geometry) -> Buffer:
        """The raw section (of "kv": K, then V) that `data` holds. Raises ObjectRejected."""


class Raw:
    """The identity: nothing is copied."""

    name = "raw"
    value = KVSP_LP1.codec_values["raw"]

    def encode(self, component: Component, sections: Data, geometry: Geometry) -> Data:
        return sections

    def decode(self, component: Component, data: Buffer, geometry: Geometry) -> Buffer:
        expected = geometry.section_size(component)
        if len(data) != expected:
            raise ObjectRejected(Check.SECTION_LENGTH, expected, len(data))
        return data


class ShuffleZlib:
    """Lossless: the octets of the elements in planes (all octets 0, then all octets 1, ...), then zlib.

    `level` is zlib's, 0 to 9; what it costs and gains depends on the cache. Decoding does not need it.
    """

    name = "x-shuffle-zlib"
    value = KVSP_LP1.codec_values["x-shuffle-zlib"]

    def __init__(self, level: int = 1) -> None:
        self.level = level

    def encode(self, component: Component, sections: Data, geometry: Geometry) -> Data:
        whole = sections if isinstance(sections, bytes | bytearray | memoryview) else b"".join(sections)
        elements = np.frombuffer(whole, np.uint8).reshape(-1, geometry.dtype.itemsize)
        return zlib.compress(np.ascontiguousarray(elements.T).data, self.level)

    def decode(self, component: Component, data: Buffer, geometry: Geometry) -> Buffer:
        expected = geometry.section_size(component)
        stream = zlib.decompressobj()
        try:
            # One octet more than expected, so that a stream that holds more shows; never the whole of a bomb.
            planes = stream.decompress(data, expected + 1)
        except zlib.error as error:
            raise ObjectRejected(Check.ENCODING, "a zlib stream", str(error)) from None
        if len(planes) != expected:
            came = f"{len(planes)} octets" if len(planes) < expected else "more"
            raise ObjectRejected(Check.ENCODING, f"{expected} octets", came)
        if not stream.eof or stream.unused_data:
            came = "more after it" if stream.eof else "no end"
            raise ObjectRejected(Check.ENCODING, "one complete zlib stream", came)
        elements = np.frombuffer(planes, np.uint8).reshape(geometry.dtype.itemsize, -1).T
        return np.ascontiguousarray(elements).reshape(-1).data


CODECS: Final[Mapping[str, Codec]] = MappingProxyType({codec.name: codec for codec in (Raw(), ShuffleZlib())})
"""The codecs by name. A track whose codec is not here is ignored (kvcs 14 #11)."""
