"""A timeline as an SVG picture: no dependency, no script, no font but the reader's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from html import escape

from examples.timeline import Row, Timeline, duration, tick_label, tick_step

WIDTH = 1200
LEFT, RIGHT = 76, 190  # beside the plot: layer numbers on the one side, lags on the other
TOP = 128  # title, subtitle, legend
LANE = 19  # height of one line of mark labels
CHARACTER = 7.0  # an upper estimate of the width of one character of a mark label

INK, MUTED, GRID, PAPER, STRIPE = "#0f172a", "#64748b", "#e2e8f0", "#ffffff", "#f8fafc"
COMPUTING, ARRIVING, TICK, VERIFIED, USED = "#cbd5e1", "#38bdf8", "#0369a1", "#15803d", "#ea580c"
MARK, ALARM = "#7c3aed", "#dc2626"
FONT = "Inter, 'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"

Scale = Callable[[float], float]


def render_svg(timeline: Timeline, *, title: str, subtitle: str = "") -> str:
    """The timeline as an SVG document: one row per layer, seconds on the x axis, each layer's lag beside
    it.
    """
    rows = timeline.rows()
    height = min(max(640 / max(len(rows), 1), 6.0), 24.0)
    span = timeline.span * 1.02

    def x(at: float) -> float:
        return LEFT + at / span * (WIDTH - LEFT - RIGHT)

    labels = _place(timeline, x)
    top = TOP + LANE * (1 + max((label.lane for label in labels), default=-1))
    bottom = top + len(rows) * height
    longest = max((row.lag for row in rows if row.lag is not None), default=0.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 64:.0f}" '
        f'width="{WIDTH}" height="{bottom + 64:.0f}" font-family="{FONT}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="100%" height="100%" rx="12" fill="{PAPER}"/>',
        _text(28, 44, title, size=22, weight=600, fill=INK),
        _text(28, 68, subtitle, size=14),
        *_legend(28, 98),
        *_grid(span, len(rows), top, height, x),
    ]
    for row in rows:
        middle = top + (row.layer + 0.5) * height
        parts += _row(row, middle, height, x)
        parts += _lag(row, middle, height, longest)
        if height >= 12 or row.layer % 5 == 0:
            parts.append(_text(LEFT - 12, middle + 3.8, str(row.layer), size=11, anchor="end"))
    parts += [
        _text(LEFT - 12, top - 8, "layer", size=11, anchor="end"),
        _text(WIDTH - RIGHT + 16, top - 8, "lag: computed to verified", size=11),
    ]
    for label in labels:
        parts += _mark(label, top, bottom)
    return "\n".join([*parts, "</svg>", ""])


def _text(
    x: float, y: float, text: str, *, size: float, fill: str = MUTED, weight: int = 400, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _bar(x: float, y: float, width: float, height: float, fill: str, *, round_: float = 0.0) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" rx="{round_:.1f}" '
        f'fill="{fill}"/>'
    )


def _pointer(x: float, y: float, size: float, fill: str, *, up: bool) -> str:
    """A triangle whose point is at (x, y)."""
    rise = size if up else -size
    half = size * 0.62
    return f'<path d="M{x:.2f} {y:.2f}l{half:.2f} {rise:.2f}h{-2 * half:.2f}z" fill="{fill}"/>'


def _legend(x: float, y: float) -> Iterator[str]:
    yield _bar(x, y - 9, 26, 9, COMPUTING, round_=2)
    yield _text(x + 34, y, "producer computes the layer", size=13, fill=INK)
    x += 244
    yield _bar(x, y - 9, 26, 9, ARRIVING, round_=2)
    for tick in (5, 13, 21):
        yield _bar(x + tick, y - 9, 1, 9, TICK)
    yield _text(x + 34, y, "its Objects arrive at the consumer", size=13, fill=INK)
    x += 278
    yield _pointer(x + 6, y, 9, VERIFIED, up=False)
    yield _text(x + 20, y, "every Object verified", size=13, fill=INK)
    x += 178
    yield _pointer(x + 6, y - 9, 9, USED, up=True)
    yield _text(x + 20, y, "used: the consumer has computed with it", size=13, fill=INK)


def _grid(span: float, rows: int, top: float, height: float, x: Scale) -> Iterator[str]:
    bottom = top + rows * height
    for index in range(0, rows, 2):
        yield _bar(LEFT, top + index * height, WIDTH - LEFT - RIGHT, height, STRIPE)
    step = tick_step(span, 10)
    for tick in range(int(span / step) + 1):
        at = x(tick * step)
        yield f'<path d="M{at:.1f} {top:.1f}V{bottom + 5:.1f}" stroke="{GRID}"/>'
        yield _text(at, bottom + 20, tick_label(tick * step, step), size=12, anchor="middle")
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield _text(middle, bottom + 44, "seconds since the producer began", size=12.5, anchor="middle")


def _row(row: Row, y: float, height: float, x: Scale) -> Iterator[str]:
    thick, pointer = height * 0.44, height * 0.26
    upper, lower = y - thick / 2, y + thick / 2
    for bar in row.computing:
        yield _bar(x(bar.begin), upper, max(x(bar.end) - x(bar.begin), 1), thick, COMPUTING, round_=2)
    ends = [bar.end for bar in row.computing]
    for bar in row.arriving:
        sent = max((end for end in ends if end <= bar.begin), default=bar.begin)
        yield (
            f'<path d="M{x(sent):.2f} {y:.2f}H{x(bar.begin):.2f}" stroke="{ARRIVING}" '
            f'stroke-width="1.2" stroke-dasharray="2 2"/>'
        )
        yield _bar(x(bar.begin), upper, max(x(bar.end) - x(bar.begin), 2), thick, ARRIVING, round_=1)
    drawn = -1.0
    for arrival in row.arrivals:
        if x(arrival) - drawn >= 4:  # denser ticks would only be a dark bar
            drawn = x(arrival)
            yield _bar(drawn - 0.5, upper, 1, thick, TICK)
    if row.verified is not None:
        yield _pointer(x(row.verified), upper, pointer, VERIFIED, up=False)
    if row.used is not None:
        yield _pointer(x(row.used), lower, pointer, USED, up=True)


def _lag(row: Row, y: float, height: float, longest: float) -> Iterator[str]:
    left = WIDTH - RIGHT + 16
    if row.verified is None:
        yield _bar(left, y - height * 0.3, 3, height * 0.6, ALARM)
        if height >= 12:
            yield _text(left + 10, y + 3.8, "not whole", size=11, fill=ALARM, weight=600)
    elif row.lag is not None:
        length = max(row.lag / longest * 84, 1) if longest > 0 else 1
        yield _bar(left, y - height * 0.22, length, height * 0.44, "#bbf7d0", round_=1.5)
        if height >= 12:
            yield _text(left + length + 6, y + 3.8, duration(row.lag), size=11, fill=INK)


@dataclass(frozen=True, slots=True)
class _Label:
    text: str
    at: float  # x of the line
    lane: int  # 0 is the lowest

    @property
    def rightwards(self) -> bool:
        """Whether the text stands right of its line: only where there is no room at its left."""
        return self.at - self.length < LEFT

    @property
    def length(self) -> float:
        return len(self.text) * CHARACTER + 12

    @property
    def extent(self) -> tuple[float, float]:
        return (self.at, self.at + self.length) if self.rightwards else (self.at - self.length, self.at)

    def crosses(self, other: _Label) -> bool:
        """Whether text covers text, or the line of the one runs through the text of the other."""
        if self.lane < other.lane:
            return other.crosses(self)
        (begin, end), (other_begin, other_end) = self.extent, other.extent
        if self.lane == other.lane and begin < other_end and end > other_begin:
            return True
        return other_begin < self.at < other_end


def _place(timeline: Timeline, x: Scale) -> list[_Label]:
    """Put each mark's label into the lowest lane where it is in nobody's way."""
    placed: list[_Label] = []
    marks = [_Label(f"{label}  {duration(at)}", x(at), 0) for label, at in timeline.relative_marks()]
    # In this order a line never has to run through a text that stands already.
    inwards = [each for each in marks if not each.rightwards]
    inwards += [each for each in reversed(marks) if each.rightwards]
    for label in inwards:
        lanes = (replace(label, lane=lane) for lane in range(len(placed) + 1))
        free = (each for each in lanes if not any(each.crosses(other) for other in placed))
        placed.append(next(free, replace(label, lane=len(placed))))
    return placed


def _mark(label: _Label, top: float, bottom: float) -> Iterator[str]:
    y = top - LANE * (label.lane + 1) - 6
    yield (
        f'<path d="M{label.at:.2f} {y - 9:.1f}V{bottom:.1f}" stroke="{MARK}" stroke-width="1.3" '
        f'stroke-dasharray="5 3"/>'
    )
    x, anchor = (label.at + 6, "start") if label.rightwards else (label.at - 6, "end")
    yield _text(x, y, label.text, size=12, fill=MARK, weight=600, anchor=anchor)
