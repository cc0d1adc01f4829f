"""The demo's producer: computes the KV cache of a prompt, and publishes each layer as soon as it is there."""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import moqt
from examples import role
from examples.llama import Cache, Float16
from examples.model import Model, complete_tokens
from examples.role import Role
from examples.timeline import Step
from kvcs.publisher import Publisher, Segment


async def produce(self: Role) -> None:
    """Publish the cache of the prompt, then write on from it."""
    model, tokens, descriptor = await self.load()
    publisher = Publisher(descriptor, self.scope_key)
    async with moqt.serve(
        "127.0.0.1",
        0,
        certificate=self.arguments.cert,
        key=self.arguments.key,
        tracks=publisher.tracks,
    ) as server:
        self.tell("listening", port=server.port)
        await self.order()
        self.tell("started", at=time.monotonic())
        complete = tokens[: complete_tokens(len(tokens), descriptor.block_tokens)]
        publication = publisher.publish(complete)
        cache = await prefill(self, model, complete, publication.segment)
        self.tell("published")
        await self.order()
        await self.write(model, model.generate(cache, tokens, self.arguments.tokens))
        await self.order()


async def prefill(self: Role, model: Model, tokens: list[int], segment: Segment) -> Cache:
    """Compute the cache of `tokens` in a thread. A layer is published while the next one is computed."""
    loop = asyncio.get_running_loop()
    published: list[Future[None]] = []

    def on_layer(layer: int, k: Float16, v: Float16) -> None:
        self.step(Step.COMPUTED, layer)
        published.append(asyncio.run_coroutine_threadsafe(segment.put_layer(layer, k, v), loop))
        time.sleep(self.arguments.layer_interval)

    cache = await asyncio.to_thread(model.prefill, tokens, on_layer=on_layer)
    await asyncio.gather(*map(asyncio.wrap_future, published))
    return cache


def main() -> int:
    """The process."""
    parser = role.parser(__doc__ or "")
    parser.add_argument("--cert", type=Path, required=True)
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--layer-interval", type=float, required=True)
    return role.main(parser.parse_args(), produce)


if __name__ == "__main__":
    sys.exit(main())
