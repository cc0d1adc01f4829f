"""What comes in crumbs must not keep the event loop from everybody else (moqt 21): so much is done in one
turn of it, and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from moqt import Location, LocationFilter, ReceivedObject, Track
from moqt.filters import RangeFilter, RangeKind
from moqt.reception import Inlet
from moqt.scheduler import Outgoing
from moqt.wire import (
    EndOfRange,
    Namespace,
    NamespaceDone,
    ObjectHeader,
    RequestOk,
    SubgroupEncoder,
    SubgroupHeader,
    encode,
)
from tests.moqt.ends import NAME, NAMESPACE, hostile, sessions
from tests.moqt.raw import subscribed
from tests.relay.network import until

pytestmark = pytest.mark.virtual

MANY = 20_000
TURN = 3000
"""What may be done in one turn."""


class Sink(Inlet):
    """Counts the Objects."""

    def __init__(self) -> None:
        self.count = 0

    def object(self, header: ObjectHeader) -> None:
        self.count += 1

    def marker(self, event: EndOfRange) -> None:
        raise AssertionError

    async def room(self) -> bool:
        return True

    def end(self, code: int | None) -> None:
        pass

    def cut(self) -> None:
        pass


class Turns:
    """Looks after each turn of the event loop how much `count` has grown; `most` is the largest growth."""

    def __init__(self, count: Callable[[], int]) -> None:
        self.most = 0
        loop: Any = asyncio.get_running_loop()
        turn = loop._run_once

        def watched() -> None:
            before = count()
            turn()
            self.most = max(self.most, count() - before)

        loop._run_once = watched


@pytest.mark.parametrize("sinks", [False, True], ids=["queue", "sink"])
async def test_empty_objects_that_come(sinks: bool) -> None:
    inlet = Sink()
    options: dict[str, Any] = {"sink": lambda _header: inlet} if sinks else {}
    async with subscribed(**options) as (_, peer, subscription, _):
        encoder = SubgroupEncoder(SubgroupHeader(1, 0, priority=128))
        data = encoder.header() + b"".join(encoder.object(number, 0) for number in range(MANY))

        def count() -> int:
            return inlet.count if sinks else len(subscription._items)

        turns = Turns(count)
        await peer.send(data, fin=True)
        await until(lambda: count() >= MANY)
        assert 0 < turns.most <= TURN


async def test_namespaces_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.subscribe_namespace(NAMESPACE))
        talk, _ = await peer.request()
        await talk.say(RequestOk())
        watch = await asking
        told = 0
        note = watch._note

        def counted(*event: Any) -> None:
            nonlocal told
            told += 1
            note(*event)

        monkeypatch.setattr(watch, "_note", counted)
        turns = Turns(lambda: told)
        await talk.stream.write((encode(Namespace(())) + encode(NamespaceDone(()))) * (MANY // 2))
        await until(lambda: told >= MANY)
        assert 0 < turns.most <= 2 * TURN


def crumbs(count: int) -> Track:
    track = Track(NAME)
    for number in range(count):
        track.append(0, number, b"x")
    return track


async def test_small_objects_that_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sessions(track=crumbs(MANY)) as ends:
        taken = 0
        take = Outgoing._take

        def counted(outgoing: Outgoing, room: int) -> list[memoryview]:
            nonlocal taken
            taken += 1
            return take(outgoing, room)

        monkeypatch.setattr(Outgoing, "_take", counted)
        turns = Turns(lambda: taken)
        everything = LocationFilter.absolute_start(0, 0)
        async with await ends.subscriber.fetch(NAME, filter=everything) as fetch:
            assert len([item async for item in fetch]) == MANY + 1
        assert taken >= MANY
        assert 0 < turns.most <= TURN


async def test_a_filter_that_nothing_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    track = crumbs(MANY)
    track.append(1, 5, b"here")
    async with sessions(track=track) as ends:
        looked = 0
        following = Track.following

        def counted(*arguments: Any) -> Any:
            nonlocal looked
            looked += 1
            return following(*arguments)

        monkeypatch.setattr(Track, "following", counted)
        turns = Turns(lambda: looked)
        everything = LocationFilter.absolute_start(0, 0)
        only = RangeFilter(RangeKind.OBJECTID, ((5, 5), (MANY, MANY)))
        async with await ends.subscriber.fetch(NAME, filter=everything, range_filters=(only,)) as fetch:
            found = [item.location async for item in fetch if isinstance(item, ReceivedObject)]
        assert found == [Location(0, 5), Location(1, 5)]
        assert looked >= MANY
        assert 0 < turns.most <= TURN
