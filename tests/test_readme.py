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
import pytest

from kvcs import Descriptor, Publisher, ScopeKey, files
from kvcs.errors import InvalidDescriptor

if TYPE_CHECKING:
    from tests.conftest import Certificates

ROOT = Path(__file__).resolve().parents[1]


def code_after(heading: str) -> str:
    """The Python example in the README's section of this heading."""
    section = (ROOT / "README.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(code)


def example() -> dict[str, Any]:
    """The names that the README's library example defines."""
    code = code_after("The library")
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


def test_a_cache_file_from_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the commands of the README read, made as it says, from the descriptor that lies here."""
    (tmp_path / "examples").mkdir()
    model = tmp_path / "examples" / "model.json"
    model.write_bytes((ROOT / "examples" / "model.json").read_bytes())
    monkeypatch.chdir(tmp_path)
    exec(code_after("The two roles, by command"), {})
    cache = files.read("cache.safetensors")
    assert cache.descriptor == Descriptor.parse(model.read_text())
    assert len(cache.layers) == cache.descriptor.layers
    assert np.array_equal(cache.tokens, files.read_tokens("prompt.json"))
    Publisher(cache.descriptor, ScopeKey.random()).publish(cache.tokens)
    assert not caplog.records  # such as: Objects outside the recommended sizes


def test_every_member_of_the_descriptor_is_documented() -> None:
    """Those that `examples/model.json` holds are all that are required; each has its row."""
    members = json.loads((ROOT / "examples" / "model.json").read_text())
    section = (
        (ROOT / "README.md").read_text().split("\n## The Compatibility Descriptor\n")[1].split("\n## ")[0]
    )
    named = {name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in row.split(", ")}
    assert named == {f"`{name}`" for name in (*members, "v_head_dim", "shard", "blind", "ext")}
    for name in members:
        with pytest.raises(InvalidDescriptor, match=f"no member '{name}'"):
            Descriptor.parse({key: value for key, value in members.items() if key != name})
