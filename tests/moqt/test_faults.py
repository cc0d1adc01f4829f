"""A fault at every step of a small scenario: every waiter ends, with the right exception or with the whole;
nothing that broke looks like a clean end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from moqt import (
    ConnectionLost,
    Fill,
    Item,
    Limits,
    Location,
    LocationFilter,
    MoqtError,
    NamespaceEvent,
    ReceivedObject,
    RequestRejected,
    Session,
    SessionClosed,
    SessionCode,
    StreamEnd,
    StreamReset,
    StreamStopped,
    Tracks,
)
from moqt.errors import DoneCode, ResetCode
from moqt.quic.memory import Link, pair
from tests.moqt.scene import EVERYTHING, NAMESPACE, filled, leftovers, make_track, noise, quiet, sessions

pytestmark = pytest.mark.virtual

SIZE = 3000
PAST, LIVE = 2, 3
"""Groups that are published before the subscription, and after."""

LAST = (*NAMESPACE, b"last")

either_role = pytest.mark.parametrize(
    "publisher_is_client", [False, True], ids=["the client subscribes", "the server subscribes"]
)


@dataclass(slots=True)
class Outcome:
    """What one waiter got, and how it ended: by itself, or with an error."""

    items: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    whole: bool = False

    def check_objects(self) -> None:
        """What came is what was published, nothing twice, and on each stream without a gap."""
        got = [item for item in self.items if isinstance(item, ReceivedObject) and item.payload]
        assert all(item.payload == noise(item.location, SIZE) for item in got)
        places = [item.location for item in got]
        assert len(set(places)) == len(places)
        past = [item.location for item in got if item.fill]
        assert past == _places(range(PAST))[: len(past)]
        for group in range(PAST, PAST + LIVE):
            live = [item.location for item in got if not item.fill and item.location.group == group]
            assert live == _places([group])[: len(live)]


def _places(groups: range | list[int]) -> list[Location]:
    return [Location(group, number) for group in groups for number in range(3)]


@dataclass(slots=True)
class Run:
    """The scenario, once over a link of its own."""

    link: Link
    publisher: Session
    subscriber: Session
    outcomes: dict[str, Outcome]

    @property
    def sides(self) -> dict[str, Session]:
        """The sessions by their role on the link."""
        sessions = (self.publisher, self.subscriber)
        return {"client" if one.connection.is_client else "server": one for one in sessions}


async def _watching(outcome: Outcome, work: Callable[[list[Any]], Awaitable[bool]]) -> None:
    try:
        outcome.whole = await work(outcome.items)
    except MoqtError as error:
        outcome.error = error


async def run(publisher_is_client: bool, inject: Callable[[Link], None], *, seed: int = 1) -> Run:
    """A publisher with a past and a live edge; a subscriber that subscribes with a fill, fetches and watches
    namespaces. `inject` sets the fault.
    """
    link = pair(seed=seed, jitter=0.003, chunk=4000)
    track = make_track(b"k")
    filled(track, range(PAST), 3, SIZE)
    tracks = Tracks()
    tracks.add(track)
    ends = (link.client, link.server) if publisher_is_client else (link.server, link.client)
    publisher = Session(ends[0], tracks=tracks, announce=False)
    subscriber = Session(ends[1])
    names = ("start", "publisher", "subscription", "fetch", "watch", "status")
    outcomes = {name: Outcome() for name in names}
    answered = {name: asyncio.Event() for name in ("subscription", "fetch", "watch", "status")}
    inject(link)

    async def start(_: list[Any]) -> bool:
        await subscriber.start()
        return True

    async def publish(_: list[Any]) -> bool:
        await publisher.start()
        announcement = await publisher.publish_namespace((b"to", b"you"))
        await asyncio.sleep(0.2)
        await announcement.close()
        return True

    async def subscribe(items: list[Item]) -> bool:
        fill = Fill(filter=EVERYTHING)
        subscription = await subscriber.subscribe(track.name, filter=LocationFilter.next_object(), fill=fill)
        await subscription.update(priority=10)
        answered["subscription"].set()
        async for item in subscription:
            items.append(item)
        assert subscription.done is not None
        return True

    async def fetch(items: list[Item]) -> bool:
        fetching = await subscriber.fetch(track.name, filter=LocationFilter.groups(0, PAST - 1))
        answered["fetch"].set()
        async for item in fetching:
            items.append(item)
        return True

    async def watch(events: list[NamespaceEvent]) -> bool:
        async with await subscriber.subscribe_namespace(NAMESPACE[:1]) as watching:
            answered["watch"].set()
            while not events or events[-1].namespace != LAST:
                events.append(await anext(watching))
            return list(watching.namespaces) == [LAST]

    async def status(items: list[Any]) -> bool:
        items.append(await subscriber.track_status(track.name))
        return True

    async def ask(name: str, work: Callable[[list[Any]], Awaitable[bool]]) -> None:
        await _watching(outcomes[name], work)
        answered[name].set()

    async def live() -> None:
        # Told out of band, so that nothing is asked for after the end of the Track, however slow the link is.
        for event in answered.values():
            await event.wait()
        for group in range(PAST, PAST + LIVE):
            await asyncio.sleep(0.03)
            filled(track, [group], 3, SIZE)
            if group == PAST:
                tracks.announce(NAMESPACE)
        tracks.withdraw(NAMESPACE)
        tracks.announce(LAST)
        tracks.remove(track.name, DoneCode.TRACK_ENDED)

    async def all_of_it() -> None:
        await _watching(outcomes["start"], start)
        await asyncio.gather(
            ask("subscription", subscribe), ask("fetch", fetch), ask("watch", watch), ask("status", status)
        )

    await asyncio.gather(_watching(outcomes["publisher"], publish), all_of_it(), live())
    return Run(link, publisher, subscriber, outcomes)


async def _end(scene: Run) -> None:
    """Close both; nothing is left."""
    for session in scene.sides.values():
        await session.close()
    await quiet()
    assert leftovers(scene.publisher) == {}
    assert leftovers(scene.subscriber) == {}


def _check_whole(scene: Run) -> None:
    """Everything came, and nothing else was said."""
    for name, outcome in scene.outcomes.items():
        assert outcome.error is None, name
        assert outcome.whole, name
    for name, groups in (("subscription", PAST + LIVE), ("fetch", PAST)):
        outcome = scene.outcomes[name]
        outcome.check_objects()
        got = [item for item in outcome.items if isinstance(item, ReceivedObject) and item.payload]
        assert sorted(item.location for item in got) == _places(range(groups))
        ends = [item for item in outcome.items if isinstance(item, StreamEnd)]
        assert all(end.code is None for end in ends)
        assert len(ends) == (1 if name == "fetch" else LIVE + 1)


def _check_ended(scene: Run, expected: Callable[[Session, BaseException], bool]) -> int:
    """Each waiter got the whole, or the exception that is `expected`; how many did not get the whole."""
    broken = 0
    for name, outcome in scene.outcomes.items():
        outcome.check_objects()
        if outcome.whole:
            assert outcome.error is None
        elif outcome.error is not None:
            broken += 1
            session = scene.publisher if name == "publisher" else scene.subscriber
            assert expected(session, outcome.error), f"{name}: {outcome.error!r}"
        else:
            raise AssertionError(f"{name} ended without a word")
    if scene.outcomes["subscription"].whole:
        got = [item for item in scene.outcomes["subscription"].items if isinstance(item, ReceivedObject)]
        assert sorted(item.location for item in got if item.payload) == _places(range(PAST + LIVE))
    if scene.outcomes["fetch"].whole:
        assert [
            item.location for item in scene.outcomes["fetch"].items if isinstance(item, ReceivedObject)
        ] == (_places(range(PAST)))
    return broken


async def _steps(publisher_is_client: bool) -> int:
    scene = await run(publisher_is_client, lambda _: None)
    _check_whole(scene)
    steps = scene.link.steps
    await _end(scene)
    assert steps > 60
    return steps


@either_role
async def test_a_cut_at_every_step(publisher_is_client: bool) -> None:
    broken = 0
    for step in range(await _steps(publisher_is_client)):
        scene = await run(publisher_is_client, lambda link: link.at(step, link.cut))  # noqa: B023

        def lost(_: Session, error: BaseException) -> bool:
            return isinstance(error, ConnectionLost) and error.reason == "the network is gone"

        broken += _check_ended(scene, lost)
        for session in scene.sides.values():
            assert lost(session, await session.wait_closed())
        await _end(scene)
    assert broken > 100


@either_role
async def test_a_stall_at_every_step(publisher_is_client: bool) -> None:
    """For ever: the idle time-out tells it."""
    broken = 0
    for step in range(await _steps(publisher_is_client)):
        scene = await run(publisher_is_client, lambda link: link.at(step, link.stall))  # noqa: B023

        def silent(_: Session, error: BaseException) -> bool:
            # A deadline of ours may be shorter than the idle time-out.
            late = isinstance(error, TimeoutError) or (
                isinstance(error, SessionClosed) and error.code == SessionCode.CONTROL_MESSAGE_TIMEOUT
            )
            return late or (isinstance(error, ConnectionLost) and "idle time-out" in error.reason)

        broken += _check_ended(scene, silent)
        for session in scene.sides.values():
            assert silent(session, await session.wait_closed())
        await _end(scene)
    assert broken > 100


@either_role
async def test_a_stall_that_ends_at_every_step(publisher_is_client: bool) -> None:
    """It costs time and nothing else."""

    def inject(link: Link, step: int) -> None:
        def stall() -> None:
            link.stall()
            asyncio.get_running_loop().call_later(3.0, link.resume)

        link.at(step, stall)

    for step in range(await _steps(publisher_is_client)):
        scene = await run(publisher_is_client, lambda link: inject(link, step))  # noqa: B023
        _check_whole(scene)
        await _end(scene)


@either_role
@pytest.mark.parametrize("closer", ["client", "server"])
async def test_a_close_at_every_step(publisher_is_client: bool, closer: str) -> None:
    broken = 0
    for step in range(await _steps(publisher_is_client)):

        def inject(link: Link) -> None:
            end = link.client if closer == "client" else link.server
            link.at(step, lambda: end.close(0x77, "enough"))  # noqa: B023

        scene = await run(publisher_is_client, inject)

        def closed(session: Session, error: BaseException) -> bool:
            ours = session.connection.is_client == (closer == "client")
            return (
                isinstance(error, SessionClosed)
                and (error.code, error.reason) == (0x77, "enough")
                and error.remote is not ours
            )

        broken += _check_ended(scene, closed)
        for session in scene.sides.values():
            assert closed(session, await session.wait_closed())
        await _end(scene)
    assert broken > 100


RESET = 0x2A


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A stream as one end receives it, at a step of the scenario."""

    step: int
    at_client: bool
    stream_id: int

    @property
    def control(self) -> bool:
        """Whether it is a control stream."""
        return self.stream_id in (2, 3)

    def reset(self, link: Link) -> None:
        """Let the end see a RESET_STREAM."""
        end = link.client if self.at_client else link.server
        stream = end._streams.get(self.stream_id)
        end.on_reset(self.stream_id, RESET, stream.arrived if stream else 0)
        end.transport_pass()


async def _places_of_streams(publisher_is_client: bool) -> list[Place]:
    """For each stream and each end that reads it: before its first byte, and after each piece of it."""
    found: list[Place] = []
    arrived: dict[tuple[bool, int], int] = {}

    def note(link: Link) -> None:
        for end in (link.client, link.server):
            for stream in end._streams.values():
                key = (end.is_client, stream.id)
                if not stream.receiving_done and arrived.get(key) != stream.arrived:
                    if key not in arrived:
                        found.append(Place(link.steps - 1, *key))
                    arrived[key] = stream.arrived
                    found.append(Place(link.steps, *key))

    def watch(link: Link) -> None:
        for step in range(1, steps):
            link.at(step, lambda: note(link))

    steps = await _steps(publisher_is_client)
    await _end(await run(publisher_is_client, watch))
    return sorted(set(found))


def _check_only_one_broke(scene: Run) -> None:
    """One waiter has seen the reset, or the subscription has lost one stream; the rest is whole."""
    assert all(session.error is None for session in scene.sides.values())
    broken = _check_ended_or_told(scene)
    assert len(broken) <= 1, broken


def _check_ended_or_told(scene: Run) -> list[str]:
    broken = []
    for name, outcome in scene.outcomes.items():
        outcome.check_objects()
        if outcome.error is not None:
            assert isinstance(outcome.error, (StreamReset, StreamStopped)), f"{name}: {outcome.error!r}"
            assert outcome.error.code in (RESET, ResetCode.CANCELLED)
            broken.append(name)
        else:
            assert outcome.whole, name
    for name, groups in (("subscription", PAST + LIVE), ("fetch", PAST)):
        outcome = scene.outcomes[name]
        got = [item for item in outcome.items if isinstance(item, ReceivedObject) and item.payload]
        if outcome.whole and sorted(item.location for item in got) != _places(range(groups)):
            # A stream broke, and it is told: by its end, or by the number of streams that did not come.
            assert name == "subscription"
            ends = [item for item in outcome.items if isinstance(item, StreamEnd)]
            codes = [end.code for end in ends if end.code is not None]
            assert codes == [RESET] or (not codes and len(ends) == LIVE)
            broken.append(name)
    return broken


@either_role
async def test_a_reset_of_each_stream_at_every_step(publisher_is_client: bool) -> None:
    places = await _places_of_streams(publisher_is_client)
    assert len({(place.at_client, place.stream_id) for place in places}) >= 16
    for place in places:
        scene = await run(publisher_is_client, lambda link: link.at(place.step, lambda: place.reset(link)))  # noqa: B023
        if place.control:

            def refused(_: Session, error: BaseException) -> bool:
                # Before its first byte nobody knows that it is the control stream: SETUP never comes.
                codes = (SessionCode.PROTOCOL_VIOLATION, SessionCode.CONTROL_MESSAGE_TIMEOUT)
                return isinstance(error, TimeoutError) or (
                    isinstance(error, SessionClosed) and error.code in codes
                )

            _check_ended(scene, refused)
            for session in scene.sides.values():
                assert refused(session, await session.wait_closed())
        else:
            _check_only_one_broke(scene)
        await _end(scene)


async def test_an_update_of_a_fetch_that_has_ended_meanwhile() -> None:
    """The publisher owes it no answer any more; whoever waits for one is told."""
    track = make_track(b"k")
    filled(track, range(2), 1, SIZE)
    async with sessions(track) as scene:
        clock = asyncio.get_running_loop().time
        fetch = await scene.subscriber.fetch(track.name, filter=EVERYTHING)
        started = clock()
        with pytest.raises(RequestRejected):
            await fetch.update(priority=3)
        assert clock() - started < 1
        await asyncio.sleep(1)
        with pytest.raises(RequestRejected):
            await fetch.update(priority=3)
        assert clock() - started < 2


async def test_an_update_of_a_fetch_whose_data_still_comes() -> None:
    """The publisher has said all that it had to, and its data waits for us."""
    track = make_track(b"k")
    filled(track, range(6), 1, 1 << 20)
    async with sessions(track, limits=Limits(receive_buffer=1)) as scene:
        clock = asyncio.get_running_loop().time
        fetch = await scene.subscriber.fetch(track.name, filter=EVERYTHING)
        for group in range(4):
            item = await anext(fetch)
            assert isinstance(item, ReceivedObject)
            assert item.location.group == group
        await quiet()
        started = clock()
        with pytest.raises(RequestRejected):
            await fetch.update(priority=3)
        assert clock() - started < 1
        assert [type(item) async for item in fetch] == [ReceivedObject, ReceivedObject, StreamEnd]


async def test_an_update_of_a_subscription_that_has_ended_meanwhile() -> None:
    track = make_track(b"k")
    async with sessions(track) as scene:
        clock = asyncio.get_running_loop().time
        subscription = await scene.subscriber.subscribe(track.name)
        scene.end(track)
        started = clock()
        with pytest.raises(RequestRejected):
            await subscription.update(priority=3)
        assert clock() - started < 1
        assert [item async for item in subscription] == []
