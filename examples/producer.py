"""The demo's producer: computes the KV cache of a prompt, and publishes each layer as soon as it is there."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path

import moqt
from examples.llama import Cache, Float16
from examples.model import Model, complete_tokens
from examples.role import Role, command_line, play
from examples.timeline import Step
from kvcs import Publisher, Segment


async def produce(role: Role) -> None:
    """Publish the cache of the prompt, then write on from it."""
    model, tokens, descriptor = await role.load()
    publisher = Publisher(descriptor, role.scope_key)
    async with endpoint(role, publisher):
        await role.order()
        role.tell("started", at=time.monotonic())
        complete = tokens[: complete_tokens(len(tokens), descriptor.block_tokens)]
        publication = publisher.publish(complete)
        cache = await prefill(role, model, complete, publication.segment)
        role.tell("published")
        await role.order()
        await role.write(model, model.generate(cache, tokens, role.arguments.tokens))
        await role.order()


@asynccontextmanager
async def endpoint(role: Role, publisher: Publisher) -> AsyncIterator[None]:
    """Serve those who connect, or publish to the relay that was named."""
    arguments = role.arguments
    if arguments.connect:
        async with moqt.connect(arguments.connect, ca=arguments.ca, tracks=publisher.tracks, announce=True):
            role.tell("ready", uri=arguments.connect)
            yield
        return
    async with moqt.serve(
        "127.0.0.1", 0, certificate=arguments.cert, key=arguments.key, tracks=publisher.tracks
    ) as server:
        role.tell("ready", uri=f"moqt://127.0.0.1:{server.port}")
        yield


async def prefill(role: Role, model: Model, tokens: list[int], segment: Segment) -> Cache:
    """Compute the cache of `tokens` in a thread. A layer is published while the next one is computed."""
    loop = asyncio.get_running_loop()
    published: list[Future[None]] = []

    def on_layer(layer: int, k: Float16, v: Float16) -> None:
        role.step(Step.COMPUTED, layer)
        published.append(asyncio.run_coroutine_threadsafe(segment.put_layer(layer, k, v), loop))
        time.sleep(role.arguments.layer_interval)

    cache = await asyncio.to_thread(model.prefill, tokens, on_layer=on_layer)
    await asyncio.gather(*map(asyncio.wrap_future, published))
    return cache


def main() -> int:
    """The process."""
    parser = command_line(__doc__ or "")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--connect", metavar="URI")
    where.add_argument("--cert", type=Path)
    parser.add_argument("--key", type=Path)
    parser.add_argument("--layer-interval", type=float, required=True)
    return play(parser.parse_args(), produce)


if __name__ == "__main__":
    sys.exit(main())
