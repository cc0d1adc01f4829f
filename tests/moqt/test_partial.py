"""A publisher that begins many Objects and ends none: what it can have a session hold is bounded."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from moqt.errors import ResetCode, StreamStopped
from moqt.limits import Limits
from moqt.quic.api import Stream
from moqt.reception import Inlet
from moqt.wire import EndOfRange, ObjectHeader, SubgroupEncoder, SubgroupHeader
from tests.moqt.ends import Peer, take
from tests.moqt.raw import subscribed

pytestmark = pytest.mark.virtual

SIZE = 1 << 20
LIMIT = 4 * SIZE


class Sink(Inlet):
    """Counts what has come."""

    def __init__(self) -> None:
        self.bytes = 0

    def object(self, header: ObjectHeader) -> Callable[[memoryview], None]:
        def write(data: memoryview) -> None:
            self.bytes += len(data)

        return write

    def marker(self, event: EndOfRange) -> None:
        raise AssertionError

    async def room(self) -> bool:
        return True

    def end(self, code: int | None) -> None:
        pass

    def cut(self) -> None:
        pass


async def begin(peer: Peer, group: int, size: int) -> Stream:
    """A Subgroup whose first Object has SIZE bytes, of which `size` are sent, if the session takes them."""
    encoder = SubgroupEncoder(SubgroupHeader(1, group, priority=128))
    stream = await peer.send(encoder.header() + encoder.object(0, SIZE))
    with suppress(StreamStopped):
        await stream.write(bytes(size))
    return stream


@pytest.mark.parametrize("sinks", [False, True], ids=["queue", "sink"])
async def test_objects_in_part_are_bounded(sinks: bool) -> None:
    inlet = Sink()
    options: dict[str, Any] = {"sink": lambda _header: inlet} if sinks else {}
    async with subscribed(limits=Limits(max_partial=LIMIT), **options) as (session, peer, subscription, _):
        begun = await asyncio.gather(*(begin(peer, group, SIZE - 1) for group in range(60)))
        await asyncio.sleep(5)
        assert LIMIT - SIZE <= session.partial.bytes <= LIMIT + SIZE
        kept = [stream for stream in begun if stream.stopped is None]
        assert 4 <= len(kept) <= 5
        assert {stream.stopped for stream in begun} == {None, ResetCode.EXCESSIVE_LOAD}
        for stream in kept:
            await stream.write(b"x", fin=True)
        if not sinks:
            assert len(await take(subscription, len(kept))) == len(kept)
        await asyncio.sleep(1)
        assert session.partial.bytes == 0
        await peer.alive()


async def test_an_object_that_is_larger_than_all_that_may_be_in_part_comes() -> None:
    async with subscribed(limits=Limits(max_partial=SIZE // 4)) as (_, peer, subscription, _):
        stream = await begin(peer, 0, SIZE)
        [item] = await take(subscription, 1)
        assert len(item.payload) == SIZE
        assert stream.stopped is None


async def test_streams_that_broke_hold_nothing() -> None:
    async with subscribed(limits=Limits(max_partial=LIMIT)) as (session, peer, subscription, _):
        for stream in [await begin(peer, group, SIZE - 1) for group in range(3)]:
            stream.reset(1)
        await asyncio.sleep(1)
        assert session.partial.bytes == 0
        await begin(peer, 3, SIZE - 1)
        await asyncio.sleep(1)
        assert session.partial.bytes == SIZE - 1
        await subscription.close()
        await asyncio.sleep(1)
        assert session.partial.bytes == 0


async def test_what_is_announced_takes_no_memory() -> None:
    """Ten bytes that announce a megabyte cost no megabyte; of a relay, see tests.relay.test_attacks."""
    async with subscribed() as (_, peer, _, _):
        tracemalloc.start()
        try:
            for group in range(200):
                await begin(peer, group, 1)
            await asyncio.sleep(1)
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert taken < 200 * 100_000
