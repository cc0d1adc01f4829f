"""MOQT URIs: `moqt://authority path-abempty [?query] [#type:value]` (moqt 1)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address
from typing import Final

from moqt.errors import ProtocolError, SessionCode, UsageError
from moqt.names import printable

DEFAULT_PORT: Final = 443
EXAMPLE: Final = "moqt://relay.example.com:4433/path"

_PCHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_PATH_QUERY = re.compile(rf"((?:/{_PCHAR}*)*)(?:\?((?:{_PCHAR}|[/?])*))?")
_FRAGMENT = re.compile(rf"[a-z][a-z0-9+.-]*:(?:{_PCHAR}|[/?])*")
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._~-]+))(?::([0-9]*))?")


@dataclass(frozen=True, slots=True)
class MoqtUri:
    """Where a session is. `host` has no brackets, `authority` is as written, `query` is without its "?"."""

    host: str
    port: int
    path: str
    query: str
    authority: str
    fragment: str = ""

    @classmethod
    def parse(cls, text: str) -> MoqtUri:
        """Read a URI. Raises UsageError with a sentence that says what to write instead."""
        scheme, separator, rest = text.partition("://")
        if not separator or scheme.lower() != "moqt":
            raise UsageError(f'"{printable(text)}" is not an MOQT address: write it like {EXAMPLE}')
        rest, hash_sign, fragment = rest.partition("#")
        if hash_sign and not _FRAGMENT.fullmatch(fragment):
            raise UsageError(
                f'the fragment "#{printable(fragment)}" is not of the form "#type:value": leave it out'
            )
        length = min((at for at in (rest.find("/"), rest.find("?")) if at >= 0), default=len(rest))
        authority, path_option = rest[:length], rest[length:]
        host, port = parse_authority(authority)
        path, query = parse_path(path_option)
        return cls(host, port, path, query, authority, fragment)

    @property
    def path_option(self) -> str:
        """The value of the PATH Setup Option: the path, and "?" and the query if there is one (moqt 1)."""
        return f"{self.path}?{self.query}" if self.query else self.path

    def __str__(self) -> str:
        return f"moqt://{self.authority}{self.path_option}{'#' + self.fragment if self.fragment else ''}"


@dataclass(frozen=True, slots=True)
class Served:
    """What a server serves: `hosts`, as in AUTHORITY before the port, and `paths`, as in PATH before
    the query; the empty path is "/". Without any, it serves all.
    """

    hosts: frozenset[str] = frozenset()
    paths: frozenset[str] = frozenset()

    def check(self, authority: str | None, path: str | None) -> None:
        """Raise ProtocolError unless a client that says this in SETUP is served (moqt 20 #31)."""
        host = parse_authority(authority)[0].lower() if authority else ""
        if self.hosts and host not in self.hosts:
            raise ProtocolError(SessionCode.INVALID_AUTHORITY, "this authority is not served here")
        where = parse_path(path)[0] if path else ""
        if self.paths and (where or "/") not in self.paths:
            raise ProtocolError(SessionCode.INVALID_PATH, "this path is not served here")


def parse_authority(text: str) -> tuple[str, int]:
    """Host (without brackets) and port of an authority, as in a URI or in the AUTHORITY Setup Option.

    Raises UsageError when it is not well-formed.
    """
    shown = printable(text)
    if "@" in text:
        raise UsageError(
            'an MOQT address carries no user name or password: leave out everything up to the "@"'
        )
    if text.count(":") > 1 and not text.startswith("["):
        raise UsageError(f'write an IPv6 address in brackets: "[{shown}]", not "{shown}"')
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        if not text or text.startswith(":"):
            raise UsageError(f'there is no host in the address: write it like "{EXAMPLE}"')
        raise UsageError(
            f'"{shown}" is not a host and port: write a DNS name or IP address, then ":" and the port'
        )
    literal, name, digits = match.groups()
    if literal is not None:
        try:
            IPv6Address(literal)
        except AddressValueError:
            raise UsageError(f'"[{printable(literal)}]" is not an IPv6 address') from None
    port = DEFAULT_PORT
    if digits:
        port = int(digits) if len(digits) <= 5 else 0
        if not 1 <= port <= 65535:
            raise UsageError(f'the port "{printable(digits)}" is not a number from 1 to 65535')
    return literal or name, port


def parse_path(text: str) -> tuple[str, str]:
    """Path and query (without "?") of a PATH Setup Option; both may be empty. Raises UsageError."""
    match = _PATH_QUERY.fullmatch(text)
    if match is None:
        raise UsageError(
            f'"{printable(text)}" is not a path of a URI: start it with "/", and percent-encode '
            "what is not a letter, digit or punctuation (a space is %20)"
        )
    return match[1], match[2] or ""
