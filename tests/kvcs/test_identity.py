"""Compatibility Descriptor and ID, scope keys, Block Keys: profile kvsp-lp1."""

from __future__ import annotations

import hmac
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import InvalidDescriptor, InvalidScopeKey, InvalidTokens, KvcsError
from kvcs.identity import (
    KVSP_LP1,
    MAX_DESCRIPTOR_SIZE,
    Descriptor,
    Extra,
    ScopeKey,
    block_keys,
    block_keys_digest,
    layer_digest,
    token_array,
)

ROOT = Path(__file__).parents[2]
VECTORS: dict[str, Any] = json.loads((ROOT / "tests/vectors/kvsp-lp1.json").read_text())
KEY = ScopeKey(bytes.fromhex(VECTORS["scope_key"]))
H64 = "5" * 64


def described(**changes: Any) -> dict[str, Any]:
    return {**VECTORS["descriptor"], **changes}


def parse(**changes: Any) -> Descriptor:
    return Descriptor.parse(described(**changes))


def test_every_value_of_the_test_vectors() -> None:
    descriptor = parse()
    assert len(descriptor.json) == 512
    assert descriptor.compat_id.hex() == VECTORS["compat_id"]
    assert KEY.scope_id.hex() == VECTORS["scope_id"]
    # The subkey is never shown; what it does to one message is as good.
    subkey = bytes.fromhex(VECTORS["block_key_subkey"])
    assert KEY.mac(b"message") == hmac.digest(subkey, b"message", "sha256")
    keys = block_keys(KEY, descriptor, VECTORS["tokens"])
    assert [key.hex() for key in keys] == VECTORS["block_keys"]
    assert block_keys_digest(keys).hex() == VECTORS["block_keys_sha256"]
    assert parse(blind="44" * 32).compat_id.hex() == VECTORS["compat_id_with_blind_44x32"]
    with_extra = block_keys(KEY, descriptor, VECTORS["tokens"], [Extra(2, 1, b"\xab" * 32)])
    assert with_extra[1].hex() == VECTORS["block_key_1_with_extra_offset2_abx32_in_block0"]
    k = np.arange(4096, dtype="<u2")
    assert layer_digest(k.tobytes(), k[::-1].tobytes()).hex() == VECTORS["layer_digest"]["sha256"]


def test_profile_gives_what_the_modules_give() -> None:
    descriptor = KVSP_LP1.parse_descriptor(described())
    key = KVSP_LP1.scope_key(bytes(range(32)))
    assert key == KEY
    assert KVSP_LP1.block_keys(key, descriptor, VECTORS["tokens"]) == block_keys(
        KEY, descriptor, VECTORS["tokens"]
    )
    assert KVSP_LP1.codec_values["raw"] == 1
    assert 0 not in KVSP_LP1.codec_values.values()


@pytest.mark.parametrize("source", [json.dumps(described()), json.dumps(described()).encode(), described()])
def test_descriptor_from_text_octets_and_object(source: str | bytes | dict[str, Any]) -> None:
    descriptor = Descriptor.parse(source)
    assert descriptor == parse()
    assert (descriptor.layers, descriptor.kv_heads, descriptor.head_dim, descriptor.v_head_dim) == (
        2,
        8,
        128,
        128,
    )
    assert (descriptor.dtype, descriptor.block_tokens, descriptor.attention) == ("bfloat16", 4, "gqa")
    assert descriptor.window == 0
    assert descriptor.members() == described()


def test_order_of_members_does_not_count() -> None:
    assert Descriptor.parse(dict(reversed(described().items()))).compat_id == parse().compat_id


def test_unknown_members_are_hashed() -> None:
    descriptor = parse(future={"a": [1, None, "ü"]}, ext={"vendor": True})
    assert descriptor.compat_id != parse().compat_id
    assert descriptor.members()["future"] == {"a": [1, None, "ü"]}


def test_optional_members_that_change_the_geometry() -> None:
    assert parse(v_head_dim=64).v_head_dim == 64
    assert parse(attention="mla", kv_heads=1).v_head_dim == 0
    assert parse(window=[0, 1024]).window == (0, 1024)
    assert parse(shard={"index": 1, "count": 2}).json
    assert parse(position={"kind": "none"}).json


@pytest.mark.parametrize(
    "changes",
    [
        {"profile": "kvsp-lp2"},
        {"model": ""},
        {"model": 7},
        {"model_sha256": "1" * 63},
        {"model_sha256": "A" * 64},
        {"tokenizer_sha256": None},
        {"adapter_sha256": ""},
        {"kv_scales_sha256": 0},
        {"attention": "linear"},
        {"attention": ["gqa"]},
        {"attention": "mla"},  # with eight heads
        {"attention": "mla", "kv_heads": 1, "v_head_dim": 64},
        {"layers": 0},
        {"layers": 2**31},
        {"layers": True},
        {"layers": "2"},
        {"kv_heads": 65536},
        {"head_dim": -1},
        {"v_head_dim": 128},  # the same as head_dim
        {"v_head_dim": 0},
        {"dtype": "torch.bfloat16"},
        {"block_tokens": 65537},
        {"layout": "htd-le"},
        {"position": {"kind": "rope", "applied": 1, "config_sha256": H64}},
        {"position": {"kind": "rope", "applied": True}},
        {"position": {"kind": "alibi"}},
        {"position": "rope"},
        {"window": -1},
        {"window": True},
        {"window": [0]},
        {"window": [0, True]},
        {"shard": {"index": 2, "count": 2}},
        {"shard": {"index": 0}},
        {"blind": "short"},
        {"ext": []},
        {"float": 1.5},
        {"large": 2**53},
        {"näme": 1},
        {"surrogate": "\ud800"},
        {"octets": b"x"},
        {"inner": {1: 2}},
        {"much": "x" * MAX_DESCRIPTOR_SIZE},
    ],
)
def test_descriptor_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidDescriptor) as caught:
        Descriptor.parse(described(**changes))
    name = next(iter(changes))
    assert ascii(name)[1:-1] in str(caught.value) or "kv_heads" in str(caught.value) or name == "much"


@pytest.mark.parametrize("name", sorted(VECTORS["descriptor"]))
def test_descriptor_without_a_member(name: str) -> None:
    members = described()
    del members[name]
    with pytest.raises(InvalidDescriptor, match=f"no member '{name}'"):
        Descriptor.parse(members)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        '{"profile":"kvsp-lp1","profile":"kvsp-lp1"}',
        "\ufeff{}",
        '{"a":NaN}',
        '{"a":1e400}',
        '{"a":' * 50_000,
        "[" * 20_000,
        b"\xff\xfe{\x00}\x00",
        b'{"a":"\xff"}',
        "{}" + " " * MAX_DESCRIPTOR_SIZE,
        "{" + "[]," * 20_000,
        '{"a":' + "1" * 5000 + "}",
    ],
)
def test_descriptor_text_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidDescriptor):
        Descriptor.parse(text)


def test_depth_of_a_descriptor_is_bounded() -> None:
    def nested(depth: int) -> Any:
        return {"x": nested(depth - 1)} if depth else 0

    assert parse(ext=nested(15)).json
    with pytest.raises(InvalidDescriptor, match="nested too deeply"):
        parse(ext=nested(16))


def test_the_blind_is_never_shown() -> None:
    blind = "c0ffee" * 10 + "abcd"
    assert blind not in repr(parse(blind=blind))
    with pytest.raises(InvalidDescriptor) as caught:
        parse(blind=blind[:-1])
    assert blind[:20] not in str(caught.value)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text('abc\\"\x01\x7f', max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(json_values)
def test_canonical_form_is_rfc_8785(value: Any) -> None:
    descriptor = parse(ext={"value": value})
    assert descriptor.json.encode() == rfc8785.dumps(descriptor.members())
    assert Descriptor.parse(descriptor.json) == descriptor


# Scope keys


@pytest.mark.parametrize("length", [0, 15, 65])
def test_scope_key_of_wrong_length(length: int) -> None:
    with pytest.raises(InvalidScopeKey, match=f"16 to 64 octets.*{length}"):
        ScopeKey(bytes(length))


def test_scope_key_shows_nothing_and_compares() -> None:
    secret = bytes(range(100, 132))
    key = ScopeKey(secret)
    assert secret.hex() not in repr(key)
    assert str(secret) not in repr(key)
    assert key == ScopeKey(secret)
    assert hash(key) == hash(ScopeKey(secret))
    assert key != KEY
    assert ScopeKey.random() != ScopeKey.random()
    with pytest.raises(InvalidScopeKey) as caught:
        ScopeKey(secret.hex())  # type: ignore[arg-type]  # the mistake that is likely: the text of a key file
    assert secret.hex() not in str(caught.value)


def test_scope_key_from_file(tmp_path: Path) -> None:
    path = tmp_path / "scope.key"
    path.write_text(VECTORS["scope_key"] + "\n")
    assert ScopeKey.from_file(path) == KEY
    path.write_text(VECTORS["scope_key"].upper())
    assert ScopeKey.from_file(str(path)) == KEY


@pytest.mark.parametrize("text", ["", "00" * 31, "0x" + "00" * 32, "zz" * 32, "00" * 200, "٠" * 64])
def test_scope_key_file_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "scope.key"
    path.write_text(text)
    with pytest.raises(InvalidScopeKey, match="64 hex digits") as caught:
        ScopeKey.from_file(path)
    assert not text or text not in str(caught.value)
    with pytest.raises(InvalidScopeKey, match="missing"):
        ScopeKey.from_file(tmp_path / "missing")


# Block Keys


def reference_keys(tokens: list[int], size: int, extras: dict[int, bytes]) -> list[bytes]:
    """kvsp 2.3, read as it stands there."""
    subkey = bytes.fromhex(VECTORS["block_key_subkey"])
    previous = hmac.digest(subkey, b"\x00" + parse(block_tokens=size).compat_id, "sha256")
    keys = []
    for block in range(len(tokens) // size):
        part = tokens[block * size : (block + 1) * size]
        extra = extras.get(block, b"")
        message = (
            b"\x01"
            + previous
            + struct.pack(f">I{size}I", size, *part)
            + struct.pack(">I", len(extra))
            + extra
        )
        previous = hmac.digest(subkey, message, "sha256")
        keys.append(previous)
    return keys


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_block_keys_are_those_of_the_text(tokens: list[int], size: int) -> None:
    expected = reference_keys(tokens, size, {})
    descriptor = parse(block_tokens=size)
    assert block_keys(KEY, descriptor, tokens) == expected
    assert block_keys(KEY, descriptor, np.array(tokens, ">u8")) == expected
    assert block_keys(KEY, descriptor, np.array(tokens, "u4")[::1]) == expected


@given(st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=40), st.data())
def test_key_of_a_block_depends_on_the_tokens_before_its_end_only(
    tokens: list[int], data: st.DataObject
) -> None:
    keys = block_keys(KEY, parse(), tokens)
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[position] ^= 1
    other = block_keys(KEY, parse(), changed)
    block = position // 4
    assert keys[:block] == other[:block]
    assert not set(keys[block:]) & set(other[block:])
    assert block_keys(KEY, parse(), tokens[:8]) == keys[:2]


def test_extra_over_several_blocks() -> None:
    tokens = list(range(12))
    one, two = b"\x01" * 32, b"\x02" * 5
    extras = {
        0: struct.pack(">IH", 1, 5) + two + struct.pack(">IH", 3, 32) + one,
        1: struct.pack(">IH", 0, 32) + one,
        2: struct.pack(">IH", 0, 32) + one,
    }
    keys = block_keys(KEY, parse(), tokens, [Extra(3, 6, one), Extra(1, 2, two)])
    assert keys == reference_keys(tokens, 4, extras)


@pytest.mark.parametrize(
    "extra",
    [Extra(-1, 2, b"x"), Extra(0, 0, b"x"), Extra(7, 2, b"x"), Extra(0, 1, b""), Extra(0, 1, bytes(65536))],
)
def test_extra_refused(extra: Extra) -> None:
    with pytest.raises(InvalidTokens):
        block_keys(KEY, parse(), range(8), [extra])


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([-1], "-1 at position 0"),
        ([0, 2**32], "4294967296 at position 1"),
        ([2**64], "beyond 64 bits"),
        ([1, 2**63], "beyond 64 bits"),
        ([1.0], "float64"),
        ([True], "bool"),
        (["1"], "str"),
        ([[1, 2]], "shape"),
        ([[1], [2, 3]], "inhomogeneous"),
        (7, "shape"),
        (np.zeros(3, np.float32), "float32"),
    ],
)
def test_tokens_refused(tokens: Any, says: str) -> None:
    with pytest.raises(InvalidTokens, match=r"0\.\.4294967295") as caught:
        token_array(tokens)
    assert says in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, KvcsError)


def test_no_complete_block_no_key() -> None:
    assert block_keys(KEY, parse(), []) == []
    assert block_keys(KEY, parse(), [1, 2, 3]) == []


PROGRAM = """
import json, pathlib
from kvcs.identity import Descriptor, ScopeKey, block_keys
from kvcs.manifest import Manifest
from kvcs.names import DataTrack, PublicationName

vectors = json.loads(pathlib.Path("tests/vectors/kvsp-lp1.json").read_text())
descriptor = Descriptor.parse({**vectors["descriptor"], "ext": {name: 1 for name in "zyxwabc"}})
key = ScopeKey(bytes.fromhex(vectors["scope_key"]))
keys = block_keys(key, descriptor, vectors["tokens"])
name = PublicationName(key.scope_id, descriptor.compat_id, keys[-1], bytes(16))
tracks = [DataTrack.parse(track) for track in ("k.raw.s0", "v.raw.s0", "kv.x-shuffle-zlib.s0")]
manifest = Manifest(descriptor, unknown={name: 1 for name in "zyxwabc"}).with_segment(keys, tracks)
for track in reversed(tracks):
    manifest = manifest.with_group(track, [bytes(32)] * 2)
print(name.namespace)
print(manifest.to_json())
"""


def test_same_octets_whatever_the_hash_seed() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    ]
    assert "kvcs-1" in outputs[0]
    assert outputs[0] == outputs[1]
