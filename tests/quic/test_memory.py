"""What the link in memory can do beyond the contract: seeds, stalls, cuts, faults at any step."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from moqt.errors import StreamReset
from moqt.quic.api import ConnectionClosed, QuicOptions, Stream
from moqt.quic.link import Link, LinkStats, pair
from moqt.quic.virtual import EverythingWaits, run_virtual

pytestmark = pytest.mark.virtual


async def transfer(link: Link, size: int = 300_000) -> bytes:
    """Send a few streams through the link; what arrived, in the order of arrival."""
    arrived = bytearray()

    async def send(stream: Stream, byte: int) -> None:
        await stream.write(bytes([byte]) * size, fin=True)

    async def read(stream: Stream) -> None:
        while data := await stream.read():
            arrived.extend(data[:1] + len(data).to_bytes(3, "big"))

    async with asyncio.TaskGroup() as group:
        for byte in range(4):
            group.create_task(send(link.client.open(bidirectional=False), byte))
        for _ in range(4):
            group.create_task(read(await link.server.accept()))
    return bytes(arrived)


def outcome(seed: int) -> tuple[bytes, LinkStats, int, float]:
    async def main() -> tuple[bytes, LinkStats, int, float]:
        link = pair(seed=seed, jitter=0.01, loss=0.1, ragged=True)
        order = await transfer(link)
        return order, link.stats, link.steps, asyncio.get_running_loop().time()

    return run_virtual(main())


def test_a_seed_decides_everything() -> None:
    assert outcome(1) == outcome(1)
    assert outcome(1) != outcome(2)


async def test_latency_is_what_a_ping_takes_twice() -> None:
    link = pair(latency=0.25)
    await link.client.ping()
    assert asyncio.get_running_loop().time() == pytest.approx(0.5)


async def test_statistics() -> None:
    link = pair(loss=0.2)
    await transfer(link, 100_000)
    assert link.stats.client.sent == 400_000
    assert link.stats.client.pieces > link.stats.client.delayed > 0
    assert 0 < link.stats.server.peak_held <= 400_000
    assert link.stats.client.peak_unsent > 0
    assert link.stats.server.sent == 0


async def test_loss_delays_only_the_stream_that_lost() -> None:
    """Without jitter, what is not lost takes one latency; of eight streams some lose their piece at 50 %."""
    link = pair(loss=0.5, latency=0.01, window=1 << 30)
    times: dict[int, list[float]] = {}

    async def read(stream: Stream) -> None:
        while await stream.read():
            times.setdefault(stream.id, []).append(asyncio.get_running_loop().time())

    streams = [link.client.open(bidirectional=False) for _ in range(8)]
    for stream in streams:
        stream.hand(bytes(16384), fin=True)
    async with asyncio.TaskGroup() as group:
        for _ in streams:
            group.create_task(read(await link.server.accept()))
    first = sorted(seen[0] for seen in times.values())
    assert first[0] == pytest.approx(0.01)
    assert first[-1] >= 0.04


async def test_stall_holds_everything_back() -> None:
    link = pair()
    stream = link.client.open(bidirectional=False)
    await stream.write(b"before")
    incoming = await link.server.accept()
    assert await incoming.read() == b"before"
    link.stall()
    await stream.write(b"after", fin=True)
    reader = asyncio.create_task(incoming.read())
    await asyncio.sleep(20)
    assert not reader.done()
    link.resume()
    assert await reader == b"after"
    assert asyncio.get_running_loop().time() == pytest.approx(20.01, abs=0.02)


async def test_a_stall_ends_in_the_idle_timeout() -> None:
    link = pair(client=QuicOptions(idle_timeout=7))
    link.stall()
    end = await link.server.wait_closed()
    assert not end.application
    assert "idle time-out" in end.reason
    assert asyncio.get_running_loop().time() == pytest.approx(7)
    assert link.client.closed is not None


async def test_cut_has_its_reason() -> None:
    link = pair()
    accepting = asyncio.create_task(link.client.accept())
    await asyncio.sleep(0)
    link.cut("the cable is out")
    with pytest.raises(ConnectionClosed, match="the cable is out"):
        await accepting
    assert (await link.server.wait_closed()).reason == "the cable is out"


async def test_a_fault_at_every_step() -> None:
    async def run(step: int | None) -> tuple[int, str]:
        link = pair(jitter=0.001)
        if step is not None:
            link.at(step, link.cut)
        result = "whole"
        try:
            await transfer(link, 20_000)
        except* ConnectionClosed:
            result = "cut"
        return link.steps, result

    steps, result = await run(None)
    assert result == "whole"
    outcomes = [await run(step) for step in range(steps)]
    assert all(seen == step + 1 for step, (seen, result) in enumerate(outcomes) if result == "cut")
    assert [result for _, result in outcomes].count("cut") > steps // 2


async def test_corruption() -> None:
    link = pair()
    link.corrupt = lambda stream_id, data: data.replace(b"good", b"evil")
    await link.client.open(bidirectional=False).write(b"good news", fin=True)
    assert await (await link.server.accept()).read() == b"evil news"


async def test_a_reset_overtakes_data_when_there_is_jitter() -> None:
    overtaken = 0
    for seed in range(20):
        link = pair(seed=seed, jitter=0.05)
        stream = link.client.open(bidirectional=False)
        await stream.write(bytes(100_000))
        await asyncio.sleep(0)
        stream.reset(1)
        incoming = await link.server.accept()
        taken = 0
        with suppress(StreamReset):
            while data := await incoming.read():
                taken += len(data)
            pytest.fail("a reset stream ended as if it were whole")
        overtaken += taken < 100_000
    assert overtaken > 5


def test_nothing_stays_in_the_event_loop_after_the_end() -> None:
    ended: list[float] = []

    async def main() -> None:
        link = pair()
        await transfer(link, 1000)
        link.client.close()
        await link.server.wait_closed()
        await link.client.wait_closed()
        ended.append(asyncio.get_running_loop().time())
        await asyncio.Event().wait()

    with pytest.raises(EverythingWaits) as caught:
        run_virtual(main())
    assert f"at {ended[0]:.6f} s" in str(caught.value)


@pytest.mark.parametrize("read_the_answer", [True, False])
async def test_the_state_of_many_streams_is_forgotten(read_the_answer: bool) -> None:
    link = pair(client=QuicOptions(max_bidi_streams=8), server=QuicOptions(max_bidi_streams=8))
    for _ in range(100):
        stream = await link.client.open_when_possible(bidirectional=True)
        await stream.write(b"x", fin=True)
        incoming = await link.server.accept()
        while await incoming.read():
            pass
        await incoming.write(b"y", fin=True)
        while read_the_answer and await stream.read():
            pass
    await link.client.ping()
    await link.client.ping()
    assert not link.client._streams
    assert not link.server._streams
