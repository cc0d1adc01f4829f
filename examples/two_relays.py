"""A cache that is being produced, received through two relays: `python -m examples.two_relays`.

The figure of kvcs 8, in four processes: a publisher, Relay A, Relay B, and this one, which has two consumers
at Relay B. The first follows the production from its start, so Relay B has layers 0 to 4 in its cache when
the second comes. That one gets these from the cache, by a fill, and the rest live. Every Object is verified
and counted; how often the publisher and the relays were asked for each track is counted in their logs. The
exit code is 0 only if each consumer got each Object once, and each hop had one subscription per track.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import runpy
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # also as a file: python examples/two_relays.py
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import moqt
from examples.child import ROOT, Child, ChildFailed
from examples.role import Role, play
from kvcs import Descriptor, KvcsError, Publisher, ScopeKey
from kvcs.codecs import CODECS
from kvcs.identity import block_keys
from kvcs.layout import Geometry
from kvcs.names import DataTrack, content_prefix
from kvcs.payload import Expected, open_object
from moqt import FullTrackName, Location, LocationFilter, ObjectStatus
from moqt.errors import MoqtError
from moqt.names import TrackNamespace

LAYERS, BLOCKS, BLOCK_TOKENS = 12, 4, 16
CACHED = 5  # layers that are in the cache of Relay B when the second consumer comes
TRACKS = (DataTrack.parse("k.raw.s0"), DataTrack.parse("v.raw.s0"))
TOKENS = list(range(BLOCKS * BLOCK_TOKENS))
DESCRIPTOR = Descriptor.parse(
    {
        "profile": "kvsp-lp1",
        "model": "kvcs-examples/two-relays",
        "model_sha256": "0" * 64,
        "tokenizer_sha256": "0" * 64,
        "adapter_sha256": None,
        "attention": "gqa",
        "layers": LAYERS,
        "kv_heads": 2,
        "head_dim": 64,
        "dtype": "float16",
        "block_tokens": BLOCK_TOKENS,
        "layout": "thd-le",
        "position": {"kind": "none"},
        "window": 0,
        "kv_scales_sha256": None,
    }
)
GEOMETRY = Geometry.of(DESCRIPTOR)
EVERY = {Location(layer, block) for layer in range(LAYERS) for block in range(BLOCKS)}
DEADLINE = 60.0  # seconds for all of it
LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"  # as the relay's
REQUEST = re.compile(r"DEBUG moqt\.\w+: \S+ (Subscribe|Fetch) of \S+--(\S+)")


@dataclass(slots=True)
class Received:
    """What a consumer has of one track: how often each Object came, and which layers by the fill and live."""

    objects: Counter[Location] = field(default_factory=Counter)
    filled: set[int] = field(default_factory=set)
    live: set[int] = field(default_factory=set)
    ended: bool = False

    @property
    def once(self) -> bool:
        """Whether each Object came once, and the end of the track."""
        return self.ended and self.objects == Counter(EVERY)

    def has(self, layers: int) -> bool:
        """Whether so many layers are whole."""
        return all(place in self.objects for place in EVERY if place.group < layers)


class Consumer:
    """Receives the data tracks of a publication as kvcs 7.2 says: Next Object, and a fill of what was."""

    def __init__(self) -> None:
        self.received = {track: Received() for track in TRACKS}
        self._news = asyncio.Event()
        self._readers: list[asyncio.Task[None]] = []

    async def join(self, session: moqt.Session, namespace: TrackNamespace) -> None:
        """Subscribe to each track; all are accepted when this returns."""
        for track in TRACKS:
            subscription = await session.subscribe(
                FullTrackName(namespace, track.name),
                filter=LocationFilter.next_object(),
                fill=moqt.Fill(filter=LocationFilter.absolute_start(0, 0)),
            )
            self._readers.append(asyncio.create_task(self._read(subscription, track)))

    async def until(self, condition: Callable[[Received], bool]) -> None:
        """Read until the condition holds for each track, or a subscription breaks."""
        while not all(map(condition, self.received.values())):
            for reader in self._readers:
                if reader.done():
                    reader.result()
            self._news.clear()
            await self._news.wait()

    async def finish(self) -> None:
        """Read until the publisher has ended each subscription, and all of its streams have come."""
        await asyncio.gather(*self._readers)

    async def _read(self, subscription: moqt.Subscription, track: DataTrack) -> None:
        received = self.received[track]
        try:
            async with subscription:
                async for item in subscription:
                    if not isinstance(item, moqt.ReceivedObject):
                        continue
                    if item.status is ObjectStatus.END_OF_TRACK:
                        received.ended = True
                    elif item.status is ObjectStatus.NORMAL:
                        verify(track, item)
                        received.objects[item.location] += 1
                        (received.filled if item.fill else received.live).add(item.location.group)
                    self._news.set()
        finally:
            self._news.set()


def verify(track: DataTrack, item: moqt.ReceivedObject) -> None:
    """All checks of kvcs 4. Raises ObjectRejected."""
    layer, block = item.location.group, item.location.object
    codec = CODECS[track.codec].value
    expected = Expected.at(
        layer, block, component=track.component, codec=codec, first_block=0, geometry=GEOMETRY
    )
    open_object(item.payload, expected)


@dataclass(slots=True)
class Outcome:
    """What came of it. `asked` counts the requests that each process got: (process, request, track name)."""

    early: dict[DataTrack, Received] = field(default_factory=dict)
    late: dict[DataTrack, Received] = field(default_factory=dict)
    asked: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def read_log(self, process: str, line: str) -> None:
        """Note the request that a line of a log tells of, if it does."""
        if found := REQUEST.search(line):
            self.asked[process, found[1], found[2].replace(".2e", ".")] += 1

    def faults(self) -> Iterator[str]:
        """What is not as the figure has it."""
        for track in TRACKS:
            for name, received in (("first", self.early[track]), ("second", self.late[track])):
                if not received.once:
                    yield f"the {name} consumer did not get each Object of {track} once, and its end"
            if self.late[track].filled != set(range(CACHED)):
                yield f"the fill of {track} brought layers {sorted(self.late[track].filled)}"
            if self.late[track].live != set(range(CACHED, LAYERS)):
                yield f"layers {sorted(self.late[track].live)} of {track} came live"
            for process, expected in (("publisher", 1), ("Relay A", 1), ("Relay B", 2)):
                subscribed = self.asked[process, "Subscribe", str(track)]
                fetched = self.asked[process, "Fetch", str(track)]
                if (subscribed, fetched) != (expected, 0):
                    yield f"{process} was asked by {subscribed} SUBSCRIBE, {fetched} FETCH for {track}"


async def show() -> Outcome:
    """Have it all happen. Raises ChildFailed, MoqtError, KvcsError, TimeoutError."""
    outcome = Outcome()
    async with asyncio.timeout(DEADLINE), AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcs-two-relays-")))
        files = runpy.run_path(str(ROOT / "certs" / "make.py"))["make"](directory)
        scope_key = directory / "scope.key"
        scope_key.touch(0o600)
        scope_key.write_text(secrets.token_hex(32))
        ca = ("--ca", str(files.ca))
        server = ("--listen", "127.0.0.1:0", "--cert", str(files.certificate), "--key", str(files.key))

        async def start(name: str, module: str, *arguments: str) -> Child:
            child = await Child.start(name, module, arguments, on_line=outcome.read_log)
            return await stack.enter_async_context(child)

        async def relay(name: str, *arguments: str) -> str:
            child = await start(name, "relay", *server, *ca, "--json", "-vv", *arguments)
            uri = f"moqt://127.0.0.1:{(await child.until('listening'))['port']}"
            print(f"{name:<10} process {child.pid} at {uri}", flush=True)
            if arguments:
                await child.until("connected")
            return uri

        uri_a = await relay("Relay A")
        uri_b = await relay("Relay B", "--upstream", uri_a)
        publisher = await start(
            "publisher", "two_relays", "--publish", uri_a, *ca, "--scope-key", str(scope_key)
        )
        await publisher.until("connected")
        print(f"publisher  process {publisher.pid} connected to Relay A", flush=True)

        consumers = Consumer(), Consumer()
        early, late = consumers
        outcome.early, outcome.late = early.received, late.received
        first, second = [await stack.enter_async_context(moqt.connect(uri_b, ca=files.ca)) for _ in consumers]
        prefix = prefix_of(ScopeKey.from_file(scope_key))
        async with await first.subscribe_namespace(prefix) as namespaces:
            namespace = (await anext(namespaces)).namespace
        await early.join(first, namespace)
        publisher.order(layers=CACHED)
        await early.until(lambda received: received.has(CACHED))
        print(f"the first consumer, at Relay B, has layers 0 to {CACHED - 1}; a second one comes", flush=True)
        await late.join(second, namespace)
        publisher.order(layers=LAYERS)
        for consumer in consumers:
            await consumer.until(lambda received: received.ended and received.has(LAYERS))
        publisher.order(leave=True)
        for consumer in consumers:
            await consumer.finish()
    return outcome  # The logs are read to their end.


def prefix_of(scope_key: ScopeKey) -> TrackNamespace:
    """Where publications of TOKENS are announced (kvcs 7.1)."""
    anchor_key = block_keys(scope_key, DESCRIPTOR, TOKENS)[-1]
    return content_prefix(scope_key.scope_id, DESCRIPTOR.compat_id, anchor_key)


async def publish(role: Role) -> None:
    """The publisher's process: publishes as many layers as it is told to."""
    logging.basicConfig(format=LOG_FORMAT, stream=sys.stderr)
    logging.getLogger("moqt").setLevel(logging.DEBUG)
    publisher = Publisher(DESCRIPTOR, role.scope_key)
    publication = publisher.publish(TOKENS)
    uri, ca = role.arguments.publish, role.arguments.ca
    async with moqt.connect(uri, ca=ca, tracks=publisher.tracks, announce=True) as session:
        role.tell("connected")
        random = np.random.default_rng(0)
        shape = (len(TOKENS), GEOMETRY.kv_heads, GEOMETRY.head_dim)
        while layers := (await role.order()).get("layers"):
            while publication.segment.next_layer < layers:
                k, v = (random.random(shape).astype(GEOMETRY.dtype) for _ in "kv")
                await publication.segment.put_layer(publication.segment.next_layer, k, v)
        publication.close()
        await session.finish(moqt.DoneCode.TRACK_ENDED, deadline=DEADLINE)


def report(outcome: Outcome) -> bool:
    """Print what came of it; whether it is as the figure has it."""
    for track in TRACKS:
        received = outcome.late[track]
        print(
            f"{track}: the second consumer got {sum(received.objects.values())} Objects, "
            f"layers {spans(received.filled)} from the cache, {spans(received.live)} live"
        )
        for process in ("publisher", "Relay A", "Relay B"):
            asked = {what: outcome.asked[process, what, str(track)] for what in ("Subscribe", "Fetch")}
            print(f"{track}: {process} was asked by {asked['Subscribe']} SUBSCRIBE, {asked['Fetch']} FETCH")
    faults = list(outcome.faults())
    for fault in faults:
        print(f"two_relays: {fault}", file=sys.stderr)
    if not faults:
        print("each Object once, and one subscription per track between publisher, Relay A and Relay B")
    return not faults


def spans(numbers: set[int]) -> str:
    """A set of numbers, as the run that it should be."""
    ordered = sorted(numbers)
    if not ordered or ordered != list(range(ordered[0], ordered[-1] + 1)):
        return str(ordered)
    return f"{ordered[0]} to {ordered[-1]}"


def main() -> int:
    """The command. 0: as in the figure; 1: not so, or something failed; 2: bad usage."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.two_relays",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--publish", metavar="URI", help=argparse.SUPPRESS)  # for the publisher's process
    parser.add_argument("--ca", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--scope-key", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.publish:
        return play(arguments, publish)
    try:
        return 0 if report(asyncio.run(show())) else 1
    except TimeoutError:
        fault = f"it took more than {DEADLINE:g} s"
    except (ChildFailed, KvcsError, MoqtError) as error:
        fault = str(error)
    print(f"two_relays: {fault}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
