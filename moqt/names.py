"""Track Namespaces, Full Track Names and their text form; escaping of whatever a peer sent.

A Track Namespace is a tuple of byte strings, compared byte by byte. Everything here raises ValueError for a
value that the protocol does not allow; decoders turn that into the session error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

TrackNamespace: TypeAlias = tuple[bytes, ...]

MAX_FIELDS: Final = 32  # moqt 2.3, 18
MAX_NAME_LENGTH: Final = 4096  # moqt 2.3, 18: fields and Track Name together, without their length prefixes

_TEXT_TOKEN = re.compile(r"[A-Za-z0-9_]|\.([0-9a-f]{2})")
_KEPT = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_")
_TEXT_OF_BYTE = tuple(chr(byte) if byte in _KEPT else f".{byte:02x}" for byte in range(256))


@dataclass(frozen=True, slots=True, order=True)
class FullTrackName:
    """What identifies a track inside one connection scope. `str()` gives the text form of moqt 2.3."""

    namespace: TrackNamespace
    name: bytes

    def __str__(self) -> str:
        return f"{format_namespace(self.namespace)}--{_format_field(self.name)}"


def check_namespace(namespace: TrackNamespace, name: bytes = b"") -> None:
    """Raise ValueError for more than 32 fields, an empty field, or more than 4096 bytes in sum (moqt 2.3)."""
    if len(namespace) > MAX_FIELDS:
        raise ValueError(f"a Track Namespace has at most {MAX_FIELDS} fields, not {len(namespace)}")
    total = len(name)
    for field in namespace:
        if not field:
            raise ValueError("a field of a Track Namespace is empty")
        total += len(field)
    if total > MAX_NAME_LENGTH:
        raise ValueError(f"namespace and name have {total} bytes in sum, more than {MAX_NAME_LENGTH}")


def is_prefix(prefix: TrackNamespace, namespace: TrackNamespace) -> bool:
    """Whether `prefix` is a prefix of, or equal to, `namespace`: whole fields only (moqt 2.3)."""
    return namespace[: len(prefix)] == prefix


def format_namespace(namespace: TrackNamespace) -> str:
    """The text form of moqt 2.3: fields joined by "-", bytes outside [A-Za-z0-9_] as ".xx" in hex."""
    return "-".join(map(_format_field, namespace))


def parse_namespace(text: str) -> TrackNamespace:
    """Read what `format_namespace` writes; the empty text is the namespace without fields.

    Raises ValueError for anything that `format_namespace` would not have written: upper-case hex, needless
    escapes.
    """
    if not text:
        return ()
    namespace = tuple(_parse_field(field) for field in text.split("-"))
    check_namespace(namespace)
    return namespace


def parse_full_name(text: str) -> FullTrackName:
    """Read what `str(FullTrackName)` writes. Raises ValueError as `parse_namespace` does."""
    head, separator, tail = text.partition("--")
    if not separator:
        raise ValueError(f'no "--" between the namespace and the name in "{printable(text)}"')
    full_name = FullTrackName(parse_namespace(head), _parse_field(tail))
    check_namespace(full_name.namespace, full_name.name)
    return full_name


def printable(text: str | bytes, limit: int = 200) -> str:
    """Text that is safe in logs and terminals, made from anything that a peer sent.

    Backslashes, control, format and other unprintable characters, and bytes that are not UTF-8, become
    backslash escapes. At most `limit` characters of the input are shown; a cut is marked with "…".
    """
    cut = text[:limit]
    if isinstance(cut, bytes):
        cut = cut.decode("utf-8", "surrogateescape")
    shown = "".join(map(_escape_character, cut))
    return shown + "…" if len(text) > limit else shown


def _escape_character(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if character.isprintable():
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8 (surrogateescape)
        code -= 0xDC00
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _format_field(field: bytes) -> str:
    return "".join(map(_TEXT_OF_BYTE.__getitem__, field))


def _parse_field(text: str) -> bytes:
    field = bytearray()
    position = 0
    while position < len(text):
        token = _TEXT_TOKEN.match(text, position)
        if token is None:
            raise ValueError(f'"{printable(text)}" is not the text form of a name: see position {position}')
        byte = int(token[1], 16) if token[1] else ord(token[0])
        if token[1] and byte in _KEPT:
            raise ValueError(f'needless escape "{token[0]}" in "{printable(text)}": write "{chr(byte)}"')
        field.append(byte)
        position = token.end()
    return bytes(field)
