"""Where the fuzzer plays: a relay and a publisher over real QUIC on loopback, two peers that behave, and the
judge of what must never happen.

All of it, and the hostile peers too, live in one process, so that the relay's tables can be looked into.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import moqt
from certs.make import CertificateFiles
from moqt import Fill, FullTrackName, Limits, LocationFilter, ReceivedObject, Session, Track, Tracks
from moqt.authorization import AccessRequest, Action, Allowed, Decision, Denied
from moqt.quic.api import Connection, QuicOptions
from moqt.quic.udp import dial
from moqt.relay import Relay
from moqt.wire import DRAFT_22, AliasType, Token

__all__ = ["LIVE", "SERVED", "Failure", "Good", "Judge", "Stage", "resident", "stage"]

NAMESPACE: Final = (b"good", b"scope")
LIVE: Final = FullTrackName(NAMESPACE, b"live")
"""What the peers that behave send each other through the relay."""
LARGE: Final = FullTrackName(NAMESPACE, b"large")
"""More than a reader that does not read can be sent."""
SERVED: Final = (LIVE, LARGE)

BEAT: Final = 0.05
"""Seconds from one Object of LIVE to the next."""
GROUP: Final = 20
"""Objects in a Group of LIVE."""
PATIENCE: Final = 15.0
"""Seconds within which the peers that behave must be served, whatever else goes on."""
FEW: Final = 5
"""Sessions that have ended and may still be in memory then."""
BUSY: Final = 5.0
"""CPU seconds that one turn of the event loop may take."""
GROWTH: Final = 128 * 1024 * 1024
"""Bytes that the process may grow after it has warmed up."""

LIMITS: Final = Limits(
    setup_deadline=2.0,
    reply_deadline=1.0,
    linger=0.3,
    data_deadline=0.5,
    suspicion=0.1,
    parked_deadline=0.3,
    done_deadline=0.3,
)
"""The defaults but for the times, so that there is much fuzzing in little time."""
PATIENT: Final = replace(LIMITS, reply_deadline=PATIENCE, setup_deadline=PATIENCE)
"""Those of the peers that behave: it is not for them to give up on a busy machine."""
QUIC: Final = QuicOptions(idle_timeout=10.0, keepalive=None)


SECRET: Final = Token(AliasType.USE_VALUE, type=0, value=b"the publisher that behaves")


class Guard:
    """Lets anybody do anything, but publish in the namespace of those who behave: without a policy a relay
    can't know who is the right one.
    """

    async def decide(self, request: AccessRequest) -> Decision:
        """As `moqt.authorization.Policy` asks."""
        publishes = request.action in (Action.PUBLISH, Action.PUBLISH_NAMESPACE)
        if not publishes or request.namespace[: len(NAMESPACE)] != NAMESPACE:
            return Allowed()
        return Allowed() if (0, SECRET.value) in request.tokens + request.held_tokens else Denied()


class Failure(AssertionError):
    """What must not happen has happened."""


def resident() -> int:
    """Bytes of memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class Judge(logging.Handler):
    """Hears of everything that is our fault: exceptions nobody awaited, errors in the log, and turns of the
    event loop that take too long.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.faults: list[str] = []
        self.busiest = 0.0
        """CPU seconds of the longest turn of the event loop."""

    def emit(self, record: logging.LogRecord) -> None:
        formatter = logging.Formatter("%(name)s: %(message)s")
        self.faults.append(formatter.format(record))

    def on_exception(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.faults.append(f"{context['message']}: {context.get('exception')!r}")

    async def watch(self) -> None:
        """Measure the turns of the event loop."""
        while True:
            before = time.process_time()
            await asyncio.sleep(0.02)
            self.busiest = max(self.busiest, time.process_time() - before)

    def check(self) -> None:
        """Raise Failure if anything was heard."""
        if self.busiest > BUSY:
            self.faults.append(f"one turn of the event loop took {self.busiest:.1f} s of CPU")
        if self.faults:
            raise Failure("; ".join(self.faults))


class Good:
    """A publisher and a subscriber that behave, through the relay: every Object of LIVE has to arrive, once,
    byte for byte, and other requests have to be answered.
    """

    def __init__(self, publisher: Session, subscriber: Session, track: Track) -> None:
        self.publisher = publisher
        self.subscriber = subscriber
        self.track = track
        self.published: list[bytes] = []
        self.arrived: set[int] = set()
        self.asked = 0
        self.slowest = 0.0
        """Seconds from the publication of an Object to its arrival, at most."""
        self._waiting: dict[int, float] = {}
        """When the Objects that have not arrived were published."""
        self._random = Random(0)

    async def publish(self) -> None:
        """An Object now and then."""
        while True:
            number = len(self.published)
            payload = self._random.randbytes(self._random.randrange(1, 800))
            self.published.append(payload)
            self._waiting[number] = time.monotonic()
            self.track.append(number // GROUP, number % GROUP, payload)
            if number % GROUP == GROUP - 1:
                self.track.end_group(number // GROUP, GROUP)
            await asyncio.sleep(BEAT)

    async def follow(self) -> None:
        """Take all Objects. Raises Failure."""
        everything = Fill(filter=LocationFilter.absolute_start(0, 0))
        async with await self.subscriber.subscribe(LIVE, fill=everything) as subscription:
            async for item in subscription:
                if isinstance(item, ReceivedObject) and item.payload:
                    self._check(item)
        raise Failure("the subscription of the peer that behaves has ended")

    async def ask(self) -> None:
        """Other requests, each answered in time. Raises what they raise."""
        while True:
            async with asyncio.timeout(PATIENCE):
                status = await self.subscriber.track_status(LIVE)
                assert status.largest is not None
                group = LocationFilter.groups(0, 0)
                async with await self.subscriber.fetch(LIVE, filter=group) as fetch:
                    items = [item async for item in fetch if isinstance(item, ReceivedObject)]
                for item in items:
                    number = item.location.group * GROUP + item.location.object
                    if bytes(item.payload) != self.published[number]:
                        raise Failure(f"the fetched Object at {item.location} has other bytes")
            self.asked += 1
            await asyncio.sleep(0.5)

    async def caught_up(self) -> None:
        """Wait until all that is published now has arrived. Raises Failure."""
        end = time.monotonic() + PATIENCE
        last = len(self.published)
        while missing := [number for number in self._waiting if number < last]:
            if time.monotonic() > end:
                raise Failure(f"Objects {missing} did not arrive within {PATIENCE:g} s")
            await asyncio.sleep(0.01)

    def check(self) -> None:
        """Raise Failure if what was published long ago is not here."""
        for number, published in self._waiting.items():
            if (late := time.monotonic() - published) > PATIENCE:
                raise Failure(f"Object {number} of the peers that behave is late by {late:.1f} s")

    def _check(self, item: ReceivedObject) -> None:
        number = item.location.group * GROUP + item.location.object
        if number in self.arrived:
            raise Failure(f"the Object at {item.location} came twice")
        if bytes(item.payload) != self.published[number]:
            raise Failure(f"the Object at {item.location} has other bytes")
        self.slowest = max(self.slowest, time.monotonic() - self._waiting.pop(number))
        self.arrived.add(number)


@dataclass(slots=True)
class Stage:
    """`relay_port` is the relay's, `publisher_port` that of a publisher that serves LARGE itself."""

    relay: Relay
    server: moqt.Server
    relay_port: int
    publisher_port: int
    certificates: CertificateFiles
    judge: Judge
    good: Good
    tasks: list[asyncio.Task[None]]

    async def dial(self, port: int, options: QuicOptions | None = None) -> Connection:
        """A connection without a session."""
        return await dial(
            "127.0.0.1",
            port,
            alpn=[DRAFT_22.alpn],
            options=options or QUIC,
            ca=self.certificates.ca,
            deadline=PATIENCE,
        )

    def session(self, port: int, limits: Limits = PATIENT) -> AbstractAsyncContextManager[Session]:
        """A session that behaves."""
        return session(self.certificates, port, limits=limits)

    def check(self) -> None:
        """Raise Failure if something is wrong now."""
        for task in self.tasks:
            if task.done():
                error = task.exception()
                raise Failure(f"the peers that behave were disturbed: {error!r}") from error
        self.good.check()
        self.judge.check()

    async def check_forgotten(self) -> None:
        """When the hostile peers have gone, and others have not: nobody keeps their sessions, but for a few
        that something still waits for. Raises Failure.
        """
        end = time.monotonic() + PATIENCE
        while True:
            gc.collect()
            left = sum(isinstance(known, Session) and known.closed for known in gc.get_objects())
            if left <= FEW:
                return
            if time.monotonic() > end:
                raise Failure(f"{left} sessions that have ended are still in memory")
            await asyncio.sleep(0.2)

    async def check_empty(self) -> None:
        """When all peers have gone: nothing is left in the relay. Raises Failure."""
        relay = self.relay
        tables: dict[str, Callable[[], object]] = {
            "sessions": lambda: len(self.server.sessions),
            "routes": lambda: relay._routes,
            "namespaces": lambda: (
                (relay._known, relay.tracks.namespaces, relay.upward.namespaces)
                if relay._known or relay.tracks.namespaces or relay.upward.namespaces
                else ()
            ),
            "watchers of namespaces": lambda: len(relay.tracks._watchers),
            "prefixes": lambda: len(relay._prefixes) + len(relay._track_prefixes),
            "followed tracks": lambda: [
                str(feed.name)
                for feed in relay.feeds.values()
                if feed._sources or feed._holes.open or feed._askers
            ],
            "pinned Objects": lambda: sum(
                item.busy for feed in relay.feeds.values() for item in feed.track.kept()
            ),
        }
        end = time.monotonic() + PATIENCE
        while left := {what: found for what, table in tables.items() if (found := table())}:
            if time.monotonic() > end:
                raise Failure(f"the relay still has {left}")
            await asyncio.sleep(0.05)
        # What is only cached stays until then, and what was on its way may come a moment later.
        while relay.feeds or len(relay.cache) or relay.cache.bytes:
            for feed in list(relay.feeds.values()):
                feed.track.clear()
            await asyncio.sleep(0.05)
            if time.monotonic() > end:
                raise Failure(f"the relay still has {relay.feeds} and {relay.cache.bytes} bytes in its cache")


def large_track() -> Track:
    track = Track(LARGE)
    random = Random(0)
    for group in range(24):
        for number in range(4):
            track.append(group, number, random.randbytes(256 * 1024))
        track.end_group(group, 4)
    return track


def session(
    certificates: CertificateFiles, port: int, tracks: Tracks | None = None, limits: Limits = PATIENT
) -> AbstractAsyncContextManager[Session]:
    uri = f"moqt://127.0.0.1:{port}/"
    return moqt.connect(
        uri,
        ca=certificates.ca,
        tracks=tracks,
        announce=False,
        tokens=() if tracks is None else (SECRET,),
        limits=limits,
        options=QUIC,
    )


@asynccontextmanager
async def stage(certificates: CertificateFiles) -> AsyncIterator[Stage]:
    """Everything set up, and at the end everything gone but for what the relay has cached."""
    judge = Judge()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(judge.on_exception)
    logging.getLogger().addHandler(judge)
    before = asyncio.all_tasks()
    large = large_track()
    try:
        async with AsyncExitStack() as stack:
            relay = Relay(cache_bytes=8 << 20, linger=0.2, grace=0.3, stall=1.0)
            stack.push_async_callback(relay.close)
            files: dict[str, Any] = {"certificate": certificates.certificate, "key": certificates.key}
            server = await stack.enter_async_context(
                moqt.serve(
                    "127.0.0.1", 0, tracks=relay.tracks, limits=LIMITS, policy=Guard(), options=QUIC, **files
                )
            )
            served = Tracks()
            served.add(large)
            served.announce(NAMESPACE)
            publisher = await stack.enter_async_context(
                moqt.serve("127.0.0.1", 0, tracks=served, limits=LIMITS, options=QUIC, **files)
            )
            tracks = Tracks()
            live = Track(LIVE)
            tracks.add(live)
            tracks.add(large)
            async with (
                session(certificates, server.port, tracks) as source,
                session(certificates, server.port) as sink,
            ):
                await source.publish_namespace(NAMESPACE)
                good = Good(source, sink, live)
                work = (good.publish(), good.follow(), good.ask(), judge.watch())
                tasks = [asyncio.create_task(coroutine) for coroutine in work]
                made = Stage(relay, server, server.port, publisher.port, certificates, judge, good, tasks)
                try:
                    yield made
                    await good.caught_up()
                    await made.check_forgotten()
                    made.check()
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
            await made.check_empty()
        for _ in range(20):
            left = asyncio.all_tasks() - before
            if not left:
                break
            await asyncio.sleep(0.05)
        else:
            raise Failure(f"tasks are left: {sorted(map(repr, left))}")
        gc.collect()  # Futures whose exception nobody took tell of it now.
        judge.check()
    finally:
        logging.getLogger().removeHandler(judge)
        loop.set_exception_handler(None)
