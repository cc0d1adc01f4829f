"""A Llama of a few layers with seeded random weights and one token per byte: the demo's arithmetic without
a download.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from examples.llama import Config, Float32, LayerWeights, Weights

NAME = "kvcs-examples/tiny"
CONFIG = Config(
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    width=64,
    hidden=160,
    vocabulary=256,
    context=8192,
    rope_base=10_000,
    norm_epsilon=1e-5,
)
PRINTABLE = range(0x20, 0x7F)


def random_weights(config: Config, seed: int = 0) -> Weights:
    """Weights of an untied model. Rows of the head outside printable ASCII are zero, so that the model
    writes readable nonsense.
    """
    random = np.random.default_rng(seed)

    def matrix(out: int, into: int) -> Float32:
        drawn = random.standard_normal((out, into), dtype=np.float32)
        drawn /= np.float32(np.sqrt(into))
        return drawn

    def norm() -> Float32:
        drawn = random.standard_normal(config.width, dtype=np.float32)
        drawn /= 10
        drawn += 1
        return drawn

    def layer() -> LayerWeights:
        heads = config.heads + 2 * config.kv_heads
        return LayerWeights(
            attention_norm=norm(),
            qkv=2 * matrix(heads * config.head_dim, config.width),
            output=2 * matrix(config.width, config.heads * config.head_dim),
            ffn_norm=norm(),
            gate_up=matrix(2 * config.hidden, config.width),
            down=matrix(config.width, config.hidden),
        )

    embedding = random.standard_normal((config.vocabulary, config.width), dtype=np.float32)
    layers = tuple(layer() for _ in range(config.layers))
    head = matrix(config.vocabulary, config.width)
    head[[token for token in range(config.vocabulary) if token not in PRINTABLE]] = 0
    return Weights(embedding, layers, norm(), head)


def digest(config: Config, weights: Weights) -> str:
    """SHA-256, as hexadecimal digits, of the numbers themselves: another numpy may draw others from the
    same seed.
    """
    state = hashlib.sha256(repr(config).encode())
    arrays = [weights.embedding, weights.norm]
    if weights.head is not None:
        arrays.append(weights.head)
    for layer in weights.layers:
        arrays += [getattr(layer, field.name) for field in dataclasses.fields(layer)]
    for array in arrays:
        state.update(array.astype("<f4").tobytes())
    return state.hexdigest()


class ByteTokenizer:
    """Token = byte of UTF-8."""

    def tokenize(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of the bytes; what is no UTF-8 becomes U+FFFD."""
        return bytes(tokens).decode(errors="replace")

    def chat(self, request: str) -> list[int]:
        """The request as it is: there is no chat template here."""
        return self.tokenize(request)
