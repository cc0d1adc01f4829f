"""Message Parameters (moqt 5), with Location Filter (6), FILL_PARAMETERS (7) and range filters (8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

from moqt.errors import ProtocolError, UsageError
from moqt.filters import (
    FIELD_COUNT,
    MAX_VARINT,
    FilterType,
    GroupOrder,
    Location,
    LocationFilter,
    RangeFilter,
    RangeKind,
)
from moqt.names import TrackNamespace
from moqt.wire.profile import FillForm, ParameterType, Profile, Scope
from moqt.wire.tokens import Token
from moqt.wire.vi64 import Reader, encode_location, encode_namespace, encode_prefixed, encode_vi64


@dataclass(frozen=True, slots=True, repr=False)
class Parameters:
    """The Message Parameters of one message; None, or an empty tuple, is one that is absent. Times are in ms.

    `fill` holds the parameters inside FILL_PARAMETERS. `range_filters` of all kinds stand in one tuple.
    """

    object_delivery_timeout: int | None = None
    tokens: tuple[Token, ...] = ()
    rendezvous_timeout: int | None = None
    subgroup_delivery_timeout: int | None = None
    expires: int | None = None
    largest: Location | None = None
    fill_timeout: int | None = None
    forward: bool | None = None
    subscriber_priority: int | None = None
    location_filter: LocationFilter | None = None
    group_order: GroupOrder | None = None
    fill: Parameters | None = None
    range_filters: tuple[RangeFilter, ...] = ()
    new_group_request: int | None = None
    prefix: TrackNamespace | None = None
    include_properties: bool | None = None

    def __repr__(self) -> str:
        values = ((field, getattr(self, field.name)) for field in fields(self))
        present = (f"{field.name}={value!r}" for field, value in values if value != field.default)
        return f"Parameters({', '.join(present)})"


NO_PARAMETERS: Final = Parameters()


class _Codec(NamedTuple):
    """Where a parameter is kept in Parameters, and its value form. FILL_PARAMETERS has a way of its own."""

    field: str
    read: Callable[[Reader], Any]
    write: Callable[[Any], bytes]


# The kinds that may occur several times in one message (moqt 5.1); their fields in Parameters are tuples.
_REPEATABLE: Final = frozenset({ParameterType.AUTHORIZATION_TOKEN, *map(ParameterType, RangeKind)})


def encode_parameters(parameters: Parameters, profile: Profile, scope: Scope | None) -> bytes:
    """Number of Parameters and parameters, ascending by type.

    Raises UsageError for a parameter that `scope` does not have (None: all allowed), or a value out of range.
    """
    present = list(_present(parameters))
    encoded = encode_vi64(len(present))
    return encoded + _encode_list(present, profile, scope)


def decode_parameters(reader: Reader, profile: Profile, scope: Scope) -> Parameters:
    """Decode Number of Parameters and parameters.

    Where `scope` has FILL_PARAMETERS, the parameters are the last of the message and must use up the reader.
    Raises ProtocolError (moqt 20 #5 to #8, #10).
    """
    return _Block(reader, profile, scope).parse(counted=True)


def _present(parameters: Parameters) -> Iterator[tuple[ParameterType, Any]]:
    """The parameters that are there, ascending by type; repeats in order."""
    for kind in ParameterType:
        value: Any = getattr(parameters, _CODECS[kind].field) if kind in _CODECS else parameters.fill
        if kind not in _REPEATABLE:
            if value is not None:
                yield kind, value
        else:
            for item in value:
                if isinstance(item, Token) or item.kind == kind:
                    yield kind, item


def _encode_list(present: list[tuple[ParameterType, Any]], profile: Profile, scope: Scope | None) -> bytes:
    encoded = b""
    previous = 0
    for kind, value in present:
        if scope is not None and kind not in profile.scopes[scope]:
            raise UsageError(f"{kind.name} does not belong into {scope.value}")
        encoded += encode_vi64(kind - previous)
        previous = kind
        if kind is ParameterType.FILL_PARAMETERS:
            encoded += _encode_fill(value, profile)
        else:
            encoded += _CODECS[kind].write(value)
    return encoded


def _encode_fill(fill: Parameters, profile: Profile) -> bytes:
    form = profile.fill_forms[0]
    present = list(_present(fill))
    encoded = _encode_list(present, profile, Scope.FILL)
    if form.has_count:
        encoded = encode_vi64(len(present)) + encoded
    return encode_prefixed(encoded) if form.has_length else encoded


class _Block:
    """Reads one list of parameters; inside it, FILL_PARAMETERS may have to be tried in several forms."""

    def __init__(self, reader: Reader, profile: Profile, scope: Scope) -> None:
        self._reader = reader
        self._profile = profile
        self._scope = scope
        self._allowed = profile.scopes[scope]

    def parse(self, *, counted: bool) -> Parameters:
        """Read as many parameters as the count says, or else all that the reader has."""
        return self._parse({}, 0, self._reader.vi64() if counted else None)

    def _parse(self, values: dict[str, Any], previous: int, left: int | None) -> Parameters:
        reader = self._reader
        while reader.remaining if left is None else left:
            delta = reader.vi64()
            kind = self._kind(previous + delta)
            if delta == 0 and kind not in _REPEATABLE:
                raise reader.fault(f"{kind.name} is given twice")
            previous = kind
            left = None if left is None else left - 1
            if kind is ParameterType.FILL_PARAMETERS:
                return self._parse_fill(values, left)
            codec = _CODECS[kind]
            if kind in _REPEATABLE:
                values.setdefault(codec.field, []).append(codec.read(reader))
            else:
                values[codec.field] = codec.read(reader)
        complete: dict[str, Any] = {
            field: tuple(value) if isinstance(value, list) else value for field, value in values.items()
        }
        return Parameters(**complete)

    def _kind(self, number: int) -> ParameterType:
        if number > MAX_VARINT:
            raise self._reader.fault("a parameter type is above 2^64-1")
        if number not in self._allowed:
            known = number in ParameterType._value2member_map_
            name = ParameterType(number).name if known else f"unknown parameter 0x{number:x}"
            raise self._reader.fault(f"{name} does not belong into {self._scope.value}")
        return ParameterType(number)

    def _parse_fill(self, values: dict[str, Any], left: int | None) -> Parameters:
        """FILL_PARAMETERS and all that follows: the first form that fits to the message's end (moqt 7.1)."""
        start = self._reader.position
        first_fault: ProtocolError | None = None
        for form in self._profile.fill_forms:
            self._reader.position = start
            try:
                attempt = {
                    key: list(value) if isinstance(value, list) else value for key, value in values.items()
                }
                attempt["fill"] = self._read_fill(form)
                parsed = self._parse(attempt, ParameterType.FILL_PARAMETERS, left)
                self._reader.end()
            except ProtocolError as fault:
                first_fault = first_fault or fault
            else:
                return parsed
        assert first_fault is not None  # a profile has at least one form
        raise first_fault

    def _read_fill(self, form: FillForm) -> Parameters:
        if not form.has_length:
            return _Block(self._reader, self._profile, Scope.FILL).parse(counted=True)
        inner = Reader(self._reader.prefixed(), what="FILL_PARAMETERS")
        parameters = _Block(inner, self._profile, Scope.FILL).parse(counted=form.has_count)
        inner.end()
        return parameters


def _encode_uint8(value: int) -> bytes:
    if not 0 <= value <= 255:
        raise UsageError(f"{value} is outside 0 … 255")
    return bytes((value,))


def _read_group_order(reader: Reader) -> GroupOrder:
    value = reader.uint8()
    if value not in tuple(GroupOrder):
        raise reader.fault(f"GROUP_ORDER is {value}, not 1 or 2")  # moqt 20 #6
    return GroupOrder(value)


def _read_location_filter(reader: Reader) -> LocationFilter:
    number = reader.vi64()
    if number not in tuple(FilterType):
        raise reader.fault(f"unknown Location Filter Type {number}")  # moqt 20 #7
    kind = FilterType(number)
    try:
        return LocationFilter(kind, *(reader.vi64() for _ in range(FIELD_COUNT[kind])))
    except UsageError as error:
        raise reader.fault(str(error)) from None


def _encode_location_filter(value: LocationFilter) -> bytes:
    sent = value.fields[: FIELD_COUNT[value.type]]
    return encode_vi64(value.type) + b"".join(map(encode_vi64, sent))


def _range_filter_reader(kind: RangeKind) -> Callable[[Reader], RangeFilter]:
    def read(outer: Reader) -> RangeFilter:
        """Moqt 8: what is wrong inside becomes the filter's `fault`; only a cut is the session's matter."""
        reader = Reader(outer.prefixed(), what=f"{kind.name} filter")
        if not reader.remaining:
            return RangeFilter(kind)
        set_id = reader.uint8()
        property_type = reader.vi64() if kind.has_property_type else None
        ranges: list[tuple[int, int | None]] = []
        position = 0
        while reader.remaining:
            start = position + reader.vi64()
            if not reader.remaining:
                ranges.append((start, None))
                break
            position = start + reader.vi64()
            ranges.append((start, position))
        fault = "" if ranges else "there is no Range"
        return RangeFilter(kind, tuple(ranges), set_id, property_type, fault)

    return read


def _encode_range_filter(value: RangeFilter) -> bytes:
    if value.fault:
        raise UsageError(f"{value.kind.name} filter: {value.fault}")
    if value.removes:
        return encode_vi64(0)
    encoded = bytes((value.set_id,))
    if value.property_type is not None:
        encoded += encode_vi64(value.property_type)
    position = 0
    for start, end in value.ranges:
        encoded += encode_vi64(start - position)
        if end is not None:
            encoded += encode_vi64(end - start)
            position = end
    return encode_prefixed(encoded)


def _flag(field: str, name: str) -> _Codec:
    return _Codec(field, lambda reader: reader.flag(name), _encode_uint8)


def _varint(field: str) -> _Codec:
    return _Codec(field, Reader.vi64, encode_vi64)


_CODECS: Final[dict[ParameterType, _Codec]] = {
    ParameterType.OBJECT_DELIVERY_TIMEOUT: _varint("object_delivery_timeout"),
    ParameterType.AUTHORIZATION_TOKEN: _Codec(
        "tokens",
        lambda reader: Token.decode(reader.prefixed()),
        lambda token: encode_prefixed(token.encode()),
    ),
    ParameterType.RENDEZVOUS_TIMEOUT: _varint("rendezvous_timeout"),
    ParameterType.SUBGROUP_DELIVERY_TIMEOUT: _varint("subgroup_delivery_timeout"),
    ParameterType.EXPIRES: _varint("expires"),
    ParameterType.LARGEST_OBJECT: _Codec("largest", Reader.location, encode_location),
    ParameterType.FILL_TIMEOUT: _varint("fill_timeout"),
    ParameterType.FORWARD: _flag("forward", "FORWARD"),
    ParameterType.SUBSCRIBER_PRIORITY: _Codec("subscriber_priority", Reader.uint8, _encode_uint8),
    ParameterType.LOCATION_FILTER: _Codec("location_filter", _read_location_filter, _encode_location_filter),
    ParameterType.GROUP_ORDER: _Codec("group_order", _read_group_order, _encode_uint8),
    **{
        ParameterType(kind): _Codec("range_filters", _range_filter_reader(kind), _encode_range_filter)
        for kind in RangeKind
    },
    ParameterType.NEW_GROUP_REQUEST: _varint("new_group_request"),
    ParameterType.TRACK_NAMESPACE_PREFIX: _Codec("prefix", Reader.namespace, encode_namespace),
    ParameterType.INCLUDE_PROPERTIES: _flag("include_properties", "INCLUDE_PROPERTIES"),
}
