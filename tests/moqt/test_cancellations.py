"""Cancelling a caller at each of its awaits leaves no task, no stream and no table entry, and the session
serves the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moqt
from moqt import Fill, LocationFilter, QuicOptions, ReceivedObject, Session, SessionCode, Track, Tracks
from moqt.quic.memory import Link, MemoryConnection, pair
from moqt.requests import RequestIds
from tests.moqt.scene import (
    EVERYTHING,
    NAMESPACE,
    Scene,
    check_exactly_once,
    collect,
    filled,
    leftovers,
    make_track,
    objects,
    piece,
    quiet,
    sessions,
)

pytestmark = pytest.mark.virtual

Operation = Callable[[Scene, Track], Coroutine[Any, Any, object]]

BULK = make_track(b"bulk")
filled(BULK, range(8), 2, 1 << 20)

either = pytest.mark.parametrize(
    "late", [False, True], ids=["while it waits", "when what it waits for has come"]
)
"""When the caller is cancelled: while nothing has come, or in the same turn in which it has."""


@types.coroutine
def _steps(coroutine: Coroutine[Any, Any, object], number: int, late: bool) -> Generator[Any, Any, None]:
    """Run `coroutine` and cancel the task that runs it at its await `number`, from 0 on."""
    task = asyncio.current_task()
    assert task is not None
    step: Callable[[], Any] = partial(coroutine.send, None)
    for count in itertools.count():
        try:
            waited = step()
        except StopIteration:
            return
        if count == number:
            if late and waited is not None:
                waited.add_done_callback(lambda _: task.cancel())
            else:
                asyncio.get_running_loop().call_soon(task.cancel)
        try:
            yield waited
        except BaseException as error:
            step = partial(coroutine.throw, error)
        else:
            step = partial(coroutine.send, None)


async def cut_short(coroutine: Coroutine[Any, Any, object], number: int, late: bool) -> bool:
    """Cancel `coroutine` at its await `number`. False if it ended before."""

    async def run() -> None:
        await _steps(coroutine, number, late)

    task = asyncio.create_task(run())
    await asyncio.wait((task,))
    if task.cancelled():
        return True
    await task
    return False


async def serves(scene: Scene, track: Track) -> None:
    """The session still brings what is there, and what comes."""
    group = (track.largest.group if track.largest else 0) + 1
    async with await scene.subscriber.subscribe(track.name, fill=Fill(filter=EVERYTHING)) as subscription:
        filled(track, [group], 2, 100)
        got: list[ReceivedObject] = []
        while len(got) < sum(1 for _ in track.objects(moqt.Location(0, 0), moqt.Location(group, 9))):
            got += objects([await anext(subscription)])
        check_exactly_once(track, got)


async def subscribe(scene: Scene, track: Track) -> None:
    fill = Fill(filter=EVERYTHING)
    async with await scene.subscriber.subscribe(track.name, fill=fill) as subscription:
        for _ in range(3):
            await anext(subscription)


async def subscribe_to_nothing(scene: Scene, track: Track) -> None:
    with pytest.raises(moqt.RequestRejected):
        await scene.subscriber.subscribe(moqt.FullTrackName(NAMESPACE, b"no such Track"))


async def update(scene: Scene, track: Track) -> None:
    async with await scene.subscriber.subscribe(track.name) as subscription:
        await subscription.update(priority=1)
        await subscription.update(forward=False)
        await subscription.update(forward=True, fill=Fill(filter=EVERYTHING))
        await anext(subscription)


async def fetch(scene: Scene, track: Track) -> None:
    async with await scene.subscriber.fetch(track.name, filter=EVERYTHING) as stream:
        await collect(stream)


async def fetch_a_part(scene: Scene, track: Track) -> None:
    async with await scene.subscriber.fetch(BULK.name, filter=EVERYTHING) as stream:
        await stream.update(priority=3)
        await anext(stream)


async def subscribe_namespace(scene: Scene, track: Track) -> None:
    async with await scene.subscriber.subscribe_namespace(NAMESPACE[:1]) as watch:
        await anext(watch)


async def publish_namespace(scene: Scene, track: Track) -> None:
    announcement = await scene.publisher.publish_namespace(NAMESPACE)
    await announcement.close()


async def track_status(scene: Scene, track: Track) -> None:
    await scene.subscriber.track_status(track.name)


@either
@pytest.mark.parametrize("publisher_is_client", [False, True])
@pytest.mark.parametrize(
    "operation",
    [
        subscribe,
        subscribe_to_nothing,
        update,
        fetch,
        fetch_a_part,
        subscribe_namespace,
        publish_namespace,
        track_status,
    ],
)
async def test_a_request_cancelled_at_each_await(
    operation: Operation, publisher_is_client: bool, late: bool
) -> None:
    track = make_track(b"k")
    filled(track, range(3), 2, 30_000)
    async with sessions(track, BULK, publisher_is_client=publisher_is_client, chunk=4096) as scene:
        scene.tracks.announce(NAMESPACE)
        before = leftovers(scene.publisher), leftovers(scene.subscriber)
        for number in itertools.count():
            cancelled = await cut_short(operation(scene, track), number, late)
            await quiet()
            assert (leftovers(scene.publisher), leftovers(scene.subscriber)) == before
            await serves(scene, track)
            if not cancelled:
                break
        assert number >= 1
        await quiet()
        assert (leftovers(scene.publisher), leftovers(scene.subscriber)) == before


@either
async def test_a_request_cancelled_while_there_is_no_stream_credit(late: bool) -> None:
    """The one request stream is taken: others wait for it, and are cancelled there."""
    track = make_track(b"k")
    one = QuicOptions(max_bidi_streams=1)
    async with sessions(track, server=one) as scene:
        before = leftovers(scene.publisher), leftovers(scene.subscriber)
        subscription = await scene.subscriber.subscribe(track.name)
        waiting = [
            asyncio.ensure_future(operation(scene, track))
            for operation in (fetch, track_status, subscribe, subscribe_namespace) * 3
        ]
        await asyncio.sleep(1)
        for task in waiting:
            task.cancel()
        if late:
            await subscription.close()
        await asyncio.wait(waiting)
        assert all(task.cancelled() for task in waiting)
        await subscription.close()
        await serves(scene, track)
        await quiet()
        assert (leftovers(scene.publisher), leftovers(scene.subscriber)) == before


@either
async def test_iteration_cancelled_at_each_item_loses_nothing(late: bool) -> None:
    track = make_track(b"k")
    filled(track, range(3), 2, 30_000)
    async with sessions(track, window=8192) as scene:
        subscription = await scene.subscriber.subscribe(track.name, fill=Fill(filter=EVERYTHING))
        fetched = await scene.subscriber.fetch(track.name, filter=EVERYTHING)
        watch = await scene.subscriber.subscribe_namespace(NAMESPACE[:1])

        async def publish() -> None:
            for group in range(3, 6):
                await asyncio.sleep(1)
                filled(track, [group], 2, 30_000)
                scene.tracks.announce((*NAMESPACE, b"%d" % group))
            scene.end(track)

        publishing = asyncio.ensure_future(publish())
        for reception in (fetched, subscription):
            items: list[moqt.Item] = []
            waits = 0
            while True:

                async def take() -> None:
                    items.append(await anext(reception))  # noqa: B023

                try:
                    waits += await cut_short(take(), 0, late)
                except StopAsyncIteration:
                    break
                await asyncio.sleep(0.001)  # Virtual: something may come meanwhile.
            assert waits
            if reception is subscription:
                check_exactly_once(track, objects(items))
            else:
                assert len(objects(items)) == 6
        events: list[moqt.NamespaceEvent] = []

        async def see() -> None:
            events.append(await anext(watch))

        while len(events) < 3:
            await cut_short(see(), 0, late)
            await asyncio.sleep(0.001)
        assert [event.namespace[-1] for event in events] == [b"3", b"4", b"5"]
        await publishing


async def test_200_subscriptions_cancelled() -> None:
    """More than the stream credit of both ends, at changing moments, with no pause between."""
    track = make_track(b"k")
    filled(track, range(3), 2, 30_000)
    few = QuicOptions(max_bidi_streams=8, max_uni_streams=8)
    async with sessions(track, client=few, server=few, jitter=0.01, seed=3) as scene:
        before = leftovers(scene.publisher), leftovers(scene.subscriber)
        for number in range(200):
            await cut_short(subscribe(scene, track), number % 11, bool(number & 1))
        await quiet()
        assert (leftovers(scene.publisher), leftovers(scene.subscriber)) == before
        # The credit is all there: as many streams as the peer allows can be used at once.
        subscriptions = []
        for index in range(7):
            other = make_track(b"%d" % index)
            filled(other, [0], 1, 1000)
            scene.tracks.add(other)
            subscriptions.append(await scene.subscriber.subscribe(other.name))
            piece(other, 1, 0, 1000)
            await anext(subscriptions[-1])
        for subscription in subscriptions:
            await subscription.close()
        await serves(scene, track)


async def test_200_subscriptions_closed_at_once() -> None:
    """Closed as soon as they are accepted, while their fill is under way."""
    track = make_track(b"k")
    filled(track, range(3), 2, 30_000)
    async with sessions(track, jitter=0.01, seed=3) as scene:
        before = leftovers(scene.publisher), leftovers(scene.subscriber)
        for _ in range(200):
            async with await scene.subscriber.subscribe(track.name, fill=Fill(filter=EVERYTHING)):
                pass
        await quiet()
        assert (leftovers(scene.publisher), leftovers(scene.subscriber)) == before
        for session in (scene.publisher, scene.subscriber):
            assert session.connection.stream_credit(bidirectional=True) >= 64
            assert session.connection.stream_credit(bidirectional=False) >= 64
        await serves(scene, track)


async def _peer(link: Link) -> Session:
    """The server's session, which lives until its connection ends, whatever its peer does."""
    session = Session(link.server)
    try:
        await session.start()
        await session.wait_closed()
    except moqt.MoqtError:
        pass
    await session.close()
    return session


async def _each_await(
    run: Callable[[Link], Coroutine[Any, Any, object]], late: bool, check: Callable[[Link], Awaitable[None]]
) -> None:
    """Over a link of its own for each await of `run`."""
    for number in itertools.count():
        link = pair()
        peer = asyncio.ensure_future(_peer(link))
        cancelled = await cut_short(run(link), number, late)
        await check(link)
        assert leftovers(await peer) == {}
        await quiet()
        if not cancelled:
            break
    assert number >= 2


@either
@pytest.mark.parametrize("announced", [False, True])
async def test_start_cancelled_at_each_await(late: bool, announced: bool) -> None:
    tracks = Tracks()
    tracks.announce(NAMESPACE)
    made: list[Session] = []

    async def run(link: Link) -> None:
        session = Session(link.client, tracks=tracks if announced else None)
        made.append(session)
        async with session:
            pass

    async def check(link: Link) -> None:
        await made[-1].close()
        assert made[-1].closed
        assert link.client.closed is not None
        assert link.client.closed.code == SessionCode.NO_ERROR
        assert leftovers(made[-1]) == {}
        assert not tracks._watchers

    await _each_await(run, late, check)


@either
async def test_connect_cancelled_at_each_await(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    links: list[Link] = []

    async def dial(*_: object, **__: object) -> MemoryConnection:
        await asyncio.sleep(0.01)
        return links[-1].client

    monkeypatch.setattr("moqt.client.dial", dial)

    async def run(link: Link) -> None:
        links.append(link)
        async with moqt.connect("moqt://localhost/"):
            pass

    async def check(link: Link) -> None:
        if link.client.closed is None:
            assert link.client.feeder is None  # It was cancelled while it dialled: no session has the link.
            link.client.close()
        assert link.client.closed is not None
        assert link.client.closed.code == SessionCode.NO_ERROR

    await _each_await(run, late, check)


@either
async def test_close_cancelled_at_each_await(late: bool) -> None:
    """A second close ends what the first one could not."""
    made: list[Session] = []

    async def run(link: Link) -> None:
        session = Session(link.client)
        made.append(session)
        await session.start()
        await session.close()

    async def check(_: Link) -> None:
        await made[-1].close()
        assert leftovers(made[-1]) == {}

    await _each_await(run, late, check)


async def test_a_filter_of_nothing_is_no_hang() -> None:
    """A subscription that selects nothing waits, can be cancelled, and leaves nothing."""
    track = make_track(b"k")
    filled(track, range(3), 2, 1000)
    async with sessions(track) as scene:
        before = leftovers(scene.publisher), leftovers(scene.subscriber)
        beyond = LocationFilter.absolute_start(1000, 0)
        async with await scene.subscriber.subscribe(track.name, filter=beyond) as subscription:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1000):
                    await anext(subscription)
        await quiet()
        assert (leftovers(scene.publisher), leftovers(scene.subscriber)) == before


async def test_a_request_that_never_left_costs_nothing_for_ever() -> None:
    """Its Request ID is lost. The peer does not keep all that come after it, and takes any number of them."""
    track = make_track(b"k")
    filled(track, range(1), 1, 1000)
    async with sessions(track) as scene:
        for _ in range(20):
            await cut_short(scene.subscriber.track_status(track.name), 0, late=False)
            await scene.subscriber.track_status(track.name)
        assert scene.publisher.error is None
    ids = RequestIds(is_client=False)
    ids.check(0)
    for number in range(4, 300_000, 2):
        ids.check(number)
    ids.check(2)
    for used in (0, 2, 4, 299_998):
        with pytest.raises(moqt.ProtocolError, match="was used before"):
            ids.check(used)


@given(st.lists(st.integers(0, 60), max_size=60), st.booleans())
def test_request_ids_are_used_once_in_any_order(numbers: list[int], is_client: bool) -> None:
    ids = RequestIds(is_client=is_client)
    used: set[int] = set()
    for number in numbers:
        if number % 2 == is_client and number not in used:
            ids.check(number)
            used.add(number)
        else:
            with pytest.raises(moqt.ProtocolError) as caught:
                ids.check(number)
            assert caught.value.code == SessionCode.INVALID_REQUEST_ID


def test_request_ids_far_apart() -> None:
    """However far a peer jumps, and however often, what is kept is bounded, and nothing is taken twice."""
    ids = RequestIds(is_client=False)
    last = (1 << 64) - 2
    ids.check(last)
    for number in range(0, 400_000, 4):
        ids.check(number)
    for number in (0, 399_996, last):
        with pytest.raises(moqt.ProtocolError):
            ids.check(number)
    ids.check(last - 2)
    assert len(ids._gaps) <= 65536
