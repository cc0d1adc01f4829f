"""Objects and padding in QUIC datagrams (moqt 12.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moqt.errors import UsageError
from moqt.filters import Location, Properties
from moqt.wire.properties import decode_properties, encode_properties
from moqt.wire.streams import MAX_PROPERTIES_LENGTH, ObjectStatus, encode_priority, parse_status
from moqt.wire.vi64 import Octets, Reader, encode_prefixed, encode_vi64

PADDING_DATAGRAM_TYPE: Final = 0x132B3E29

_PROPERTIES: Final = 0x01
_END_OF_GROUP: Final = 0x02
_ZERO_OBJECT_ID: Final = 0x04
_DEFAULT_PRIORITY: Final = 0x08
_STATUS: Final = 0x20
_ALL: Final = _PROPERTIES | _END_OF_GROUP | _ZERO_OBJECT_ID | _DEFAULT_PRIORITY | _STATUS


@dataclass(frozen=True, slots=True)
class ObjectDatagram:
    """One Object. `priority` None: the track's default. `end_of_group`: it is the last of its group."""

    track_alias: int
    location: Location
    priority: int | None = None
    properties: Properties = ()
    status: ObjectStatus = ObjectStatus.NORMAL
    end_of_group: bool = False
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class PaddingDatagram:
    """`size` bytes that mean nothing."""

    size: int = 0


def encode_datagram(datagram: ObjectDatagram | PaddingDatagram) -> bytes:
    """Encode with the shortest form.

    Raises UsageError for a value out of range, and for properties, a payload or `end_of_group` with another
    status than NORMAL.
    """
    if isinstance(datagram, PaddingDatagram):
        return encode_vi64(PADDING_DATAGRAM_TYPE) + bytes(datagram.size)
    flags = 0
    fields = encode_vi64(datagram.track_alias) + encode_vi64(datagram.location.group)
    if datagram.location.object == 0:
        flags |= _ZERO_OBJECT_ID
    else:
        fields += encode_vi64(datagram.location.object)
    if datagram.priority is None:
        flags |= _DEFAULT_PRIORITY
    else:
        fields += encode_priority(datagram.priority)
    if datagram.end_of_group:
        flags |= _END_OF_GROUP
    if datagram.status is not ObjectStatus.NORMAL:
        if datagram.properties or datagram.payload or datagram.end_of_group:
            raise UsageError(f"a datagram of status {datagram.status.name} carries nothing else")
        return encode_vi64(flags | _STATUS) + fields + encode_vi64(datagram.status)
    if datagram.properties:
        flags |= _PROPERTIES
        fields += encode_prefixed(encode_properties(datagram.properties))
    return encode_vi64(flags) + fields + datagram.payload


def decode_datagram(data: Octets) -> ObjectDatagram | PaddingDatagram:
    """Decode one datagram. Raises ProtocolError (moqt 20 #1, #24, #27, #28)."""
    reader = Reader(data, what="datagram")
    flags = reader.vi64()
    if flags == PADDING_DATAGRAM_TYPE:
        return PaddingDatagram(reader.remaining)
    if flags & ~_ALL or flags & (_STATUS | _END_OF_GROUP) == _STATUS | _END_OF_GROUP:
        raise reader.fault(f"unknown type 0x{flags:x}")
    track_alias = reader.vi64()
    group = reader.vi64()
    location = Location(group, 0 if flags & _ZERO_OBJECT_ID else reader.vi64())
    priority = None if flags & _DEFAULT_PRIORITY else reader.uint8()
    properties: Properties = ()
    if flags & _PROPERTIES:
        encoded = reader.prefixed()
        if not encoded:
            raise reader.fault("Properties of Length 0")
        if len(encoded) > MAX_PROPERTIES_LENGTH:
            raise reader.fault(f"Properties of {len(encoded)} octets, more than {MAX_PROPERTIES_LENGTH}")
        properties = decode_properties(encoded)
    status = ObjectStatus.NORMAL
    if flags & _STATUS:
        status = parse_status(reader.vi64())
        if properties and status is not ObjectStatus.NORMAL:
            raise reader.fault(f"an Object of status {status.name} has properties")
        reader.end()
    end_of_group = bool(flags & _END_OF_GROUP)
    return ObjectDatagram(track_alias, location, priority, properties, status, end_of_group, reader.rest())
