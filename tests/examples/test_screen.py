"""The demo's terminal, and what is not one."""

import io
import os

import pytest

from examples.screen import GREEN, Screen, side_by_side


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a property here, an attribute there
        return "utf-8"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("shutil.get_terminal_size", lambda _: os.terminal_size((100, 30)))
    return Screen(Terminal())


def test_a_block_is_drawn_over_the_one_before(terminal: Screen) -> None:
    stream = terminal._stream
    assert isinstance(stream, Terminal)
    terminal.draw(["one", "two"])
    terminal.draw(["three"])
    terminal.say("below")
    terminal.draw(["four"])
    assert stream.getvalue() == (
        "one\x1b[K\ntwo\x1b[K\n\x1b[J\x1b[2Fthree\x1b[K\n\x1b[Jbelow\nfour\x1b[K\n\x1b[J"
    )


def test_a_block_moves_only_where_it_fits(terminal: Screen) -> None:
    assert terminal.moves(29)
    assert not terminal.moves(30)
    assert not Screen(io.StringIO()).moves(1)


def test_what_is_no_terminal_gets_plain_text() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    screen.add("0")
    screen.add(" 1")
    screen.say(screen.paint("green", GREEN))
    screen.draw(["one", "two"])
    screen.draw(["three"])
    assert stream.getvalue() == "0 1\ngreen\none\ntwo\nthree\n"
    assert screen.ascii_only  # it has not said that it can take more


def test_colours_are_left_out_where_nobody_wants_them(
    terminal: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert terminal.paint("x", GREEN) == "\x1b[1;32mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Screen(Terminal()).paint("x", GREEN) == "x"
    assert not Screen(Terminal()).ascii_only


def test_lines_are_wrapped_with_room_for_what_stands_before(terminal: Screen) -> None:
    assert terminal.width == 99
    assert terminal.wrap("word " * 19, 10) == [" ".join(["word"] * 18), " " * 10 + "word"]
    assert terminal.wrap("/" * 100, 10) == ["/" * 100]
    assert terminal.wrap("", 10) == [""]


def test_texts_stand_side_by_side() -> None:
    assert side_by_side("a text that wraps\n\nend", "short", width=23, divider="|") == [
        "a text     | short",
        "that wraps |",
        "           |",
        "end        |",
    ]
