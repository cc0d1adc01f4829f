"""KV caches behind relays: a publisher at the first one, consumers at the last, and a tap on every link."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvcs.assembly import Layer
from kvcs.identity import Descriptor
from kvcs.publisher import Publisher
from kvcs.subscriber import Subscriber
from moqt import Session, Tracks
from moqt.quic.link import Link
from moqt.wire import Request, Subscribe
from tests.kvcs.stage import MODEL, SCOPE_KEY, TOKENS, Wiretap, collect
from tests.relay.network import Network, network

__all__ = ["BLOCKS", "LAYERS", "ONCE", "Tree", "every_object", "tree"]

LAYERS, BLOCKS = MODEL.layers, len(TOKENS) // MODEL.block_tokens


def every_object(layers: range = range(LAYERS), blocks: int = BLOCKS) -> Counter[tuple[str, int, int]]:
    """Each Object of both data tracks once: (component, layer, block)."""
    return Counter(itertools.product("kv", layers, range(blocks)))


ONCE = every_object()


@dataclass(slots=True)
class Tree:
    """Relays in a row. Hop 0 is between the publisher and the first relay, hop n ends at relay n."""

    net: Network
    tracks: Tracks
    taps: dict[Link, Wiretap]
    hops: list[list[Link]] = field(default_factory=list)
    """The links of each hop, one after the other: the last is the one in use."""

    def publisher(self, model: Descriptor = MODEL, **options: Any) -> Publisher:
        return Publisher(model, SCOPE_KEY, tracks=self.tracks, **options)

    def subscriber(self, number: int = 0, model: Descriptor = MODEL, **options: Any) -> Subscriber:
        return Subscriber(self.net.sessions[number], model, SCOPE_KEY, **options)

    async def receive(
        self, number: int = 0, *, wait: float = 5.0, patience: float = 10.0, **options: Any
    ) -> list[Layer]:
        """All layers that the consumer `number` asks for, without a single repair."""
        consumer = self.subscriber(number, patience=patience)
        async with await consumer.receive(TOKENS, wait=wait, **options) as reception:
            layers = await collect(reception)
            assert (reception.missing, reception.rejected, reception.reason) == ([], 0, "")
            return layers

    def received(self, number: int = 0) -> Counter[tuple[str, int, int]]:
        """How often each Object went to the consumer `number`."""
        return self.taps[self._consumer(number)].data_objects(from_client=False)

    def requests(self, number: int = 0) -> list[Request]:
        """What the consumer `number` has asked for."""
        return self.taps[self._consumer(number)].requests(from_client=True)

    def carried(self, hop: int) -> Counter[tuple[str, int, int]]:
        """How often each Object went down a hop, whole, over all of its links."""
        count: Counter[tuple[str, int, int]] = Counter()
        for link in self.hops[hop]:
            count += self.taps[link].data_objects(from_client=hop == 0)
        return count

    def asked(self, hop: int) -> list[Request]:
        """What went up a hop, over all of its links."""
        return [one for link in self.hops[hop] for one in self.taps[link].requests(from_client=hop > 0)]

    def subscriptions(self, hop: int) -> Counter[bytes]:
        """How often each data track was subscribed to over a hop."""
        return Counter(
            one.track.name
            for one in self.asked(hop)
            if isinstance(one, Subscribe) and b".s0" in one.track.name
        )

    async def mend(self, hop: int) -> None:
        """Whoever had dialled the link of a hop, which was cut, dials again."""
        if hop == 0:
            link, _ = await self.net.publish(self.tracks)
        else:
            link = await self.net.chain(hop, hop - 1)
        self.hops[hop].append(link)
        await asyncio.sleep(1)

    def session(self, number: int = 0) -> Session:
        """That of the consumer `number`."""
        return self.net.sessions[number]

    def _consumer(self, number: int) -> Link:
        return self.net.links[len(self.net.relays) + number]


@asynccontextmanager
async def tree(*, relays: int = 2, **options: Any) -> AsyncIterator[Tree]:
    """Relays in a row, and consumers at the last one; options as for `network`."""
    taps: dict[Link, Wiretap] = {}

    def tap(link: Link) -> None:
        taps[link] = Wiretap(link)

    async with network(relays=relays, tap=tap, **options) as net:
        made = Tree(net, net.tracks, taps)
        made.hops = [[link] for link in net.links[:relays]]
        yield made
