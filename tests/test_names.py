"""Namespaces, their text form, and escaping of what peers send (moqt 2.3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.names import (
    FullTrackName,
    check_namespace,
    format_namespace,
    is_prefix,
    parse_full_name,
    parse_namespace,
    printable,
)

FORMS = {
    "kvcs.2d1-scope--k.2eraw.2es0": FullTrackName((b"kvcs-1", b"scope"), b"k.raw.s0"),
    "--": FullTrackName((), b""),
    "--name": FullTrackName((), b"name"),
    "a--": FullTrackName((b"a",), b""),
    ".00.ff-A_z9--.2d": FullTrackName((b"\x00\xff", b"A_z9"), b"-"),
}


@pytest.mark.parametrize(("text", "name"), FORMS.items())
def test_text_form(text: str, name: FullTrackName) -> None:
    assert str(name) == text
    assert parse_full_name(text) == name


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a-b",
        "a---b",
        "a--b-c",
        "a--b--c",
        "-a--b",
        "a---",
        "a.2D--b",
        "a.2--b",
        "a.--b",
        "a.61--b",
        "a b--c",
        "ä--b",
        "a--b\n",
        "-".join(["a"] * 33) + "--b",
        "a" * 4096 + "--b",
    ],
)
def test_parser_refuses_what_is_never_written(text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 which of several reasons is told does not matter
        parse_full_name(text)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["-", "a-", "-a", "a--b", ".2f.", ".5f", "-".join(["a"] * 33)])
def test_namespace_parser_refuses(text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 which of several reasons is told does not matter
        parse_namespace(text)
    assert str(caught.value).isprintable()


def test_a_needless_escape_is_explained() -> None:
    with pytest.raises(ValueError, match=r'needless escape "\.61" in "x\.61": write "a"'):
        parse_namespace("x.61")


NAMESPACES = st.lists(st.binary(min_size=1, max_size=20), max_size=32).map(tuple)


@given(NAMESPACES, st.binary(max_size=50))
def test_text_form_round_trips(namespace: tuple[bytes, ...], name: bytes) -> None:
    full_name = FullTrackName(namespace, name)
    assert parse_full_name(str(full_name)) == full_name
    assert parse_namespace(format_namespace(namespace)) == namespace


@given(st.text(max_size=30) | st.text("ab-.0126f", max_size=12))
def test_text_form_is_unique(text: str) -> None:
    try:
        name = parse_full_name(text)
    except ValueError:
        return
    assert str(name) == text


@pytest.mark.parametrize(
    ("namespace", "name", "reason"),
    [
        ((b"a",) * 33, b"", "at most 32 fields"),
        ((b"a", b""), b"", "is empty"),
        ((b"a" * 4096, b"b"), b"", "4097 bytes"),
        ((b"a" * 4000,), b"b" * 97, "4097 bytes"),
        ((), b"b" * 4097, "4097 bytes"),
    ],
)
def test_limits(namespace: tuple[bytes, ...], name: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_namespace(namespace, name)


def test_at_the_limits() -> None:
    check_namespace(())
    check_namespace((b"a",) * 32)
    check_namespace((b"a" * 128,) * 32)
    check_namespace((b"a" * 4000,), b"b" * 96)


@pytest.mark.parametrize(
    ("prefix", "namespace", "expected"),
    [
        ((), (), True),
        ((), (b"foo",), True),
        ((b"foo",), (b"foo",), True),
        ((b"foo",), (b"foo", b"bar"), True),
        ((b"foo",), (b"foobar",), False),
        ((b"foo", b"bar"), (b"foo",), False),
        ((b"Foo",), (b"foo",), False),
        ((b"foo", b"b"), (b"foo", b"bar"), False),
    ],
)
def test_prefix(prefix: tuple[bytes, ...], namespace: tuple[bytes, ...], expected: bool) -> None:
    assert is_prefix(prefix, namespace) is expected


def test_names_are_ordered_and_hashable() -> None:
    names = [FullTrackName((b"b",), b"a"), FullTrackName((b"a",), b"z"), FullTrackName((b"a",), b"b")]
    assert sorted(names) == [names[2], names[1], names[0]]
    assert len({*names, FullTrackName((b"b",), b"a")}) == 3


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, ünïcode", "plain text, ünïcode"),
        (b"bytes \xc3\xbc", "bytes ü"),
        (b"\xff\x80", "\\xff\\x80"),
        ("\x1b[31mred\r\n\x00", "\\x1b[31mred\\x0d\\x0a\\x00"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("back\\slash", "back\\\\slash"),
        ("\U000e0001", "\\U000e0001"),
        ("\ud800", "\\ud800"),
        ("\x85\xa0", "\\x85\\xa0"),
        ("", ""),
    ],
)
def test_printable(text: str | bytes, shown: str) -> None:
    assert printable(text) == shown


def test_printable_is_bounded() -> None:
    assert printable("a" * 200) == "a" * 200
    assert printable("a" * 201) == "a" * 200 + "…"
    assert printable(b"\x00" * 10_000_000, limit=3) == "\\x00" * 3 + "…"


@given(st.text(max_size=50) | st.binary(max_size=50))
def test_printable_is_one_printable_line(text: str | bytes) -> None:
    assert printable(text).isprintable()
