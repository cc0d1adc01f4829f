"""A language model whose KV cache can be shipped: what the demo's producer and consumer both run.

The producer computes the complete blocks of the prompt, layer by layer (`Model.prefill`), and ships each
layer's K and V. The consumer takes the layers as they arrive (`Continuation.take`), runs the rest of the
prompt through each at once, and writes on (`Continuation.write`). What the producer alone would write is
`Model.generate`, and that is the same procedure: its own cache of complete blocks, in the dtype in which it
is shipped; the tokens that fill no block as one chunk; then one token at a time. Therefore both write the
same tokens, provided that both run the same weights, numpy and number of BLAS threads on the same kind of
processor. Elsewhere their own parts may round differently, and a tie between two tokens could fall the
other way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from examples import smollm, tiny
from examples.llama import Cache, Config, Float16, Llama, Weights
from examples.smollm import canonical_sha256

ModelName = Literal["smollm2-135m", "tiny"]
MODEL_NAMES: tuple[ModelName, ...] = ("smollm2-135m", "tiny")
DTYPE = "float16"


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def tokenize(self, text: str) -> list[int]: ...
    def detokenize(self, tokens: Sequence[int]) -> str: ...
    def chat(self, request: str) -> list[int]: ...


class Model(Llama):
    """A model with its tokeniser and its identity."""

    def __init__(
        self,
        config: Config,
        weights: Weights,
        tokenizer: Tokenizer,
        *,
        name: str,
        model_sha256: str,
        tokenizer_sha256: str,
    ) -> None:
        super().__init__(config, weights)
        self.tokenizer = tokenizer
        self.name = name
        self._model_sha256 = model_sha256
        self._tokenizer_sha256 = tokenizer_sha256

    @classmethod
    def load(cls, name: ModelName) -> Model:
        """Raises smollm.WeightsMissing where the packages with the weights are not installed; its message
        says what to install.
        """
        if name == "tiny":
            weights = tiny.random_weights(tiny.CONFIG)
            return cls(
                tiny.CONFIG,
                weights,
                tiny.ByteTokenizer(),
                name=tiny.NAME,
                model_sha256=canonical_sha256({"tiny": tiny.digest(tiny.CONFIG, weights)}),
                tokenizer_sha256=canonical_sha256("one token per octet of UTF-8"),
            )
        loaded = smollm.load_gguf(smollm.find_weights())
        return cls(
            loaded.config,
            loaded.weights,
            loaded.tokenizer,
            name=smollm.NAME,
            model_sha256=canonical_sha256({loaded.file_name: loaded.sha256}),
            tokenizer_sha256=loaded.sha256,
        )

    def descriptor(self, block_tokens: int) -> dict[str, object]:
        """The Compatibility Descriptor of this model's caches, profile kvsp-lp1 (kvsp.md 2.1)."""
        config = self.config
        attention = "mha" if config.group == 1 else "mqa" if config.kv_heads == 1 else "gqa"
        rotation = {"base": config.rope_base, "dimensions": config.head_dim, "pairs": "halves"}
        return {
            "profile": "kvsp-lp1",
            "model": self.name,
            "model_sha256": self._model_sha256,
            "tokenizer_sha256": self._tokenizer_sha256,
            "adapter_sha256": None,
            "attention": attention,
            "layers": config.layers,
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "dtype": DTYPE,
            "block_tokens": block_tokens,
            "layout": "thd-le",
            "position": {"kind": "rope", "applied": True, "config_sha256": canonical_sha256(rotation)},
            "window": 0,
            "kv_scales_sha256": None,
        }

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`, without any begin or end token."""
        return self.tokenizer.tokenize(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`."""
        return self.tokenizer.detokenize(tokens)

    def chat(self, request: str) -> list[int]:
        """The tokens after which the model answers `request`."""
        return self.tokenizer.chat(request)

    def generate(self, cache: Cache, tokens: Sequence[int], n: int) -> Iterator[int]:
        """Up to `n` tokens that follow `tokens`, greedily; `cache` holds the first of them, usually those
        of the complete blocks. `cache` is left as it is.
        """
        continuation = Continuation(self, tokens, cache.tokens())
        for layer in range(self.config.layers):
            continuation.take(*cache.layer(layer))
        return continuation.write(n)


class Continuation:
    """Goes on writing a text from a cache that arrives layer by layer. Each call computes: in asyncio, use
    `asyncio.to_thread` (one call at a time).
    """

    def __init__(self, model: Llama, tokens: Sequence[int], cached: int) -> None:
        """`tokens` is the whole text so far, of which the cache will hold the first `cached`. Of a cache
        that holds all of them the last is left aside: the next token follows from computing the last one,
        which no cache spares.
        """
        if not 0 <= cached <= len(tokens) or len(tokens) == 0:
            raise ValueError(f"a cache of {cached} tokens for a text of {len(tokens)}")
        self.cached = min(cached, len(tokens) - 1)
        self._model = model
        self._cache = Cache(model.config, len(tokens) + 256)
        self._hidden = model.embed(tokens[self.cached :])
        self._layer = 0
        self._written: int | None = None

    @property
    def layer(self) -> int:
        """The layer that `take` wants next; the number of layers when it has had all."""
        return self._layer

    def take(self, k: Float16, v: Float16) -> None:
        """K and V of layer `layer`, float16 [tokens, kv_heads, head_dim], copied: runs the rest of the text
        through this layer. Raises ValueError for arrays of another dtype, another shape or too few tokens.
        """
        if self._layer == self._model.config.layers:
            raise ValueError(f"there is no layer {self._layer}")
        if min(len(k), len(v)) < self.cached:
            raise ValueError(f"layer {self._layer}: {min(len(k), len(v))} tokens, wanted {self.cached}")
        self._cache.put(self._layer, k[: self.cached], v[: self.cached])
        self._hidden = self._model.extend_layer(self._layer, self._hidden, self._cache)
        self._layer += 1

    def write(self, n: int) -> Iterator[int]:
        """Up to `n` further tokens, greedily; ends early before `config.end`. Call it again to go on.
        Raises ValueError while layers are missing."""
        layers = self._model.config.layers
        if self._layer < layers:
            raise ValueError(f"layer {self._layer} of {layers} has not been taken yet")
        for _ in range(n):
            if self._written is not None:
                self._hidden = self._model.embed([self._written])
                for layer in range(layers):
                    self._hidden = self._model.extend_layer(layer, self._hidden, self._cache)
                self._written = None
            token = self._model.next_token(self._hidden)
            if token == self._model.config.end:
                return
            self._written = token
            yield token


def complete_tokens(tokens: int, block_tokens: int) -> int:
    """How many of the first `tokens` tokens lie in complete blocks: those whose cache is shipped."""
    return tokens // block_tokens * block_tokens
