"""Two sessions over an in-memory link, and what tests look at: what was received, what left in which order,
what is held.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from moqt import (
    FullTrackName,
    GroupOrder,
    Item,
    Limits,
    Location,
    LocationFilter,
    ReceivedObject,
    Session,
    Subscription,
    Track,
    Tracks,
)
from moqt.errors import DoneCode
from moqt.quic.link import Link, pair
from moqt.quic.memory import MemoryConnection
from moqt.subscribing import FetchStream
from moqt.wire import DataStreamDecoder, FetchHeader, ObjectHeader, PayloadChunk, SubgroupHeader

__all__ = [
    "EVERYTHING",
    "NAMESPACE",
    "SLICE",
    "Scene",
    "Wire",
    "at_hand",
    "check_exactly_once",
    "collect",
    "filled",
    "leftovers",
    "make_track",
    "noise",
    "objects",
    "piece",
    "quiet",
    "sessions",
]

NAMESPACE = (b"scene", b"one")
EVERYTHING = LocationFilter.absolute_start(0, 0)

SLICE = 64 * 1024
"""Bytes that the scheduler hands over between two looks at urgency."""

_NOISE = random.Random(22).randbytes(9 * 1024 * 1024)


def noise(location: Location, size: int) -> memoryview:
    """The payload of the Object at `location`: no two of a test are alike."""
    start = (location.group * 7919 + location.object * 104_729) % (len(_NOISE) - size)
    return memoryview(_NOISE)[start : start + size]


def make_track(name: bytes, **more: Any) -> Track:
    """An empty Track under NAMESPACE."""
    return Track(FullTrackName(NAMESPACE, name), **more)


def piece(track: Track, group: int, object_id: int, size: int, **more: Any) -> None:
    """Publish one Object."""
    track.append(group, object_id, noise(Location(group, object_id), size), **more)


def filled(track: Track, groups: Iterable[int], per_group: int, size: int) -> None:
    """Publish whole Groups."""
    for group in groups:
        for object_id in range(per_group):
            piece(track, group, object_id, size)
        track.end_group(group, per_group)


@dataclass(frozen=True, slots=True)
class Scene:
    """`publisher` offers `tracks`, `subscriber` wants them; either may be the client of `link`."""

    link: Link
    publisher: Session
    subscriber: Session
    tracks: Tracks

    @property
    def sender(self) -> MemoryConnection:
        """The publisher's connection."""
        return self.link.client if self.publisher.connection.is_client else self.link.server

    @property
    def receiver(self) -> MemoryConnection:
        """The subscriber's connection."""
        return self.sender.peer_end

    def end(self, track: Track) -> None:
        """The Track is whole: its subscriptions end with PUBLISH_DONE."""
        self.tracks.remove(track.name, DoneCode.TRACK_ENDED)


@asynccontextmanager
async def sessions(
    *tracks: Track,
    publisher_is_client: bool = False,
    limits: Limits | None = None,
    publisher_limits: Limits | None = None,
    **link_options: Any,
) -> AsyncIterator[Scene]:
    """A scene whose sessions are up; they are closed at the end. `limits` are the subscriber's."""
    link = pair(**link_options)
    offered = Tracks()
    for track in tracks:
        offered.add(track)
    ends = (link.client, link.server) if publisher_is_client else (link.server, link.client)
    publisher = Session(ends[0], tracks=offered, announce=False, limits=publisher_limits)
    subscriber = Session(ends[1], limits=limits)
    try:
        await asyncio.gather(publisher.start(), subscriber.start())
        yield Scene(link, publisher, subscriber, offered)
    finally:
        await asyncio.gather(publisher.close(), subscriber.close())


async def collect(reception: Subscription | FetchStream) -> list[Item]:
    """All of it, to its end."""
    return [item async for item in reception]


def at_hand(reception: Subscription | FetchStream) -> list[Item]:
    """What can be taken right now, without a turn of the event loop."""
    items: list[Item] = []
    while True:
        step = reception.__anext__()
        try:
            step.send(None)
        except StopIteration as stop:
            items.append(stop.value)
        except StopAsyncIteration:
            return items
        else:
            step.close()
            return items


def objects(items: Iterable[Item]) -> list[ReceivedObject]:
    """The Objects with a payload among `items`."""
    return [item for item in items if isinstance(item, ReceivedObject) and item.payload]


def check_exactly_once(track: Track, received: Iterable[ReceivedObject]) -> None:
    """Every Object of the Track is there once, as it was published."""
    whole = {
        item.location: b"".join(item.payload) for item in track.objects(Location(0, 0), Location(1 << 60, 0))
    }
    got = sorted(item.location for item in received)
    assert got == sorted(whole)
    assert all(item.payload == whole[item.location] for item in received)


async def quiet() -> None:
    """Let a virtual minute pass, which is longer than everything that a session does after an end."""
    await asyncio.sleep(60)


def leftovers(session: Session) -> dict[str, int]:
    """How much there is in each table of a session, as far as there is anything. What is retired on purpose,
    in a ring, does not count.
    """
    found = {}
    for owner in (session, session.answering, session.publishing, session.incoming, session.scheduler):
        for name, value in vars(owner).items():
            if isinstance(value, Sized) and "retired" not in name and not isinstance(value, (str, bytes)):
                found[f"{type(owner).__name__}.{name}"] = len(value)
            elif name in ("serving", "_fetches", "_parked"):
                found[f"{type(owner).__name__}.{name}"] = value
    connection = session.connection
    assert isinstance(connection, MemoryConnection)
    found["streams"] = len(connection._streams)
    found["watchers"] = len(session.tracks._watchers)
    for track in session.tracks:
        found[f"watchers of {track.name}"] = len(track._watchers)
    return {name: size for name, size in found.items() if size}


@dataclass(slots=True)
class _Sending:
    decoder: DataStreamDecoder
    header: SubgroupHeader | FetchHeader | None = None
    current: ObjectHeader | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """Where an Object began or ended on the wire: `offset` counts the bytes of all data streams."""

    header: SubgroupHeader | FetchHeader
    location: Location
    offset: int

    @property
    def fill(self) -> bool:
        """Whether it went on a fill or fetch stream."""
        return isinstance(self.header, FetchHeader)

    @property
    def alias(self) -> int:
        """The Track Alias; -1 on a fill or fetch stream."""
        return self.header.track_alias if isinstance(self.header, SubgroupHeader) else -1


class Wire:
    """What the publisher's data streams carried, in the order in which it was sent. `order` is that of the
    Groups on fill and fetch streams.
    """

    def __init__(self, scene: Scene, order: GroupOrder = GroupOrder.ASCENDING) -> None:
        self.begins: list[Mark] = []
        self.ends: list[Mark] = []
        self.order: list[tuple[int, int]] = []
        """(Track Alias or -1, bytes) of each piece."""
        self.offset = 0
        self._group_order = order
        self._kind = 2 if scene.publisher.connection.is_client else 3
        self._streams: dict[int, _Sending] = {}
        self._moved = asyncio.Event()
        scene.link.corrupt = self._piece

    def _piece(self, stream_id: int, data: bytes) -> bytes:
        if stream_id % 4 == self._kind and stream_id // 4 and data:  # The first one is the control stream.
            self._decode(self._streams.setdefault(stream_id, _Sending(DataStreamDecoder())), data)
        return data

    def _decode(self, sending: _Sending, data: bytes) -> None:
        before = self.offset
        self.offset += len(data)
        for event in sending.decoder.feed(data):
            if isinstance(event, (SubgroupHeader, FetchHeader)):
                sending.header = event
                sending.decoder.order = self._group_order
            elif isinstance(event, ObjectHeader) and event.size:
                assert sending.header is not None
                sending.current = event
                self.begins.append(Mark(sending.header, event.location, before))
            elif isinstance(event, PayloadChunk) and event.last:
                assert sending.header is not None
                assert sending.current is not None
                self.ends.append(Mark(sending.header, sending.current.location, self.offset))
        alias = sending.header.track_alias if isinstance(sending.header, SubgroupHeader) else -1
        self.order.append((alias, len(data)))
        self._moved.set()

    async def reached(self, offset: int) -> None:
        """Wait until so many bytes have left."""
        while self.offset < offset:
            self._moved.clear()
            await self._moved.wait()

    def begin(self, *, alias: int = -1, group: int | None = None) -> int:
        """Where the first Object begins; of a fill or fetch stream without an `alias`."""
        return min(mark.offset for mark in self._select(self.begins, alias, group))

    def end(self, *, alias: int = -1, group: int | None = None) -> int:
        """Where the last Object ends."""
        return max(mark.offset for mark in self._select(self.ends, alias, group))

    @staticmethod
    def _select(marks: list[Mark], alias: int, group: int | None) -> Iterator[Mark]:
        return (
            mark for mark in marks if mark.alias == alias and (group is None or mark.location.group == group)
        )
