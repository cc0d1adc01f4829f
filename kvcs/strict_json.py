"""JSON without its ambiguities, for what is hashed, signed or sent by a peer.

Strict UTF-8 without a byte order mark, no duplicate member names, no fractions, exponents, NaN or Infinity,
bounded in octets, values and depth. Every fault is a `ValueError` with a sentence.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn, TypeAlias

Json: TypeAlias = Any  # None, bool, int, str, list[Json], dict[str, Json]

MAX_INTEGER: Final = 2**53 - 1  # kvsp 2.1: what every JSON reader takes as an exact integer
_HEX64 = re.compile(r"[0-9a-f]{64}")


def loads(data: bytes | bytearray | memoryview | str, *, max_size: int, max_values: int) -> Json:
    """Parse `data` of at most `max_size` octets holding about `max_values` values at most."""
    text = _text(data, max_size)
    # One cheap pass: a bomb such as 15 MB of "[]," would otherwise cost seconds and hundreds of MB.
    if text.count(",") + text.count("[") + text.count("{") > max_values:
        raise ValueError(f"more than {max_values} values")
    try:
        return json.loads(
            text,
            parse_constant=_refuse_number,
            parse_float=_refuse_number,
            object_pairs_hook=_without_duplicates,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def canonical(value: Json) -> str:
    """The JSON Canonicalization Scheme (RFC 8785) of a value that `check_plain` takes as narrow."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def check_plain(value: Json, *, max_depth: int, narrow: bool, where: str = "") -> None:
    """Raise ValueError unless `value` can be written as JSON again and reads the same everywhere.

    That is: objects, arrays, strings without lone surrogates, integers, true, false and null, at most
    `max_depth` containers deep; `narrow` (kvsp 2.1) refuses member names outside ASCII and integers above
    2^53-1 in magnitude, too.
    """
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        if narrow and abs(value) > MAX_INTEGER:
            raise ValueError(f"{_at(where)}an integer above 2^53-1 in magnitude")
    elif isinstance(value, str):
        _check_text(value, where)
    elif isinstance(value, list | tuple | dict):
        if max_depth == 0:
            raise ValueError(f"{_at(where)}nested too deeply")
        if not isinstance(value, dict):
            members = [(f"{where}[{index}]", element) for index, element in enumerate(value)]
        else:
            for name in value:
                if not isinstance(name, str):
                    raise ValueError(f"{_at(where)}a member name of type {type(name).__name__}")
                if narrow and not name.isascii():
                    raise ValueError(f"{_at(where)}the member name {name!a} is not ASCII")
                _check_text(name, where)
            members = [(f"{where}.{name}" if where else name, member) for name, member in value.items()]
        for inner, member in members:
            check_plain(member, max_depth=max_depth - 1, narrow=narrow, where=inner)
    else:
        raise ValueError(f"{_at(where)}{type(value).__name__} is no JSON type that is allowed here")


def is_integer(value: Json, low: int, high: int) -> bool:
    """Whether `value` is an integer in low..high; true and false are none."""
    return type(value) is int and low <= value <= high


def is_hex64(value: Json) -> bool:
    """Whether `value` is the text of 32 octets: 64 lower-case hex digits."""
    return isinstance(value, str) and _HEX64.fullmatch(value) is not None


def _text(data: bytes | bytearray | memoryview | str, max_size: int) -> str:
    size = len(data)  # of a str: a lower bound, and all that is needed before encoding it
    if size <= max_size:
        if not isinstance(data, str):
            return str(data, "utf-8")  # UnicodeDecodeError is a ValueError
        size = len(data.encode("utf-8"))
        if size <= max_size:
            return data
    raise ValueError(f"{size} octets or more, but at most {max_size} are allowed")


def _check_text(text: str, where: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"{_at(where)}a string with a lone surrogate") from None


def _without_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the member {name!a} stands twice")
            seen.add(name)
    return members


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is not allowed: numbers are integers without fraction or exponent")


def _at(where: str) -> str:
    return f"{ascii(where)[1:-1]}: " if where else ""
