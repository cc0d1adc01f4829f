"""The cache on disk as users run it: separate processes, killed and started again."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.kvcs.test_commands import BLOCK_TOKENS, BLOCKS, LAYERS, Command, Place, place, run, running, same
from tests.relay.test_relay_command import relay

__all__ = ["place"]  # The fixture.


async def status(port: int) -> dict[str, Any]:
    """What the relay tells of itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    page: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return page


async def ports(command: Command) -> tuple[int, int]:
    """Where it can be asked for its status, and where it listens."""
    address = (await command.until("watching"))["address"]
    return int(address.rpartition(":")[2]), (await command.until("listening"))["port"]


async def kept(port: int) -> None:
    """Wait until the publisher has gone, and all is on disk."""
    async with asyncio.timeout(30):
        while True:
            now = await status(port)
            gone = not any(track["publishers"] for track in now["tracks"])
            if now["tracks"] and gone and not now["cache_dir"]["unwritten"]:
                assert now["cache_dir"]["skipped"] == 0
                return
            await asyncio.sleep(0.05)


async def receive(place: Place, port: int) -> tuple[int, str]:
    """Have a subscriber fetch the whole cache; its exit code, and what it complained of."""
    place.output.unlink(missing_ok=True)
    code, _, errors = await run(place.subscribe(port, "--patience", "5"))
    if not code:
        assert same(place, range(LAYERS), BLOCKS * BLOCK_TOKENS)
    return code, errors


@pytest.mark.requirement("R8a")
@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGKILL])
async def test_a_publication_outlives_its_publisher_and_the_relay(place: Place, way: signal.Signals) -> None:
    """Published, received once, and then served by relays that were started again with nothing else."""
    arguments = [*relay(place), "--cache-dir", str(place.folder / "kept"), "--metrics-port", "0"]
    async with running(arguments) as command:
        watching, port = await ports(command)
        dial = ("--connect", f"moqt://localhost:{port}", "--ca", str(place.certificates.ca))
        async with running(place.publish(*dial)) as publisher:
            await publisher.until("complete")
            assert await receive(place, port) == (0, "")
            publisher.process.send_signal(signal.SIGTERM)
            assert (await publisher.end())[0] == 0
        if way == signal.SIGKILL:
            await kept(watching)
        command.process.send_signal(way)
        assert (await command.end())[0] == (0 if way == signal.SIGTERM else -signal.SIGKILL)
    received = []
    for _ in range(2):
        async with running(arguments) as command:
            _, port = await ports(command)
            assert await receive(place, port) == (0, "")
            received.append(place.output.read_bytes())
            command.process.send_signal(way)
            code, _, errors = await command.end()
            assert (code, errors) == (0 if way == signal.SIGTERM else -signal.SIGKILL, "")
    assert received[0] == received[1]
    assert oct((place.folder / "kept").stat().st_mode & 0o777) == "0o700"


async def test_a_relay_that_is_killed_in_the_middle(place: Place) -> None:
    """What was not committed is gone; what the next relay serves is whole Objects, and the rest comes from
    the publisher, which dials it.
    """
    arguments = [*relay(place), "--cache-dir", str(place.folder / "kept"), "--metrics-port", "0"]
    async with running(place.listen("--layer-interval", "0.2")) as publisher:
        upstream = ("--upstream", f"moqt://localhost:{(await publisher.until('listening'))['port']}")
        async with running([*arguments, *upstream]) as command:
            _, port = await ports(command)
            async with running(place.subscribe(port)) as subscriber:
                await subscriber.until("layer", layer=LAYERS // 2)
                command.process.kill()
        async with running([*arguments, *upstream]) as command:
            _, port = await ports(command)
            await command.until("connected")
            assert await receive(place, port) == (0, "")


async def test_a_disk_that_is_full(place: Place) -> None:
    """It is told once, in a sentence; the relay serves from memory."""
    folder = place.folder / "kept"
    async with running([*relay(place), "--cache-dir", str(folder)]) as command:
        port = (await command.until("listening"))["port"]
        size = (folder / "objects.sqlite3").stat().st_size
        resource.prlimit(command.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        dial = ("--connect", f"moqt://localhost:{port}", "--ca", str(place.certificates.ca))
        async with running(place.publish(*dial)) as publisher:
            await publisher.until("complete")
            assert await receive(place, port) == (0, "")
        assert await receive(place, port) == (0, "")
        command.process.send_signal(signal.SIGTERM)
        code, _, errors = await command.end()
        assert code == 0
        assert errors.count("kept in memory only") == 1
        assert f"{folder / 'objects.sqlite3'} fails; Objects are kept in memory only: " in errors


async def test_a_directory_that_can_not_be_used(place: Place) -> None:
    folder = place.folder / "kept"
    arguments = [*relay(place), "--cache-dir", str(folder)]
    async with running(arguments) as first:
        await first.until("listening")
        code, events, errors = await run(arguments)
        assert (code, errors) == (
            1,
            f"{folder} is in use by another relay: each needs a directory of its own\n",
        )
        assert events[-1]["text"] == errors.strip()
    with closing(sqlite3.connect(folder / "objects.sqlite3")) as file:
        file.execute("PRAGMA user_version = 2")
    says = {
        folder: (1, "was written by another version of the relay (schema 2, this one has 1): remove it"),
        place.cache: (2, f"{place.cache} is not a directory that this relay can write to (File exists)"),
        Path("/proc/no"): (2, "/proc/no is not a directory that this relay can write to (No such file"),
    }
    for directory, (expected, text) in says.items():
        code, _, errors = await run([*relay(place), "--cache-dir", str(directory)])
        assert code == expected
        assert text in errors
        assert errors.count("\n") == 1
    os.truncate(folder / "objects.sqlite3", 20_000)
    code, _, errors = await run(arguments)
    assert code == 1
    assert f"{folder / 'objects.sqlite3'} is damaged: remove it, and the cache begins anew" in errors
    code, _, errors = await run([*arguments, "--cache-dir-bytes", "1000"])
    assert code == 2
    assert "--cache-dir-bytes: expected a whole number of at least 16777216, not 1000" in errors
