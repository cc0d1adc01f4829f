"""80 layers and two tracks: 160 Subgroup streams at once (kvcs 9)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from moqt.quic.api import QuicOptions
from moqt.quic.memory import MemoryConnection
from moqt.track import Track
from tests.kvcs.stage import (
    TOKENS,
    Wiretap,
    check_layers,
    collect,
    descriptor,
    make_cache,
    now,
    put_layers,
    stage,
)

pytestmark = pytest.mark.virtual

MODEL = descriptor(layers=80)
CACHE = make_cache(MODEL, len(TOKENS))


def open_streams(connection: MemoryConnection) -> int:
    """Unidirectional streams of the peer that have begun and not ended, as the connection sees them."""
    return sum(
        not stream.bidirectional and not stream.receiving_done for stream in connection._streams.values()
    )


@pytest.mark.requirement("R9b")
@pytest.mark.parametrize("publisher_dials", [False, True])
@pytest.mark.parametrize("jitter", [0.0, 0.2])
async def test_160_streams_at_once(publisher_dials: bool, jitter: float) -> None:
    """No Group ends before all have begun, so all streams are open at the same time."""
    taps: list[Wiretap] = []
    async with stage(
        publisher_dials=publisher_dials, jitter=jitter, seed=3, tap=lambda link: taps.append(Wiretap(link))
    ) as scene:
        publication = scene.publisher(MODEL).publish(TOKENS)
        later: list[Callable[[], object]] = []
        for track in publication.segment.tracks.values():
            hold_back(track, later)
        layer_done = publication.layer_done
        publication.layer_done = lambda *args: later.append(partial(layer_done, *args))  # type: ignore[method-assign]  # the test takes its place
        receiving = scene.link.server if publisher_dials else scene.link.client
        async with await scene.subscriber(MODEL).receive(TOKENS) as reception:
            task = asyncio.create_task(collect(reception))
            await asyncio.sleep(1)
            await put_layers(publication.segment, CACHE)
            await asyncio.sleep(1)
            assert open_streams(receiving) == 160 + 1  # and the control stream
            assert len(reception.missing) == 80
            for action in later:
                action()
            check_layers(await task, CACHE, MODEL)
            assert (reception.missing, reception.rejected) == ([], 0)
    count = taps[0].data_objects(from_client=publisher_dials)
    assert len(count) == 2 * 80 * 3
    assert set(count.values()) == {1}


def hold_back(track: Track, later: list[Callable[[], object]]) -> None:
    """Let a track publish the last Object of each Group, and its end, only when it is told to."""
    append, end_group, end = track.append, track.end_group, track.end

    def hold(group: int, object_id: int, *args: Any, **options: Any) -> bool:
        if object_id == 2:
            later.append(partial(append, group, object_id, *args, **options))
            return True
        return append(group, object_id, *args, **options)

    track.append = hold  # type: ignore[method-assign]  # a slow producer
    track.end_group = lambda *args: later.append(partial(end_group, *args))  # type: ignore[method-assign]  # the test takes its place
    track.end = lambda location: later.append(partial(end, location))  # type: ignore[method-assign]  # the test takes its place


@pytest.mark.parametrize("streams", [2, 3, 10])
async def test_few_streams_are_granted(streams: int) -> None:
    """One is the control stream; the Groups take turns on the others."""
    async with stage(options=QuicOptions(max_uni_streams=streams)) as scene:
        segment = scene.publisher(MODEL).publish(TOKENS).segment
        task = asyncio.create_task(scene.receive(model=MODEL))
        await asyncio.sleep(1)
        await put_layers(segment, CACHE)
        check_layers(await task, CACHE, MODEL)
        assert now() < 30
