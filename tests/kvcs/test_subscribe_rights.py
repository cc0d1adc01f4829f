"""What `python -m kvcs.subscribe` says when its right ends while it receives."""

from __future__ import annotations

import asyncio

import pytest

import moqt
from kvcs import Publisher, files
from kvcs.subscribe import parser, subscribe
from moqt.credentials import TokenFile
from tests.kvcs.test_commands import LAYERS, Place, place
from tests.kvcs.test_publish_rights import Door, Told

__all__ = ["place"]  # The fixture.


@pytest.mark.requirement("R10d")
@pytest.mark.parametrize("more", [[], ["--partial"]])
async def test_a_token_that_ends_leaves_it_incomplete_with_advice(
    place: Place, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, for a part has come; what to do is the same as where nothing was allowed."""
    door, told, token = Door(), Told(), place.folder / "token"
    await asyncio.to_thread(token.write_bytes, b"first")
    cache = files.read(place.cache)
    publisher = Publisher(place.descriptor, place.scope_key)
    segment = publisher.publish(cache.tokens).segment
    await segment.put_layer(0, *cache.layers[0])
    chain, key = place.certificates.chain, place.certificates.key
    async with moqt.serve(
        "localhost", 0, certificate=chain, key=key, tracks=publisher.tracks, policy=door
    ) as server:
        arguments = parser().parse_args(place.subscribe(server.port, *more)[1:])
        task = asyncio.create_task(subscribe(arguments, TokenFile(token), told))
        await told.until("layer")
        door.key = b"second"
        code = await asyncio.wait_for(task, 30)
    assert code == 3
    errors = capsys.readouterr().err
    assert errors.startswith("incomplete: the peer does not allow ")
    assert f"another key now. The token in {token} is not in force any more: put a fresh one there" in errors
    assert f"layer {LAYERS - 1}: blocks" in errors
    assert place.output.exists() == bool(more)
