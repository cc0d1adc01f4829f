"""Relays: aiomoqt's test client with ours, and our publisher and consumer with aiomoqt's. What that one gets
wrong is listed in spec/moqt.md 23. See test_aiomoqt.py for how to run these.
"""

from __future__ import annotations

import asyncio
import re
import socket
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import moqt
from kvcs.assembly import Layer
from kvcs.identity import Descriptor, ScopeKey
from kvcs.names import DataTrack
from kvcs.publisher import Publication, Publisher
from kvcs.subscriber import Subscriber
from moqt import DoneCode
from moqt.errors import MoqtError
from tests.conftest import Certificates
from tests.interop.test_aiomoqt import DEADLINE, DIGEST, PYTHON, pytestmark
from tests.kvcs.stage import Cache, check_layer, check_layers, make_cache, put_layers
from tests.kvcs.test_commands import running

__all__ = ["pytestmark"]  # The same as of the other tests with aiomoqt.

LAYERS, BLOCKS, BLOCK_TOKENS = 12, 3, 16
"""More Groups than aiomoqt's relay keeps of a Track (8)."""

MODEL = Descriptor.parse(
    {
        "profile": "kvsp-lp1",
        "model": "interop",
        "model_sha256": DIGEST,
        "tokenizer_sha256": DIGEST,
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
SCOPE_KEY = ScopeKey(bytes(range(32)))
TOKENS = list(range(1000, 1000 + BLOCKS * BLOCK_TOKENS))
CACHE: Cache = make_cache(MODEL, len(TOKENS), seed=22)
DATA_TRACKS = ("k.raw.s0", "v.raw.s0")


def script(name: str) -> str:
    """A command that aiomoqt has installed."""
    assert PYTHON is not None
    return str(Path(PYTHON).with_name(name))


# aiomoqt's client and our relay.


@pytest.mark.parametrize("case", ["", "fetch", "join"])
async def test_their_test_client_passes_against_our_relay(certificates: Certificates, case: str) -> None:
    """All cases that it runs by default, and the two that it runs only when told to."""
    files = ("--cert", str(certificates.chain), "--key", str(certificates.key))
    async with running(["moqt.relay", "--listen", "127.0.0.1:0", *files, "--json"]) as relay:
        port = (await relay.until("listening"))["port"]
        client = await asyncio.create_subprocess_exec(
            script("moq-interop-client"),
            *("-r", f"moqt://127.0.0.1:{port}/moq", "--draft", "22", "--tls-disable-verify"),
            *(("-t", case) if case else ()),
            stdout=PIPE,
            stderr=PIPE,
        )
        async with asyncio.timeout(DEADLINE):
            output, _ = await client.communicate()
    tap = output.decode()
    passed = re.findall(r"^ok \d+ - (\S+)", tap, re.MULTILINE)
    assert re.findall(r"^not ok .*", tap, re.MULTILINE) == [], tap
    assert f"1..{len(passed)}\n" in tap
    assert passed == [case] if case else len(passed) == 12
    assert client.returncode == 0


# Our publisher and consumer, and aiomoqt's relay.


@asynccontextmanager
async def their_relay(certificates: Certificates) -> AsyncIterator[str]:
    """aiomoqt's relay; its URI. It answers when this begins."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    relay = await asyncio.create_subprocess_exec(
        script("moq-interop-relay"),
        *("--quic", "--bind", "127.0.0.1", "--port", str(port), "--draft", "22"),
        *("--cert", str(certificates.chain), "--key", str(certificates.key)),
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    uri = f"moqt://127.0.0.1:{port}/moq"
    try:
        async with asyncio.timeout(DEADLINE):
            while True:
                try:
                    async with moqt.connect(uri, ca=certificates.ca, deadline=1.0):
                        break
                except MoqtError:
                    assert relay.returncode is None
        yield uri
    finally:
        if relay.returncode is None:
            relay.terminate()
        await relay.wait()


def fetches(log: str) -> list[str]:
    """The Tracks that a FETCH to our publisher was for, by its log."""
    return re.findall(r": Fetch of \S+--(\S+)", log.replace(".2e", "."))


async def consume(uri: str, certificates: Certificates) -> list[Layer]:
    """All layers, verified."""
    async with (
        moqt.connect(uri, ca=certificates.ca) as session,
        await Subscriber(session, MODEL, SCOPE_KEY).receive(TOKENS, wait=DEADLINE) as reception,
    ):
        layers = [layer async for layer in reception]
        assert (reception.missing, reception.rejected) == ([], 0)
        return layers


@asynccontextmanager
async def publishing(uri: str, certificates: Certificates) -> AsyncIterator[Publication]:
    """Our publisher, at the relay."""
    publisher = Publisher(MODEL, SCOPE_KEY)
    async with moqt.connect(uri, ca=certificates.ca, tracks=publisher.tracks, announce=True) as session:
        publication = publisher.publish(TOKENS)
        yield publication
        publication.close()
        await session.finish(DoneCode.TRACK_ENDED, deadline=DEADLINE)


@pytest.mark.parametrize("before", [0, 5, LAYERS])
async def test_a_cache_through_their_relay(
    certificates: Certificates, caplog: pytest.LogCaptureFixture, before: int
) -> None:
    """Two consumers that come when `before` layers are published, and one when all are. The relay keeps 8
    layers, so the others come to it by a FETCH from our publisher; and it makes an End of Group of the End of
    Track, so that the end is known from the manifest.
    """
    caplog.set_level("DEBUG", logger="moqt.answering")
    async with (
        asyncio.timeout(2 * DEADLINE),
        their_relay(certificates) as uri,
        publishing(uri, certificates) as publication,
    ):
        await put_layers(publication.segment, CACHE, last=before - 1)
        consumers = [asyncio.create_task(consume(uri, certificates)) for _ in range(2)]
        for layer in range(before, LAYERS):
            await asyncio.sleep(0.1)
            await put_layers(publication.segment, CACHE, first=layer, last=layer)
        for consumer in consumers:
            check_layers(await consumer, CACHE, MODEL)
        check_layers(await consume(uri, certificates), CACHE, MODEL)
    assert set(DATA_TRACKS) <= set(fetches(caplog.text))
    assert publication.segment.tracks[DataTrack.parse("k.raw.s0")].ended is not None


async def test_a_range_of_layers_through_their_relay(certificates: Certificates) -> None:
    """Layers that it never had, and then some that it has in part."""
    async with (
        asyncio.timeout(DEADLINE),
        their_relay(certificates) as uri,
        publishing(uri, certificates) as publication,
    ):
        await put_layers(publication.segment, CACHE)
        for first, last in ((0, 3), (2, 11), (0, 11)):
            async with (
                moqt.connect(uri, ca=certificates.ca) as session,
                await Subscriber(session, MODEL, SCOPE_KEY).receive(
                    TOKENS, layers=(first, last), wait=DEADLINE
                ) as reception,
            ):
                received = [layer async for layer in reception]
            assert [layer.layer for layer in received] == list(range(first, last + 1))
            for layer in received:
                check_layer(layer, CACHE, MODEL)
