"""KV caches, token ids and descriptors in files.

A cache file is .safetensors with the tensors `layers.{i}.k` and `layers.{i}.v` [tokens, kv_heads, head_dim],
the integer tensor `tokens` [tokens], and the Compatibility Descriptor as JSON text under "descriptor" in the
metadata. A partial cache has some of the layers. The same as .npz (the descriptor as a string array) works
for the dtypes that numpy itself knows: float16, float32, int8. Elements are kept bit for bit.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import safetensors
import safetensors.numpy

from kvcs import strict_json
from kvcs.errors import FileFault, InvalidDescriptor, InvalidTensor, InvalidTokens, NotWritten
from kvcs.identity import Descriptor, token_array
from kvcs.layout import NUMPY_DTYPES, Geometry, Order, Tensor, check_tensor, in_native_order, wire_bits
from kvcs.names import Component

MAX_TOKENS_FILE: Final = 256 * 1024 * 1024  # octets of JSON

_TENSOR_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,9})\.(k|v)")
_NPZ_DTYPES: Final = ("float16", "float32", "int8")
_SAFETENSORS_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "F16": NUMPY_DTYPES["float16"],
    "BF16": NUMPY_DTYPES["bfloat16"],
    "F32": NUMPY_DTYPES["float32"],
    "F8_E4M3": NUMPY_DTYPES["float8_e4m3fn"],
    "F8_E5M2": NUMPY_DTYPES["float8_e5m2"],
    **{f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for kind in "IU" for size in (1, 2, 4, 8)},
}


@dataclass(frozen=True, slots=True, eq=False)
class CacheFile:
    """The KV cache of a token sequence, whole or some of its layers."""

    descriptor: Descriptor
    tokens: np.ndarray[Any, np.dtype[np.int64]]
    """The token ids, [tokens]: all of them, also those after the last complete block."""
    layers: Mapping[int, tuple[Tensor, Tensor]]
    """K and V of a layer, by layer index: [tokens, kv_heads, head_dim] of the descriptor's dtype each."""

    def check(self) -> None:
        """Raise InvalidTokens or InvalidTensor unless tokens and layers fit each other and the descriptor."""
        geometry = Geometry.of(self.descriptor)
        tokens = len(token_array(self.tokens))
        for layer, pair in self.layers.items():
            if not 0 <= layer < geometry.layers:
                raise InvalidTensor(f"layer {layer}: the descriptor has layers 0 to {geometry.layers - 1}")
            for component, array in zip((Component.K, Component.V), pair, strict=True):
                name = f"layers.{layer}.{component.text}"
                try:
                    check_tensor(array, geometry, Order.TOKENS_HEADS_DIM, component)
                except InvalidTensor as error:
                    raise InvalidTensor(f"{name}: {error}") from None
                if len(array) != tokens:
                    raise InvalidTensor(
                        f"{name}: expected {tokens} tokens, as many as token ids, got {len(array)}"
                    )
        if not self.layers:
            raise InvalidTensor("no layers: expected layers.0.k, layers.0.v and so on")


def read(path: str | Path, *, descriptor: Descriptor | None = None) -> CacheFile:
    """Read a cache file, .safetensors or .npz.

    The tensors of a .safetensors file are read-only views of the mapped file: they take no memory of their
    own, and the file must not be changed in place meanwhile (`write` replaces it, which is safe).
    `descriptor` is for files that hold none, and must agree with that of a file that does. Raises FileFault.
    """
    path = Path(path)
    reader, _ = _format(path)
    try:
        with path.open("rb"):
            pass  # before the readers, which take what can't be opened for a bad format
    except OSError as error:
        raise FileFault(f"cache file {path}: {error.strerror}") from error
    text, tensors = reader(path)
    if text is not None:
        try:
            stated = Descriptor.parse(text)
        except InvalidDescriptor as error:
            raise FileFault(f"cache file {path}: {error}") from None
        if descriptor is not None and descriptor.json != stated.json:
            raise FileFault(f"cache file {path}: holds another Compatibility Descriptor than the one given")
        descriptor = stated
    if descriptor is None:
        raise FileFault(
            f'cache file {path}: no "descriptor" in its metadata; give one, or write it with kvcs.files'
        )
    if "tokens" not in tensors:
        raise FileFault(f'cache file {path}: no tensor "tokens" with the token ids')
    try:
        cache = CacheFile(
            descriptor, token_array(tensors["tokens"]), _layers(tensors, Geometry.of(descriptor))
        )
        cache.check()
    except (InvalidTokens, InvalidTensor) as error:
        raise FileFault(f"cache file {path}: {error}{_advice(path, descriptor)}") from None
    return cache


def check_writable(path: str | Path, descriptor: Descriptor) -> None:
    """Raise FileFault where `write` could not write a cache of `descriptor`: to know it before the work.

    A file is made beside `path`, and removed, to find out. Whether there will be room is not known.
    """
    path = Path(path)
    _format(path)
    if advice := _advice(path, descriptor):
        raise FileFault(f"cache file {path}{advice}")
    if path.is_dir():
        raise FileFault(f"cache file {path}: not written: it is a directory")
    if not path.parent.is_dir():
        raise FileFault(f"cache file {path}: not written: there is no directory {path.parent}")
    trial = _temporary(path)
    try:
        trial.touch(mode=0o600, exist_ok=False)
        trial.unlink()
    except OSError as error:
        raise FileFault(
            f"cache file {path}: not written: no file can be made in {path.parent}: {error.strerror}"
        ) from error


def write(path: str | Path, cache: CacheFile) -> None:
    """Write a cache file, .safetensors or .npz: whole or not at all, readable by its owner only.

    An existing file is replaced in one step. Raises InvalidTokens or InvalidTensor for a cache that does not
    fit its descriptor, FileFault, and NotWritten.
    """
    path = Path(path)
    check_writable(path, cache.descriptor)
    _, writer = _format(path)
    cache.check()
    tensors: dict[str, Tensor] = {"tokens": token_array(cache.tokens)}
    for layer in sorted(cache.layers):
        k, v = cache.layers[layer]
        tensors[f"layers.{layer}.k"] = np.ascontiguousarray(in_native_order(k))
        if v.shape[2]:
            tensors[f"layers.{layer}.v"] = np.ascontiguousarray(in_native_order(v))
    temporary = _temporary(path)
    try:
        try:
            writer(temporary, cache.descriptor.json, tensors)
            os.chmod(temporary, 0o600)  # kvcs 10: a cache reveals its prompt
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, safetensors.SafetensorError) as error:
        raise NotWritten(f"cache file {path}: not written: {error}") from error


def read_tokens(path: str | Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Read token ids, [tokens]: a JSON array of integers, or a .npy file of integers. Raises FileFault."""
    path = Path(path)
    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:
                values = np.load(file, allow_pickle=False)
        else:
            values = strict_json.loads(
                path.read_bytes(), max_size=MAX_TOKENS_FILE, max_values=MAX_TOKENS_FILE // 2
            )
            if not isinstance(values, list) or not all(type(value) is int for value in values):
                raise ValueError("expected a JSON array of integers")
        return token_array(values)
    except OSError as error:
        raise FileFault(f"tokens file {path}: {error.strerror}") from error
    except (ValueError, EOFError) as error:
        raise FileFault(f"tokens file {path}: {error}") from error


def read_descriptor(path: str | Path) -> Descriptor:
    """Read a Compatibility Descriptor from a JSON file. Raises FileFault."""
    try:
        return Descriptor.parse(Path(path).read_bytes())
    except OSError as error:
        raise FileFault(f"descriptor file {path}: {error.strerror}") from error
    except InvalidDescriptor as error:
        raise FileFault(f"descriptor file {path}: {error}") from error


_Reader: TypeAlias = Callable[[Path], tuple[str | None, dict[str, Tensor]]]
_Writer: TypeAlias = Callable[[Path, str, dict[str, Tensor]], None]


def _format(path: Path) -> tuple[_Reader, _Writer]:
    match path.suffix:
        case ".safetensors":
            return _read_safetensors, _write_safetensors
        case ".npz":
            return _read_npz, _write_npz
    raise FileFault(f"cache file {path}: expected a name that ends in .safetensors or .npz")


def _read_safetensors(path: Path) -> tuple[str | None, dict[str, Tensor]]:
    try:
        with safetensors.safe_open(path, framework="np"):
            pass  # it has checked the header: lengths, shapes, and offsets without overlap or gap
        octets = np.asarray(np.memmap(path, np.uint8, "r"))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise FileFault(f"cache file {path}: not a safetensors file: {error}") from error
    start = 8 + int.from_bytes(octets[:8].tobytes(), "little")
    header = json.loads(octets[8:start].tobytes())
    metadata = header.pop("__metadata__", None) or {}
    tensors = {}
    for name, entry in header.items():
        dtype = _SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype is None:
            continue
        first, end = entry["data_offsets"]
        # Little-endian by the format. Elements come in as integers, so that none is interpreted.
        elements = octets[start + first : start + end].view(wire_bits(dtype))
        tensors[name] = in_native_order(elements).view(dtype).reshape(entry["shape"])
    return metadata.get("descriptor"), tensors


def _write_safetensors(path: Path, descriptor: str, tensors: dict[str, Tensor]) -> None:
    safetensors.numpy.save_file(tensors, path, metadata={"descriptor": descriptor})


def _read_npz(path: Path) -> tuple[str | None, dict[str, Tensor]]:
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            with loaded:
                tensors = {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise FileFault(
            f"cache file {path}: not an .npz file of arrays: {error} (such files keep "
            f"{', '.join(_NPZ_DTYPES)}; use .safetensors for other dtypes)"
        ) from error
    descriptor = tensors.pop("descriptor", None)
    return None if descriptor is None else str(descriptor), tensors


def _write_npz(path: Path, descriptor: str, tensors: dict[str, Tensor]) -> None:
    with path.open("xb") as file:
        members: dict[str, Any] = {"descriptor": np.array(descriptor), **tensors}
        np.savez(file, **members)


def _layers(tensors: Mapping[str, Tensor], geometry: Geometry) -> dict[int, tuple[Tensor, Tensor]]:
    """K and V by layer, in ascending order; the empty V of "mla" is not in the file."""
    present = sorted({int(match[1]) for match in map(_TENSOR_NAME.fullmatch, tensors) if match})
    layers = {}
    for layer in present:
        k, v = (tensors.get(f"layers.{layer}.{letter}") for letter in "kv")
        if v is None and k is not None and geometry.v_head_dim == 0:
            v = np.empty((len(k), geometry.kv_heads, 0), geometry.dtype)
        if k is None or v is None:
            raise InvalidTensor(f"layers.{layer} has no {'k' if k is None else 'v'}")
        layers[layer] = (k, v)
    return layers


def _advice(path: Path, descriptor: Descriptor) -> str:
    if path.suffix != ".npz" or descriptor.dtype in _NPZ_DTYPES:
        return ""
    return f"; an .npz file does not keep {descriptor.dtype}: use .safetensors instead"


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
