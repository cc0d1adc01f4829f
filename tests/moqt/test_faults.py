"""A fault at every step of a small exchange: it ends with an exception or whole, and never hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from moqt.errors import ConnectionLost, DeadlineExceeded, DoneCode, MoqtError, RequestRejected, SessionClosed
from moqt.filters import LocationFilter
from moqt.limits import Limits
from moqt.quic.link import Link
from moqt.quic.memory import MemoryConnection, MemoryStream
from moqt.quic.virtual import run_virtual
from moqt.subscribing import FetchStream, Item, ReceivedObject, StreamEnd, Subscription
from moqt.track import Track
from tests.moqt.ends import NAME, WHOLE, At, Ends, payload, publish, publish_groups, sessions

ALL = LocationFilter.absolute_start(0, 0)
EXPECTED: list[At] = [(group, number) for group in range(4) for number in range(3)]
LIMIT = 120.0
"""Seconds of virtual time within which all must be over; the idle time-out takes 30 of them."""


@dataclass(slots=True)
class Outcome:
    """What came, and how each part ended: None for whole."""

    steps: int = 0
    live: list[At] = field(default_factory=list)
    fetched: list[At] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)
    broken: list[int | None] = field(default_factory=list)
    """Groups whose stream broke; None for a fill."""


Fault = Callable[[Ends], None]


async def play(fault: Fault | None, step: int, *, seed: int = 0, publisher_dials: bool = False) -> Outcome:
    """Subscribe with a fill while a Track is published, fetch it, ask for its status, and end."""
    outcome = Outcome()
    limits = Limits(reply_deadline=5)
    track = Track(NAME, one_subgroup=True)
    publish_groups(track, [0], 3)
    publish(track, (1, 0))
    async with sessions(
        track=track, seed=seed, chunk=25, limits=limits, publisher_dials=publisher_dials
    ) as ends:
        base = ends.link.steps
        if fault is not None:
            ends.link.at(base + step, lambda: fault(ends))

        async def attempt(name: str, run: Callable[[], object]) -> None:
            try:
                result = run()
                assert asyncio.iscoroutine(result)
                await result
            except MoqtError as error:
                outcome.errors[name] = error

        async def receive() -> None:
            async with await ends.subscriber.subscribe(NAME, fill=WHOLE) as subscription:
                outcome.broken = await gather_into(outcome.live, subscription)

        async def fetch() -> None:
            async with await ends.subscriber.fetch(NAME, filter=ALL) as fetched:
                await gather_into(outcome.fetched, fetched)

        async def produce() -> None:
            await asyncio.sleep(0.03)
            publish(track, (1, 1), (1, 2))
            track.end_group(1, 3)
            for group in (2, 3):
                await asyncio.sleep(0.02)
                publish_groups(track, [group], 3)
            await asyncio.sleep(0.05)
            ends.tracks.remove(NAME, DoneCode.TRACK_ENDED)

        async def ask() -> None:
            await ends.subscriber.track_status(NAME)

        async with asyncio.timeout(LIMIT):
            await asyncio.gather(
                attempt("live", receive), attempt("fetch", fetch), attempt("status", ask), produce()
            )
        outcome.steps = ends.link.steps - base
    return outcome


async def gather_into(found: list[At], items: Subscription | FetchStream) -> list[int | None]:
    broken: list[int | None] = []
    async for item in items:
        note(found, broken, item)
    return broken


def note(found: list[At], broken: list[int | None], item: Item) -> None:
    if isinstance(item, StreamEnd) and item.code is not None:
        broken.append(item.group)
    elif isinstance(item, ReceivedObject) and not item.status:
        assert item.payload == payload(item.location)
        found.append((item.location.group, item.location.object))


def check(outcome: Outcome, kinds: tuple[type[MoqtError], ...]) -> None:
    """Exactly once whatever came; and whole where nothing was said."""
    for found in (outcome.live, outcome.fetched):
        assert len(set(found)) == len(found)
    assert all(isinstance(error, kinds) for error in outcome.errors.values()), outcome.errors
    if "live" not in outcome.errors and not outcome.broken:
        assert sorted(outcome.live) == EXPECTED
    if "fetch" not in outcome.errors:
        # The Track grew meanwhile: at least what was there when the fetch was asked for.
        assert set(outcome.fetched) >= {(0, 0), (0, 1), (0, 2), (1, 0)}


def steps_of(**options: bool) -> int:
    outcome = run_virtual(play(None, 0, **options))
    assert not outcome.errors
    assert not outcome.broken
    check(outcome, ())
    return outcome.steps


def cut(ends: Ends) -> None:
    ends.link.cut("gone")


def stall(ends: Ends) -> None:
    ends.link.stall()


def stall_for_a_while(ends: Ends) -> None:
    link: Link = ends.link
    link.stall()
    asyncio.get_running_loop().call_later(3.0, link.resume)


def close_by_publisher(ends: Ends) -> None:
    ends.publisher.connection.close(7, "bye")


def close_by_subscriber(ends: Ends) -> None:
    ends.subscriber.connection.close(7, "bye")


@pytest.mark.parametrize("publisher_dials", [True, False])
@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        (cut, (ConnectionLost,)),
        (stall, (ConnectionLost, DeadlineExceeded)),
        (stall_for_a_while, (DeadlineExceeded, RequestRejected)),
        (close_by_publisher, (SessionClosed,)),
        (close_by_subscriber, (SessionClosed,)),
    ],
)
def test_the_connection_at_every_step(
    fault: Fault, kinds: tuple[type[MoqtError], ...], publisher_dials: bool
) -> None:
    whole = 0
    for step in range(steps_of(publisher_dials=publisher_dials)):
        outcome = run_virtual(play(fault, step, publisher_dials=publisher_dials))
        check(outcome, kinds)
        whole += not outcome.errors
    # A short stall breaks nothing; the rest mostly does.
    assert whole > 100 if fault is stall_for_a_while else whole < 30


def data_streams(ends: Ends) -> list[tuple[MemoryConnection, MemoryStream]]:
    """Those that the subscriber has open, but for the control stream."""
    _, receiving = ends.connections
    return [
        (receiving, stream)
        for stream in list(receiving._streams.values())
        if stream._readable and not stream._writable and stream.id > 3
    ]


def reset_data(ends: Ends) -> None:
    """As if the publisher had reset all streams that carry data."""
    for connection, stream in data_streams(ends):
        connection.on_reset(stream.id, 0x6, stream.arrived)


def reset_requests(ends: Ends) -> None:
    _, receiving = ends.connections
    for stream in list(receiving._streams.values()):
        if stream._readable and stream._writable:
            receiving.on_reset(stream.id, 0x4, stream.arrived)


def stop_data(ends: Ends) -> None:
    """As if the subscriber had stopped them, which its layers above do not know."""
    sending, _ = ends.connections
    for stream in list(sending._streams.values()):
        if stream._writable and not stream._readable and stream.id > 3:
            sending.on_stop(stream.id, 0x1)


def stop_requests(ends: Ends) -> None:
    sending, _ = ends.connections
    for stream in list(sending._streams.values()):
        if stream._writable and stream._readable:
            sending.on_stop(stream.id, 0x1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", [reset_data, reset_requests, stop_data, stop_requests])
def test_streams_at_every_step(fault: Fault, seed: int) -> None:
    for step in range(0, steps_of(), 1):
        outcome = run_virtual(play(fault, step, seed=seed))
        check(outcome, (MoqtError,))
        assert not any(isinstance(error, ConnectionLost | SessionClosed) for error in outcome.errors.values())
