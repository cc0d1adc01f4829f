"""When a track is complete for the consumer: by End of Track, PUBLISH_DONE, or fill and manifest (kvcs 7.2,
14 #9).

A consumer that has all it wants asks for no such sign. So what is looked at is when it knows that an Object
which is missing will not come.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvcs.assembly import Missing
from kvcs.names import DataTrack
from kvcs.publisher import Publication
from kvcs.retrieval import SETTLE
from kvcs.subscriber import CacheIncomplete
from moqt.errors import DoneCode
from moqt.filters import Location
from moqt.track import Track, TrackWatcher
from moqt.wire import Subscribe
from tests.kvcs.stage import (
    CACHE,
    MODEL,
    TOKENS,
    Piece,
    Stage,
    Wiretap,
    check_layers,
    collect,
    make_cache,
    now,
    put_layers,
    put_one_by_one,
    stage,
)

pytestmark = pytest.mark.virtual

LAYERS, BLOCKS = MODEL.layers, 3
PATIENCE = 30.0
SOON = SETTLE + 0.5
"""Seconds that a consumer may take to know that nothing more will come."""


def lose(publication: Publication, name: str, layer: int, block: int) -> None:
    """Let a track never publish one of its Objects."""
    track = publication.segment.tracks[DataTrack.parse(name)]
    append = track.append

    def forgetful(group: int, object_id: int, *args: Any, **options: Any) -> bool:
        return (group, object_id) != (layer, block) and append(group, object_id, *args, **options)

    track.append = forgetful  # type: ignore[method-assign]  # a fault, for once


def never_end(publication: Publication) -> None:
    """No End of Track."""
    for track in publication.segment.tracks.values():
        track.end = lambda location: None  # type: ignore[method-assign]  # a fault, for once


def never_end_a_group(publication: Publication) -> None:
    """No End of Group, and the streams of the Groups stay open."""
    for track in publication.segment.tracks.values():
        track.end_group = lambda group, object_id: None  # type: ignore[method-assign]  # a fault, for once


def never_complete(publication: Publication) -> None:
    """No manifest but the first."""
    publication.layer_done = lambda segment, digests: None  # type: ignore[method-assign]  # a fault, for once


async def incomplete(scene: Stage, *, patience: float = PATIENCE) -> tuple[float, CacheIncomplete]:
    """Receive what will turn out to be incomplete; when that was known, and the error."""
    with pytest.raises(CacheIncomplete) as caught:
        await scene.receive(patience=patience)
    return now(), caught.value


@pytest.mark.requirement("R7.2d")
@pytest.mark.parametrize(("layer", "block"), [(0, 0), (2, 1), (3, 2)])
async def test_end_of_track_alone(layer: int, block: int) -> None:
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        lose(publication, "v.raw.s0", layer, block)
        never_end_a_group(publication)
        never_complete(publication)
        task = asyncio.create_task(incomplete(scene))
        await asyncio.sleep(1)
        await put_layers(publication.segment, CACHE)
        ended = now()
        at, error = await task
        assert error.missing == (Missing(0, layer, block),)
        assert ended < at < ended + SOON


@pytest.mark.requirement("R7.2d")
async def test_publish_done_for_track_ended_alone() -> None:
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        publication = scene.publisher().publish(TOKENS)
        lose(publication, "v.raw.s0", 2, 1)
        never_end_a_group(publication)
        never_complete(publication)
        never_end(publication)
        task = asyncio.create_task(incomplete(scene))
        await asyncio.sleep(1)
        await put_layers(publication.segment, CACHE)
        await asyncio.sleep(2)
        assert not task.done()
        for track in publication.segment.tracks.values():
            track.close(DoneCode.TRACK_ENDED)
        ended = now()
        at, error = await task
        assert error.missing == (Missing(0, 2, 1),)
        assert ended < at < ended + 0.5
    # Nor is there a reason to subscribe again.
    requests = [one for one in taps[0].requests(from_client=True) if isinstance(one, Subscribe)]
    assert [one.track.name for one in requests].count(b"v.raw.s0") == 1


@pytest.mark.requirement("R7.2d")
@pytest.mark.parametrize("join", [0, 9, 20])
async def test_fill_and_complete_manifest_alone(join: int) -> None:
    """The manifest that says so comes later than all Objects."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        lose(publication, "v.raw.s0", 2, 1)
        never_end_a_group(publication)
        never_end(publication)
        layer_done = publication.layer_done
        done: list[Any] = []
        publication.layer_done = lambda *args: done.append(args)  # type: ignore[method-assign]  # held back
        production = put_one_by_one(publication.segment, CACHE)
        for _ in range(join):
            next(production)
        task = asyncio.create_task(incomplete(scene))
        for _ in production:
            await asyncio.sleep(0.1)
        await asyncio.sleep(3)
        assert not task.done()
        for args in done:
            layer_done(*args)
        complete = now()
        at, error = await task
        assert error.missing == (Missing(0, 2, 1),)
        assert complete < at < complete + SOON


@pytest.mark.parametrize("block", range(BLOCKS))
async def test_end_of_group_tells_of_its_layer(block: int) -> None:
    """While production goes on, the consumer knows that a layer which has ended will not be whole."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        lose(publication, "k.raw.s0", 1, block)
        task = asyncio.create_task(incomplete(scene))
        await asyncio.sleep(1)
        await put_layers(publication.segment, CACHE, last=1)
        put = now()
        at, error = await task
        assert at < put + 0.5
        assert error.missing[0] == Missing(0, 1, block)
        assert "k.raw.s0" in error.reason
        assert len(error.missing) == 1 + 2 * BLOCKS  # and layers 2 and 3, which are not published


async def test_nothing_comes_after_the_error() -> None:
    """What is missing stays as it was told, though production goes on."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        lose(publication, "k.raw.s0", 1, 1)
        async with await scene.subscriber().receive(TOKENS) as reception:
            await put_layers(publication.segment, CACHE, last=1)
            with pytest.raises(CacheIncomplete) as caught:
                await collect(reception)
            await asyncio.sleep(0.1)
            assert not any(track._watchers for track in publication.segment.tracks.values())
            await put_layers(publication.segment, CACHE, first=2)
            await asyncio.sleep(1)
            assert reception.missing == list(caught.value.missing)
            assert len(reception.missing) == 1 + 2 * BLOCKS


@pytest.mark.requirement("R7.2d")
async def test_none_of_the_three() -> None:
    """Then the Object may still come: it is waited for as long as patience lasts."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        lose(publication, "v.raw.s0", 3, 2)
        never_end(publication)
        never_complete(publication)
        never_end_a_group(publication)
        task = asyncio.create_task(incomplete(scene, patience=8.0))
        await asyncio.sleep(1)
        await put_layers(publication.segment, CACHE)
        last = now()
        at, error = await task
        assert error.missing == (Missing(0, 3, 2),)
        assert last + 7.9 < at < last + 8.1


async def test_all_objects_without_any_sign() -> None:
    """No End of Group, no End of Track, no complete manifest, no PUBLISH_DONE: what is there is enough."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        never_end(publication)
        never_complete(publication)
        never_end_a_group(publication)
        task = asyncio.create_task(scene.receive())
        await asyncio.sleep(1)
        await put_layers(publication.segment, CACHE)
        put = now()
        check_layers(await task, CACHE)
        assert now() < put + 0.2


async def test_going_away_is_no_end_but_nothing_more_comes() -> None:
    """The producer leaves in the middle of its work."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        task = asyncio.create_task(incomplete(scene))
        await asyncio.sleep(1)
        await put_layers(publication.segment, CACHE, last=1)
        await asyncio.sleep(1)
        publication.close()
        closed = now()
        at, error = await task
        assert closed < at < closed + 0.5
        assert error.missing == tuple(Missing(0, layer, block) for layer in (2, 3) for block in range(BLOCKS))


@pytest.mark.parametrize("code", [DoneCode.TOO_FAR_BEHIND, DoneCode.GOING_AWAY, DoneCode.INTERNAL_ERROR])
async def test_a_subscription_that_ends_early_is_made_again(code: DoneCode) -> None:
    """PUBLISH_DONE for another reason than the end of the track, while the track goes on."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        task = asyncio.create_task(scene.receive())
        for layer in range(LAYERS):
            await asyncio.sleep(1)
            for track in publication.segment.tracks.values():
                track.close(code)
            await asyncio.sleep(1)
            await put_layers(publication.segment, CACHE, first=layer, last=layer)
        check_layers(await task, CACHE)


async def test_subscriptions_that_end_again_and_again() -> None:
    """Without bringing anything: that is not tried for ever."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        await put_layers(publication.segment, CACHE, last=1)
        for track in publication.segment.tracks.values():
            watch = track.watch

            def watch_and_end(watcher: TrackWatcher, watch: Any = watch, track: Track = track) -> None:
                watch(watcher)
                asyncio.get_running_loop().call_later(0.1, track.close, DoneCode.TOO_FAR_BEHIND)

            track.watch = watch_and_end  # type: ignore[method-assign]  # a fault, for once
        at, error = await incomplete(scene)
        assert at < 2
        assert error.missing == tuple(Missing(0, layer, block) for layer in (2, 3) for block in range(BLOCKS))


@pytest.mark.parametrize("live", [True, False])
async def test_a_further_segment_is_waited_for_while_there_is_production(live: bool) -> None:
    """The tokens go on after what is published: a segment may follow, but hardly when all was complete."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        await put_layers(publication.segment, CACHE, last=2 if live else None)
        subscriber = scene.subscriber(segment_wait=3.0)
        async with await subscriber.receive([*TOKENS, 1, 2]) as reception:
            task = asyncio.create_task(collect(reception))
            await asyncio.sleep(0.5)
            if live:
                await put_layers(publication.segment, CACHE, first=3)
            at = now()
            check_layers(await task, CACHE)
            assert reception.blocks == BLOCKS
            assert (3.0 <= now() - at < 3.1) if live else now() == at


async def test_patience_for_a_further_segment_begins_with_it() -> None:
    """However long it was waited for."""
    tokens = [*TOKENS, 1, 2]
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        subscriber = scene.subscriber(patience=5.0, segment_wait=60.0)
        async with await subscriber.receive(tokens) as reception:
            task = asyncio.create_task(collect(reception))
            await put_layers(publication.segment, CACHE)
            await asyncio.sleep(30)
            publication.add_segment([1, 2])
            await asyncio.sleep(4)
            await put_layers(publication.segment, make_cache(MODEL, 2))
            assert len(await task) == 2 * LAYERS


# Signs that come too early


@pytest.mark.parametrize("delay", [SETTLE - 0.1, SETTLE + 1])
@pytest.mark.parametrize("sign", ["End of Track", "PUBLISH_DONE"])
async def test_the_end_overtakes_the_streams(sign: str, delay: float) -> None:
    """The streams of the data are held up on the way, the sign of the end is not."""
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        publication = scene.publisher().publish(TOKENS)
        task = asyncio.create_task(scene.receive(patience=PATIENCE))
        await asyncio.sleep(1)

        def hold(piece: Piece) -> float:
            return delay if b"KVO1" in piece.data and len(taps[0].pieces) < 200 else 0.0

        taps[0].delay = hold
        if sign == "PUBLISH_DONE":
            never_end(publication)
            never_complete(publication)
        await put_layers(publication.segment, CACHE)
        if sign == "PUBLISH_DONE":
            for track in publication.segment.tracks.values():
                track.close(DoneCode.TRACK_ENDED)
        check_layers(await task, CACHE)
        if delay < SETTLE:  # Then nothing is fetched.
            sent = taps[0].data_objects(from_client=False)
            assert set(sent.values()) == {1}


# Manifest and track disagree (kvcs 14 #9)


def finish(publication: Publication) -> None:
    """A manifest that marks segment 0 complete, whatever its tracks have."""
    publication.segment.next_layer = LAYERS
    publication.layer_done(publication.segment, {})


@pytest.mark.parametrize("live", [True, False])
async def test_the_manifest_promises_more_than_the_track_has(live: bool) -> None:
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        task = asyncio.create_task(incomplete(scene)) if live else None
        await asyncio.sleep(1)
        await put_layers(publication.segment, CACHE, last=1)
        for track in publication.segment.tracks.values():
            track.end(Location(2, 0))
        finish(publication)
        ended = now()
        at, error = await (task or incomplete(scene))
        assert at < ended + SOON
        assert error.missing == tuple(Missing(0, layer, block) for layer in (2, 3) for block in range(BLOCKS))


@pytest.mark.parametrize("live", [True, False])
async def test_the_track_has_more_than_the_manifest_promises(live: bool) -> None:
    """Blocks and layers beyond, and other Subgroup IDs there: they are ignored."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        never_end(publication)
        never_end_a_group(publication)
        task = asyncio.create_task(scene.receive()) if live else None
        await asyncio.sleep(1)
        await put_layers(publication.segment, CACHE, last=2)
        for track in publication.segment.tracks.values():
            for group in (0, 1, 2, LAYERS, LAYERS + 5):
                for block in (BLOCKS, BLOCKS + 1):
                    track.append(group, block, b"more", priority=128 * group // LAYERS if group < 4 else 0)
        await put_layers(publication.segment, CACHE, first=3)
        check_layers(await (task or scene.receive()), CACHE)


@pytest.mark.parametrize("lost", [True, False])
async def test_end_of_track_that_a_relay_turned_into_end_of_group(lost: bool) -> None:
    """As aiomoqt's relay does: the manifest tells the end then."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        if lost:
            lose(publication, "k.raw.s0", 0, 0)
        for track in publication.segment.tracks.values():
            track.end = lambda location, track=track: track.end_group(location.group, location.object)  # type: ignore[method-assign, misc]  # the test takes its place
        task = asyncio.create_task(incomplete(scene) if lost else scene.receive())
        await asyncio.sleep(1)
        await put_layers(publication.segment, CACHE)
        put = now()
        result: Any = await task
        if lost:
            assert result[1].missing == (Missing(0, 0, 0),)
            assert result[0] < put + SOON
        else:
            check_layers(result, CACHE)
            assert now() < put + 0.2
