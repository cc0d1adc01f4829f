"""A producer that dies, stalls or breaks streams, at any step: the wait ends in time, and what is missing is
told exactly (kvcs 7.4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from kvcs.assembly import Layer, Missing, SegmentAssembly
from kvcs.discovery import DISCOVERY_WAIT
from kvcs.layout import Buffer
from kvcs.names import DataTrack
from kvcs.retrieval import SILENCE
from kvcs.subscriber import CacheIncomplete, NothingFound, Reception
from moqt.errors import MoqtError
from moqt.quic.link import Link
from moqt.quic.virtual import run_virtual
from moqt.tracks import Tracks
from tests.kvcs.stage import (
    TOKENS,
    Piece,
    Stage,
    Wiretap,
    check_layer,
    check_layers,
    descriptor,
    make_cache,
    now,
    put_one_by_one,
    stage,
)

MODEL = descriptor(layers=3)
CACHE = make_cache(MODEL, 6)
BLOCKS = 3
PAIRS = {(layer, block) for layer in range(MODEL.layers) for block in range(BLOCKS)}
PATIENCE = 5.0
REPLY_DEADLINE = 10.0
"""What the session gives a reply to a request, by default."""

CONTROL_STREAM_ID = 3
"""Of the server, which publishes where streams are broken off."""

Fault = Callable[[Stage], None]
Change = Callable[[Piece], Piece | None]
Placed = set[tuple[DataTrack, int, int]]


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Placed:
    """All Objects that were verified and placed, as the test goes on."""
    seen: Placed = set()
    original = SegmentAssembly.place

    def place(self: SegmentAssembly, track: DataTrack, layer: int, block: int, payload: Buffer) -> bool:
        usable = original(self, track, layer, block, payload)
        seen.add((track, layer, block))
        return usable

    monkeypatch.setattr(SegmentAssembly, "place", place)
    return seen


@dataclass
class Outcome:
    """How a reception went."""

    steps: int = 0
    began: int = 0
    fault_at: float | None = None
    ended_at: float = 0.0
    tap: Wiretap | None = None
    error: Exception | None = None
    layers: list[Layer] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    reception: Reception | None = None


async def play(
    fault: Fault | None,
    step: int,
    *,
    live: bool,
    partial: bool = False,
    publisher_dials: bool = False,
    budget: float | None = None,
    change: Change | None = None,
    reset_after: float = 0.0,
) -> Outcome:
    """Receive a cache, half of it live if `live`, while `fault` happens before message `step` is delivered,
    or `change` changes what is sent.
    """
    outcome = Outcome()

    def tap(link: Link) -> None:
        outcome.tap = Wiretap(link)
        outcome.tap.change = change
        outcome.tap.reset_after = reset_after

    async with stage(publisher_dials=publisher_dials, chunk=40, seed=step, tap=tap) as scene:
        outcome.began = scene.link.steps

        def happen() -> None:
            assert fault is not None
            outcome.fault_at = now()
            fault(scene)

        if fault is not None:
            scene.link.at(max(step, outcome.began), happen)
        production = put_one_by_one(scene.publisher(MODEL).publish(TOKENS).segment, CACHE)
        for _ in range(10 if live else 1000):
            next(production, None)

        async def produce() -> None:
            for _ in production:
                await asyncio.sleep(0.02)

        producer = asyncio.create_task(produce())
        try:
            subscriber = scene.subscriber(MODEL, patience=PATIENCE, budget=budget)
            async with await subscriber.receive(TOKENS) as reception:
                outcome.reception = reception
                reception.partial = partial
                try:
                    async for layer in reception:
                        outcome.layers.append(layer)
                finally:
                    outcome.missing = reception.missing
        except (CacheIncomplete, NothingFound, MoqtError) as error:
            outcome.error = error
        outcome.ended_at = now()
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)
        outcome.steps = scene.link.steps
    return outcome


def check(outcome: Outcome, placed: Placed, *, partial: bool) -> None:
    """What was handed out and what is missing are what was received and what was not."""
    if outcome.reception is None:
        assert isinstance(outcome.error, NothingFound | MoqtError)
        return
    tracks = {track for track, _, _ in placed} | {DataTrack.parse("k.raw.s0"), DataTrack.parse("v.raw.s0")}
    whole = {pair for pair in PAIRS if all((track, *pair) in placed for track in tracks)}
    assert {(pair.layer, pair.block) for pair in outcome.missing} == PAIRS - whole
    assert len(outcome.missing) == len(PAIRS - whole)
    usable = [layer for layer in range(MODEL.layers) if {(layer, b) for b in range(BLOCKS)} <= whole]
    came = [layer.layer for layer in outcome.layers]
    if partial:
        assert came == usable
        assert outcome.error is None
    else:
        assert came == usable[: len(came)] == list(range(len(came)))
        if outcome.missing:
            assert isinstance(outcome.error, CacheIncomplete)
            assert list(outcome.error.missing) == outcome.missing
            assert len(came) not in usable
        else:
            assert outcome.error is None
    for layer in outcome.layers:
        check_layer(layer, CACHE, MODEL)


def cut(scene: Stage) -> None:
    scene.link.cut()


def stall(scene: Stage) -> None:
    scene.link.stall()


def close(scene: Stage) -> None:
    scene.there.connection.close(0, "gone")


def steps_of(*, live: bool, publisher_dials: bool = False) -> range:
    """The messages of a reception in which nothing goes wrong."""
    outcome = run_virtual(play(None, 0, live=live, publisher_dials=publisher_dials))
    assert outcome.error is None
    check_layers(outcome.layers, CACHE, MODEL)
    return range(outcome.began, outcome.steps)


@pytest.mark.requirement("R7.4d")
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("fault", [cut, stall, close])
def test_the_producer_dies_at_any_step(fault: Fault, live: bool, placed: Placed) -> None:
    """Pieces have 40 octets, an Object 84: most steps lie in the middle of an Object."""
    incomplete = 0
    for step in steps_of(live=live):
        placed.clear()
        partial, publisher_dials = bool(step % 2), bool(step // 2 % 2)
        outcome = run_virtual(play(fault, step, live=live, partial=partial, publisher_dials=publisher_dials))
        check(outcome, placed, partial=partial)
        assert outcome.fault_at is not None
        wait = outcome.ended_at - outcome.fault_at
        if outcome.reception is None:
            assert wait <= REPLY_DEADLINE + DISCOVERY_WAIT
        elif fault is stall:
            assert wait <= PATIENCE + 0.1
        else:
            assert wait <= 0.1
        incomplete += bool(outcome.missing)
    assert incomplete > 20


@pytest.mark.requirement("R7.4d")
@pytest.mark.parametrize("live", [True, False])
def test_a_budget_bounds_the_whole(live: bool, placed: Placed) -> None:
    """Also discovery, for which the deadline of a reply would be longer."""
    for step in steps_of(live=live)[::5]:
        placed.clear()
        outcome = run_virtual(play(stall, step, live=live, budget=2.0))
        check(outcome, placed, partial=False)
        assert outcome.error is None or isinstance(outcome.error, CacheIncomplete | NothingFound)
        assert outcome.ended_at <= 2.2
        assert outcome.error is None or "budget" in str(outcome.error)


class Breaker:
    """Breaks off streams of the publisher, but for its control stream: those in which one of its pieces, by
    their number, is in `pieces`.
    """

    def __init__(self, pieces: Container[int]) -> None:
        self.pieces = pieces
        self.seen = 0

    def __call__(self, piece: Piece) -> Piece | None:
        if piece.from_client or piece.stream == CONTROL_STREAM_ID:
            return piece
        self.seen += 1
        return None if self.seen - 1 in self.pieces else piece


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("reset_after", [0.0, 0.05])
def test_any_stream_is_reset_once(reset_after: float, live: bool, placed: Placed) -> None:
    """Whatever the stream is for, and wherever it breaks off, all comes in the end, and soon. A reset that
    comes at once also hides what was sent before it.
    """
    breaker = Breaker(())
    untroubled = run_virtual(play(None, 0, live=live, change=breaker))
    assert breaker.seen > 50
    for number in range(breaker.seen):
        placed.clear()
        outcome = run_virtual(play(None, 0, live=live, change=Breaker({number}), reset_after=reset_after))
        assert outcome.error is None
        check(outcome, placed, partial=False)
        check_layers(outcome.layers, CACHE, MODEL)
        assert outcome.ended_at <= untroubled.ended_at + SILENCE + 0.5


@pytest.mark.requirement("R7.4d")
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("every", [1, 3, 7])
def test_streams_are_reset_again_and_again(live: bool, every: int, placed: Placed) -> None:
    """Every stream breaks off at its first piece, its third, or so: it ends, with what could be had."""
    for start in range(0, 120, 11):
        placed.clear()
        pieces = range(start, 10**6, every)
        outcome = run_virtual(play(None, 0, live=live, partial=bool(start % 2), change=Breaker(pieces)))
        check(outcome, placed, partial=bool(start % 2))
        assert outcome.ended_at <= REPLY_DEADLINE + 2 * PATIENCE


@pytest.mark.requirement("R7.4d")
def test_a_restarted_subscriber_gets_everything() -> None:
    """The subscriber dies at a step of its reception, and its successor has nothing of what came before."""

    async def restart(step: int) -> None:
        tracks = Tracks()
        async with stage(tracks=tracks, chunk=40) as scene:
            production = put_one_by_one(scene.publisher(MODEL).publish(TOKENS).segment, CACHE)
            for _ in range(10):
                next(production)
            scene.link.at(max(step, scene.link.steps), scene.link.cut)
            with suppress(MoqtError, CacheIncomplete, NothingFound, TimeoutError):
                await asyncio.wait_for(scene.receive(model=MODEL), 1)
        async with stage(tracks=tracks) as scene:
            task = asyncio.create_task(scene.receive(model=MODEL))
            for _ in production:
                await asyncio.sleep(0.02)
            check_layers(await task, CACHE, MODEL)

    for step in range(10, 200, 7):
        run_virtual(restart(step))
