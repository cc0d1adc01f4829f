"""What `import moqt` offers, and what it costs one who only publishes."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

import moqt
from moqt.names import FullTrackName
from tests.moqt.scene import EVERYTHING, objects

if TYPE_CHECKING:
    from tests.conftest import Certificates

PUBLISHER = """
import asyncio, sys
import moqt

async def run(chain, key):
    track = moqt.Track(moqt.FullTrackName((b"n",), b"t"))
    track.append(0, 0, b"payload")
    tracks = moqt.Tracks()
    tracks.add(track)
    async with moqt.serve("127.0.0.1", 0, certificate=chain, key=key, tracks=tracks) as server:
        print(server.port, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(*sys.modules)

asyncio.run(run(*sys.argv[1:]))
"""


@pytest.mark.parametrize("name", moqt.__all__)
def test_every_name_that_is_offered_is_there(name: str) -> None:
    assert getattr(moqt, name) is not None


def test_what_is_not_offered_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Relay'"):
        _ = moqt.Relay  # type: ignore[attr-defined]  # that is what is tested


async def test_a_publisher_serves_subscriptions_and_fetches_without_the_subscribing_half(
    certificates: Certificates,
) -> None:
    publisher = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PUBLISHER, certificates.chain, certificates.key),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert publisher.stdout is not None
        port = int(await publisher.stdout.readline())
        name = FullTrackName((b"n",), b"t")
        received: list[moqt.Item] = []
        async with moqt.connect(f"moqt://127.0.0.1:{port}/", ca=certificates.ca) as session:
            async with await session.subscribe(name, fill=moqt.Fill(filter=EVERYTHING)) as subscription:
                received.append(await anext(subscription))
            async with await session.fetch(name, filter=EVERYTHING) as fetch:
                received.extend([item async for item in fetch])
        assert [item.payload for item in objects(received)] == [b"payload", b"payload"]
        loaded = {*(await publisher.communicate(b"\n"))[0].decode().split()}
    finally:
        if publisher.returncode is None:
            publisher.kill()
            await publisher.wait()
    assert {"moqt.publishing", "moqt.incoming"} <= loaded
    assert not {"moqt.subscribing", "moqt.reception", "moqt.ledger", "moqt.offers"} & loaded
