"""The five-field namespace of a publication and the names of its tracks (kvcs 3.1, 3.2, 12)."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvcs.errors import InvalidName
from moqt.names import TrackNamespace, format_namespace, parse_namespace, printable

KVCS_FIELD: Final = b"kvcs-1"
FIELD_SIZES: Final = (6, 16, 32, 32, 16)
MANIFEST: Final = b"manifest"
MANIFEST_COSE: Final = b"manifest.cose"
MAX_SEGMENT: Final = 2**53 - 1  # what a manifest can state exactly; the syntax itself has no bound
HOLDER_FRAGMENT: Final = "kvcs-ns"  # kvsp 2.6

_FIELD_NAMES = ("kvcs-1", "Scope ID", "Compatibility ID", "Anchor Key", "Publication ID")
_DATA_TRACK = re.compile(rb"(k|v|kv)\.([a-z0-9-]{1,32})\.s(0|[1-9][0-9]{0,15})")


class Component(IntEnum):
    """The tensor kind that a track carries; the value stands in Object headers (kvcs 12; 0 is reserved)."""

    K = 1
    V = 2
    KV = 3

    @property
    def text(self) -> str:
        """The name in the registry and in track names: "k", "v" or "kv"."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, order=True)
class PublicationName:
    """One publication: fields 1 to 4 of its namespace, raw octets. Raises InvalidName for other lengths."""

    scope_id: bytes
    compat_id: bytes
    anchor_key: bytes
    publication_id: bytes

    def __post_init__(self) -> None:
        _check_fields(self.namespace)

    @classmethod
    def new(cls, scope_id: bytes, compat_id: bytes, anchor_key: bytes) -> PublicationName:
        """The name of a new production of a cache: its Publication ID is random."""  # kvcs 3.1
        return cls(scope_id, compat_id, anchor_key, secrets.token_bytes(16))

    @classmethod
    def from_namespace(cls, namespace: TrackNamespace) -> PublicationName:
        """The publication that a namespace names. Raises InvalidName for any other shape than 3.1."""
        if len(namespace) != len(FIELD_SIZES):
            raise InvalidName(f"a KVCS namespace has {len(FIELD_SIZES)} fields, got {len(namespace)}")
        _check_fields(namespace)
        return cls(*namespace[1:])

    @classmethod
    def from_holder(cls, holder: str) -> PublicationName:
        """The publication in the fragment of a replica's holder URI (kvsp 2.6). Raises InvalidName."""
        kind, _, text = holder.partition("#")[2].partition(":")
        if kind != HOLDER_FRAGMENT:
            raise InvalidName(f'expected a URI that ends in "#{HOLDER_FRAGMENT}:…", got {printable(holder)}')
        try:
            namespace = parse_namespace(text)
        except ValueError as error:
            raise InvalidName(f"holder URI: {error}") from None
        return cls.from_namespace(namespace)

    @property
    def namespace(self) -> TrackNamespace:
        """All five fields: the namespace of the publication's tracks."""
        return (KVCS_FIELD, self.scope_id, self.compat_id, self.anchor_key, self.publication_id)

    def holder(self, server: str) -> str:
        """The holder URI of this publication at `server`, a moqt:// URI without a fragment (kvsp 2.6)."""
        return f"{server}#{HOLDER_FRAGMENT}:{format_namespace(self.namespace)}"


def scope_prefix(scope_id: bytes) -> TrackNamespace:
    """The namespace prefix of all publications of a scope: the unit of authorisation (kvcs 3.1)."""
    return _checked((KVCS_FIELD, scope_id))


def content_prefix(scope_id: bytes, compat_id: bytes, anchor_key: bytes) -> TrackNamespace:
    """The namespace prefix of all publications of one token prefix: what discovery asks for (kvcs 7.1)."""
    return _checked((KVCS_FIELD, scope_id, compat_id, anchor_key))


@dataclass(frozen=True, slots=True, order=True)
class DataTrack:
    """A data track: one component of one segment in one codec. Raises InvalidName as `parse` does."""

    component: Component
    codec: str
    segment: int

    def __post_init__(self) -> None:
        _match(self.name)

    @property
    def name(self) -> bytes:
        """The Track Name."""
        return str(self).encode("utf-8", "surrogatepass")

    @classmethod
    def parse(cls, name: bytes | str) -> DataTrack:
        """Read a Track Name. Raises InvalidName for whatever the syntax of kvcs 3.2 does not allow."""
        match = _match(name.encode("utf-8", "surrogatepass") if isinstance(name, str) else name)
        return cls(Component[match[1].decode().upper()], match[2].decode(), int(match[3]))

    def __str__(self) -> str:
        return f"{self.component.text}.{self.codec}.s{self.segment}"


def _match(name: bytes) -> re.Match[bytes]:
    match = _DATA_TRACK.fullmatch(name)
    if match is None or int(match[3]) > MAX_SEGMENT:
        if name in (MANIFEST, MANIFEST_COSE):
            raise InvalidName(f"{name.decode()} is a manifest track, not a data track")
        raise InvalidName(
            'expected a track name such as "k.raw.s0" (component k, v or kv; codec of 1 to 32 a-z, 0-9, "-"; '
            f'a segment number without leading zeros, at most {MAX_SEGMENT}), got "{printable(name, 80)}"'
        )
    return match


def _checked(namespace: TrackNamespace) -> TrackNamespace:
    _check_fields(namespace)
    return namespace


def _check_fields(namespace: TrackNamespace) -> None:
    if namespace[0] != KVCS_FIELD:
        raise InvalidName(f'namespace field 0 is "kvcs-1", got "{printable(namespace[0])}"')
    for index, field in enumerate(namespace):
        size = FIELD_SIZES[index]
        if len(field) != size:
            raise InvalidName(
                f"namespace field {index} ({_FIELD_NAMES[index]}) has {size} octets, got {len(field)}"
            )
