"""When each layer of a cache was computed, arrived, was verified and was used: drawn as text here, and as a
picture in `timeline_svg`.

Times are seconds of one clock that all who report them share: `time.monotonic()` on one machine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby


class Step(StrEnum):
    """What happened to a layer."""

    COMPUTED = "computed"  # producer: its K and V exist and go to the publisher
    ARRIVED = (
        "arrived"  # consumer: an Object of it is here; once per Object, or for the first and the last only
    )
    VERIFIED = "verified"  # consumer: every check has passed, the layer is handed out
    USED = "used"  # consumer: the rest of the prompt has gone through this layer


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time, in seconds since the start."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Row:
    """One layer, in seconds since the start. What has not happened is None or empty. `computing` has one
    bar per COMPUTED: its begin is the COMPUTED before it, of whatever layer.
    """

    layer: int
    computing: tuple[Bar, ...]
    arrivals: tuple[float, ...]
    verified: float | None
    used: float | None

    @property
    def arriving(self) -> tuple[Bar, ...]:
        """From the first to the last arrival after each COMPUTED: one bar per segment of the cache."""
        ends = [bar.end for bar in self.computing]
        groups = groupby(self.arrivals, key=lambda at: bisect_right(ends, at))
        spans = [list(group) for _, group in groups]
        return tuple(Bar(span[0], span[-1]) for span in spans)

    @property
    def lag(self) -> float | None:
        """Seconds from computed to verified."""
        if not self.computing or self.verified is None:
            return None
        return self.verified - self.computing[-1].end


@dataclass(slots=True)
class Timeline:
    """`start` is when the producer began to compute; None: at the first event. `layers` is how many rows to
    show at least.
    """

    start: float | None = None
    layers: int = 0
    events: list[tuple[Step, int, float]] = field(default_factory=list)
    marks: list[tuple[str, float]] = field(default_factory=list)

    def note(self, step: Step, layer: int, at: float) -> None:
        """`step` happened to `layer` at the time `at`."""
        self.events.append((step, layer, at))

    def mark(self, label: str, at: float) -> None:
        """Something happened that is no layer's: drawn as a line across all rows."""
        self.marks.append((label, at))

    @property
    def origin(self) -> float:
        """The time that is drawn as 0 s."""
        times = [at for _, _, at in self.events] + [at for _, at in self.marks]
        return self.start if self.start is not None else min(times, default=0.0)

    @property
    def span(self) -> float:
        """Seconds from the origin to whatever came last; never 0."""
        times = [at for _, _, at in self.events] + [at for _, at in self.marks]
        return max(max(times, default=self.origin) - self.origin, 1e-3)

    def relative_marks(self) -> list[tuple[str, float]]:
        """The marks in order, in seconds since the origin."""
        return sorted(((label, at - self.origin) for label, at in self.marks), key=lambda mark: mark[1])

    def rows(self) -> list[Row]:
        """One row per layer, from 0."""
        origin = self.origin
        count = max([self.layers, *(layer + 1 for _, layer, _ in self.events)])
        computing: list[list[Bar]] = [[] for _ in range(count)]
        before = 0.0
        for layer, end in sorted(self._of(Step.COMPUTED), key=lambda event: event[1]):
            computing[layer].append(Bar(before, end - origin))
            before = end - origin
        times: dict[Step, list[list[float]]] = {step: [[] for _ in range(count)] for step in Step}
        for step, layer, at in self.events:
            times[step][layer].append(at - origin)
        return [
            Row(
                layer,
                tuple(computing[layer]),
                tuple(sorted(times[Step.ARRIVED][layer])),
                max(times[Step.VERIFIED][layer], default=None),
                max(times[Step.USED][layer], default=None),
            )
            for layer in range(count)
        ]

    def _of(self, wanted: Step) -> list[tuple[int, float]]:
        return [(layer, at) for step, layer, at in self.events if step is wanted]


def tick_step(span: float, most: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten of which at most `most` steps fit into `span` seconds."""
    power = 1e-6
    while True:
        for factor in (1, 2, 5):
            if span <= factor * power * most:
                return factor * power
        power *= 10


def tick_label(value: float, step: float) -> str:
    """`value` with as many decimals as multiples of `step` need."""
    decimals = 0
    while decimals < 6 and abs(round(step, decimals) - step) > 1e-9:
        decimals += 1
    return f"{value:.{decimals}f}"


def duration(seconds: float) -> str:
    """Such as "6.3 ms", "412 ms" or "1.52 s"."""
    if seconds < 0.0995:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of the text form."""

    computing: str
    arriving: str
    verified: str
    used: str
    mark: str


UNICODE = Glyphs("░", "█", "◆", "●", "│")
ASCII = Glyphs(".", "#", "v", "u", "|")
COLOURS = {"computing": "90", "arriving": "36", "verified": "32", "used": "33", "mark": "35"}  # SGR numbers
MEANINGS = {
    "computing": "being computed",
    "arriving": "arriving",
    "verified": "verified",
    "used": "used by the consumer",
}
GUTTER, LAG_WIDTH = " " * 6, 11  # columns left and right of the plot


def render_text(
    timeline: Timeline,
    *,
    width: int = 100,
    span: float = 0.0,
    live: bool = False,
    ascii_only: bool = False,
    colour: bool = False,
) -> str:
    """The timeline in `width` columns, for a terminal: one line per layer, a scale above, a legend below. It
    shows `span` seconds at least. `live`: what has not come yet may still come, and is not called missing.
    """
    glyphs = ASCII if ascii_only else UNICODE
    columns = max(width - len(GUTTER) - LAG_WIDTH, 20)
    span = max(span, timeline.span)
    per_column = span / (columns - 1)

    def column(at: float) -> int:
        return min(max(round(at / per_column), 0), columns - 1)

    def painted(kinds: Sequence[str]) -> str:
        text = ""
        for kind, run in groupby(kinds):
            cells = getattr(glyphs, kind, " ") * len(list(run))
            text += f"\x1b[{COLOURS[kind]}m{cells}\x1b[0m" if colour and kind else cells
        return text

    def line(row: Row) -> str:
        kinds = [""] * columns
        for _, at in timeline.relative_marks():
            kinds[column(at)] = "mark"
        bars = [("computing", bar) for bar in row.computing]
        bars += [("arriving", bar) for bar in row.arriving]
        for kind, bar in bars:
            for place in range(column(bar.begin), column(bar.end) + 1):
                kinds[place] = kind
        for kind, moment in (("verified", row.verified), ("used", row.used)):
            if moment is not None:
                kinds[column(moment)] = kind
        if row.verified is None:
            note = "" if live else "not whole"
        else:
            note = "" if row.lag is None else duration(row.lag)
        return f"{row.layer:>5} {painted(kinds)}{note:>{LAG_WIDTH}}"

    def scale() -> str:
        step = tick_step(span, max(columns // 10, 2))
        text = ""
        for tick in range(int(span / step) + 1):
            label = tick_label(tick * step, step) + (" s" if tick == 0 else "")
            at = column(tick * step)
            if at >= len(text) and at + len(label) <= columns:
                text = text.ljust(at) + label
        return text.ljust(columns)

    legend = "   ".join(f"{painted([kind])} {meaning}" for kind, meaning in MEANINGS.items())
    return "\n".join(
        [
            f"layer {scale()}{'lag':>{LAG_WIDTH}}",
            *(line(row) for row in timeline.rows()),
            f"{GUTTER}{legend}",
            f"{GUTTER}lag: from computed to verified",
            *(f"{GUTTER}{painted(['mark'])} {at:.3f} s  {label}" for label, at in timeline.relative_marks()),
        ]
    )
