"""The Llama architecture in numpy: RMSNorm, rotary positions, grouped-query attention, SwiGLU; forward pass
only.

The key-value cache of a layer is made of float16: each K (after rotation) and each V is rounded to float16
as soon as it is computed, and attention reads the rounded values, also in the process that computed them.
So what travels is exactly what the producer itself computes with, at half the size of float32, and float16
-> float32 is exact. Arithmetic is float32.

The order of floating-point additions inside a matrix product depends on the product's shape. Two processes
therefore agree bit for bit when they make the same calls: `Llama.extend_layer` on the same rows against the
same cache. It depends on nothing else, neither on the capacity of the cache nor on where its values came
from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float16 = npt.NDArray[np.float16]
OnLayer = Callable[[int, Float16, Float16], None]

QUERY_TILE = 128  # queries per step of attention: bounds its memory, and skips most of what causality masks


@dataclass(frozen=True, slots=True)
class Config:
    """The shape of a model. `end` is the token that ends a text, None where there is none."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    hidden: int
    vocabulary: int
    context: int
    rope_base: int
    norm_epsilon: float
    end: int | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(
                f"{self.heads} heads over {self.kv_heads} KV heads of {self.head_dim}: not a Llama shape"
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head: query head h reads KV head h // group."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; matrices are [out, in], float32, C order. `qkv` and `gate_up` are stacked along `out`."""

    attention_norm: Float32
    qkv: Float32
    output: Float32
    ffn_norm: Float32
    gate_up: Float32
    down: Float32


@dataclass(frozen=True, slots=True)
class Weights:
    """A model; `head` is None where the output matrix is the embedding (tied)."""

    embedding: Float32
    layers: tuple[LayerWeights, ...]
    norm: Float32
    head: Float32 | None = None


class Cache:
    """K (rotated) and V of one sequence, per layer. The values are float16 numbers, held as float32
    [kv_heads, tokens, head_dim] because that is what attention multiplies.
    """

    def __init__(self, config: Config, capacity: int) -> None:
        shape = (config.kv_heads, max(capacity, 1), config.head_dim)
        self._k = [np.empty(shape, np.float32) for _ in range(config.layers)]
        self._v = [np.empty(shape, np.float32) for _ in range(config.layers)]
        self._tokens = [0] * config.layers

    def tokens(self, layer: int = 0) -> int:
        """How many tokens layer `layer` holds."""
        return self._tokens[layer]

    def put(self, layer: int, k: Float16, v: Float16) -> None:
        """Append K and V of shape [tokens, kv_heads, head_dim], float16, after what layer `layer` holds.

        Raises ValueError for another shape or dtype: nothing is ever cast here."""
        kv_heads, capacity, head_dim = self._k[layer].shape
        for name, array in (("K", k), ("V", v)):
            if array.dtype != np.float16 or array.shape != (len(k), kv_heads, head_dim):
                raise ValueError(
                    f"layer {layer}: {name} is {array.dtype} {array.shape}, "
                    f"wanted float16 {(len(k), kv_heads, head_dim)}"
                )
        start = self._tokens[layer]
        end = start + len(k)
        for store, array in ((self._k, k), (self._v, v)):
            if end > capacity:
                grown = np.empty((kv_heads, max(end, 2 * capacity), head_dim), np.float32)
                grown[:, :start] = store[layer][:, :start]
                store[layer] = grown
            store[layer][:, start:end] = array.swapaxes(0, 1)
        self._tokens[layer] = end

    def operands(self, layer: int) -> tuple[Float32, Float32]:
        """K and V of a layer as attention reads them, [kv_heads, tokens, head_dim]: views."""
        end = self._tokens[layer]
        return self._k[layer][:, :end], self._v[layer][:, :end]

    def layer(self, layer: int) -> tuple[Float16, Float16]:
        """K and V of a layer as they are shipped: float16 [tokens, kv_heads, head_dim], C order, copies."""
        k, v = self.operands(layer)
        return _shipped(k.swapaxes(0, 1)), _shipped(v.swapaxes(0, 1))


def _shipped(values: Float32) -> Float16:
    with np.errstate(over="raise"):  # a K or V beyond 65504 would become infinite: better stop
        return np.ascontiguousarray(values, dtype=np.float16)


class Rope:
    """Rotary positions in the form of Hugging Face: element i turns with element i + head_dim / 2."""

    def __init__(self, head_dim: int, base: float, positions: int) -> None:
        rates = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        angles = np.outer(np.arange(positions, dtype=np.float64), rates)
        self._cos = np.cos(angles).astype(np.float32)[:, None, :]
        self._sin = np.sin(angles).astype(np.float32)[:, None, :]

    def rotate(self, x: Float32, start: int) -> Float32:
        """`x` [tokens, heads, head_dim], whose first token stands at position `start`, turned. Raises
        IndexError past the last.
        """
        end = start + len(x)
        if end > len(self._cos):
            raise IndexError(f"position {end - 1} of a context of {len(self._cos)} tokens")
        cos, sin = self._cos[start:end], self._sin[start:end]
        half = x.shape[-1] // 2
        low, high = x[..., :half], x[..., half:]
        turned = np.empty_like(x)
        turned[..., :half] = low * cos - high * sin
        turned[..., half:] = high * cos + low * sin
        return turned


def rms_norm(x: Float32, weight: Float32, epsilon: float) -> Float32:
    """`x` [tokens, width] over the root of its mean square, times `weight`."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    normed: Float32 = x / np.sqrt(mean_square + np.float32(epsilon))
    normed *= weight
    return normed


def attention(q: Float32, k: Float32, v: Float32) -> Float32:
    """Causal attention of `q` [tokens, heads, head_dim] over `k` and `v` [kv_heads, all tokens, head_dim];
    the queries are the last of all tokens. Returns [tokens, heads * head_dim].
    """
    tokens, heads, head_dim = q.shape
    kv_heads, total, _ = k.shape
    group = heads // kv_heads
    scaled = q * np.float32(1 / math.sqrt(head_dim))
    by_head = np.ascontiguousarray(scaled.reshape(tokens, kv_heads, group, head_dim).transpose(1, 2, 0, 3))
    mixed = np.empty((tokens, kv_heads, group, head_dim), np.float32)
    for first in range(0, tokens, QUERY_TILE):
        count = min(QUERY_TILE, tokens - first)
        seen = total - tokens + first + count
        rows = by_head[:, :, first : first + count].reshape(kv_heads, group * count, head_dim)
        scores = (rows @ k[:, :seen].swapaxes(1, 2)).reshape(kv_heads, group, count, seen)
        # Only among the tile's own tokens is there a future to hide.
        scores[..., seen - count :] += np.triu(np.full((count, count), -np.inf, np.float32), 1)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        weight = scores.sum(axis=-1, keepdims=True)
        out = scores.reshape(kv_heads, group * count, seen) @ v[:, :seen]
        out = out.reshape(kv_heads, group, count, head_dim) / weight
        mixed[first : first + count] = out.transpose(2, 0, 1, 3)
    return mixed.reshape(tokens, heads * head_dim)


def swiglu(gate_up: Float32) -> Float32:
    """silu(gate) * up, of `gate_up` [tokens, 2 * hidden]."""
    gate, up = np.split(gate_up, 2, axis=-1)
    activated = np.negative(gate)
    with np.errstate(over="ignore"):  # exp(-gate) may be infinite: silu is then 0, as it should be
        np.exp(activated, out=activated)
    activated += 1
    np.divide(gate, activated, out=activated)
    activated *= up
    return activated


class Llama:
    """The forward pass. Holds no state of a sequence: that is in `Cache`, and in the hidden rows that the
    caller carries.
    """

    def __init__(self, config: Config, weights: Weights) -> None:
        if len(weights.layers) != config.layers:
            raise ValueError(f"weights of {len(weights.layers)} layers for {config.layers}")
        self.config = config
        self.weights = weights
        self._rope = Rope(config.head_dim, config.rope_base, config.context)

    def embed(self, tokens: Sequence[int]) -> Float32:
        """The rows of `tokens` that enter layer 0: [tokens, width]."""
        return self.weights.embedding[np.asarray(tokens, dtype=np.int64)]

    def extend_layer(self, layer: int, hidden: Float32, cache: Cache) -> Float32:
        """Run layer `layer` over the rows `hidden` [tokens, width] of the tokens that follow those in the
        cache: appends their K and V to layer `layer` of `cache`, and returns the rows that enter the next
        layer. Needs only layer `layer` of the cache, so it can run as soon as that layer has arrived.
        """
        q, k, v = self._project(layer, hidden, cache.tokens(layer))
        cache.put(layer, k, v)
        return self._mix(layer, hidden, q, cache)

    def prefill(
        self, tokens: Sequence[int], *, cache: Cache | None = None, on_layer: OnLayer | None = None
    ) -> Cache:
        """Compute K and V of `tokens`, which follow those in `cache` (a new one where None), and append
        them.

        `on_layer(layer, k, v)` is called with the new tokens' K and V, float16 [tokens, kv_heads,
        head_dim], as soon as they exist: before this layer's attention and before the next layer. No
        logits: the last layer ends with its K and V.
        """
        cache = Cache(self.config, len(tokens)) if cache is None else cache
        hidden = self.embed(tokens)
        for layer in range(self.config.layers):
            q, k, v = self._project(layer, hidden, cache.tokens(layer))
            cache.put(layer, k, v)
            if on_layer is not None:
                on_layer(layer, k, v)
            if layer + 1 < self.config.layers:
                hidden = self._mix(layer, hidden, q, cache)
        return cache

    def next_token(self, hidden: Float32) -> int:
        """The likeliest token after the last row that left the last layer; the lowest id among equals."""
        return int(self.logits(hidden[-1:])[0].argmax())

    def logits(self, hidden: Float32) -> Float32:
        """Scores of every token of the vocabulary for each row that left the last layer: [rows,
        vocabulary].
        """
        weights = self.weights
        head = weights.embedding if weights.head is None else weights.head
        return rms_norm(hidden, weights.norm, self.config.norm_epsilon) @ head.T

    def _project(self, layer: int, hidden: Float32, start: int) -> tuple[Float32, Float16, Float16]:
        config, weights = self.config, self.weights.layers[layer]
        rows = rms_norm(hidden, weights.attention_norm, config.norm_epsilon) @ weights.qkv.T
        by_head = rows.reshape(len(rows), config.heads + 2 * config.kv_heads, config.head_dim)
        q, k, v = np.split(by_head, (config.heads, config.heads + config.kv_heads), axis=1)
        return self._rope.rotate(q, start), _shipped(self._rope.rotate(k, start)), _shipped(v)

    def _mix(self, layer: int, hidden: Float32, q: Float32, cache: Cache) -> Float32:
        weights = self.weights.layers[layer]
        hidden = hidden + attention(q, *cache.operands(layer)) @ weights.output.T
        rows = rms_norm(hidden, weights.ffn_norm, self.config.norm_epsilon)
        return hidden + swiglu(rows @ weights.gate_up.T) @ weights.down.T
