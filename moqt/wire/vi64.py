"""vi64, the only variable-length integer of MOQT (moqt 2.1), and a cursor over complete bytes.

It is not the varint of RFC 9000: as many bytes follow the first one as that has leading 1 bits.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from moqt.errors import ProtocolError, SessionCode, UsageError
from moqt.filters import MAX_VARINT, Location
from moqt.names import TrackNamespace, check_namespace

Octets: TypeAlias = bytes | bytearray | memoryview
_Bytes: TypeAlias = bytes  # inside Reader, `bytes` is a method

_SMALL: Final = tuple(bytes((value,)) for value in range(128))
_EXTRA: Final = tuple(8 - (byte ^ 0xFF).bit_length() for byte in range(256))
"""Bytes that follow a first byte: its leading 1 bits."""
_FIRST_BITS: Final = tuple(0x7F >> extra for extra in range(9))
"""The bits of the first byte that belong to the value, by the number of bytes that follow."""


def size(value: int) -> int:
    """How many bytes `encode_vi64(value)` has: 1 to 9. Raises UsageError outside 0 … 2^64-1."""
    if not 0 <= value <= MAX_VARINT:
        raise UsageError(f"{value} is outside 0 … 2^64-1")
    bits = value.bit_length()
    return 9 if bits > 56 else max(bits + 6, 7) // 7


def encode_vi64(value: int) -> bytes:
    """The shortest encoding. Raises UsageError outside 0 … 2^64-1."""
    if 0 <= value < 128:
        return _SMALL[value]
    length = size(value)
    if length == 9:
        return b"\xff" + value.to_bytes(8)
    prefix = (0xFF00 >> (length - 1)) & 0xFF
    return (prefix << 8 * (length - 1) | value).to_bytes(length)


def read_vi64(buffer: Octets, offset: int) -> tuple[int, int] | None:
    """The value at `offset` and the offset behind it; None when more bytes are needed.

    Encodings that are longer than needed are legal (moqt 2.1).
    """
    available = len(buffer)
    if offset >= available:
        return None
    first = buffer[offset]
    offset += 1
    if first < 0x80:
        return first, offset
    extra = _EXTRA[first]
    end = offset + extra
    if end > available:
        return None
    return (first & _FIRST_BITS[extra]) << 8 * extra | int.from_bytes(buffer[offset:end]), end


class Reader:
    """A cursor over bytes that are all there: running out of them is the peer's fault.

    `code` is the session error of that fault, `what` names the thing that is read.
    """

    __slots__ = ("_code", "_data", "_what", "position")

    def __init__(
        self, data: Octets, *, what: str = "message", code: SessionCode = SessionCode.PROTOCOL_VIOLATION
    ) -> None:
        self._data = bytes(data)
        self._what = what
        self._code = code
        self.position = 0

    @property
    def remaining(self) -> int:
        """How many bytes are left."""
        return len(self._data) - self.position

    def fault(self, reason: str) -> ProtocolError:
        """The error to raise for bytes that are wrong."""
        return ProtocolError(self._code, f"{self._what}: {reason}")

    def vi64(self) -> int:
        """A variable-length integer."""
        found = read_vi64(self._data, self.position)
        if found is None:
            raise self.fault("cut off inside a number")
        value, self.position = found
        return value

    def uint8(self) -> int:
        """One byte."""
        return self.bytes(1)[0]

    def bytes(self, count: int) -> _Bytes:
        """The next `count` bytes."""
        if count > self.remaining:
            raise self.fault(f"{count} bytes are announced and {self.remaining} are left")
        start = self.position
        self.position += count
        return self._data[start : self.position]

    def prefixed(self) -> _Bytes:
        """A vi64 length and that many bytes."""
        return self.bytes(self.vi64())

    def rest(self) -> _Bytes:
        """All that is left."""
        return self.bytes(self.remaining)

    def flag(self, name: str) -> bool:
        """One byte that is 0 or 1."""
        value = self.uint8()
        if value > 1:
            raise self.fault(f"{name} is {value}, not 0 or 1")
        return value == 1

    def location(self) -> Location:
        """Group and Object (moqt 2.2)."""
        return Location(self.vi64(), self.vi64())

    def namespace(self) -> TrackNamespace:
        """A Track Namespace within its limits (moqt 2.3, 20 #11)."""
        count = self.vi64()
        if count > self.remaining:  # each field has a length: do not loop for a number that cannot be true
            raise self.fault(f"{count} namespace fields are announced and {self.remaining} bytes are left")
        namespace = tuple(self.prefixed() for _ in range(count))
        self.check_names(namespace)
        return namespace

    def check_names(self, namespace: TrackNamespace, name: _Bytes = b"") -> None:
        """Raise ProtocolError for names that break the limits of moqt 2.3."""
        try:
            check_namespace(namespace, name)
        except ValueError as error:
            raise self.fault(str(error)) from None

    def end(self) -> None:
        """Raise ProtocolError unless everything was read (moqt 20 #2)."""
        if self.remaining:
            raise self.fault(f"{self.remaining} bytes are left over")


def encode_prefixed(data: Octets) -> bytes:
    """A vi64 length and the bytes."""
    return encode_vi64(len(data)) + data


def encode_location(location: Location) -> bytes:
    """Group and Object (moqt 2.2)."""
    return encode_vi64(location.group) + encode_vi64(location.object)


def encode_namespace(namespace: TrackNamespace, name: bytes = b"") -> bytes:
    """A Track Namespace alone; `name` only counts toward the limits. Raises UsageError beyond them."""
    try:
        check_namespace(namespace, name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return encode_vi64(len(namespace)) + b"".join(map(encode_prefixed, namespace))
