"""Data streams: subgroups, fetches and fills, padding (moqt 12.1 to 12.4).

The decoder never buffers payload: a PayloadChunk is a view of what was fed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final, TypeAlias

from moqt.errors import ProtocolError, SessionCode, UsageError
from moqt.filters import MAX_PRIORITY, MAX_VARINT, GroupOrder, Location, Properties
from moqt.wire.messages import Setup
from moqt.wire.properties import decode_properties
from moqt.wire.vi64 import Octets, encode_prefixed, encode_vi64, read_vi64

FETCH_HEADER_TYPE: Final = 0x05
PADDING_STREAM_TYPE: Final = 0x132B3E28

_FIRST_STEP: Final = 64
"""How many octets to look at first when a header was cut: the most that one without Properties has."""

MAX_PROPERTIES_LENGTH: Final = 64 * 1024
"""Most octets of Properties of one Object. Everything else in its header has at most 64 octets."""

# Type Flags of SUBGROUP_HEADER (moqt 12.2)
_SUBGROUP_PROPERTIES: Final = 0x01
_SUBGROUP_MODE: Final = 0x06
_MODE_ZERO: Final = 0x00
_MODE_FIRST_OBJECT: Final = 0x02
_MODE_EXPLICIT: Final = 0x04
_SUBGROUP_END_OF_GROUP: Final = 0x08
_SUBGROUP_ALWAYS: Final = 0x10
_SUBGROUP_DEFAULT_PRIORITY: Final = 0x20
_SUBGROUP_FIRST_OBJECT: Final = 0x40

# Serialization Flags of an Object on a fetch stream (moqt 12.4)
_FETCH_SUBGROUP: Final = 0x03
_SUBGROUP_PRIOR: Final = 0x01
_SUBGROUP_PRIOR_PLUS_1: Final = 0x02
_SUBGROUP_PRESENT: Final = 0x03
_FETCH_OBJECT: Final = 0x04
_FETCH_GROUP: Final = 0x08
_FETCH_PRIORITY: Final = 0x10
_FETCH_PROPERTIES: Final = 0x20
_FETCH_DATAGRAM: Final = 0x40
_FETCH_FLAGS_END: Final = 0x80


class StreamKind(Enum):
    """What a unidirectional stream carries."""

    CONTROL = "control"
    DATA = "data"


class ObjectStatus(IntEnum):
    """Object Status (moqt 12.3); never sent on fetch streams."""

    NORMAL = 0x0
    END_OF_GROUP = 0x3
    END_OF_TRACK = 0x4


class RangeStatus(IntEnum):
    """What an End of Range record says of the Locations up to it; the numbers are its flags (moqt 12.4)."""

    NON_EXISTENT = 0x8C
    UNKNOWN = 0x10C
    TIMED_OUT = 0x20C


@dataclass(frozen=True, slots=True)
class SubgroupHeader:
    """SUBGROUP_HEADER.

    `subgroup` None: the ID of the first Object. `priority` None: the track's DEFAULT_PUBLISHER_PRIORITY.
    `end_of_group`: at FIN, the last Object here is the last of the group. `first_object`: the first Object
    here is the first that was ever published in the subgroup. `has_properties`: every Object has a
    Properties block.
    """

    track_alias: int
    group: int
    subgroup: int | None = 0
    priority: int | None = None
    end_of_group: bool = False
    first_object: bool = False
    has_properties: bool = False


@dataclass(frozen=True, slots=True)
class FetchHeader:
    """FETCH_HEADER; the request is a FETCH, or what carried FILL_PARAMETERS."""

    request_id: int


@dataclass(frozen=True, slots=True)
class PaddingHeader:
    """The stream is padding; nothing follows this event."""


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """All of an Object but its payload of `size` bytes, which follows as PayloadChunks.

    `priority` None: the track's default. `subgroup` of a `datagram` Object is 0 and means nothing.
    `raw_properties` are the octets that `properties` were decoded from.
    """

    location: Location
    subgroup: int
    priority: int | None
    properties: Properties
    raw_properties: bytes
    status: ObjectStatus
    size: int
    datagram: bool = False


@dataclass(frozen=True, slots=True)
class PayloadChunk:
    """The next bytes of the payload, at least one; `last` with the last of them."""

    data: memoryview
    last: bool


@dataclass(frozen=True, slots=True)
class EndOfRange:
    """Everything after the previous record, up to and including `location`, is as `kind` says."""

    kind: RangeStatus
    location: Location


Event: TypeAlias = SubgroupHeader | FetchHeader | PaddingHeader | ObjectHeader | PayloadChunk | EndOfRange


def stream_kind(start: Octets) -> StreamKind | None:
    """What a unidirectional stream that starts so carries; None when more bytes are needed.

    The bytes still belong to the stream's decoder. Raises ProtocolError for an unknown type (moqt 20 #1,
    #23).
    """
    found = read_vi64(start, 0)
    if found is None:
        return None
    if found[0] == Setup.TYPE:
        return StreamKind.CONTROL
    _check_data_type(found[0])
    return StreamKind.DATA


class SubgroupEncoder:
    """Writes one subgroup stream. `explicit_subgroup`: write the Subgroup ID even if flags could say it."""

    def __init__(self, header: SubgroupHeader, *, explicit_subgroup: bool = False) -> None:
        self._header = header
        self._explicit = explicit_subgroup or header.subgroup not in (0, None)
        self._previous = -1

    def header(self) -> bytes:
        """SUBGROUP_HEADER, the first bytes of the stream. Raises UsageError for a value out of range."""
        header = self._header
        flags = _SUBGROUP_ALWAYS
        subgroup = priority = b""
        if header.subgroup is None:
            flags |= _MODE_FIRST_OBJECT
        elif self._explicit:
            flags |= _MODE_EXPLICIT
            subgroup = encode_vi64(header.subgroup)
        if header.priority is None:
            flags |= _SUBGROUP_DEFAULT_PRIORITY
        else:
            priority = encode_priority(header.priority)
        if header.end_of_group:
            flags |= _SUBGROUP_END_OF_GROUP
        if header.first_object:
            flags |= _SUBGROUP_FIRST_OBJECT
        if header.has_properties:
            flags |= _SUBGROUP_PROPERTIES
        return (
            encode_vi64(flags)
            + encode_vi64(header.track_alias)
            + encode_vi64(header.group)
            + subgroup
            + priority
        )

    def object(
        self,
        object_id: int,
        size: int,
        *,
        status: ObjectStatus = ObjectStatus.NORMAL,
        properties: bytes = b"",
    ) -> bytes:
        """What stands before the `size` payload bytes. `properties` are encoded, without their length.

        Raises UsageError for an Object ID not above the previous one, properties on a stream without or on a
        status other than NORMAL, and a payload with such a status.
        """
        delta = object_id - self._previous - 1
        if delta < 0 or object_id > MAX_VARINT:
            raise UsageError(f"Object {object_id} cannot follow Object {self._previous} in a subgroup")
        encoded = encode_vi64(delta)
        if self._header.has_properties:
            if properties and status is not ObjectStatus.NORMAL:
                raise UsageError(f"an Object of status {status.name} has no properties")
            encoded += _encode_properties_block(properties)
        elif properties:
            raise UsageError("the header of this subgroup stream says that Objects have no properties")
        if size == 0:
            encoded += b"\x00" + encode_vi64(status)
        elif status is not ObjectStatus.NORMAL:
            raise UsageError(f"an Object of status {status.name} has no payload")
        else:
            encoded += encode_vi64(size)
        self._previous = object_id
        return encoded


class FetchEncoder:
    """Writes one fetch or fill stream, with the fewest flags that every reader understands alike."""

    def __init__(self, request_id: int, order: GroupOrder = GroupOrder.ASCENDING) -> None:
        self._request_id = request_id
        self._order = order
        self._previous: Location | None = None
        self._subgroup: int | None = None
        self._priority: int | None = None

    def header(self) -> bytes:
        """FETCH_HEADER, the first bytes of the stream."""
        return encode_vi64(FETCH_HEADER_TYPE) + encode_vi64(self._request_id)

    def object(
        self,
        location: Location,
        size: int,
        *,
        subgroup: int = 0,
        priority: int = 128,
        properties: bytes = b"",
        datagram: bool = False,
    ) -> bytes:
        """What stands before the `size` payload bytes. `properties` are encoded, without their length.

        `datagram`: the Object's delivery mode is Datagram; `subgroup` is not sent then. Raises UsageError
        for a Location that does not follow the previous record's in the order of the stream.
        """
        if max(location.group, location.object, subgroup) > MAX_VARINT:
            raise UsageError(f"an ID of {location} in subgroup {subgroup} is above 2^64-1")
        flags, group_field, object_field = self._position(location)
        subgroup_field = priority_field = properties_field = b""
        if datagram:
            flags |= _FETCH_DATAGRAM
        elif subgroup != 0:
            if subgroup == self._subgroup:
                flags |= _SUBGROUP_PRIOR
            elif self._subgroup is not None and subgroup == self._subgroup + 1:
                flags |= _SUBGROUP_PRIOR_PLUS_1
            else:
                flags |= _SUBGROUP_PRESENT
                subgroup_field = encode_vi64(subgroup)
        if priority != self._priority:
            flags |= _FETCH_PRIORITY
            priority_field = encode_priority(priority)
        if properties:
            flags |= _FETCH_PROPERTIES
            properties_field = _encode_properties_block(properties)
        encoded = (
            encode_vi64(flags)
            + group_field
            + subgroup_field
            + object_field
            + priority_field
            + properties_field
            + encode_vi64(size)
        )
        self._previous = location
        self._priority = priority
        # What "prior subgroup" means after a Datagram Object is open: never refer to it then.
        self._subgroup = None if datagram else subgroup
        return encoded

    def end_of_range(self, kind: RangeStatus, location: Location) -> bytes:
        """An End of Range record: absolute, without Payload Length (moqt 12.4, 25 #5).

        Raises UsageError as `object` does.
        """
        self._position(location)
        encoded = encode_vi64(kind) + encode_vi64(location.group) + encode_vi64(location.object)
        self._previous = location
        return encoded

    def _position(self, location: Location) -> tuple[int, bytes, bytes]:
        """Flags and fields that say where the next record is. Object ID always goes with a new group."""
        previous = self._previous
        if previous is None:
            return _FETCH_GROUP | _FETCH_OBJECT, encode_vi64(location.group), encode_vi64(location.object)
        if location.group == previous.group:
            delta = location.object - previous.object
            if delta > 0:
                return (0, b"", b"") if delta == 1 else (_FETCH_OBJECT, b"", encode_vi64(delta))
        else:
            distance = location.group - previous.group
            delta = (distance if self._order is GroupOrder.ASCENDING else -distance) - 1
            if delta >= 0:
                return _FETCH_GROUP | _FETCH_OBJECT, encode_vi64(delta), encode_vi64(location.object)
        raise UsageError(f"{location} does not follow {previous} in {self._order.name} order")


class DataStreamDecoder:
    """Decodes one data stream as its bytes arrive.

    `order` is the group order of a fetch stream; it may be set after the FetchHeader was taken, before the
    next event is. After a ProtocolError the decoder is of no more use.
    """

    def __init__(self) -> None:
        self.order = GroupOrder.ASCENDING
        self._head = bytearray()  # the start of a header that has not arrived completely
        self._left = 0  # payload bytes still to come
        self._stream: SubgroupHeader | FetchHeader | PaddingHeader | None = None
        self._group: int | None = None
        self._object = -1
        self._subgroup: int | None = None
        self._priority: int | None = None

    def feed(self, data: Octets) -> Iterator[Event]:
        """The events in `data`; drain the iterator before the next call, and do not change `data` meanwhile.

        The iterator raises ProtocolError.
        """
        position = 0
        end = len(data)
        view: memoryview | None = None
        while position < end:
            if self._left:
                if view is None:
                    view = memoryview(data)
                stop = position + self._left
                if stop > end:
                    stop = end
                self._left -= stop - position
                yield PayloadChunk(view[position:stop], not self._left)
                position = stop
                continue
            if isinstance(self._stream, PaddingHeader):
                return
            if self._head:
                # Complete the header that was cut; it takes no more octets than it needs.
                had = len(self._head)
                step = min(end, position + max(had, _FIRST_STEP))
                self._head += data[position:step]
                found = self._parse(self._head, 0)
                if found is None:
                    position = step
                    continue
                self._head = bytearray()
                event, used = found
                position += used - had
            else:
                found = self._parse(data, position)
                if found is None:
                    self._head += data[position:]
                    return
                event, position = found
            yield event

    def finish(self) -> None:
        """The stream has ended (FIN). Raises ProtocolError inside a header or an Object (moqt 20 #29)."""
        if self._left:
            raise _violation(f"the stream ended {self._left} bytes before the end of an Object")
        if self._head or self._stream is None:
            raise _violation("the stream ended inside a header")

    def _parse(self, data: Octets, position: int) -> tuple[Event, int] | None:
        """The header at `position` and the offset behind it; None: it is not complete, nothing changed."""
        cursor = _Cursor(data, position)
        try:
            if isinstance(self._stream, SubgroupHeader):
                event: Event = self._parse_subgroup_object(cursor, self._stream)
            elif isinstance(self._stream, FetchHeader):
                event = self._parse_fetch_record(cursor)
            else:
                event = self._stream = self._parse_stream_header(cursor)
        except _NeedMore:
            return None
        return event, cursor.position

    def _parse_stream_header(self, cursor: _Cursor) -> SubgroupHeader | FetchHeader | PaddingHeader:
        stream_type = cursor.vi64()
        _check_data_type(stream_type)
        if stream_type == FETCH_HEADER_TYPE:
            return FetchHeader(cursor.vi64())
        if stream_type == PADDING_STREAM_TYPE:
            return PaddingHeader()
        track_alias = cursor.vi64()
        group = cursor.vi64()
        mode = stream_type & _SUBGROUP_MODE
        subgroup: int | None = 0
        if mode == _MODE_EXPLICIT:
            subgroup = cursor.vi64()
        elif mode == _MODE_FIRST_OBJECT:
            subgroup = None
        return SubgroupHeader(
            track_alias,
            group,
            subgroup,
            None if stream_type & _SUBGROUP_DEFAULT_PRIORITY else cursor.uint8(),
            end_of_group=bool(stream_type & _SUBGROUP_END_OF_GROUP),
            first_object=bool(stream_type & _SUBGROUP_FIRST_OBJECT),
            has_properties=bool(stream_type & _SUBGROUP_PROPERTIES),
        )

    def _parse_subgroup_object(self, cursor: _Cursor, header: SubgroupHeader) -> ObjectHeader:
        object_id = self._object + 1 + cursor.vi64()
        if object_id > MAX_VARINT:
            raise _violation("an Object ID is above 2^64-1")  # moqt 20 #25
        raw = cursor.properties() if header.has_properties else b""
        size = cursor.vi64()
        status = ObjectStatus.NORMAL if size else parse_status(cursor.vi64())
        if raw and status is not ObjectStatus.NORMAL:
            raise _violation(f"an Object of status {status.name} has properties")  # moqt 20 #28
        properties = decode_properties(raw) if raw else ()
        self._object = object_id
        self._left = size
        if self._subgroup is None:
            self._subgroup = object_id if header.subgroup is None else header.subgroup
        return ObjectHeader(
            Location(header.group, object_id), self._subgroup, header.priority, properties, raw, status, size
        )

    def _parse_fetch_record(self, cursor: _Cursor) -> ObjectHeader | EndOfRange:
        flags = cursor.vi64()
        if flags >= _FETCH_FLAGS_END:
            return self._parse_end_of_range(cursor, flags)
        group = self._next_group(cursor, flags)
        subgroup = self._next_subgroup(cursor, flags)
        object_id = self._next_object(cursor, flags)
        priority = cursor.uint8() if flags & _FETCH_PRIORITY else self._priority
        if priority is None:
            raise _violation("the first Object of a fetch refers to a prior priority")  # moqt 20 #26
        raw = cursor.properties() if flags & _FETCH_PROPERTIES else b""
        size = cursor.vi64()
        properties = decode_properties(raw) if raw else ()
        datagram = bool(flags & _FETCH_DATAGRAM)
        self._group, self._object, self._priority, self._left = group, object_id, priority, size
        if not datagram:  # a Datagram Object has no subgroup: "prior" goes on meaning the last one that had
            self._subgroup = subgroup
        return ObjectHeader(
            Location(group, object_id),
            subgroup,
            priority,
            properties,
            raw,
            ObjectStatus.NORMAL,
            size,
            datagram,
        )

    def _parse_end_of_range(self, cursor: _Cursor, flags: int) -> EndOfRange:
        if flags not in tuple(RangeStatus):
            raise _violation(f"unknown Serialization Flags 0x{flags:x}")
        location = Location(cursor.vi64(), cursor.vi64())
        self._group, self._object = location.group, location.object
        return EndOfRange(RangeStatus(flags), location)

    def _next_group(self, cursor: _Cursor, flags: int) -> int:
        if self._group is None and flags & (_FETCH_GROUP | _FETCH_OBJECT) != _FETCH_GROUP | _FETCH_OBJECT:
            raise _violation("the first record of a fetch has no Group ID or no Object ID")  # moqt 20 #26
        if not flags & _FETCH_GROUP:
            assert self._group is not None
            return self._group
        delta = cursor.vi64()
        if self._group is None:
            return delta
        group = self._group + delta + 1 if self.order is GroupOrder.ASCENDING else self._group - delta - 1
        if not 0 <= group <= MAX_VARINT:
            raise _violation("a Group ID is outside 0 … 2^64-1")  # moqt 20 #25
        return group

    def _next_subgroup(self, cursor: _Cursor, flags: int) -> int:
        mode = flags & _FETCH_SUBGROUP
        if mode == 0 or flags & _FETCH_DATAGRAM:
            return 0
        if mode == _SUBGROUP_PRESENT:
            return cursor.vi64()
        if self._subgroup is None:
            raise _violation("the first Object of a fetch refers to a prior subgroup")  # moqt 20 #26
        subgroup = self._subgroup + (mode == _SUBGROUP_PRIOR_PLUS_1)
        if subgroup > MAX_VARINT:
            raise _violation("a Subgroup ID is above 2^64-1")
        return subgroup

    def _next_object(self, cursor: _Cursor, flags: int) -> int:
        if not flags & _FETCH_OBJECT:
            object_id = self._object + 1
        elif flags & _FETCH_GROUP:
            return cursor.vi64()
        else:
            object_id = self._object + cursor.vi64()
        if object_id > MAX_VARINT:
            raise _violation("an Object ID is above 2^64-1")  # moqt 20 #25
        return object_id


class _NeedMore(Exception):
    """A header has not arrived completely."""


class _Cursor:
    """Reads a header whose end may not have arrived yet."""

    __slots__ = ("_data", "position")

    def __init__(self, data: Octets, position: int) -> None:
        self._data = data
        self.position = position

    def vi64(self) -> int:
        found = read_vi64(self._data, self.position)
        if found is None:
            raise _NeedMore
        value, self.position = found
        return value

    def uint8(self) -> int:
        if self.position >= len(self._data):
            raise _NeedMore
        self.position += 1
        return self._data[self.position - 1]

    def properties(self) -> bytes:
        """A Properties block, still encoded; one above the limit is refused by its length alone."""
        length = self.vi64()
        if length > MAX_PROPERTIES_LENGTH:
            raise _violation(f"Properties of {length} octets, more than {MAX_PROPERTIES_LENGTH}")
        start = self.position
        if start + length > len(self._data):
            raise _NeedMore
        self.position += length
        return bytes(self._data[start : self.position])


def parse_status(value: int) -> ObjectStatus:
    """The status with this number. Raises ProtocolError for an unknown one (moqt 20 #27)."""
    try:
        return ObjectStatus(value)
    except ValueError:
        raise _violation(f"unknown Object Status {value}") from None


def encode_priority(priority: int) -> bytes:
    """One byte. Raises UsageError outside 0 … 255."""
    if not 0 <= priority <= MAX_PRIORITY:
        raise UsageError(f"priority {priority} is outside 0 … {MAX_PRIORITY}")
    return bytes((priority,))


def _encode_properties_block(properties: bytes) -> bytes:
    if len(properties) > MAX_PROPERTIES_LENGTH:
        raise UsageError(f"Properties of {len(properties)} octets, more than {MAX_PROPERTIES_LENGTH}")
    return encode_prefixed(properties)


def _check_data_type(stream_type: int) -> None:
    """Raise ProtocolError for a number that is no type of a data stream (moqt 12.1, 20 #1, #23)."""
    if stream_type in (FETCH_HEADER_TYPE, PADDING_STREAM_TYPE):
        return
    if stream_type >= 0x80 or not stream_type & _SUBGROUP_ALWAYS:
        raise _violation(f"unknown stream type 0x{stream_type:x}")
    if stream_type & _SUBGROUP_MODE == _SUBGROUP_MODE:
        raise _violation(f"reserved Subgroup ID mode in stream type 0x{stream_type:x}")


def _violation(reason: str) -> ProtocolError:
    return ProtocolError(SessionCode.PROTOCOL_VIOLATION, reason)
