"""The caller is cancelled at every await: nothing is left behind, and the session goes on (as httpcore tests
it).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from moqt.errors import DoneCode, RequestRejected, SessionClosed
from moqt.filters import LocationFilter
from moqt.limits import Limits
from moqt.quic.api import QuicOptions
from moqt.quic.link import pair
from moqt.quic.virtual import run_virtual
from moqt.session import Session
from moqt.subscribing import Fill
from moqt.track import Track
from tests.moqt.ends import (
    NAME,
    NAMESPACE,
    NEW,
    OLD,
    WHOLE,
    Ends,
    check_once,
    collect,
    old_track,
    places,
    publish,
    sessions,
    tables_of,
    take,
)

ALL = LocationFilter.absolute_start(0, 0)
Scenario = Callable[[Ends], Awaitable[object]]


class CancelledAt:
    """Awaits, but is cancelled at its wait number `step`: when the wait begins, or, `late`, when what it
    waited for has come. `waits` is how many there were.
    """

    def __init__(self, awaitable: Awaitable[object], step: int, *, late: bool) -> None:
        self._awaitable = awaitable
        self._step = step
        self._late = late
        self.waits = 0
        self.cancelled = False

    def __await__(self) -> Generator[Any, Any, object]:
        steps = self._awaitable.__await__()
        try:
            future = next(steps)
            while True:
                due = self.waits == self._step
                self.waits += 1
                if due and not self._late:
                    self.cancelled = True
                    future = steps.throw(asyncio.CancelledError())
                    continue
                try:
                    yield future
                except BaseException as error:
                    future = steps.throw(error)
                    continue
                if due:
                    self.cancelled = True
                    future = steps.throw(asyncio.CancelledError())
                else:
                    future = next(steps)
        except StopIteration as end:
            return end.value


async def subscribe(ends: Ends) -> None:
    async with await ends.subscriber.subscribe(NAME, fill=WHOLE) as subscription:
        assert len(await take(subscription, len(OLD))) == len(OLD)


async def subscribe_and_leave_it(ends: Ends) -> None:
    subscription = await ends.subscriber.subscribe(NAME, fill=WHOLE)
    try:
        await take(subscription, 3)
    finally:
        await subscription.close()


async def update(ends: Ends) -> None:
    async with await ends.subscriber.subscribe(NAME) as subscription:
        await subscription.update(forward=False)
        await subscription.update(filter=LocationFilter.groups(0, 9), priority=3)
        assert await subscription.update(forward=True, fill=Fill(filter=LocationFilter.groups(0, 1)))
        await take(subscription, 5)


async def fetch(ends: Ends) -> None:
    async with await ends.subscriber.fetch(NAME, filter=ALL) as fetched:
        with suppress(RequestRejected):  # When all has been sent before it came.
            await fetched.update(priority=4)
        assert len(places(await collect(fetched))) == len(OLD)


async def watch_namespaces(ends: Ends) -> None:
    ends.tracks.announce(NAMESPACE)
    async with await ends.subscriber.subscribe_namespace(()) as watch:
        assert (await anext(watch)).namespace == NAMESPACE


async def publish_namespace(ends: Ends) -> None:
    announcement = await ends.subscriber.publish_namespace(NAMESPACE)
    await announcement.close()


async def track_status(ends: Ends) -> None:
    assert (await ends.subscriber.track_status(NAME)).largest is not None


SCENARIOS: list[Scenario] = [
    subscribe,
    subscribe_and_leave_it,
    update,
    fetch,
    watch_namespaces,
    publish_namespace,
    track_status,
]


@asynccontextmanager
async def scene(narrow: bool) -> AsyncIterator[Ends]:
    """Sessions; `narrow` ones have so little credit that what is said once must wait for it."""
    options = QuicOptions(max_bidi_streams=2, max_uni_streams=3, max_stream_data=4096, max_data=8192)
    options = options if narrow else QuicOptions()
    async with sessions(
        track=old_track(), chunk=30 if narrow else 1000, client=options, server=options
    ) as ends:
        yield ends


async def check_nothing_is_left(ends: Ends) -> None:
    """And all still works."""
    await asyncio.sleep(1)
    for session in (ends.subscriber, ends.publisher):
        assert session.connection.closed is None
        assert set(tables_of(session).values()) == {0}, tables_of(session)
        assert len(session._tasks) == 2
    assert not ends.track._watchers
    assert not ends.tracks._watchers
    async with await ends.subscriber.subscribe(NAME, fill=WHOLE) as subscription:
        publish(ends.track, *NEW)
        ends.tracks.remove(NAME, DoneCode.TRACK_ENDED)
        check_once(places(await collect(subscription)), OLD + NEW)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_cancelled_at_every_await(scenario: Scenario, narrow: bool, late: bool) -> None:
    async def play(step: int) -> bool:
        async with scene(narrow) as ends:
            run = CancelledAt(scenario(ends), step, late=late)
            try:
                await run
            except asyncio.CancelledError:
                assert run.cancelled
            await check_nothing_is_left(ends)
            return run.cancelled

    step = 0
    while run_virtual(play(step)):
        step += 1
    assert step >= 1


@pytest.mark.parametrize("late", [False, True])
def test_start_is_cancelled_at_every_await(late: bool) -> None:
    async def play(step: int) -> bool:
        link = pair()
        client, server = Session(link.client), Session(link.server)
        other = asyncio.ensure_future(server.start())
        run = CancelledAt(client.start(), step, late=late)
        try:
            await run
        except asyncio.CancelledError:
            assert client.closed
        await asyncio.gather(other, return_exceptions=True)
        await asyncio.gather(client.close(), server.close())
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return run.cancelled

    step = 0
    while run_virtual(play(step)):
        step += 1
    assert step >= 1


@pytest.mark.parametrize("late", [False, True])
def test_close_is_cancelled_at_every_await(late: bool) -> None:
    """A second close does what is left."""

    async def play(step: int) -> bool:
        async with sessions(track=old_track(), limits=Limits(receive_buffer=10)) as ends:
            subscription = await ends.subscriber.subscribe(NAME, fill=WHOLE)
            await anext(subscription)
            run = CancelledAt(ends.subscriber.close(), step, late=late)
            try:
                await run
            except asyncio.CancelledError:
                assert ends.subscriber.closed
            await ends.subscriber.close()
            await ends.publisher.close()
            with pytest.raises(SessionClosed):
                await collect(subscription)
            assert asyncio.all_tasks() == {asyncio.current_task()}
            return run.cancelled

    step = 0
    while run_virtual(play(step)):
        step += 1
    assert step >= 1


@pytest.mark.parametrize("late", [False, True])
def test_finish_is_cancelled_at_every_await(late: bool) -> None:
    async def play(step: int) -> bool:
        async with sessions(track=Track(NAME)) as ends:
            subscription = await ends.subscriber.subscribe(NAME)
            publish(ends.track, *OLD)
            run = CancelledAt(ends.publisher.finish(DoneCode.GOING_AWAY, deadline=5), step, late=late)
            try:
                await run
            except asyncio.CancelledError:
                assert not ends.publisher.closed
            check_once(places(await collect(subscription)), OLD)
            return run.cancelled

    step = 0
    while run_virtual(play(step)):
        step += 1
    assert step >= 1
