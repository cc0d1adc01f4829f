"""What the README shows works: its library example is run as it stands, over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcs import Descriptor, ScopeKey

if TYPE_CHECKING:
    from tests.conftest import Certificates

ROOT = Path(__file__).resolve().parents[1]


def example() -> dict[str, Any]:
    """The names that the README's Python example defines."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as free:
        free.bind(("::1", 0))
        port = free.getsockname()[1]
    names: dict[str, Any] = {}
    exec(code.replace("4433", str(port)).replace("producer.example", "localhost"), names)
    return names


async def test_library_example(certificates: Certificates) -> None:
    vectors = json.loads((ROOT / "tests" / "vectors" / "kvsp-lp1.json").read_text())
    descriptor = Descriptor.parse({**vectors["descriptor"], "dtype": "float16", "block_tokens": 16})
    random = np.random.default_rng(0)
    shape = (40, descriptor.kv_heads, descriptor.head_dim)
    layers = [tuple(random.random(shape).astype(np.float16) for _ in "kv") for _ in range(descriptor.layers)]
    tokens, key = list(range(40)), ScopeKey.random()
    names = example()
    names.update(CERT=certificates.chain, KEY=certificates.key, CA=certificates.ca)
    used: list[tuple[int, Any, Any]] = []

    producer = asyncio.create_task(names["produce"](descriptor, key, tokens, lambda: layers))
    try:
        async with asyncio.timeout(30):
            while not used:  # The producer may not listen yet.
                with contextlib.suppress(OSError, names["moqt"].MoqtError):
                    await names["consume"](descriptor, key, tokens, lambda *layer: used.append(layer))
    finally:
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)
    assert [layer for layer, _, _ in used] == list(range(descriptor.layers))
    for (k, v), (_, got_k, got_v) in zip(layers, used, strict=True):
        assert np.array_equal(k[:32], got_k)
        assert np.array_equal(v[:32], got_v)
