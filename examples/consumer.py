"""The demo's consumer: receives a KV cache, computes with each layer as soon as it is verified, and goes on
writing.

It has the model, the tokens of the prompt and the scope key. From these follow the names under which the
cache is published, if anybody has published it.
"""

from __future__ import annotations

import asyncio
import sys
import time

import moqt
from examples.model import Continuation
from examples.role import Role, command_line, play
from examples.timeline import Step
from kvcs import CacheIncomplete, Subscriber
from kvcs.console import describe_missing

DISCOVERY = 10.0  # seconds for the producer to begin


async def consume(role: Role) -> None:
    """Receive the cache of the prompt, then write on from it."""
    model, tokens, descriptor = await role.load()
    order = await role.order()
    async with moqt.connect(order["uri"], ca=role.arguments.ca) as session:
        role.mark("connected")
        subscriber = Subscriber(session, descriptor, role.scope_key, patience=role.arguments.patience)
        async with await subscriber.receive(tokens, wait=DISCOVERY) as reception:
            role.mark("cache found")
            continuation = Continuation(model, tokens, reception.blocks * descriptor.block_tokens)
            computing = 0.0
            try:
                async for layer in reception:
                    times = reception.times[layer.segment, layer.layer]
                    role.step(Step.ARRIVED, layer.layer, times.first_object)
                    role.step(Step.VERIFIED, layer.layer, times.usable)
                    assert layer.v is not None  # only "mla" has none
                    began = time.monotonic()
                    await asyncio.to_thread(continuation.take, layer.k, layer.v)
                    computing += time.monotonic() - began
                    role.step(Step.USED, layer.layer)
            except CacheIncomplete as error:
                missing = "".join(f"\n    {line}" for line in describe_missing(list(error.missing)))
                role.tell(
                    "failed", text=f"the consumer's cache is incomplete: {error.reason}; missing are{missing}"
                )
                return
            role.tell(
                "received",
                octets=reception.received,
                objects=reception.blocks * descriptor.layers * 2,
                rejected=reception.rejected,
                computing=computing,
            )
        await role.write(model, continuation.write(role.arguments.tokens))


def main() -> int:
    """The process."""
    parser = command_line(__doc__ or "")
    parser.add_argument("--patience", type=float, required=True)
    return play(parser.parse_args(), consume)


if __name__ == "__main__":
    sys.exit(main())
