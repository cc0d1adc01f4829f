"""Bytes for a hostile peer, drawn from a seed: valid messages and streams, and ways to spoil them.

Messages are put together here from the tables of spec/moqt.md 2 to 8, not by `moqt.wire`: what our encoder
would refuse to write has to be written too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Final

from moqt.names import FullTrackName, TrackNamespace
from tests.moqt.hostile import MAXIMUM, frame, full_name, namespace, prefixed, vi

__all__ = ["NEGATIVE", "REPLIES", "REQUESTS", "Material", "padded"]

EDGES: Final = (
    *(0, 1, 2, 3, 63, 64, 127, 128, 255, 256, 16383, 16384, 65535, 65536, 2**21 - 1, 2**21, 2**28, 2**32 - 1),
    *(2**32, 2**35, 2**42, 2**49, 2**53, 2**56 - 1, 2**56, 2**62 - 1, 2**62, 2**63, MAXIMUM - 1, MAXIMUM),
)
"""Where an integer, its vi64 (moqt 2.1), or what is counted with it may go wrong."""

SUBSCRIBE, PUBLISH, FETCH, TRACK_STATUS = 0x03, 0x1D, 0x16, 0x0D
PUBLISH_NAMESPACE, SUBSCRIBE_NAMESPACE, SUBSCRIBE_TRACKS = 0x06, 0x50, 0x51
REQUESTS: Final = (
    SUBSCRIBE,
    PUBLISH,
    FETCH,
    TRACK_STATUS,
    PUBLISH_NAMESPACE,
    SUBSCRIBE_NAMESPACE,
    SUBSCRIBE_TRACKS,
)
ABOUT_A_TRACK: Final = (SUBSCRIBE, PUBLISH, FETCH, TRACK_STATUS)

UPDATE, OK, ERROR, SUBSCRIBE_OK, FETCH_OK, DONE = 0x02, 0x07, 0x05, 0x04, 0x18, 0x0B
NOTIFY, NAMESPACE, NAMESPACE_DONE, SKIPPED, GOAWAY, SETUP = 0x22, 0x08, 0x0E, 0x0F, 0x10, 0x2F00
REPLIES: Final = (
    *(UPDATE, OK, ERROR, SUBSCRIBE_OK, FETCH_OK, DONE),
    *(NOTIFY, NAMESPACE, NAMESPACE_DONE, SKIPPED, GOAWAY, SETUP),
)
"""Everything that is no request."""
SUCCESS: Final = {SUBSCRIBE: SUBSCRIBE_OK, FETCH: FETCH_OK}

ALLOWED: Final[dict[int, bytes]] = {
    SUBSCRIBE: bytes.fromhex("02030406102021222325262728 32 35"),
    PUBLISH: bytes.fromhex("020306080910202122"),
    FETCH: bytes.fromhex("030A202122 25262728 35"),
    TRACK_STATUS: bytes.fromhex("0335"),
    PUBLISH_NAMESPACE: b"\x03",
    SUBSCRIBE_NAMESPACE: b"\x03",
    SUBSCRIBE_TRACKS: bytes.fromhex("03102225262728 29 35"),
    UPDATE: bytes.fromhex("0203061020212325262728 32"),
    OK: b"\x08\x09",
    SUBSCRIBE_OK: b"\x08\x09",
    NOTIFY: bytes.fromhex("091021"),
    FETCH_OK: b"",
    0x23: bytes.fromhex("0A202122 25262728"),
}
"""Message Parameters by the message (moqt 5.2), and those inside FILL_PARAMETERS."""
ALL_PARAMETERS: Final = tuple(ALLOWED[SUBSCRIBE] + b"\x08\x09\x0a\x29\x34")

VECTORS: Final = Path(__file__).parent.parent / "vectors"
CONTROL: Final = [
    bytes.fromhex(vector["hex"])
    for name in ("moqt22.json", "moqt22-kvcs.json")
    for vector in json.loads((VECTORS / name).read_text())
    if vector["id"][0] in "CK" and not vector["hex"].startswith("af00")
]
NEGATIVE: Final[list[tuple[bytes, str]]] = [
    (b"".join(bytes.fromhex(part) * count for part, count in vector["parts"]), vector["expect"])
    for vector in json.loads((VECTORS / "moqt22-negative.json").read_text())
]
"""Messages of moqt 26.6 and what has to come of them."""


def padded(value: int, length: int) -> bytes:
    """A vi64 of `length` bytes, more than it needs or too few."""
    if length == 9:
        return b"\xff" + value.to_bytes(8)
    bits = value & (1 << 7 * length) - 1 | (0xFF << 9 - length & 0xFF) << 8 * (length - 1)
    return bits.to_bytes(length)


class Material:
    """Draws bytes. `tracks` are names that mean something to the peer; the same `random` gives the same
    bytes.
    """

    def __init__(self, random: Random, tracks: Sequence[FullTrackName]) -> None:
        self.random = random
        self.tracks = tracks

    # Values.

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def rare(self) -> bool:
        """Whether something shall be wrong that makes the session close at once."""
        return self.chance(0.02)

    def edge(self) -> int:
        kind = self.random.random()
        if kind < 0.3:
            return self.random.randrange(4)
        if kind < 0.9:
            return self.random.choice(EDGES)
        return self.random.getrandbits(64)

    def number(self) -> bytes:
        """Any vi64, also one that is longer than it has to be."""
        if self.chance(0.15):
            return padded(self.edge(), self.random.randint(1, 9))
        return vi(self.edge())

    def octets(self, most: int = 40) -> bytes:
        return self.random.randbytes(self.random.randint(0, most))

    def field(self) -> bytes:
        """A field of a namespace."""
        return self.random.choice(
            (
                b"x",
                b"\x00",
                b".",
                b"..",
                b"\xff\xfe",
                "ü\u202e".encode(),
                b"\x1b[2J\n",
                b"%s{}",
                b"-",
                b"kvcs-1",
            )
        ) + self.octets(3)

    def fields(self) -> TrackNamespace:
        """A namespace or prefix that may be one of nobody, and may be none."""
        kind = self.random.random()
        if kind < 0.4:
            known = self.random.choice(self.tracks).namespace
            return known[: self.random.randint(0, len(known))]
        if kind < 0.42:
            return (b".session", b"x")[: self.random.randint(1, 2)]
        if kind < 0.45:
            return (self.random.randbytes(4097 if self.rare() else self.random.randint(3900, 4000)),)
        if kind < 0.5:
            return (b"f",) * (33 if self.rare() else self.random.randint(20, 32))
        if self.rare():
            return (b"a", b"")
        return tuple(self.field() for _ in range(self.random.randint(0, 6)))

    def foreign(self) -> TrackNamespace:
        """A namespace in which nobody else has a Track."""
        return b"hostile", self.field(), self.octets() + b"x"

    def track(self) -> FullTrackName:
        if self.chance(0.7):
            known = self.random.choice(self.tracks)
            return known if self.chance(0.8) else FullTrackName(known.namespace, self.octets())
        return FullTrackName(self.fields(), self.octets())

    # Parts of messages.

    def token(self) -> bytes:
        kind = 4 if self.rare() else self.random.choice((0, 1, 2, 2, 3, 3, 3))
        alias = vi(self.random.randrange(4)) if kind != 3 else b""
        if kind in (0, 2):
            return vi(kind) + alias + b"x" * self.rare()
        size = 5000 if self.rare() else self.random.choice((4, 300))
        return vi(kind) + alias + vi(self.random.choice((0, 1, 0x9D))) + self.octets(size)

    def location_filter(self) -> bytes:
        kind = 6 if self.rare() else self.random.choice((0, 1, 2, 2, 3, 4, 4, 5, 5))
        count = {1: 1, 2: 2, 3: 3, 4: 4}.get(kind, 0)
        numbers = (self.number() if self.chance(0.5) else vi(self.random.randrange(6)) for _ in range(count))
        return vi(kind) + b"".join(numbers)

    def range_filter(self, kind: int) -> bytes:
        if self.chance(0.1):
            return b""
        body = bytes((self.random.randrange(3),))
        if kind in (0x28, 0x29):
            body += vi(self.random.choice((0x78, 0x79, 0x3E)))
        count = self.random.choice((1, 1, 2, 3, 7, 40))
        return body + b"".join(self.number() for _ in range(count))

    def parameter(self, kind: int) -> bytes:
        match kind:
            case 0x03:
                return prefixed(self.token())
            case 0x09:
                return self.number() + self.number()
            case 0x10 | 0x35:
                return bytes((2 if self.rare() else self.random.randrange(2),))
            case 0x20:
                return bytes((self.random.choice((0, 127, 128, 255)),))
            case 0x21:
                return self.location_filter()
            case 0x22:
                return bytes((3 if self.rare() else self.random.randint(1, 2),))
            case 0x23:
                return self.parameters(0x23) if self.rare() else prefixed(self.parameters(0x23))
            case 0x25 | 0x26 | 0x27 | 0x28 | 0x29:
                return prefixed(self.range_filter(kind))
            case 0x34:
                return namespace(*self.fields())
            case _:
                return self.number()

    def parameters(self, message: int, *, most: int = 4) -> bytes:
        """Number of Parameters and parameters, most often such as `message` may have, in order."""
        pool = ALL_PARAMETERS if self.rare() else ALLOWED.get(message, b"")
        kinds = [self.random.choice(pool) for _ in range(self.random.randint(0, most) if pool else 0)]
        if not self.rare():
            kinds = sorted(kinds if self.rare() else set(kinds))
        body = vi(self.random.choice((0, 1, 1000)) if self.rare() else len(kinds))
        before = 0
        for kind in kinds:
            body += vi((kind - before) & MAXIMUM) + self.parameter(kind)
            before = kind
        return body

    def properties(self) -> bytes:
        """Key-Value-Pairs (moqt 2.4)."""
        types = (
            0x02,
            0x04,
            0x06,
            0x0B,
            0x0E,
            0x22,
            0x30,
            0x3C,
            0x3E,
            0x78,
            0x79,
            0x9D,
            0x11C,
            0x3801,
            0x4001,
        )
        kinds = sorted(self.random.choice(types) for _ in range(self.random.choice((0, 0, 1, 2, 4))))
        body, before = b"", 0
        for kind in kinds:
            body += vi(kind - before)
            body += prefixed(self.octets()) if kind % 2 else self.number()
            before = kind
        return body

    # Messages.

    def request(self, kind: int, number: int, track: FullTrackName | None = None) -> bytes:
        """A request that is valid for the most part."""
        body = vi(number)
        if kind not in ABOUT_A_TRACK:
            prefix = self.foreign() if kind == PUBLISH_NAMESPACE and self.chance(0.8) else self.fields()
            return frame(kind, body, namespace(*prefix), self.parameters(kind))
        body += full_name(track or self.track())
        if kind == PUBLISH:
            return frame(kind, body, self.number(), self.parameters(kind), self.properties())
        return frame(kind, body, self.parameters(kind))

    def message(self, kind: int, number: int = 0) -> bytes:
        """A message that is no request; `number` is the Request ID of an update and the alias of a reply."""
        match kind:
            case 0x02:
                return frame(kind, vi(number), self.parameters(kind))
            case 0x07 | 0x22:
                return frame(kind, self.parameters(kind))
            case 0x05:
                code = self.random.choice((0, 1, 9, 0x10, 0x34, 0x36, 0x19B, MAXIMUM))
                body = vi(code, self.random.choice((0, 0, 1, 50))) + prefixed(self.octets(1030))
                if code == 0x34:
                    body += prefixed(b"moqt://x/" * self.random.randrange(2)) + full_name(self.track())
                return frame(kind, body)
            case 0x04:
                return frame(kind, vi(number), self.parameters(kind), self.properties())
            case 0x18:
                end = self.number() + self.number()
                return frame(
                    kind, vi(self.random.randrange(2)), end, self.parameters(kind), self.properties()
                )
            case 0x0B:
                count = self.random.choice((0, 1, 2, 5, MAXIMUM, 2**62))
                return frame(
                    kind, vi(self.random.choice((0, 2, 4, 5, 0x12, 0x19B)), count), prefixed(self.octets())
                )
            case 0x08 | 0x0E:
                return frame(kind, namespace(*self.fields()))
            case 0x0F:
                return frame(kind, full_name(self.track()))
            case 0x10:
                uri = self.random.choice((b"", b"", b"moqt://h/", b"u" * 8192, b"u" * 8193))
                return frame(kind, prefixed(uri), self.number())
            case _:
                return frame(kind, self.setup_options())

    def setup_options(self) -> bytes:
        kinds = sorted(
            self.random.choice((0x03, 0x04, 0x06, 0x07, 0x08, 0x9D, 0x11C, 0x01, 0x05))
            for _ in range(self.random.randint(0, 4))
        )
        body, before = b"", 0
        for kind in kinds:
            body += vi(kind - before)
            if kind == 0x03:
                body += prefixed(self.token())
            elif kind in (0x01, 0x05):
                body += prefixed(
                    self.random.choice((b"/moq", b"localhost:1", b"", b"\xff\xfe", b"no path", b"/%zz"))
                )
            else:
                body += prefixed(self.octets()) if kind % 2 else self.number()
            before = kind
        return body

    # Data streams.

    def subgroup(self, alias: int, *, group: int | None = None) -> bytes:
        """A subgroup stream of a few Objects (moqt 12.2)."""
        flags = 0x10 | self.random.choice((0, 2, 4)) | self.random.choice((0, 0x08))
        flags |= self.random.choice((0, 0x20)) | self.random.choice((0, 0x40)) | self.random.choice((0, 1))
        if group is None:
            group = self.random.randrange(4) if self.chance(0.7) else self.edge()
        body = vi(flags, alias, group)
        if flags & 0x06 == 4:
            body += self.number()
        if not flags & 0x20:
            body += bytes((self.random.choice((0, 128, 255)),))
        for _ in range(self.random.randint(0, 6)):
            body += vi(self.random.randrange(3)) if self.chance(0.8) else self.number()
            if flags & 1:
                body += prefixed(self.properties())
            body += self.payload(status=True)
        return body

    def fetch(self, number: int) -> bytes:
        """A fetch stream of a few records (moqt 12.4)."""
        body, first = vi(0x05, number), True
        for _ in range(self.random.randint(0, 6)):
            if self.chance(0.15):
                body += vi(self.random.choice((0x8C, 0x10C, 0x20C)), self.random.randrange(6)) + self.number()
                continue
            flags = self.random.choice((0x1C, 0x1F, 0x3C, 0x5C)) if first else self.random.randrange(0x80)
            first = False
            body += vi(flags)
            if flags & 0x08:
                body += vi(self.random.randrange(3)) if self.chance(0.8) else self.number()
            if flags & 0x43 == 3:
                body += self.number()
            if flags & 0x04:
                body += vi(self.random.randrange(3)) if self.chance(0.8) else self.number()
            if flags & 0x10:
                body += b"\x80"
            if flags & 0x20:
                body += prefixed(self.properties())
            body += self.payload(status=False)
        return body

    def payload(self, *, status: bool) -> bytes:
        kind = self.random.random()
        if kind < 0.15:
            return vi(0) + (vi(self.random.choice((0, 3, 4, 1))) if status else b"")
        if kind < 0.25:  # Announced, and not all there.
            return vi(self.random.choice((1 << 20, 2**26, 2**26 + 1, 2**40, MAXIMUM))) + self.octets(2000)
        return prefixed(self.octets(2000) + b"x")

    def datagram(self) -> bytes:
        if self.chance(0.2):
            return vi(0x132B3E29) + bytes(self.random.randrange(100))
        return vi(self.random.randrange(0x40)) + b"".join(self.number() for _ in range(5)) + self.octets()

    def object_datagram(self, alias: int) -> bytes:
        """An Object of a Track that somebody may want (moqt 12.5)."""
        flags = self.random.choice((0x00, 0x01, 0x02, 0x04, 0x08, 0x0C, 0x20, 0x24))
        body = vi(flags, alias, self.random.randrange(5))
        if not flags & 0x04:
            body += vi(self.random.randrange(5))
        if not flags & 0x08:
            body += b"\x80"
        if flags & 0x01:
            body += prefixed(self.properties() or b"\x78\x01")
        return body + (vi(self.random.choice((0, 3, 4))) if flags & 0x20 else self.octets())

    def data_stream(self) -> bytes:
        kind = self.random.random()
        if kind < 0.45:
            return self.subgroup(self.edge())
        if kind < 0.8:
            return self.fetch(self.edge())
        if kind < 0.9:
            return vi(0x132B3E28) + bytes(self.random.randrange(5000))
        return self.number() + self.octets()

    # Spoiling.

    def spoil(self, data: bytes) -> bytes:
        """`data` with one to three faults, which may be none."""
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            data = self.random.choice(self._faults)(self, data)
        return data

    def _place(self, data: bytes) -> int:
        return self.random.randrange(len(data) + 1)

    def _flip(self, data: bytes) -> bytes:
        spoilt = bytearray(data)
        if spoilt:
            spoilt[self.random.randrange(len(spoilt))] ^= 1 << self.random.randrange(8)
        return bytes(spoilt)

    def _byte(self, data: bytes) -> bytes:
        at = self._place(data)
        return data[:at] + bytes((self.random.choice((0, 0x7F, 0x80, 0xFE, 0xFF)),)) + data[at + 1 :]

    def _truncate(self, data: bytes) -> bytes:
        return data[: self._place(data)]

    def _extend(self, data: bytes) -> bytes:
        return data + self.octets()

    def _delete(self, data: bytes) -> bytes:
        at = self._place(data)
        return data[:at] + data[at + self.random.randint(1, 4) :]

    def _repeat(self, data: bytes) -> bytes:
        at = self._place(data)
        part = data[at : at + self.random.randint(1, 12)]
        return data[:at] + part * self.random.choice((2, 2, 50)) + data[at:]

    def _insert(self, data: bytes) -> bytes:
        at = self._place(data)
        return data[:at] + self.number() + data[at + self.random.randrange(2) :]

    def _length(self, data: bytes) -> bytes:
        """The length field of a message with a type of one byte."""
        length = int.from_bytes(data[1:3])
        claimed = self.random.choice((length + 1, length - 1, 0, 0xFFFF, length + 256)) & 0xFFFF
        return data[:1] + claimed.to_bytes(2) + data[3:]

    def _splice(self, data: bytes) -> bytes:
        other = self.random.choice(CONTROL)
        return data[: self._place(data)] + other[self._place(other) :]

    _faults: Final[tuple[Callable[[Material, bytes], bytes], ...]] = (
        _flip,
        _flip,
        _byte,
        _truncate,
        _extend,
        _delete,
        _repeat,
        _insert,
        _length,
        _splice,
    )
