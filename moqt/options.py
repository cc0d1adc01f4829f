"""Options of a command, told once: each is a field of a dataclass, and can be given as a flag, as a variable
of the environment, or as a key of a TOML file.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        listen: str = option(REQUIRED, "HOST:PORT", "wait for sessions here", section="sessions")
        cache_bytes: int = option(2 << 30, "N", "most bytes of Objects to keep", least=0)

makes `--cache-bytes N`, `PREFIX_CACHE_BYTES=N` and `cache-bytes = N`. A flag counts before a variable, and a
variable before the file. A field may be int, float, str, Path, bool, a Literal of strings, `tuple[str, ...]`
(a flag that is repeated, a variable with blanks between, an array), or one of these or None.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import math
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Final, TypeVar

from moqt.errors import UsageError
from moqt.names import printable

__all__ = ["REQUIRED", "add_flags", "load", "option"]

REQUIRED: Final[Any] = dataclasses.MISSING
"""The default of an option that must be given."""

T = TypeVar("T")

_WORDS: Final[dict[Any, str]] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    Path: "a path",
    bool: "true or false",
    tuple: "a list of strings",
}


def option(
    default: Any,
    metavar: str,
    help: str,
    *,
    least: float | None = None,
    most: float | None = None,
    check: Callable[[Any, str], object] | None = None,
    section: str = "",
    flag: str = "",
) -> Any:
    """A field that is an option. A number lies between `least` and `most`; `check` gets a value, and where it
    was said, and raises UsageError for one that is not as it must be. `section` begins a section of
    `--help`; `flag` is a second flag, of one letter: that of a number counts how often it is given.
    """
    metadata = {
        "metavar": metavar,
        "help": help,
        "least": least,
        "most": most,
        "check": check,
        "section": section,
        "flag": flag,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """One option. `kind` is its type, a key of _WORDS; `choices` are the values of a Literal."""

    field: str
    kind: Any
    default: Any
    choices: tuple[str, ...]
    metavar: str
    help: str
    least: float | None
    most: float | None
    check: Callable[[Any, str], object] | None
    section: str
    flag: str

    @property
    def name(self) -> str:
        """As in a flag and a file."""
        return self.field.replace("_", "-")

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        bounds = [("at least", self.least), ("at most", self.most)]
        said = " and ".join(f"{words} {bound}" for words, bound in bounds if bound is not None)
        return f"{_WORDS[self.kind]} of {said}" if said else _WORDS[self.kind]

    def from_text(self, text: str, source: str) -> Any:
        """The value that a flag or a variable, `source`, says. Raises UsageError."""
        value: Any = text
        if self.kind is bool:
            value = {"true": True, "false": False}.get(text, text)
        elif self.kind is tuple:
            value = text.split()
        elif self.kind in (int, float):
            with contextlib.suppress(ValueError):
                value = self.kind(text)
        return self.checked(value, source)

    def checked(self, value: Any, source: str) -> Any:
        """`value`, which `source` says, as the type that the field has. Raises UsageError."""
        made = value
        if self.kind is float and type(value) is int:
            made = float(value)
        elif self.kind is Path and isinstance(value, str) and value:
            made = Path(value)
        elif self.kind is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
            made = tuple(value)
        # To Python a bool is an int.
        right = isinstance(made, self.kind) and isinstance(made, bool) == (self.kind is bool)
        if not right or not self._within(made):
            shown = f'"{printable(value)}"' if isinstance(value, str) else printable(str(value))
            raise UsageError(f"{source}: expected {self.expected}, not {shown}")
        if self.check is not None:
            self.check(made, source)
        return made

    def _within(self, value: Any) -> bool:
        if self.kind not in (int, float):
            return not self.choices or value in self.choices
        low = self.least is None or value >= self.least
        high = self.most is None or value <= self.most
        return math.isfinite(value) and low and high


def _options(settings: type[Any]) -> Iterator[_Option]:
    """The options of a dataclass, its own before those that it inherits."""
    known = {field.name: field for field in dataclasses.fields(settings)}
    hints = typing.get_type_hints(settings)
    names = [name for base in settings.__mro__ for name in inspect.get_annotations(base) if name in known]
    for name in dict.fromkeys(names):
        origin, inside = typing.get_origin(hints[name]), typing.get_args(hints[name])
        kind = hints[name]
        if origin is typing.Literal:
            kind = str
        elif origin is tuple:
            kind = tuple
        elif inside:  # X | None
            (kind,) = set(inside) - {NoneType}
        yield _Option(
            field=name,
            kind=kind,
            default=known[name].default,
            choices=inside if origin is typing.Literal else (),
            **known[name].metadata,
        )


def add_flags(parser: argparse.ArgumentParser, settings: type[Any], *, layered: bool = False) -> None:
    """Give `parser` a flag for each option of the dataclass `settings`. With `layered` there is `--config`,
    too, and the namespace holds only what was given, as text: it is for `load`.
    """
    group: argparse._ActionsContainer = parser
    if layered:
        help = "a TOML file that says what no flag or variable does"
        parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=help)
    for item in _options(settings):
        if item.section:
            group = parser.add_argument_group(item.section)
        flags = [f"--{item.name}"]
        has_default = item.default not in (REQUIRED, None, False, ()) and not item.flag
        help = f"{item.help} (default: {item.default})" if has_default else item.help
        more: dict[str, Any] = {"help": help.replace("%", "%%")}
        more["default"] = argparse.SUPPRESS if layered else item.default
        if item.kind is bool:
            more["action"] = argparse.BooleanOptionalAction
        elif item.flag:
            flags.insert(0, f"-{item.flag}")
            more["action"] = "count"
        else:
            more["metavar"] = item.metavar
            if item.kind is tuple:
                more["action"] = "append"
            if not layered:
                more |= {"type": _converter(item), "required": item.default is REQUIRED}
        group.add_argument(*flags, **more)


def _converter(item: _Option) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return item.from_text(text, "")
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from None

    return convert


def load(settings: type[T], flags: Mapping[str, Any], environment: Mapping[str, str], prefix: str) -> T:
    """The settings: what a flag says, or else the environment, or else the file that `--config` or
    PREFIX_CONFIG names, or else the default.

    `flags` is the namespace of a parser with `layered` flags, as a mapping; variables of the environment that
    begin with `prefix` are ours. Raises UsageError, which tells where it was said and what is expected.
    """
    options = {item.name: item for item in _options(settings)}
    variables = {prefix + item.field.upper(): item for item in options.values()}
    values: dict[str, Any] = {}
    file = flags.get("config", environment.get(f"{prefix}CONFIG"))
    if file is not None:
        for key, value in _read(Path(file)).items():
            item = _find(options, key, f"{file}: no option")
            values[item.field] = item.checked(value, f"{file}: {key}")
    for variable, text in environment.items():
        if variable.startswith(prefix) and variable != f"{prefix}CONFIG":
            item = _find(variables, variable, "no option for the environment variable")
            values[item.field] = item.from_text(text, variable)
    for item in options.values():
        given = flags.get(item.field)
        if given is not None:
            check = item.from_text if isinstance(given, str) else item.checked
            values[item.field] = check(given, f"--{item.name}")
    for item in options.values():
        if item.default is REQUIRED and item.field not in values:
            raise UsageError(
                f"--{item.name} {item.metavar} is missing (or {prefix}{item.field.upper()} in the "
                f"environment, or {item.name} in the file of --config)"
            )
    return settings(**values)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {file}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--config {file} is not TOML: {error}") from error


def _find(known: Mapping[str, _Option], name: str, what: str) -> _Option:
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f": did you mean {close[0]}?" if close else ""
        raise UsageError(f'{what} "{printable(name)}"{hint}')
    return known[name]
