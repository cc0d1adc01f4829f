"""Setup Options (moqt 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from moqt.errors import ProtocolError, SessionCode, UsageError
from moqt.uri import parse_authority, parse_path
from moqt.wire.kvp import decode_pairs, encode_pairs, malformed
from moqt.wire.tokens import Token
from moqt.wire.vi64 import Octets


class OptionType(IntEnum):
    """The Setup Options that this implementation understands."""

    PATH = 0x01
    AUTHORIZATION_TOKEN = 0x03
    MAX_AUTH_TOKEN_CACHE_SIZE = 0x04
    AUTHORITY = 0x05
    MAX_FILTER_RANGES = 0x06
    MOQT_IMPLEMENTATION = 0x07
    MAX_REQUEST_UPDATES = 0x08


@dataclass(frozen=True, slots=True)
class SetupOptions:
    """What an endpoint says about itself.

    `max_auth_token_cache_size` is in bytes (0: no aliases), `max_filter_ranges` the most Ranges it accepts
    (0: no range filters), `max_request_updates` the most unanswered REQUEST_UPDATEs of a stream (0: no
    limit). `path`, which holds the query as well, and `authority` are a client's.
    """

    path: str | None = None
    authority: str | None = None
    tokens: tuple[Token, ...] = ()
    max_auth_token_cache_size: int = 0
    max_filter_ranges: int = 0
    implementation: str = ""
    max_request_updates: int = 0


NO_OPTIONS: Final = SetupOptions()

_NUMBERS: Final = {
    OptionType.MAX_AUTH_TOKEN_CACHE_SIZE: "max_auth_token_cache_size",
    OptionType.MAX_FILTER_RANGES: "max_filter_ranges",
    OptionType.MAX_REQUEST_UPDATES: "max_request_updates",
}


def encode_setup_options(options: SetupOptions) -> bytes:
    """The body of SETUP, without defaults. Raises UsageError for an ill-formed path or authority."""
    pairs: list[tuple[int, int | bytes]] = []
    if options.path is not None:
        parse_path(options.path)
        pairs.append((OptionType.PATH, options.path.encode()))
    if options.authority is not None:
        parse_authority(options.authority)
        pairs.append((OptionType.AUTHORITY, options.authority.encode()))
    pairs += [(OptionType.AUTHORIZATION_TOKEN, token.encode()) for token in options.tokens]
    if options.implementation:
        pairs.append((OptionType.MOQT_IMPLEMENTATION, options.implementation.encode("utf-8", "replace")))
    pairs += [(kind, getattr(options, name)) for kind, name in _NUMBERS.items() if getattr(options, name)]
    return encode_pairs(tuple(pairs))


def decode_setup_options(data: Octets) -> SetupOptions:
    """Decode the body of SETUP; unknown options are ignored, repeated ones included (moqt 3.2, 19).

    Raises ProtocolError: PROTOCOL_VIOLATION (a repeat of another option than AUTHORIZATION_TOKEN),
    MALFORMED_PATH, MALFORMED_AUTHORITY or KEY_VALUE_FORMATTING_ERROR (moqt 20 #9, #10, #31).
    """
    found: dict[OptionType, int | bytes] = {}
    tokens: list[Token] = []
    for number, value in decode_pairs(data, "Setup Options"):
        if number not in OptionType._value2member_map_:
            continue
        kind = OptionType(number)
        if kind is OptionType.AUTHORIZATION_TOKEN and isinstance(value, bytes):
            tokens.append(Token.decode(value))
        elif kind in found:
            raise ProtocolError(SessionCode.PROTOCOL_VIOLATION, f"Setup Option {kind.name} is repeated")
        else:
            found[kind] = value
    path = _text(found, OptionType.PATH)
    authority = _text(found, OptionType.AUTHORITY)
    if path is not None:
        try:
            parse_path(path)
        except UsageError as error:
            raise ProtocolError(SessionCode.MALFORMED_PATH, str(error)) from None
    if authority is not None:
        try:
            parse_authority(authority)
        except UsageError as error:
            raise ProtocolError(SessionCode.MALFORMED_AUTHORITY, str(error)) from None
    implementation = _text(found, OptionType.MOQT_IMPLEMENTATION) or ""
    numbers = {name: int(found.get(kind, 0)) for kind, name in _NUMBERS.items()}
    return SetupOptions(path, authority, tuple(tokens), implementation=implementation, **numbers)


def _text(found: dict[OptionType, int | bytes], kind: OptionType) -> str | None:
    value = found.get(kind)
    if not isinstance(value, bytes):
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise malformed(kind.name, "not UTF-8") from None  # moqt 20 #10
