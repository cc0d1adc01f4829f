"""A hostile publisher, or server: it answers what is asked of it, wrongly for the most part. And what a
session that behaves asks of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Final

from moqt import Fill, FullTrackName, GroupOrder, LocationFilter, Session
from moqt.errors import MoqtError
from moqt.quic.api import Connection, NoStreamCredit, Stream
from moqt.wire import Fetch, MessageDecoder, Request, Subscribe, SubscribeNamespace, SubscribeTracks
from tests.fuzz.attacks import PLAIN, Attacker
from tests.fuzz.material import (
    DONE,
    ERROR,
    FETCH_OK,
    NOTIFY,
    OK,
    PUBLISH,
    REPLIES,
    SETUP,
    SKIPPED,
    SUBSCRIBE_OK,
    UPDATE,
    Material,
)
from tests.fuzz.material import NAMESPACE as HERE
from tests.fuzz.material import NAMESPACE_DONE as GONE
from tests.moqt.hostile import frame, full_name, namespace, vi

__all__ = ["WISHES", "Imposter"]


class Imposter(Attacker):
    """It takes requests, on a connection that it dialled or that was dialled to it."""

    def __init__(self, connection: Connection, random: Random) -> None:
        super().__init__(connection, random, reads=False)
        self.next_id = 0 if connection.is_client else 1
        self._seed = random.getrandbits(64)
        self._asked = 0

    async def begin(self, *, honest: bool) -> None:
        """SETUP, and then answers to all requests."""
        setup = PLAIN if honest else self.material.spoil(self.material.message(SETUP))
        await self.open_control(setup)
        self.run(self._take_requests())

    async def announce(self, fields: tuple[bytes, ...]) -> None:
        """Offer what is under a namespace."""
        await self.request(frame(0x06, vi(self.take_id()), namespace(*fields), vi(0)))

    async def offer(self, m: Material, track: FullTrackName) -> None:
        """PUBLISH a Track, and what belongs to it, before anybody has asked for it or after."""
        alias = m.random.randrange(3, 6)
        parameters = m.parameters(PUBLISH, most=1) if m.random.random() < 0.3 else vi(0)
        properties = m.properties() if m.random.random() < 0.2 else b""
        body = frame(PUBLISH, vi(self.take_id()), full_name(track), vi(alias), parameters, properties)
        stream = await self.request(body)
        if m.random.random() < 0.5:
            await self.settle()
        for _ in range(m.random.randrange(5)):
            await self._send(m, m.subgroup(alias, group=m.random.randrange(5)))
            self.datagram(m.object_datagram(alias)[:1000])
        await asyncio.sleep(m.random.choice((0, 0.1, 0.4)))
        for _ in range(m.random.choice((0, 1, 1, 3))):
            await self.add(stream, m.message(m.random.choice((NOTIFY, DONE, UPDATE, OK)), self.take_id()))
        self.leave(stream)

    async def _take_requests(self) -> None:
        while True:
            stream = await self.connection.accept()
            if stream.bidirectional:
                self._asked += 1
                self.run(self._answer(stream, f"{self._seed}/{self._asked}"))

    async def _answer(self, stream: Stream, seed: str) -> None:
        """Answer one request; the seed is its own, so that it does not matter which of two came first."""
        m = Material(Random(seed), self.material.tracks)
        decoder = MessageDecoder()
        while not (messages := decoder.feed(await stream.read())):
            pass
        request = messages[0]
        assert isinstance(request, Request)
        kind = m.random.random()
        if kind < 0.05:
            return
        if kind < 0.15:
            self.leave(stream)
            return
        if kind < 0.25:
            await self.add(stream, m.message(m.random.choice(REPLIES)))
            return
        spoils = m.spoil if kind < 0.35 else bytes
        data: list[bytes] = []
        match request:
            case Subscribe():
                alias = m.random.randrange(3)
                await self.add(stream, spoils(_accepted(m, SUBSCRIBE_OK, alias)))
                data = [m.subgroup(alias, group=m.random.randrange(5)) for _ in range(m.random.randrange(6))]
                data += [m.fetch(request.request_id)] if request.parameters.fill else []
                for _ in range(m.random.randrange(3)):
                    self.datagram(m.object_datagram(alias)[:1000])
                sequel = (NOTIFY, DONE, DONE, OK, ERROR, SUBSCRIBE_OK)
            case Fetch():
                data = [m.fetch(request.request_id) for _ in range(m.random.choice((1, 1, 1, 2)))]
                await self.add(stream, spoils(_accepted(m, FETCH_OK, 0)))
                sequel = (OK, FETCH_OK, ERROR, DONE, NOTIFY, NOTIFY)
            case SubscribeNamespace():
                await self.add(stream, spoils(frame(OK, vi(0))))
                sequel = (HERE, HERE, HERE, GONE, GONE, OK)
            case SubscribeTracks():
                await self.add(stream, spoils(frame(OK, vi(0))))
                for number in range(m.random.randrange(3)):
                    self.run(self.offer(m, FullTrackName(request.prefix, b"%d" % number)))
                sequel = (SKIPPED, SKIPPED, SKIPPED, HERE, OK, DONE)
            case _:
                await self.add(stream, spoils(frame(OK, vi(0))))
                sequel = (OK, ERROR, NOTIFY, DONE, HERE, FETCH_OK)
        m.random.shuffle(data)
        for body in data:
            with suppress(NoStreamCredit):
                await self._send(m, body)
        for _ in range(m.random.choice((0, 1, 1, 4))):
            await self.add(stream, m.message(m.random.choice(sequel), m.random.randrange(3)))
        self.leave(stream)

    async def _send(self, m: Material, body: bytes) -> None:
        """One data stream, with a fault now and then."""
        if m.random.random() < 0.25:
            body = m.spoil(body)
        stream = await self.stream(body, fin=m.random.random() < 0.6)
        if m.random.random() < 0.15:
            stream.reset(m.random.choice((0, 1, 5, 0x12)))


def _accepted(m: Material, kind: int, alias: int) -> bytes:
    """SUBSCRIBE_OK or FETCH_OK, seldom an odd one."""
    if m.random.random() < 0.2:
        return m.message(kind, alias)
    if kind == FETCH_OK:
        return frame(kind, vi(0, m.random.randrange(6), m.random.randrange(6), 0))
    largest = vi(1, 0x09, m.random.randrange(5), m.random.randrange(5)) if m.random.random() < 0.6 else vi(0)
    return frame(kind, vi(alias), largest)


# What a session that behaves wants of the imposter.


async def _subscribe(session: Session, track: FullTrackName) -> None:
    async with await session.subscribe(track, filter=LocationFilter.none()) as subscription:
        async for _ in subscription:
            pass


async def _join(session: Session, track: FullTrackName) -> None:
    fill = Fill(filter=LocationFilter.absolute_start(0, 0))
    async with await session.subscribe(track, fill=fill) as subscription:
        async for _ in subscription:
            pass


async def _update(session: Session, track: FullTrackName) -> None:
    async with await session.subscribe(track) as subscription:
        await subscription.update(priority=1, fill=Fill(filter=LocationFilter.absolute_start(0, 0)))
        async for _ in subscription:
            pass


async def _fetch(session: Session, track: FullTrackName) -> None:
    async with await session.fetch(track, filter=LocationFilter.groups(0, 9)) as fetch:
        async for _ in fetch:
            pass


async def _fetch_backwards(session: Session, track: FullTrackName) -> None:
    groups = LocationFilter.groups(0, 9)
    async with await session.fetch(track, filter=groups, order=GroupOrder.DESCENDING) as fetch:
        async for _ in fetch:
            pass


async def _status(session: Session, track: FullTrackName) -> None:
    await session.track_status(track)


async def _watch(session: Session, track: FullTrackName) -> None:
    async with await session.subscribe_namespace(track.namespace) as watch:
        async for _ in watch:
            pass


async def _tracks(session: Session, track: FullTrackName) -> None:
    watch = await session.subscribe_tracks(track.namespace)
    await asyncio.sleep(0.2)
    await watch.close()


async def _announce(session: Session, track: FullTrackName) -> None:
    announcement = await session.publish_namespace(track.namespace)
    await asyncio.sleep(0.05)
    await announcement.close()


WISHES: Final[tuple[Callable[[Session, FullTrackName], Awaitable[None]], ...]] = (
    _subscribe,
    _join,
    _join,
    _update,
    _fetch,
    _fetch_backwards,
    _status,
    _watch,
    _tracks,
    _announce,
)

ENDS: Final = (MoqtError, TimeoutError)
"""How a wish may end besides well."""


async def wish(session: Session, track: FullTrackName, random: Random, *, seconds: float) -> None:
    """A few wishes at once. Each is fulfilled, or fails as it may, or goes on until nobody wants it any
    more; anything else is raised.
    """
    chosen = [random.choice(WISHES) for _ in range(random.randint(1, 4))]

    async def one(wish: Callable[[Session, FullTrackName], Awaitable[None]]) -> None:
        with suppress(*ENDS):
            async with asyncio.timeout(seconds):
                await wish(session, track)

    await asyncio.gather(*map(one, chosen))
