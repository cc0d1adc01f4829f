"""What the demo has seen: gathered from what both processes report, and told in figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import median

from examples.child import Event
from examples.timeline import Step, Timeline, duration

FIRST_TOKEN = "first token"
LAST_COMPUTED = "last layer computed"


@dataclass(slots=True)
class Report:
    """What the producer and the consumer have reported so far; `events` holds the last of each kind. `relays`
    is how many are between them.
    """

    relays: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    events: dict[tuple[str, str], Event] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=lambda: {"producer": [], "consumer": []})

    def note(self, name: str, event: Event) -> None:
        """Take in an event of the process `name`."""
        self.events[name, event["event"]] = event
        match event:
            case {"event": "loaded", "layers": layers}:
                self.timeline.layers = layers
            case {"event": "started", "at": at}:
                self.timeline.start = at
            case {"event": "step", "step": step, "layer": layer, "at": at}:
                self.timeline.note(Step(step), layer, at)
                if step == Step.COMPUTED and layer == self.timeline.layers - 1:
                    self.timeline.mark(LAST_COMPUTED, at)
            case {"event": "mark", "label": label, "at": at}:
                self.timeline.mark(label, at)
            case {"event": "token", "token": token, "at": at}:
                if name == "consumer" and not self.tokens[name]:
                    self.timeline.mark(FIRST_TOKEN, at)
                self.tokens[name].append(token)

    def text(self, name: str) -> str:
        """What the process `name` has written."""
        event = self.events.get((name, "token"))
        return "" if event is None else str(event["text"])

    @property
    def agreeing(self) -> int:
        """How many tokens, from the first on, are the same in both texts."""
        pairs = zip(self.tokens["producer"], self.tokens["consumer"], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def same(self) -> bool:
        """Whether both wrote the same tokens, one at least."""
        return 0 < self.agreeing == len(self.tokens["producer"]) == len(self.tokens["consumer"])

    def foreseen(self) -> float:
        """About how many seconds it will be from the start to the first token."""
        rows = self.timeline.rows()
        ends = [bar.end for row in rows for bar in row.computing]
        if len(ends) < 2:
            return self.timeline.span
        per_layer = (ends[-1] - ends[0]) / (len(ends) - 1)
        return max(self.timeline.span, ends[0] + (len(rows) - 0.5) * per_layer)

    def title(self) -> str:
        """What the picture shows."""
        loaded = self.events["consumer", "loaded"]
        published = loaded["tokens"] // loaded["block_tokens"] * loaded["block_tokens"]
        model = str(loaded["model"]).rpartition("/")[2]
        return f"The KV cache of {published:,} tokens leaves {model} layer by layer"

    def subtitle(self) -> str:
        """How that went."""
        received = self.events.get(("consumer", "received"))
        if received is None:
            return "It did not arrive whole."
        lags = [row.lag for row in self.timeline.rows() if row.lag is not None]
        way = {0: "", 1: ", through a relay"}.get(self.relays, f", through {self.relays} relays")
        return (
            f"{_size(received)} over MOQT, from one process to another on one machine{way}. "
            f"A layer is verified {duration(median(lags))} after it was computed (median)."
        )

    def figures(self) -> Iterator[tuple[str, str]]:
        """Names and figures of a cache that arrived whole."""
        received = self.events.get(("consumer", "received"))
        if received is None:
            return
        timeline = self.timeline
        rows = timeline.rows()
        lags = [row.lag for row in rows if row.lag is not None]
        verified = [row.verified for row in rows if row.verified is not None]
        computed = max(bar.end for row in rows for bar in row.computing)
        refused = f"; {received['rejected']} refused" if received["rejected"] else ""
        yield "cache", f"{_size(received)}, each one verified{refused}"
        yield "layer 0", f"usable after {duration(verified[0])}, {duration(lags[0])} after it was computed"
        yield (
            "all layers",
            f"usable after {duration(max(verified))}, "
            f"{duration(max(verified) - computed)} after the last one was computed",
        )
        yield "lag", f"{duration(median(lags))} from computed to verified, at most {duration(max(lags))}"
        for label, at in timeline.relative_marks():
            if label == FIRST_TOKEN:
                yield (
                    label,
                    f"written by the consumer after {duration(at)}, "
                    f"{duration(at - computed)} after the last layer was computed",
                )
        yield (
            "work",
            f"the producer computed for {duration(computed)}, "
            f"the consumer for {duration(received['computing'])}",
        )


def _size(received: Event) -> str:
    return f"{received['octets'] / 1e6:.1f} MB in {received['objects']:,} Objects"
