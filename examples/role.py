"""What the demo's producer and consumer have in common: a model, a prompt, a scope key, and the demo that
they report to. `examples.child` is the other end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from examples.model import DTYPE, MODEL_NAMES, Model
from examples.smollm import WeightsMissing
from examples.timeline import Step
from kvcs import Descriptor, KvcsError, ScopeKey
from moqt.errors import MoqtError

OBJECT_SIZE = 16 * 1024  # octets that an Object should have at least (kvcs 9)


class Unsuitable(Exception):
    """The prompt does not suit the model; the message says why."""


class Role:
    """One process of the demo. `arguments` are those of `command_line`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.scope_key = ScopeKey.from_file(arguments.scope_key)
        self._orders: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._speaking = threading.Lock()

    async def load(self) -> tuple[Model, list[int], Descriptor]:
        """The model, the tokens of the prompt, and the descriptor of the model's caches.

        Raises WeightsMissing, Unsuitable.
        """
        started = time.monotonic()
        model = await asyncio.to_thread(Model.load, self.arguments.model)
        tokens = model.chat(self.arguments.prompt.read_text(encoding="utf-8").strip())
        size = block_tokens(model)
        if len(tokens) < size:
            raise Unsuitable(f"a prompt of {len(tokens)} tokens fills no block of {size}: take a longer one")
        if len(tokens) + self.arguments.tokens > model.config.context:
            raise Unsuitable(
                f"a prompt of {len(tokens)} tokens and {self.arguments.tokens} to be written: "
                f"the model takes {model.config.context} in all"
            )
        descriptor = Descriptor.parse(model.descriptor(size))
        self.tell(
            "loaded",
            seconds=time.monotonic() - started,
            model=model.name,
            layers=descriptor.layers,
            tokens=len(tokens),
            block_tokens=size,
        )
        return model, tokens, descriptor

    async def write(self, model: Model, tokens: Iterator[int]) -> None:
        """Report each token as soon as it is written."""

        def write() -> None:
            written: list[int] = []
            for token in tokens:
                written.append(token)
                self.tell("token", token=token, text=model.detokenize(written), at=time.monotonic())

        await asyncio.to_thread(write)
        self.tell("written")

    def tell(self, event: str, **details: object) -> None:
        """Report to the demo; from any thread."""
        with self._speaking:
            print(json.dumps({"event": event, **details}), flush=True)

    def step(self, step: Step, layer: int, at: float | None = None) -> None:
        """Report that `step` happened to `layer`, now or at the time `at`."""
        self.tell("step", step=step, layer=layer, at=time.monotonic() if at is None else at)

    def mark(self, label: str) -> None:
        """Report something that is no layer's."""
        self.tell("mark", label=label, at=time.monotonic())

    async def order(self) -> dict[str, Any]:
        """What the demo wants next."""
        return await self._orders.get()

    async def run(self, work: Callable[[Role], Awaitable[None]]) -> None:
        """Do `work` until it is done or the demo is gone, however it went: then standard input ends."""
        task = asyncio.ensure_future(work(self))
        listener = asyncio.create_task(self._listen())
        try:
            await asyncio.wait((task, listener), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (task, listener):
                one.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listener
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _listen(self) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
        )
        try:
            async for line in reader:
                self._orders.put_nowait(json.loads(line))
        finally:
            transport.close()


def block_tokens(model: Model) -> int:
    """How many tokens make a block: a power of two that makes Objects large enough."""
    octets = model.config.kv_heads * model.config.head_dim * np.dtype(DTYPE).itemsize
    return 1 << (-(-OBJECT_SIZE // octets) - 1).bit_length()


def command_line(description: str) -> argparse.ArgumentParser:
    """The command line of both; the demo fills it in."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--model", choices=MODEL_NAMES, required=True)
    result.add_argument("--prompt", type=Path, required=True)
    result.add_argument("--scope-key", type=Path, required=True)
    result.add_argument("--ca", type=Path, required=True)
    result.add_argument("--tokens", type=int, required=True)
    return result


def play(arguments: argparse.Namespace, work: Callable[[Role], Awaitable[None]]) -> int:
    """Play a role to its exit code."""
    role = Role(arguments)
    try:
        asyncio.run(role.run(work))
    except (WeightsMissing, Unsuitable, KvcsError, MoqtError) as error:
        role.tell("failed", text=str(error))
        return 1
    return 0
