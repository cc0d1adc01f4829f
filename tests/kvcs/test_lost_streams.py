"""Streams that break off while production goes on for long: a layer that is due does not wait for its end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from kvcs.assembly import Layer
from kvcs.retrieval import SETTLE, SILENCE
from kvcs.subscriber import CacheIncomplete
from moqt.quic.link import Link
from tests.kvcs.stage import (
    TOKENS,
    Piece,
    Stage,
    Wiretap,
    check_layers,
    descriptor,
    make_cache,
    now,
    put_layers,
    put_one_by_one,
    stage,
)

pytestmark = pytest.mark.virtual

LAYERS = 12
MODEL = descriptor(layers=LAYERS)
CACHE = make_cache(MODEL, len(TOKENS))
CONTROL_STREAM_ID = 3
INTERVAL = 0.5
"""Seconds between layers: never long enough for silence."""


class Streams:
    """Tells streams of the publisher apart by their first octets, which are a piece of their own."""

    def __init__(self) -> None:
        self.first: dict[int, bytes] = {}

    def is_fill_of_data(self, piece: Piece) -> bool:
        """Whether it is the second fetch stream: the first one is the fill of the manifest."""
        fetches = [stream for stream, data in self.note(piece).items() if data[0] == 0x05]
        return fetches[1:2] == [piece.stream]

    def is_group_2(self, piece: Piece) -> bool:
        """Whether it is the first stream of a Group 2: that of a data track."""
        streams = self.note(piece).items()
        groups = [stream for stream, data in streams if data[0] & 0x10 and data[2] == 2]
        return groups[:1] == [piece.stream]

    def is_fetch_of_data(self, piece: Piece) -> bool:
        """Whether it is a fetch stream, but for that of the manifest."""
        fetches = [stream for stream, data in self.note(piece).items() if data[0] == 0x05]
        return piece.stream in fetches[1:] and not piece.from_client

    def note(self, piece: Piece) -> dict[int, bytes]:
        if not piece.from_client and piece.stream & 2 and piece.stream != CONTROL_STREAM_ID:
            self.first.setdefault(piece.stream, piece.data)
        return self.first


def breaking(chooses: Callable[[Piece], bool], after: int, broken: list[Piece]) -> Callable[[Link], None]:
    """Break the stream that is chosen off after so many pieces."""
    pieces = 0

    def change(piece: Piece) -> Piece | None:
        nonlocal pieces
        if not chooses(piece):
            return piece
        pieces += 1
        if pieces <= after:
            return piece
        broken.append(piece)
        return None

    def tap(link: Link) -> None:
        wiretap = Wiretap(link)
        wiretap.change = change
        wiretap.reset_after = 0.1 if after else 0.0  # A reset that comes at once hides what was sent before.

    return tap


async def receive(scene: Stage, times: list[float]) -> list[Layer]:
    """All layers, and when each one came."""
    layers = []
    async with await scene.subscriber(MODEL).receive(TOKENS) as reception:
        async for layer in reception:
            layers.append(layer)
            times.append(now())
    return layers


@pytest.mark.parametrize("after", [0, 4])
async def test_a_fill_that_breaks_off(after: int) -> None:
    """Before its header has come, so that it may have been any stream, or behind it."""
    broken: list[Piece] = []
    times: list[float] = []
    async with stage(tap=breaking(Streams().is_fill_of_data, after, broken)) as scene:
        segment = scene.publisher(MODEL).publish(TOKENS).segment
        await put_layers(segment, CACHE, last=1)
        task = asyncio.create_task(receive(scene, times))
        for layer in range(2, LAYERS):
            await asyncio.sleep(INTERVAL)
            await put_layers(segment, CACHE, first=layer, last=layer)
        check_layers(await task, CACHE, MODEL)
    assert len(broken) == 1
    assert times[0] < (SILENCE + 2 * INTERVAL if after == 0 else 0.4)


async def test_a_fill_that_never_begins() -> None:
    """As of a peer that has none for us: then what it should bring is fetched."""
    times: list[float] = []
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        taps[0].mute = Streams().is_fill_of_data
        segment = scene.publisher(MODEL).publish(TOKENS).segment
        await put_layers(segment, CACHE, last=1)
        task = asyncio.create_task(receive(scene, times))
        for layer in range(2, LAYERS):
            await asyncio.sleep(INTERVAL)
            await put_layers(segment, CACHE, first=layer, last=layer)
        check_layers(await task, CACHE, MODEL)
    assert SILENCE < times[0] < SILENCE + 2 * INTERVAL


@pytest.mark.parametrize("after", [0, 4])
async def test_a_group_that_breaks_off(after: int) -> None:
    broken: list[Piece] = []
    times: list[float] = []
    async with stage(tap=breaking(Streams().is_group_2, after, broken)) as scene:
        segment = scene.publisher(MODEL).publish(TOKENS).segment
        task = asyncio.create_task(receive(scene, times))
        for layer in range(LAYERS):
            await asyncio.sleep(INTERVAL)
            await put_layers(segment, CACHE, first=layer, last=layer)
        check_layers(await task, CACHE, MODEL)
    assert len(broken) == 1
    began = 3 * INTERVAL  # of layer 2
    assert began < times[2] < began + (SETTLE + 2 * INTERVAL if after == 0 else 0.3)
    assert times[1] < began


@pytest.mark.requirement("R7.2d")
async def test_a_slow_fill_is_waited_for() -> None:
    """The manifest marks the segment complete, and nothing comes for more than a second: but the fill has not
    ended, so the track is not complete, and nothing is fetched.
    """
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        segment = scene.publisher(MODEL).publish(TOKENS).segment
        await put_layers(segment, CACHE, last=LAYERS - 2)

        streams = Streams()

        def delay(piece: Piece) -> float:
            return SETTLE + 0.7 if streams.is_fill_of_data(piece) else 0.0

        assert SETTLE + 0.7 < SILENCE
        taps[0].delay = delay
        task = asyncio.create_task(receive(scene, []))
        await asyncio.sleep(0.2)
        await put_layers(segment, CACHE, first=LAYERS - 1)
        check_layers(await task, CACHE, MODEL)
        assert now() > SETTLE + 0.7
    assert set(taps[0].data_objects(from_client=False).values()) == {1}


async def test_a_group_that_breaks_off_before_all_of_it_is_published() -> None:
    """The rest can't be fetched yet, and is not lost for that: it comes when it is there."""
    broken: list[Piece] = []
    times: list[float] = []
    async with stage(tap=breaking(Streams().is_group_2, 4, broken)) as scene:
        production = put_one_by_one(scene.publisher(MODEL).publish(TOKENS).segment, CACHE)
        task = asyncio.create_task(receive(scene, times))
        for _ in production:
            await asyncio.sleep(0.4)
        check_layers(await task, CACHE, MODEL)
    assert len(broken) == 1


@pytest.mark.parametrize("live", [False, True])
async def test_fetches_that_break_off_with_something(live: bool) -> None:
    """Each brings some Objects more, so none is lost, however often."""
    count = 0
    pieces: Counter[int] = Counter()
    streams = Streams()

    def change(piece: Piece) -> Piece | None:
        nonlocal count
        if not streams.is_fetch_of_data(piece):
            return piece
        pieces[piece.stream] += 1
        if pieces[piece.stream] < 12:
            return piece
        count += 1
        return None

    def tap(link: Link) -> None:
        wiretap = Wiretap(link)
        wiretap.change = change
        wiretap.reset_after = 0.1

    async with stage(tap=tap) as scene:
        segment = scene.publisher(MODEL).publish(TOKENS).segment
        await put_layers(segment, CACHE, last=LAYERS - 2 if live else None)
        task = asyncio.create_task(receive(scene, []))
        await asyncio.sleep(2)
        await put_layers(segment, CACHE, first=segment.next_layer)
        check_layers(await task, CACHE, MODEL)
    assert count > 10


async def test_fetches_that_break_off_with_nothing() -> None:
    """That is tried a few times, and no longer."""
    streams = Streams()

    def tap(link: Link) -> None:
        wiretap = Wiretap(link)
        wiretap.change = lambda piece: (
            None if streams.is_fetch_of_data(piece) and len(piece.data) > 2 else piece
        )
        wiretap.reset_after = 0.1

    async with stage(tap=tap) as scene:
        await put_layers(scene.publisher(MODEL).publish(TOKENS).segment, CACHE)
        with pytest.raises(CacheIncomplete, match="the peer reset the stream"):
            await receive(scene, [])
        assert now() < 1.0
