"""Parts of aioquic's receiving side, made quicker. See `moqt.quic.engine`."""

from __future__ import annotations

from bisect import bisect_left

from aioquic._buffer import Buffer
from aioquic.quic.crypto import CryptoContext
from aioquic.quic.packet import decode_packet_number
from aioquic.quic.rangeset import RangeSet

__all__ = ["Fragments", "peek_varint", "read_varint", "unprotect"]


class Fragments(RangeSet):
    """What has arrived of a stream out of order. aioquic looks at all ranges to add one, and how many there
    are is up to the peer (RFC 9000 21.6).
    """

    def add(self, start: int, stop: int | None = None) -> None:
        end = start + 1 if stop is None else stop
        ranges: list[range] = self._RangeSet__ranges  # type: ignore[attr-defined]  # private, and so mangled
        first = last = bisect_left(ranges, start, key=lambda known: known.stop)
        while last < len(ranges) and ranges[last].start <= end:
            last += 1
        if first < last:
            start, end = min(start, ranges[first].start), max(end, ranges[last - 1].stop)
        ranges[first:last] = [range(start, end)]


def unprotect(
    keys: CryptoContext, data: bytes, id_length: int, expected: int
) -> tuple[int, int, bytes] | None:
    """Decrypt a 1-RTT packet: its first byte, packet number and payload (RFC 9001 5.3, 5.4).

    None if it is under another key, or is odd in any way, and so a matter for aioquic. Raises CryptoError.
    """
    if keys.aead is None or keys.hp is None or len(data) < 21 + id_length:
        return None
    mask = keys.hp._mask(data[5 + id_length : 21 + id_length])
    first = data[0] ^ (mask[0] & 0x1F)
    if (first >> 2) & 1 != keys.key_phase or first & 0x18:
        return None
    number_at = 1 + id_length
    payload_at = number_at + 1 + (first & 0x03)
    truncated = 0
    for at in range(number_at, payload_at):
        truncated = truncated << 8 | data[at] ^ mask[at - id_length]
    size = payload_at - number_at
    number = decode_packet_number(truncated, size * 8, expected)
    header = bytes((first,)) + data[1:number_at] + truncated.to_bytes(size, "big")
    return first, number, keys.aead.decrypt(data[payload_at:], header, number)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A QUIC varint (RFC 9000 16) at `at`, and where it ends. Raises IndexError if it is cut off."""
    first = data[at]
    if first < 0x40:
        return first, at + 1
    end = at + (1 << (first >> 6))
    if end > len(data):
        raise IndexError
    return int.from_bytes(data[at:end], "big") & (1 << (8 * (end - at) - 2)) - 1, end


def peek_varint(buf: Buffer) -> int:
    """The QUIC varint that comes next, which is left there."""
    at = buf.tell()
    value = buf.pull_uint_var()
    buf.seek(at)
    return value
