"""The relay as its users run it: separate processes over the loopback network."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import moqt
from moqt import FullTrackName, Limits, Location, QuicOptions, ReceivedObject, Track, Tracks
from moqt.errors import ConnectionLost, DeadlineExceeded, RequestRejected, SessionClosed, SessionCode
from moqt.quic.udp import dial
from moqt.wire import DRAFT_22
from tests.kvcs.test_commands import BLOCK_TOKENS, BLOCKS, LAYERS, Place, place, run, running, same

__all__ = ["place"]  # The fixture.


def relay(place: Place, *more: str) -> list[str]:
    files = ("--cert", str(place.certificates.chain), "--key", str(place.certificates.key))
    ca = ("--ca", str(place.certificates.ca))
    return ["moqt.relay", "--listen", "localhost:0", *files, *ca, "--json", *more]


async def test_two_relays_between_publisher_and_subscribers(place: Place) -> None:
    """One subscriber live, one when the publisher has gone; SIGTERM ends each relay with exit code 0."""
    async with running(relay(place)) as upper:
        port = (await upper.until("listening"))["port"]
        async with running(relay(place, "--upstream", f"moqt://localhost:{port}")) as lower:
            lower_port = (await lower.until("listening"))["port"]
            await lower.until("connected")
            dial = ("--connect", f"moqt://localhost:{port}", "--ca", str(place.certificates.ca))
            async with running(place.publish(*dial, "--layer-interval", "0.1")) as publisher:
                await publisher.until("publication")
                for _ in range(2):
                    code, events, errors = await run(place.subscribe(lower_port))
                    assert (code, errors) == (0, "")
                    layers = [event["layer"] for event in events if event["event"] == "layer"]
                    assert layers == list(range(LAYERS))
                    assert same(place, range(LAYERS), BLOCKS * BLOCK_TOKENS)
                publisher.process.send_signal(signal.SIGTERM)
                assert (await publisher.end())[0] == 0
            for command in (lower, upper):
                command.process.send_signal(signal.SIGTERM)
                code, events, errors = await command.end()
                assert (code, errors) == (0, "")
                assert events[-1] == {"event": "end", "reason": "SIGTERM"}


@pytest.mark.parametrize("verbose", ["-v", "-vv"])
async def test_streams_that_are_reset_are_told_to_those_who_want_everything(
    place: Place, verbose: str
) -> None:
    async with running([*relay(place), verbose]) as command:
        port = (await command.until("listening"))["port"]
        async with moqt.connect(f"moqt://localhost:{port}", ca=place.certificates.ca) as session:
            await (await session.subscribe_namespace((b"n",))).close()
            with pytest.raises(RequestRejected):
                await session.track_status(FullTrackName((b"n",), b"t"))
        command.process.send_signal(signal.SIGTERM)
        code, _, errors = await command.end()
        assert code == 0
        assert "session with" in errors
        assert ("reset by peer" in errors) == (verbose == "-vv")


@pytest.mark.parametrize("below", [False, True])
async def test_told_to_go_while_a_publication_is_live(place: Place, below: bool) -> None:
    """moqt 16: who follows it gets it whole, here or from a relay below, and the relay leaves after that."""
    async with running(relay(place, "--drain", "60")) as upper:
        port = leaf = (await upper.until("listening"))["port"]
        async with running(relay(place, "--upstream", f"moqt://localhost:{port}")) as lower:
            if below:
                leaf = (await lower.until("listening"))["port"]
                await lower.until("connected")
            dial = ("--connect", f"moqt://localhost:{port}", "--ca", str(place.certificates.ca))
            async with running(place.publish(*dial, "--layer-interval", "0.2")) as publisher:
                await publisher.until("publication")
                async with running(place.subscribe(leaf)) as subscriber:
                    await subscriber.until("layer")
                    upper.process.send_signal(signal.SIGTERM)
                    await upper.until("draining")
                    code, events, errors = await subscriber.end()
                    assert (code, errors) == (0, "")
                    layers = [event["layer"] for event in events if event["event"] == "layer"]
                    assert layers == list(range(LAYERS))
                    assert same(place, range(LAYERS), BLOCKS * BLOCK_TOKENS)
                assert publisher.process.returncode is None
                if below:
                    lower.process.send_signal(signal.SIGTERM)
                code, events, errors = await upper.end()
                assert (code, errors) == (0, "")
                assert events[-1] == {"event": "end", "reason": "SIGTERM"}


@pytest.mark.parametrize("relays_too", [False, True])
async def test_kill_9_of_the_publisher(place: Place, relays_too: bool) -> None:
    """What the last relay has in its cache is found and served whole while nobody knows yet that the
    publisher is gone; and also when the first relay was killed with it.
    """
    async with running(relay(place)) as upper:
        port = (await upper.until("listening"))["port"]
        async with running(relay(place, "--upstream", f"moqt://localhost:{port}")) as lower:
            lower_port = (await lower.until("listening"))["port"]
            await lower.until("connected")
            dial = ("--connect", f"moqt://localhost:{port}", "--ca", str(place.certificates.ca))
            async with running(place.publish(*dial)) as publisher:
                await publisher.until("publication")
                for killed in ((), (publisher, upper) if relays_too else (publisher,)):
                    for command in killed:
                        command.process.kill()
                        await command.end()
                    code, _, errors = await run(place.subscribe(lower_port))
                    assert (code, errors) == (0, "")
                    assert same(place, range(LAYERS), BLOCKS * BLOCK_TOKENS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--listen", "0.0.0.0:0"], "does not listen on 0.0.0.0"),
        (["--listen", "localhost"], "HOST:PORT"),
        (["--upstream", "http://x"], "moqt://"),
        (
            ["--listen", "[::1]:4433", "--upstream", "moqt://localhost:4433"],
            "where this relay listens itself",
        ),
        (["--cache-bytes", "-1"], "--cache-bytes: expected a whole number of at least 0, not -1"),
        (["--cert", "/no/such/file"], "/no/such/file: No such file or directory"),
        (["--key", "/no/such/file"], "/no/such/file: No such file or directory"),
        (["--key", "/"], "/: Is a directory"),
        (["--cert", "{key}"], "{key}: no certificates in PEM form in it"),
        (["--key", "{chain}"], "{chain}: no private key in PEM form in it"),
        (["--key", "{other}"], "the key in {other} does not belong to the first certificate in {chain}"),
        (["--ca", "{key}"], "{key}: no certificates in PEM form in it"),
        (["--config", "/no/such/file"], "--config /no/such/file: No such file"),
    ],
)
async def test_bad_usage(place: Place, arguments: list[str], says: str) -> None:
    files = {
        "chain": place.certificates.chain,
        "key": place.certificates.key,
        "other": place.certificates.expired_key,
    }
    says = says.format(**files)
    code, events, errors = await run([*relay(place), *(word.format(**files) for word in arguments)])
    assert code == 2
    assert says in errors
    assert says in events[-1]["text"]


async def test_the_port_is_taken(place: Place) -> None:
    """The UDP port, or the TCP port of the pages."""
    async with running([*relay(place), "--metrics-port", "0"]) as first:
        pages = (await first.until("watching"))["address"].rpartition(":")[2]
        port = (await first.until("listening"))["port"]
        code, events, errors = await run([*relay(place), "--listen", f"127.0.0.1:{port}"])
        assert (code, errors) == (1, f"can't listen on 127.0.0.1:{port}: Address already in use\n")
        assert events[-1]["text"] == errors.strip()
        code, _, errors = await run([*relay(place), "--metrics-port", pages])
        assert code == 1
        assert f"the pages at 127.0.0.1:{pages}: " in errors
        assert "address already in use" in errors
        assert "Errno" not in errors


async def test_a_configuration_file(place: Place, tmp_path: Path) -> None:
    """It alone is enough; a flag goes before it."""
    file = tmp_path / "relay.toml"
    file.write_text(
        f"""
        listen = "192.0.2.1:1"
        cert = "{place.certificates.chain}"
        key = "{place.certificates.key}"
        json = true
        """
    )
    async with running(["moqt.relay", "--config", str(file), "--listen", "localhost:0"]) as command:
        await command.until("listening")
        command.process.send_signal(signal.SIGTERM)
        assert (await command.end())[0] == 0


async def test_what_peers_say_does_not_reach_the_terminal(place: Place) -> None:
    """Neither by our logs nor by those of the QUIC library."""
    async with running([*relay(place), "-vv"]) as command:
        port = (await command.until("listening"))["port"]
        connection = await dial("localhost", port, alpn=[DRAFT_22.alpn], ca=place.certificates.ca)
        connection.close(0, "\x1b[2J\nERROR moqt.relay: \u202e")
        await connection.wait_closed()
        command.process.send_signal(signal.SIGTERM)
        code, _, errors = await command.end()
        assert code == 0
        assert "\\x1b[2J\\nERROR moqt.relay: \\u202e" in errors
        assert all(line.isprintable() for line in errors.split("\n"))
        assert not any(line.startswith("ERROR") for line in errors.split("\n"))


async def test_told_to_go_under_load(place: Place) -> None:
    """A reader is told, and gets what is in flight and what is published then; one that is stuck holds the
    relay up, until the time for it is over (tests/moqt/test_server.py) or, here, until the relay is told a
    second time.
    """
    name = FullTrackName((b"n",), b"t")
    tracks, track = Tracks(), Track(name, one_subgroup=True)
    tracks.add(track)
    tracks.announce(name.namespace)
    ca = place.certificates.ca
    small = QuicOptions(max_data=1 << 16, max_stream_data=1 << 14)
    async with running([*relay(place), "--drain", "600"]) as command:
        uri = f"moqt://localhost:{(await command.until('listening'))['port']}"
        async with (
            moqt.connect(uri, ca=ca, tracks=tracks),
            moqt.connect(uri, ca=ca) as good,
            moqt.connect(uri, ca=ca, options=small, limits=Limits(receive_buffer=1000)) as stuck,
            await good.subscribe_namespace(name.namespace) as watch,
        ):
            await anext(watch)
            taken = await good.subscribe(name)
            left = await stuck.subscribe(name)
            for group in range(20):
                for number in range(4):
                    track.append(group, number, bytes([group]) * 100_000)
                track.end_group(group, 4)
            first = await anext(taken)
            command.process.send_signal(signal.SIGTERM)
            assert (await command.until("draining"))["reason"] == "SIGTERM"
            await good.goaway_received.wait()
            track.append(20, 0, b"late")
            items = [first]
            while len(items) < 20 * 4 + 1:
                item = await anext(taken)
                if isinstance(item, ReceivedObject) and item.payload:
                    items.append(item)
            places = {item.location for item in items if isinstance(item, ReceivedObject)}
            assert places >= {Location(group, number) for group in range(20) for number in range(4)}
            assert Location(20, 0) in places
            assert taken.done is None
            await taken.close()
            with pytest.raises((DeadlineExceeded, ConnectionLost)):
                async with moqt.connect(uri, ca=ca, deadline=0.5):
                    pass
            assert command.process.returncode is None
            command.process.send_signal(signal.SIGINT)
            code, events, errors = await command.end()
            assert (code, errors) == (0, "")
            assert events[-1] == {"event": "end", "reason": "SIGTERM"}
            error = await stuck.wait_closed()
            assert isinstance(error, SessionClosed)
            assert error.code == SessionCode.NO_ERROR
            await left.close()
