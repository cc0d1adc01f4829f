"""The demo's timeline: what both ends recorded, as rows, as text and as a picture."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.timeline import Bar, Step, Timeline, duration, render_text, tick_label, tick_step
from examples.timeline_svg import _place, render_svg

SVG = "{http://www.w3.org/2000/svg}"


def recorded(*, layers: int = 3, whole: int = 3) -> Timeline:
    """A producer that takes 0.25 s per layer from 100 s on, and a consumer that gets `whole` layers whole
    and half of the next.
    """
    timeline = Timeline(start=100.0, layers=layers)
    for layer in range(layers):
        done = 100.25 + layer / 4
        timeline.note(Step.COMPUTED, layer, done)
        if layer <= whole:
            timeline.note(Step.ARRIVED, layer, done + 0.0625)
        if layer < whole:
            timeline.note(Step.ARRIVED, layer, done + 0.125)
            timeline.note(Step.VERIFIED, layer, done + 0.1875)
            timeline.note(Step.USED, layer, done + 0.25)
    timeline.mark("first <token> & more", 101.25)
    return timeline


def test_rows_hold_what_both_ends_recorded_relative_to_the_start() -> None:
    rows = recorded().rows()
    assert [row.layer for row in rows] == [0, 1, 2]
    assert rows[1].computing == (Bar(0.25, 0.5),)
    assert rows[1].arriving == (Bar(0.5625, 0.625),)
    assert (rows[1].verified, rows[1].used, rows[1].lag) == (0.6875, 0.75, 0.1875)
    assert recorded().span == 1.25
    assert recorded().relative_marks() == [("first <token> & more", 1.25)]


def test_a_layer_that_is_not_whole_has_no_lag() -> None:
    rows = recorded(layers=4, whole=1).rows()
    assert [row.lag for row in rows] == [0.1875, None, None, None]
    assert [len(row.arriving) for row in rows] == [1, 1, 0, 0]
    text = render_text(recorded(layers=4, whole=1))
    assert [line.endswith("not whole") for line in text.splitlines()[1:5]] == [False, True, True, True]
    assert "not whole" not in render_text(recorded(layers=4, whole=1), live=True)


def test_segments_of_chunked_prefill_are_bars_of_their_own() -> None:
    timeline = Timeline(start=0.0)
    for moment, layer in enumerate((0, 1, 0, 1), start=1):
        timeline.note(Step.COMPUTED, layer, float(moment))
        timeline.note(Step.ARRIVED, layer, moment + 0.25)
        timeline.note(Step.ARRIVED, layer, moment + 0.5)
    first, second = timeline.rows()
    assert first.computing == (Bar(0.0, 1.0), Bar(2.0, 3.0))
    assert first.arriving == (Bar(1.25, 1.5), Bar(3.25, 3.5))
    assert second.computing == (Bar(1.0, 2.0), Bar(3.0, 4.0))


def test_nothing_recorded_is_drawn_too() -> None:
    assert Timeline().rows() == []
    assert "layer" in render_text(Timeline())
    ElementTree.fromstring(render_svg(Timeline(layers=2), title="nothing"))


@pytest.mark.parametrize("width", [60, 80, 133])
def test_text_keeps_its_width_and_its_order(width: int) -> None:
    lines = render_text(recorded(), width=width).splitlines()
    assert all(len(line) == width for line in lines[1:4])
    for line in lines[1:4]:
        places = [line.index(glyph) for glyph in "░█◆●"]
        assert places == sorted(places)
    starts = [line.index("░") for line in lines[1:4]]
    assert starts == sorted(starts)


def test_text_on_a_longer_scale_leaves_room_for_what_comes() -> None:
    def used(span: float) -> int:
        return render_text(recorded(), span=span).splitlines()[3].index("●")

    assert used(0.0) == used(1.0)  # the scale never cuts anything off
    assert used(2.5) == pytest.approx(used(0.0) / 2, abs=4)


def test_text_is_ascii_where_asked_and_colour_adds_only_colour() -> None:
    assert render_text(recorded(), ascii_only=True).isascii()
    coloured = render_text(recorded(), colour=True)
    assert re.sub(r"\x1b\[\d*m", "", coloured) == render_text(recorded())
    assert coloured.count("\x1b[0m") == len(re.findall(r"\x1b\[\d+m", coloured)) / 2


def test_picture_names_every_layer_and_escapes_labels() -> None:
    picture = ElementTree.fromstring(render_svg(recorded(), title="a < b", subtitle="c & d"))
    texts = [element.text or "" for element in picture.iter(f"{SVG}text")]
    assert {"a < b", "c & d", "0", "1", "2", "188 ms", "first <token> & more  1.25 s"} <= set(texts)
    assert "seconds since the producer began" in texts


def test_picture_stays_inside_its_frame() -> None:
    for layers in (1, 4, 30, 126):
        picture = ElementTree.fromstring(render_svg(recorded(layers=layers, whole=layers // 2), title="t"))
        width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
        for bar in picture.iter(f"{SVG}rect"):
            if "x" in bar.attrib:
                assert (
                    0
                    <= float(bar.attrib["x"])
                    <= float(bar.attrib["x"]) + float(bar.attrib["width"])
                    <= width
                )
                assert (
                    0
                    <= float(bar.attrib["y"])
                    <= float(bar.attrib["y"]) + float(bar.attrib["height"])
                    <= height
                )


@given(st.lists(st.tuples(st.text("abc ", max_size=30), st.floats(0, 1)), max_size=6))
def test_labels_of_marks_never_cover_each_other(marks: list[tuple[str, float]]) -> None:
    timeline = Timeline(start=0.0)
    for label, at in marks:
        timeline.mark(label, at)
    placed = _place(timeline, lambda at: 76 + at * 900)
    assert len(placed) == len(marks)
    for index, one in enumerate(placed):
        for other in placed[:index]:
            if one.lane == other.lane:
                assert one.extent[1] <= other.extent[0] or other.extent[1] <= one.extent[0]


@pytest.mark.parametrize(
    ("span", "step"), [(0.04, "0.005"), (0.05, "0.005"), (2.0, "0.2"), (2.1, "0.5"), (30.0, "5")]
)
def test_ticks_are_round_numbers(span: float, step: str) -> None:
    assert tick_label(tick_step(span, 10), tick_step(span, 10)) == step


def test_durations_read_well() -> None:
    assert [duration(seconds) for seconds in (0.00042, 0.0995, 0.412, 0.9996, 2.69)] == [
        "0.4 ms",
        "100 ms",
        "412 ms",
        "1.00 s",
        "2.69 s",
    ]
