"""What differs between drafts of MOQT, as one value: parameter scopes, forms, ALPN (moqt 5, 7.1, 22)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Final


class ParameterType(IntEnum):
    """Message Parameters (moqt 5.1)."""

    OBJECT_DELIVERY_TIMEOUT = 0x02
    AUTHORIZATION_TOKEN = 0x03
    RENDEZVOUS_TIMEOUT = 0x04
    SUBGROUP_DELIVERY_TIMEOUT = 0x06
    EXPIRES = 0x08
    LARGEST_OBJECT = 0x09
    FILL_TIMEOUT = 0x0A
    FORWARD = 0x10
    SUBSCRIBER_PRIORITY = 0x20
    LOCATION_FILTER = 0x21
    GROUP_ORDER = 0x22
    FILL_PARAMETERS = 0x23
    SUBGROUP_FILTER = 0x25
    OBJECTID_FILTER = 0x26
    PRIORITY_FILTER = 0x27
    OBJECT_PROPERTY_FILTER = 0x28
    TRACK_PROPERTY_FILTER = 0x29
    NEW_GROUP_REQUEST = 0x32
    TRACK_NAMESPACE_PREFIX = 0x34
    INCLUDE_PROPERTIES = 0x35


class Scope(Enum):
    """Where Message Parameters stand: a message, or what a message means on its stream (moqt 5.2)."""

    SUBSCRIBE = "SUBSCRIBE"
    SUBSCRIBE_OK = "SUBSCRIBE_OK"
    PUBLISH = "PUBLISH"
    PUBLISH_OK = "PUBLISH_OK"
    FETCH = "FETCH"
    FETCH_OK = "FETCH_OK"
    TRACK_STATUS = "TRACK_STATUS"
    TRACK_STATUS_OK = "TRACK_STATUS_OK"
    PUBLISH_NAMESPACE = "PUBLISH_NAMESPACE"
    SUBSCRIBE_NAMESPACE = "SUBSCRIBE_NAMESPACE"
    SUBSCRIBE_TRACKS = "SUBSCRIBE_TRACKS"
    NAMESPACE_OK = "the REQUEST_OK of a namespace request or SUBSCRIBE_TRACKS"
    UPDATE_SUBSCRIPTION = "REQUEST_UPDATE of a subscription"
    UPDATE_FETCH = "REQUEST_UPDATE of a FETCH"
    UPDATE_PUBLISH_NAMESPACE = "REQUEST_UPDATE of PUBLISH_NAMESPACE"
    UPDATE_SUBSCRIBE_NAMESPACE = "REQUEST_UPDATE of SUBSCRIBE_NAMESPACE"
    UPDATE_SUBSCRIBE_TRACKS = "REQUEST_UPDATE of SUBSCRIBE_TRACKS"
    UPDATE_OK = "the REQUEST_OK of a REQUEST_UPDATE"
    PUBLISH_STATE_NOTIFY = "PUBLISH_STATE_NOTIFY"
    FILL = "FILL_PARAMETERS"


class FillForm(Enum):
    """How the value of FILL_PARAMETERS is written: draft-22 does not say (moqt 7.1)."""

    LENGTH_AND_COUNT = "Length, Number of Parameters, parameters"
    LENGTH = "Length, parameters"
    COUNT = "Number of Parameters, parameters"

    @property
    def has_length(self) -> bool:
        return self is not FillForm.COUNT

    @property
    def has_count(self) -> bool:
        return self is not FillForm.LENGTH


@dataclass(frozen=True)
class Profile:
    """One draft. `fill_forms` are tried in this order when reading; the first one is written."""

    alpn: str
    draft: int
    scopes: Mapping[Scope, frozenset[ParameterType]]
    fill_forms: tuple[FillForm, ...]


def _types(text: str) -> frozenset[ParameterType]:
    return frozenset(ParameterType(int(number, 16)) for number in text.split())


_SUBSCRIBE = "02 03 04 06 10 20 21 22 23 25 26 27 28 32 35"

DRAFT_22: Final = Profile(
    alpn="moqt-22",
    draft=22,
    scopes=MappingProxyType(
        {
            Scope.SUBSCRIBE: _types(_SUBSCRIBE),
            Scope.SUBSCRIBE_OK: _types("08 09"),
            Scope.PUBLISH: _types("02 03 06 08 09 10 20 21 22"),
            Scope.PUBLISH_OK: _types("08"),
            Scope.FETCH: _types("03 0A 20 21 22 25 26 27 28 35"),
            Scope.FETCH_OK: _types(""),
            Scope.TRACK_STATUS: _types("03 35"),
            Scope.TRACK_STATUS_OK: _types("09"),
            Scope.PUBLISH_NAMESPACE: _types("03"),
            Scope.SUBSCRIBE_NAMESPACE: _types("03"),
            # The draft contradicts itself: accept what its section 3.6.2 allows (moqt 5.2, 25 #3).
            Scope.SUBSCRIBE_TRACKS: _types(_SUBSCRIBE + " 29"),
            Scope.NAMESPACE_OK: _types("08"),
            Scope.UPDATE_SUBSCRIPTION: _types("02 03 06 10 20 21 23 25 26 27 28 32"),
            Scope.UPDATE_FETCH: _types("03 20"),
            Scope.UPDATE_PUBLISH_NAMESPACE: _types("03"),
            Scope.UPDATE_SUBSCRIBE_NAMESPACE: _types("03 34"),
            Scope.UPDATE_SUBSCRIBE_TRACKS: _types("03 10 29 34"),
            Scope.UPDATE_OK: _types("08 09"),
            Scope.PUBLISH_STATE_NOTIFY: _types("09 10 21"),
            Scope.FILL: _types("0A 20 21 22 25 26 27 28"),
        }
    ),
    fill_forms=(FillForm.LENGTH_AND_COUNT, FillForm.LENGTH, FillForm.COUNT),
)
