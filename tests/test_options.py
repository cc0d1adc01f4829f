"""Options of commands: one table, three places to say them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from moqt.errors import UsageError
from moqt.options import REQUIRED, add_flags, load, option


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    json: bool = option(False, "", "for machines", section="output")
    verbose: int = option(0, "N", "more", least=0, flag="v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Common):
    listen: str = option(REQUIRED, "HOST:PORT", "where", section="sessions")
    key: Path | None = option(None, "FILE", "100% secret")
    upstream: tuple[str, ...] = option((), "URI", "who")
    cache_bytes: int = option(1000, "N", "how much", least=0, most=1 << 40)
    linger: float = option(10.0, "SECONDS", "how long", least=0)
    retry: Literal["never", "always"] = option("never", "WHEN", "when")


def layered(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser, Settings, layered=True)
    return vars(parser.parse_args(arguments))


def loaded(*arguments: str, **environment: str) -> Settings:
    environment = {f"T_{name}": value for name, value in environment.items()}
    return load(Settings, layered("--listen", "x:1", *arguments), environment, "T_")


def from_file(file: Path, *arguments: str, **environment: str) -> Settings:
    return loaded("--config", str(file), *arguments, **environment)


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "relay.toml"
    file.write_text(text)
    return file


def test_defaults() -> None:
    assert loaded() == Settings(listen="x:1")


def test_a_flag_before_the_environment_before_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "cache-bytes = 1\nlinger = 1\nverbose = 1\njson = true\n")
    made = from_file(file, "--cache-bytes", "3", "--no-json", CACHE_BYTES="2", LINGER="2")
    assert (made.cache_bytes, made.linger, made.verbose, made.json) == (3, 2.0, 1, False)


def test_each_kind_in_each_place(tmp_path: Path) -> None:
    text = """
    key = "k"
    upstream = ["a", "b"]
    cache-bytes = 5
    linger = 2
    retry = "always"
    json = true
    verbose = 2
    """
    flags = ["--key", "k", "--upstream", "a", "--upstream", "b", "--cache-bytes", "5", "--linger", "2", "-vv"]
    variables = {"KEY": "k", "UPSTREAM": "a b", "CACHE_BYTES": "5", "LINGER": "2", "VERBOSE": "2"}
    expected = Settings(
        listen="x:1",
        key=Path("k"),
        upstream=("a", "b"),
        cache_bytes=5,
        linger=2.0,
        retry="always",
        json=True,
        verbose=2,
    )
    assert from_file(written(tmp_path, text)) == expected
    assert loaded(*flags, "--retry", "always", "--json") == expected
    assert loaded(**variables, RETRY="always", JSON="true") == expected
    assert type(from_file(written(tmp_path, text)).linger) is float


def test_flags_replace_a_list(tmp_path: Path) -> None:
    file = written(tmp_path, 'upstream = ["a", "b"]')
    assert from_file(file, "--upstream", "c").upstream == ("c",)


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "cache-bytes = 7")
    assert loaded(CONFIG=str(file)).cache_bytes == 7
    assert from_file(written(tmp_path, "linger = 1"), CONFIG="/no/such/file").linger == 1.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cache-byte = 1", 'no option "cache-byte": did you mean cache-bytes?'),
        ("cache_bytes = 1", "did you mean cache-bytes?"),
        ("[limits]\ncache-bytes = 1", 'no option "limits"'),
        ('config = "x"', 'no option "config"'),
        ('"\\u001b[2J" = 1', 'no option "\\x1b[2J"'),
        (
            "cache-bytes = true",
            "cache-bytes: expected a whole number of at least 0 and at most 1099511627776",
        ),
        ('cache-bytes = "5"', 'not "5"'),
        ("cache-bytes = 1.5", "not 1.5"),
        ("cache-bytes = -1", "not -1"),
        ("cache-bytes = 1099511627777", "not 1099511627777"),
        ("linger = nan", "linger: expected a number of at least 0, not nan"),
        ("linger = inf", "not inf"),
        ("json = 1", "json: expected true or false, not 1"),
        ('upstream = "a"', 'upstream: expected a list of strings, not "a"'),
        ('upstream = ["a", 1]', "upstream: expected a list of strings"),
        ("key = 5", "key: expected a path, not 5"),
        ('key = ""', 'key: expected a path, not ""'),
        ("listen = 5", "listen: expected a string, not 5"),
        ('retry = "sometimes"', 'retry: expected one of never, always, not "sometimes"'),
        ("listen", "is not TOML"),
    ],
)
def test_what_is_wrong_in_the_file(tmp_path: Path, text: str, says: str) -> None:
    """The message names the file, the key and what is expected."""
    with pytest.raises(UsageError) as error:
        from_file(written(tmp_path, text))
    assert says in str(error.value)
    assert str(tmp_path / "relay.toml") in str(error.value)


def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"/no/such/file: No such file"):
        from_file(Path("/no/such/file"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not TOML"):
        from_file(tmp_path / "binary")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("CACHE_BYTE", "1", 'variable "T_CACHE_BYTE": did you mean T_CACHE_BYTES?'),
        (
            "CACHE_BYTES",
            "many",
            'T_CACHE_BYTES: expected a whole number of at least 0 and at most 1099511627776, not "many"',
        ),
        ("CACHE_BYTES", "", 'not ""'),
        ("JSON", "yes", 'T_JSON: expected true or false, not "yes"'),
        ("LINGER", "nan", "not nan"),
        ("RETRY", "sometimes", "one of never, always"),
        ("KEY", "", "expected a path"),
    ],
)
def test_what_is_wrong_in_the_environment(name: str, value: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        loaded(**{name: value})
    assert says in str(error.value)


def test_other_variables_are_not_ours() -> None:
    assert load(Settings, layered("--listen", "x:1"), {"CACHE_BYTES": "x", "PATH": "/"}, "T_") == loaded()


def test_what_is_wrong_in_a_flag() -> None:
    with pytest.raises(UsageError, match=r"^--linger: expected a number of at least 0, not -1\.0$"):
        loaded("--linger", "-1")


def test_what_is_missing() -> None:
    with pytest.raises(
        UsageError, match=r"--listen HOST:PORT is missing \(or T_LISTEN .* or listen in the file"
    ):
        load(Settings, {}, {}, "T_")


def test_wrong_before_missing() -> None:
    with pytest.raises(UsageError, match="--linger"):
        load(Settings, layered("--linger", "x"), {}, "T_")


def test_flags_without_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that has no file and no variables gets typed values, defaults and errors from its parser."""
    parser = argparse.ArgumentParser()
    add_flags(parser, Settings)
    assert vars(parser.parse_args(["--listen", "x", "--cache-bytes", "5", "-v", "--key", "k"])) == {
        "listen": "x",
        "key": Path("k"),
        "upstream": (),
        "cache_bytes": 5,
        "linger": 10.0,
        "retry": "never",
        "json": False,
        "verbose": 1,
    }
    for arguments, says in (
        ([], "required: --listen"),
        (["--cache-bytes", "x"], "--cache-bytes: expected a whole number of at least 0"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(arguments)
        assert says in capsys.readouterr().err


def test_help() -> None:
    """Own options before inherited ones, in sections, with defaults where there are any."""
    parser = argparse.ArgumentParser()
    add_flags(parser, Settings, layered=True)
    text = parser.format_help()
    text = text[text.index("options:") :]
    assert text.index("--config") < text.index("sessions:") < text.index("--linger") < text.index("output:")
    assert "how much (default: 1000)" in text
    assert "100% secret\n" in text
    assert "{" not in text
