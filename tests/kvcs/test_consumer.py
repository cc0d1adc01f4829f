"""Consumers that cancel, leave early, are slow, or come in numbers: nothing is left behind or lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvcs.assembly import Layer, SegmentAssembly
from kvcs.subscriber import CacheIncomplete
from moqt.errors import SessionClosed
from moqt.limits import Limits
from moqt.quic.virtual import VirtualLoop, run_virtual
from moqt.track import TrackWatcher
from tests.kvcs.stage import (
    CACHE,
    MODEL,
    TOKENS,
    Piece,
    Stage,
    Wiretap,
    check_layer,
    check_layers,
    collect,
    descriptor,
    make_cache,
    now,
    put_layers,
    put_one_by_one,
    stage,
)

LAYERS, BLOCKS = MODEL.layers, 3


CONTROL_STREAMS = {2, 3}


async def nothing_left(scene: Stage) -> None:
    """No stream is open but the control streams, on neither side."""
    await asyncio.sleep(0.2)
    assert set(scene.link.client._streams) == set(scene.link.server._streams) == CONTROL_STREAMS


async def play(step: int | None, act: Callable[[asyncio.Task[Any]], None], *, live: bool) -> range:
    """Receive, and let `act` do something to the consumer's task before message `step` is delivered."""
    async with stage(chunk=60) as scene:
        production = put_one_by_one(scene.publisher().publish(TOKENS).segment, CACHE)
        for _ in range(9 if live else 1000):
            next(production, None)

        async def produce() -> None:
            for _ in production:
                await asyncio.sleep(0.01)

        began = scene.link.steps
        task = asyncio.create_task(scene.receive())
        if step is not None:
            scene.link.at(step, lambda: act(task))
        await produce()
        if step is None:
            check_layers(await task, CACHE)
        else:
            with pytest.raises(asyncio.CancelledError):
                await task
        steps = range(began, scene.link.steps)
        await nothing_left(scene)
        if step is not None and step % 5 == 0:
            check_layers(await scene.receive(), CACHE)
            await nothing_left(scene)
    return steps


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_cancelled_at_any_moment(turns: int, live: bool) -> None:
    """At every message, and a turn or two of the event loop later. The stage looks for tasks left behind."""

    def cancel(task: asyncio.Task[Any], turns: int = turns) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(cancel, task, turns - 1)
        else:
            task.cancel()

    steps = run_virtual(play(None, cancel, live=live))
    assert len(steps) > 50
    for step in steps[turns:-20:3]:
        run_virtual(play(step, cancel, live=live))


@pytest.mark.virtual
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("after", range(LAYERS + 1))
async def test_a_reception_that_is_left_early(after: int, live: bool) -> None:
    async with stage() as scene:
        segment = scene.publisher().publish(TOKENS).segment
        await put_layers(segment, CACHE, last=2 if live else None)
        async with await scene.subscriber().receive(TOKENS) as reception:
            for _ in range(min(after, 3)):
                check_layer(await anext(reception), CACHE)
        await nothing_left(scene)
        await put_layers(segment, CACHE, first=segment.next_layer)
        check_layers(await scene.receive(), CACHE)
        await nothing_left(scene)


@pytest.mark.virtual
async def test_an_error_of_the_consumer_ends_everything() -> None:
    async with stage() as scene:
        await put_layers(scene.publisher().publish(TOKENS).segment, CACHE)
        with pytest.raises(ZeroDivisionError):
            await fail_at_layer_1(scene)
        await nothing_left(scene)


async def fail_at_layer_1(scene: Stage) -> None:
    async with await scene.subscriber().receive(TOKENS) as reception:
        async for layer in reception:
            assert 1 / (1 - layer.layer) == 1


@pytest.mark.virtual
async def test_a_wait_that_is_cancelled_can_be_resumed() -> None:
    """A consumer that looks in every 10 ms loses no layer by it."""
    async with stage(jitter=0.01, seed=4) as scene:
        production = put_one_by_one(scene.publisher().publish(TOKENS).segment, CACHE)

        async def produce() -> None:
            for _ in production:
                await asyncio.sleep(0.03)

        producer = asyncio.create_task(produce())
        layers: list[Layer] = []
        looks = 0
        async with await scene.subscriber().receive(TOKENS) as reception:
            while len(layers) < LAYERS:
                looks += 1
                try:
                    async with asyncio.timeout(0.01):
                        layers.append(await anext(reception))
                except TimeoutError:
                    pass
            assert await collect(reception) == []
        check_layers(layers, CACHE)
        assert looks > 50
        await producer


@pytest.mark.virtual
@pytest.mark.parametrize("live", [True, False])
async def test_two_receptions_at_once_in_one_session(live: bool) -> None:
    """Of the same cache, and of parts of it, and of another one."""
    other = make_cache(MODEL, 4, seed=3)
    async with stage(jitter=0.02, seed=1) as scene:
        publisher = scene.publisher()
        first, second = publisher.publish(TOKENS), publisher.publish([1, 2, 3, 4])

        async def produce() -> None:
            await put_layers(first.segment, CACHE)
            await put_layers(second.segment, other)

        if not live:
            await produce()
        tasks = [
            asyncio.create_task(scene.receive(tokens, **options))
            for tokens, options in (
                (TOKENS, {}),
                (TOKENS, {}),
                (TOKENS, {"layers": (1, 2)}),
                (TOKENS, {"blocks": 1}),
                ([1, 2, 3, 4], {}),
            )
        ]
        await asyncio.sleep(3)
        if live:
            await produce()
        whole, again, layers, blocks, others = await asyncio.gather(*tasks)
        check_layers(whole, CACHE)
        check_layers(again, CACHE)
        assert [layer.layer for layer in layers] == [1, 2]
        for layer in layers:
            check_layer(layer, CACHE)
        for layer in blocks:
            check_layer(layer, CACHE, blocks=(0, 1))
        check_layers(others, other)
        await nothing_left(scene)


@pytest.mark.virtual
async def test_more_receptions_than_the_publisher_serves_at_once() -> None:
    """It says that it is busy; they wait their turn (kvcs 10)."""
    model = descriptor(layers=2, kv_heads=8, head_dim=64, block_tokens=16)
    tokens = list(range(256))
    cache = make_cache(model, len(tokens))
    async with stage(limits=Limits(max_fetches=3), window=64 * 1024, latency=0.05) as scene:
        await put_layers(scene.publisher(model).publish(tokens).segment, cache)
        names = [found.name for found in await scene.subscriber(model).discover(tokens)]
        receptions = [scene.receive(tokens, model=model, publications=names, patience=60.0) for _ in range(8)]
        for layers in await asyncio.gather(*receptions):
            check_layers(layers, cache, model)


@pytest.mark.virtual
@pytest.mark.parametrize("live", [True, False])
async def test_a_consumer_slower_than_the_publisher(live: bool) -> None:
    """It takes longer for a layer than its patience is; that is not the publisher's silence."""
    async with stage() as scene:
        segment = scene.publisher().publish(TOKENS).segment
        if not live:
            await put_layers(segment, CACHE)
        async with await scene.subscriber(patience=5.0).receive(TOKENS) as reception:
            if live:
                asyncio.get_running_loop().call_later(
                    1, lambda: asyncio.ensure_future(put_layers(segment, CACHE))
                )
            layers = []
            async for layer in reception:
                layers.append(layer)
                await asyncio.sleep(20)
        check_layers(layers, CACHE)


@pytest.mark.virtual
async def test_a_publisher_slower_than_patience_for_a_layer() -> None:
    """Each Object is a sign of life, not only each layer: none is more than 4.8 seconds after the last."""
    async with stage() as scene:
        production = put_one_by_one(scene.publisher().publish(TOKENS).segment, CACHE)
        task = asyncio.create_task(scene.receive(patience=5.0))
        for _ in production:
            await asyncio.sleep(1.2)
        check_layers(await task, CACHE)


@pytest.mark.virtual
async def test_a_consumer_that_blocks_the_event_loop() -> None:
    """Nothing was read meanwhile. What has arrived counts when it is back, and so does the next segment."""
    tokens = [*TOKENS, 1, 2]
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        await put_layers(publication.segment, CACHE, last=0)
        subscriber = scene.subscriber(patience=5.0, segment_wait=5.0)
        async with await subscriber.receive(tokens) as reception:
            check_layer(await anext(reception), CACHE)
            for layer in range(1, LAYERS):
                await put_layers(publication.segment, CACHE, first=layer, last=layer)
                loop._jumping.now += 20  # as computing would
                check_layer(await anext(reception), CACHE)
            loop._jumping.now += 20
            publication.add_segment([1, 2])
            await put_layers(publication.segment, make_cache(MODEL, 2))
            assert [layer.segment for layer in await collect(reception)] == [1] * LAYERS


@pytest.mark.virtual
async def test_a_consumer_that_never_reads() -> None:
    """It holds its layers, and the session stays of use to others."""
    async with stage() as scene:
        await put_layers(scene.publisher().publish(TOKENS).segment, CACHE)
        async with await scene.subscriber().receive(TOKENS) as reception:
            await asyncio.sleep(100)
            check_layers(await scene.receive(), CACHE)
            check_layers(await collect(reception), CACHE)


@pytest.mark.virtual
async def test_the_session_is_closed_by_its_own_side() -> None:
    async with stage() as scene:
        segment = scene.publisher().publish(TOKENS).segment
        await put_layers(segment, CACHE, last=1)
        async with await scene.subscriber().receive(TOKENS) as reception:
            check_layer(await anext(reception), CACHE)
            check_layer(await anext(reception), CACHE)
            waiter = asyncio.create_task(collect(reception))
            await asyncio.sleep(1)
            await scene.here.close()
            with pytest.raises(CacheIncomplete):
                await waiter
            assert now() < 1.5
        with pytest.raises(SessionClosed):
            await scene.receive()


@pytest.mark.virtual
async def test_streams_that_overtake_subscribe_ok() -> None:
    """More than a session keeps for later: what it has refused is fetched."""
    model = descriptor(layers=60)
    cache = make_cache(model, len(TOKENS))
    taps: list[Wiretap] = []
    async with stage(
        tap=lambda link: taps.append(Wiretap(link)), subscriber_limits=Limits(parked_streams=8)
    ) as scene:
        publication = scene.publisher(model).publish(TOKENS)
        subscribed: list[TrackWatcher] = []
        tasks: list[asyncio.Task[None]] = []

        def delay(piece: Piece) -> float:
            """Hold back the replies on request streams, from the first subscription to a data track on."""
            return 0.5 if subscribed and not piece.from_client and not piece.stream & 2 else 0.0

        taps[0].delay = delay
        for track in publication.segment.tracks.values():

            def watch(watcher: TrackWatcher, watch: Callable[[TrackWatcher], None] = track.watch) -> None:
                watch(watcher)
                subscribed.append(watcher)
                if len(subscribed) == 2:
                    tasks.append(asyncio.create_task(put_layers(publication.segment, cache)))

            track.watch = watch  # type: ignore[method-assign]  # to produce as soon as someone listens
        check_layers(await scene.receive(model=model), cache, model)
        assert now() < 5
        assert max(taps[0].data_objects(from_client=False).values()) == 2  # Some were refused at first.
        await tasks[0]


@pytest.mark.virtual
async def test_partial_may_be_asked_for_after_the_error() -> None:
    """The error tells what is missing at that moment; what is usable of the rest can be had then."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        track = next(iter(publication.segment.tracks.values()))
        append = track.append
        track.append = lambda group, *args, **options: (  # type: ignore[method-assign]  # the test takes its place
            group != 1 and append(group, *args, **options)
        )
        await put_layers(publication.segment, CACHE)
        async with await scene.subscriber().receive(TOKENS) as reception:
            await asyncio.sleep(1)
            check_layer(await anext(reception), CACHE)
            for _ in range(2):
                with pytest.raises(CacheIncomplete) as caught:
                    await anext(reception)
                assert list(caught.value.missing) == reception.missing
                assert {(pair.layer, pair.block) for pair in reception.missing} == {(1, 0), (1, 1), (1, 2)}
            reception.partial = True
            assert [layer.layer for layer in await collect(reception)] == [2, 3]
            assert len(reception.missing) == BLOCKS
            assert reception.reason


@pytest.mark.virtual
async def test_times_of_layers() -> None:
    async with stage() as scene:
        await put_layers(scene.publisher().publish(TOKENS).segment, CACHE)
        async with await scene.subscriber().receive(TOKENS) as reception:
            assert reception.times == {}
            await collect(reception)
        assert list(reception.times) == [(0, layer) for layer in range(LAYERS)]
        for times in reception.times.values():
            assert times.usable is not None
            assert 0 < times.first_object <= times.usable <= now()


@pytest.mark.virtual
async def test_a_fault_of_ours_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a task of the reception raises, and should not, reaches the consumer."""

    def broken(*_: object) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(SegmentAssembly, "place", broken)
    async with stage() as scene:
        await put_layers(scene.publisher().publish(TOKENS).segment, CACHE)
        with pytest.raises(RuntimeError, match="a bug"):
            await scene.receive()
        await nothing_left(scene)
