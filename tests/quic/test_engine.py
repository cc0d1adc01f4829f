"""Our changes to aioquic: windows, order, quick paths, keys. Over a simulated network in virtual time."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from aioquic.quic.connection import QuicConnectionError
from aioquic.quic.packet import QuicErrorCode
from aioquic.quic.rangeset import RangeSet
from hypothesis import given
from hypothesis import strategies as st

from moqt.errors import StreamReset, StreamStopped, UsageError
from moqt.quic import engine as engine_module
from moqt.quic.api import QuicOptions, Stream
from moqt.quic.connection import DATAGRAMS_WAITING, AioquicConnection
from moqt.quic.receiving import Fragments
from moqt.quic.virtual import EverythingWaits, run_virtual
from tests.quic.contract import Offer, noise, read_all, until_quiet
from tests.quic.ends import Ends, Port, simulated_ends

if TYPE_CHECKING:
    from tests.conftest import Certificates

pytestmark = pytest.mark.virtual


@pytest.fixture
async def ends(certificates: Certificates) -> AsyncIterator[Ends]:
    async with simulated_ends(certificates) as ends:
        yield ends


def aioquic(end: object) -> AioquicConnection:
    assert isinstance(end, AioquicConnection)
    return end


@pytest.mark.parametrize("seed", range(8))
async def test_whole_or_reset_over_a_bad_network(certificates: Certificates, seed: int) -> None:
    """Streams of all kinds in both directions; each arrives as it was sent or ends with its code."""
    choose = random.Random(seed)
    options = QuicOptions(
        max_data=256 * 1024, max_stream_data=32 * 1024, max_uni_streams=5, max_bidi_streams=3
    )
    stops: dict[int, int] = {}
    bad = {"jitter": 0.01, "loss": 0.05, "repeat": 0.05}

    async def send(end: AioquicConnection, number: int) -> None:
        data = noise(choose.choice((0, 1, 100, 5_000, 200_000)), number)
        stream = await end.open_when_possible(bidirectional=bool(number % 2))
        fate = choose.choice(("whole", "whole", "whole", "reset"))
        head = number.to_bytes(4, "big") + len(data).to_bytes(4, "big")
        try:
            await stream.write(head)
            if fate == "reset":
                await stream.write(data[: len(data) // 2])
                stream.reset(number)
            else:
                await stream.write(data, fin=True)
        except StreamStopped as error:
            stops[error.code] = number
        if stream.bidirectional:
            await read_all(stream)

    async def receive(stream: Stream, results: dict[int, str]) -> None:
        data = bytearray()
        number = None
        stop_at = choose.choice((None, None, None, 3000))
        try:
            while part := await stream.read():
                data += part
                if number is None and len(data) >= 8:
                    number = int.from_bytes(data[:4], "big")
                if stop_at is not None and number is not None and len(data) > stop_at:
                    stream.stop(1000 + number)
                    results[number] = "stopped"
                    break
            else:
                assert number is not None
                assert int.from_bytes(data[4:8], "big") == len(data) - 8
                assert data[8:] == noise(len(data) - 8, number)
                results[number] = "whole"
        except StreamReset as error:
            if number is not None:
                assert data[8:] == noise(200_000, number)[: len(data) - 8] or len(data) < 200_000
            results[error.code] = "reset"
        if stream.bidirectional:
            await stream.write(b"", fin=True)

    async with simulated_ends(certificates, options, options, seed=seed, **bad) as ends:
        results: dict[AioquicConnection, dict[int, str]] = {}
        async with asyncio.TaskGroup() as group:
            for sender, receiver in ((ends.client, ends.server), (ends.server, ends.client)):
                results[aioquic(receiver)] = {}
                for number in range(1, 41):
                    group.create_task(send(aioquic(sender), number))

                async def accept(end: AioquicConnection) -> None:
                    async with asyncio.TaskGroup() as readers:
                        for _ in range(40):
                            readers.create_task(receive(await end.accept(), results[end]))

                group.create_task(accept(aioquic(receiver)))
        assert all(code == 1000 + number for code, number in stops.items())
        for result in results.values():
            assert sorted(result) == list(range(1, 41))
            assert {"whole", "reset"} <= set(result.values())
        await asyncio.sleep(10)
        for end in (ends.client, ends.server):
            assert end.held == 0
            assert end.unsent == 0
            assert not aioquic(end)._streams


async def test_a_handshake_over_a_very_bad_network(certificates: Certificates) -> None:
    for seed in range(5):
        async with simulated_ends(certificates, loss=0.25, seed=seed) as ends:
            await ends.client.ping()


@pytest.mark.parametrize("size", [1200, 1452, 8900, 16000])
async def test_datagram_sizes(certificates: Certificates, size: int) -> None:
    options = QuicOptions(max_datagram_size=size)
    data = noise(1 << 20)
    async with simulated_ends(certificates, options, options) as ends:
        stream = ends.client.open(bidirectional=False)
        async with asyncio.TaskGroup() as group:
            group.create_task(stream.write(data, fin=True))
            assert await read_all(await ends.server.accept()) == data
        assert ends.network is not None
        assert ends.network.carried < 2 * (1 << 20) // size + 300


async def test_keys_change_while_data_flows(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "KEY_UPDATE_PACKETS", 200)
    data = noise(2 << 20)
    async with simulated_ends(certificates, loss=0.01, jitter=0.001) as ends:
        phases = set()

        async def read() -> bytes:
            incoming = await ends.server.accept()
            parts = []
            while part := await incoming.read():
                parts.append(part)
                phases.add(aioquic(ends.client).engine._cryptos[engine_module.ONE_RTT].recv.secret)
            return b"".join(parts)

        reader = asyncio.create_task(read())
        await ends.client.open(bidirectional=False).write(data, fin=True)
        assert await reader == data
        assert len(phases) > 3
        await ends.server.ping()


async def test_damaged_datagrams_are_as_good_as_lost(ends: Ends) -> None:
    chance = random.Random(1)

    def damage(data: bytes) -> bytes:
        if chance.random() < 0.9:
            return data
        at = chance.randrange(len(data))
        return data[:at] + bytes((data[at] ^ 1 << chance.randrange(8),)) + data[at + 1 :]

    assert ends.network is not None
    ends.network.change = damage
    data = noise(1 << 20)
    async with asyncio.TaskGroup() as group:
        group.create_task(ends.client.open(bidirectional=False).write(data, fin=True))
        assert await read_all(await ends.server.accept()) == data


async def test_a_client_whose_address_changes_is_followed(ends: Ends) -> None:
    """As when a NAT forgets a mapping: the server proves the new path, and the transfer goes on both ways."""
    assert ends.network is not None
    data = noise(4 << 20)
    stream = ends.client.open(bidirectional=True)
    upward = asyncio.create_task(stream.write(data, fin=True))
    incoming = await ends.server.accept()
    downward = asyncio.create_task(incoming.write(data, fin=True))
    parts = [await incoming.read(), await stream.read()]
    ends.network.client_address = ("peer", 2)
    assert parts[0] + await read_all(incoming) == data
    assert parts[1] + await read_all(stream) == data
    await upward
    await downward
    assert aioquic(ends.server).engine.get_peer_address() == ("peer", 2)


async def test_an_exception_in_aioquic_ends_that_connection_only(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(context["exception"]))

    def fail(*_: object) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(aioquic(ends.server).engine, "_receive_quickly", fail)
    ends.client.open(bidirectional=False).hand(b"x")
    end = await ends.client.wait_closed()
    loop.set_exception_handler(None)
    assert (end.code, end.application, end.remote) == (QuicErrorCode.INTERNAL_ERROR, False, True)
    assert [str(fault) for fault in faults] == ["a bug"]


async def test_the_keepalive_keeps_a_silent_connection(certificates: Certificates) -> None:
    options = QuicOptions(idle_timeout=5, keepalive=2)
    async with simulated_ends(certificates, options, options) as ends:
        await asyncio.sleep(600)
        assert ends.client.closed is None
        await ends.client.ping()


async def test_without_keepalive_silence_ends_it(certificates: Certificates) -> None:
    options = QuicOptions(idle_timeout=5, keepalive=None)
    async with simulated_ends(certificates, options, options) as ends:
        await until_quiet(ends.client)
        began = asyncio.get_running_loop().time()
        end = await ends.client.wait_closed()
        assert asyncio.get_running_loop().time() - began == pytest.approx(5, abs=0.5)
        assert "idle time-out: nothing came from the peer for 5 s" in str(end)
        assert (end.code, end.remote, end.application) == (0, False, False)


async def test_a_lost_close_is_said_again_to_a_peer_that_sends(ends: Ends) -> None:
    assert ends.network is not None
    Offer(ends.server, streams=1, each=1 << 20)
    incoming = await ends.client.accept()
    await incoming.read()
    lost: list[Port] = []

    def drop_first(to: Port) -> bool:
        lost.append(to)
        return len(lost) == 1

    ends.network.drop = drop_first
    ends.client.close(7, "said twice")
    end = await ends.server.wait_closed()
    assert (end.code, end.reason, end.application) == (7, "said twice", True)
    assert len(lost) > 1


async def test_bytes_beyond_the_stream_window_close_the_connection(ends: Ends) -> None:
    client = aioquic(ends.client)
    stream = client.open(bidirectional=False)
    _, state = stream.id, client.engine.state(stream.id)
    assert state is not None
    state.quic.max_stream_data_remote = 1 << 40
    stream.hand(bytes(5 << 20))
    assert (await ends.server.wait_closed()).code == QuicErrorCode.FLOW_CONTROL_ERROR
    end = await client.wait_closed()
    assert (end.code, end.remote, end.application) == (QuicErrorCode.FLOW_CONTROL_ERROR, True, False)
    assert "FLOW_CONTROL_ERROR" in str(end)


async def test_bytes_beyond_the_connection_window_close_the_connection(certificates: Certificates) -> None:
    options = QuicOptions(max_data=100_000, max_stream_data=100_000)
    async with simulated_ends(certificates, options, options) as ends:
        client = aioquic(ends.client)
        client.engine._remote_max_data = 1 << 40
        for _ in range(2):
            client.open(bidirectional=False).hand(bytes(60_000))
        assert (await client.wait_closed()).code == QuicErrorCode.FLOW_CONTROL_ERROR


async def test_more_streams_than_allowed_close_the_connection(certificates: Certificates) -> None:
    options = QuicOptions(max_uni_streams=3)
    async with simulated_ends(certificates, options, options) as ends:
        client = aioquic(ends.client)
        client.engine._remote_max_streams_uni = 100
        for _ in range(4):
            client.open(bidirectional=False).hand(b"x")
        assert (await client.wait_closed()).code == QuicErrorCode.STREAM_LIMIT_ERROR


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", QuicErrorCode.PROTOCOL_VIOLATION),
        (b"\x0a", QuicErrorCode.FRAME_ENCODING_ERROR),
        (b"\x0e\x01", QuicErrorCode.FRAME_ENCODING_ERROR),
        (b"\x0e\x01\x40", QuicErrorCode.FRAME_ENCODING_ERROR),
        (b"\x0a\x02\x05abcd", QuicErrorCode.FRAME_ENCODING_ERROR),
        (b"\x0a\x02\x01a\x3f", QuicErrorCode.FRAME_ENCODING_ERROR),
        (b"\x08\x03abc", QuicErrorCode.STREAM_STATE_ERROR),  # the server's own unidirectional stream
        (b"\x08\x05abc", QuicErrorCode.STREAM_STATE_ERROR),  # a stream that the server has not opened
        (b"\x0b\x00\x01a\x0e\x00\x01\x01b", QuicErrorCode.FINAL_SIZE_ERROR),
        (b"\x0e\x00\x01\x01b\x0b\x00\x01a", QuicErrorCode.FINAL_SIZE_ERROR),
    ],
)
async def test_payloads_that_break_the_rules(ends: Ends, payload: bytes, code: int) -> None:
    with pytest.raises(QuicConnectionError) as caught:
        aioquic(ends.server).engine._read_payload(payload, asyncio.get_running_loop().time())
    assert caught.value.error_code == code


async def test_a_stream_in_crumbs_closes_the_connection(ends: Ends) -> None:
    """One byte of each two: what comes between would never have to come (RFC 9000 21.6)."""
    engine, now = aioquic(ends.server).engine, asyncio.get_running_loop().time()

    def crumb(number: int) -> bytes:  # STREAM with offset and length, on the client's stream 2.
        return b"\x0e\x02" + (0x80000000 | 2 * number + 1).to_bytes(4) + b"\x01x"

    for number in range(engine_module.MAX_FRAGMENTS):
        engine._read_payload(crumb(number), now)
    with pytest.raises(QuicConnectionError) as caught:
        engine._read_payload(crumb(engine_module.MAX_FRAGMENTS), now)
    assert caught.value.error_code == QuicErrorCode.INTERNAL_ERROR


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9))))
def test_fragments_are_kept_as_aioquic_keeps_them(added: list[tuple[int, int]]) -> None:
    ours, theirs = Fragments(), RangeSet()
    for start, size in added:
        ours.add(start, start + size)
        theirs.add(start, start + size)
        assert list(ours) == list(theirs)


async def test_data_on_a_stream_that_only_we_write(ends: Ends) -> None:
    server = aioquic(ends.server)
    server.open(bidirectional=False).hand(b"ours")
    with pytest.raises(QuicConnectionError) as caught:
        server.engine._read_payload(b"\x08\x03abc", asyncio.get_running_loop().time())
    assert caught.value.error_code == QuicErrorCode.STREAM_STATE_ERROR


async def test_frames_of_all_shapes_in_one_payload(ends: Ends) -> None:
    server = aioquic(ends.server)
    payload = (
        b"\x0a\x02\x03abc"  # with a length
        b"\x0e\x02\x40\x03\x02de"  # with an offset in two bytes
        b"\x01"  # PING: the rest is read by aioquic
        b"\x0f\x02\x05\x01f"  # with FIN
        b"\x08\x00rest of the packet"  # without a length
    )
    assert server.engine._read_payload(payload, asyncio.get_running_loop().time())
    first, second = await server.accept(), await server.accept()
    assert await read_all(first) == b"abcdef"
    assert await second.read() == b"rest of the packet"


async def test_datagrams_that_wait_are_few(ends: Ends) -> None:
    arrived: list[bytes] = []
    ends.server.on_datagram = arrived.append
    for _ in range(1000):
        ends.client.send_datagram(b"x")
    await until_quiet(ends.client)
    assert len(arrived) == DATAGRAMS_WAITING


async def test_a_packet_that_comes_twice_counts_once(certificates: Certificates) -> None:
    async with simulated_ends(certificates, repeat=1.0) as ends:
        arrived: list[bytes] = []
        ends.server.on_datagram = arrived.append
        for number in range(20):
            ends.client.send_datagram(bytes([number]))
        await until_quiet(ends.client)
        assert arrived == [bytes([number]) for number in range(20)]


async def test_the_longest_datagram(ends: Ends) -> None:
    limit = aioquic(ends.client).engine.datagram_limit
    arrived: list[bytes] = []
    ends.server.on_datagram = arrived.append
    ends.client.send_datagram(bytes(limit))
    await until_quiet(ends.client)
    assert [len(data) for data in arrived] == [limit]
    with pytest.raises(UsageError, match="does not fit"):
        ends.client.send_datagram(bytes(limit + 1))


async def test_qlog_has_the_packets_of_the_quick_paths(certificates: Certificates, tmp_path: Path) -> None:
    options = QuicOptions(qlog_dir=tmp_path / "qlog")
    async with simulated_ends(certificates, options, options) as ends:
        await ends.client.open(bidirectional=False).write(bytes(50_000), fin=True)
        await read_all(await ends.server.accept())
    files = list((tmp_path / "qlog").iterdir())
    assert len(files) == 1  # one name for both sides: that of the connection
    events = [event for trace in json.loads(files[0].read_text())["traces"] for event in trace["events"]]
    frames = [
        frame
        for event in events
        if event["name"] in ("transport:packet_sent", "transport:packet_received")
        for frame in event["data"]["frames"]
    ]
    assert sum(frame.get("length", 0) for frame in frames if frame["frame_type"] == "stream") >= 50_000


def test_nothing_stays_in_the_event_loop_after_the_end(certificates: Certificates) -> None:
    ended: list[float] = []

    async def main() -> None:
        async with simulated_ends(certificates) as ends:
            await ends.client.open(bidirectional=False).write(b"x", fin=True)
            await read_all(await ends.server.accept())
        ended.append(asyncio.get_running_loop().time())
        await asyncio.Event().wait()

    with pytest.raises(EverythingWaits) as caught:
        run_virtual(main())
    # The network of the test may still have had an answer under way, for one latency.
    stopped = float(str(caught.value).partition(" at ")[2].partition(" s:")[0])
    assert stopped - ended[0] <= 0.005


async def test_the_state_of_many_streams_is_forgotten(certificates: Certificates) -> None:
    options = QuicOptions(max_uni_streams=8, max_bidi_streams=8)
    async with simulated_ends(certificates, options, options) as ends:
        for number in range(200):
            stream = await ends.client.open_when_possible(bidirectional=bool(number % 2))
            await stream.write(b"x", fin=True)
            incoming = await ends.server.accept()
            await read_all(incoming)
            if incoming.bidirectional:
                await incoming.write(b"y", fin=True)
                await read_all(stream)
        for end in (aioquic(ends.client), aioquic(ends.server)):
            await until_quiet(end)
            assert not end._streams
            assert not end.engine._streams
            assert not end.engine._states
            assert not end.engine._streams_queue
            assert not end.engine._aborting
