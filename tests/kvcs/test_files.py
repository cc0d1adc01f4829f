"""Cache files, tokens files, descriptor files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcs.errors import FileFault, InvalidTensor, InvalidTokens, NotWritten
from kvcs.files import CacheFile, check_writable, read, read_descriptor, read_tokens, write
from kvcs.identity import DTYPES, Descriptor
from kvcs.layout import NUMPY_DTYPES, Geometry, Order, Tensor, to_blocks

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors/kvsp-lp1.json").read_text())


def described(dtype: str = "bfloat16", **changes: Any) -> Descriptor:
    return Descriptor.parse(
        {**VECTORS["descriptor"], "dtype": dtype, "kv_heads": 2, "head_dim": 6, "layers": 3, **changes}
    )


def tensor(shape: tuple[int, ...], dtype: str, seed: int) -> Tensor:
    """Any bits: NaN payloads, -0, denormals and all."""
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, NUMPY_DTYPES[dtype].itemsize), np.uint8)
    bits.reshape(-1)[: bits.shape[-1] * 2] = 0xFF  # the NaN with every bit set, twice
    return bits.view(NUMPY_DTYPES[dtype])[..., 0]


def cache(dtype: str = "bfloat16", tokens: int = 9, layers: tuple[int, ...] = (0, 1, 2)) -> CacheFile:
    return CacheFile(
        described(dtype),
        np.arange(tokens) * 1000,
        {
            layer: (tensor((tokens, 2, 6), dtype, 2 * layer), tensor((tokens, 2, 6), dtype, 2 * layer + 1))
            for layer in layers
        },
    )


def assert_same(got: CacheFile, expected: CacheFile) -> None:
    assert got.descriptor == expected.descriptor
    assert got.tokens.dtype == np.int64
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert list(got.layers) == sorted(expected.layers)
    for layer, pair in got.layers.items():
        for array, other in zip(pair, expected.layers[layer], strict=True):
            assert array.dtype == Geometry.of(expected.descriptor).dtype
            assert array.shape == other.shape
            assert array.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_there_and_back(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "cache.safetensors"
    write(path, cache(dtype))
    assert_same(read(path), cache(dtype))
    assert_same(read(str(path)), cache(dtype))


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_npz_there_and_back(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "cache.npz"
    write(path, cache(dtype))
    assert_same(read(path), cache(dtype))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    st.sampled_from(DTYPES),
    st.integers(0, 9),
    st.sets(st.integers(0, 2), min_size=1),
    st.lists(st.integers(0, 2**32 - 1), min_size=9, max_size=9),
)
def test_any_part_of_a_cache(
    tmp_path: Path, dtype: str, count: int, layers: set[int], tokens: list[int]
) -> None:
    path = tmp_path / "cache.safetensors"
    part = replace(cache(dtype, count, tuple(sorted(layers))), tokens=np.array(tokens[:count], np.int64))
    write(path, part)
    assert_same(read(path), part)


def test_layers_in_any_order_and_with_any_strides(tmp_path: Path) -> None:
    whole = cache()
    k = tensor((2, 9, 12), "bfloat16", 5).transpose(1, 0, 2)[:, :, ::2]
    v = np.asfortranarray(whole.layers[0][1])
    write(tmp_path / "a.safetensors", replace(whole, layers={2: (k, v), 0: (v, k)}))
    got = read(tmp_path / "a.safetensors")
    assert list(got.layers) == [0, 2]
    assert got.layers[2][0].tobytes() == k.tobytes()
    assert got.layers[0][0].tobytes() == v.tobytes()


def big_endian(array: Tensor) -> Tensor:
    size = array.dtype.itemsize
    swapped: Tensor = array.view(f"u{size}").astype(f">u{size}")
    return swapped.view(f">f{size}")


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_big_endian_arrays(tmp_path: Path, suffix: str) -> None:
    native = cache("float16")
    swapped = replace(
        native,
        tokens=native.tokens.astype(">u4"),
        layers={layer: (big_endian(k), big_endian(v)) for layer, (k, v) in native.layers.items()},
    )
    write(tmp_path / f"a{suffix}", swapped)
    assert_same(read(tmp_path / f"a{suffix}"), native)


def test_a_reader_of_npz_takes_the_byte_order_it_finds(tmp_path: Path) -> None:
    native = cache("float32", layers=(1,))
    k, v = (big_endian(array) for array in native.layers[1])
    members: dict[str, Any] = {"layers.1.k": k, "layers.1.v": v, "tokens": native.tokens.astype(">i4")}
    np.savez(tmp_path / "a.npz", descriptor=np.array(native.descriptor.json), **members)
    got = read(tmp_path / "a.npz")
    blocks, _ = to_blocks(got.layers[1][0], Geometry.of(native.descriptor), Order.TOKENS_HEADS_DIM)
    assert b"".join(blocks) == native.layers[1][0][:8].tobytes()


def test_mla_has_no_v(tmp_path: Path) -> None:
    descriptor = described(attention="mla", kv_heads=1)
    layers = {0: (tensor((5, 1, 6), "bfloat16", 1), np.empty((5, 1, 0), NUMPY_DTYPES["bfloat16"]))}
    write(tmp_path / "a.safetensors", CacheFile(descriptor, np.arange(5), layers))
    got = read(tmp_path / "a.safetensors")
    assert got.layers[0][0].tobytes() == layers[0][0].tobytes()
    assert got.layers[0][1].shape == (5, 1, 0)


def test_reading_maps_the_file(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    descriptor = described("float16", head_dim=4096, layers=2)
    zeros = np.zeros((1024, 2, 4096), np.float16)
    write(path, CacheFile(descriptor, np.zeros(1024, np.int64), dict.fromkeys(range(2), (zeros, zeros))))
    size = path.stat().st_size
    assert size > 64 * 1024 * 1024
    tracemalloc.start()
    try:
        got = read(path)
        blocks, _ = to_blocks(got.layers[1][1], Geometry.of(descriptor), Order.TOKENS_HEADS_DIM)
        assert bytes(blocks[-1][-4:]) == bytes(4)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 32
    assert not got.layers[0][0].flags.writeable


def test_other_libraries_read_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    write(path, cache("float16"))
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata() == {"descriptor": cache("float16").descriptor.json}
        assert file.get_tensor("tokens").tolist() == cache().tokens.tolist()
        assert file.get_tensor("layers.2.v").tobytes() == cache("float16").layers[2][1].tobytes()


def test_descriptor_given_for_a_file_without_one(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    whole = cache("float16", layers=(0,))
    k, v = whole.layers[0]
    safetensors.numpy.save_file(
        {"tokens": whole.tokens.astype("u4"), "layers.0.k": k, "layers.0.v": v, "other": k}, path
    )
    with pytest.raises(FileFault, match=r'cache\.safetensors: no "descriptor" in its metadata; give one'):
        read(path)
    assert_same(read(path, descriptor=whole.descriptor), whole)
    write(path, whole)
    assert_same(read(path, descriptor=whole.descriptor), whole)
    with pytest.raises(FileFault, match="another Compatibility Descriptor"):
        read(path, descriptor=described("float16", layers=4))


# Writing is all or nothing


def test_replacing_a_file_leaves_an_old_reader_alone(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    write(path, cache(layers=(0,)))
    old = read(path)
    write(path, cache(layers=(1, 2)))
    assert_same(old, cache(layers=(0,)))
    assert_same(read(path), cache(layers=(1, 2)))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
def test_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, step: str
) -> None:
    path = tmp_path / f"cache{suffix}"
    write(path, cache("float16", layers=(0,)))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(NotWritten, match=rf"{path.name}: not written: .*No space left"):
            write(path, cache("float16", layers=(1,)))
    assert_same(read(path), cache("float16", layers=(0,)))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_what_cannot_be_written_is_known_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    (tmp_path / f"directory{suffix}").mkdir()
    descriptor = described("float16")
    check_writable(tmp_path / f"a{suffix}", descriptor)
    for name, says in ((f"missing/a{suffix}", "no directory"), (f"directory{suffix}", "is a directory")):
        with pytest.raises(FileFault, match=says):
            check_writable(tmp_path / name, descriptor)
        with pytest.raises(FileFault, match=says):
            write(tmp_path / name, cache("float16"))
    with pytest.raises(FileFault, match="ends in"):
        check_writable(tmp_path / "a.pt", descriptor)
    with pytest.raises(FileFault, match="not written: no file can be made in /proc: "):
        check_writable(f"/proc/a{suffix}", descriptor)  # whoever runs the tests

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "touch", denied)
    with pytest.raises(FileFault, match=f"no file can be made in {tmp_path}: Permission denied"):
        check_writable(tmp_path / f"a{suffix}", descriptor)
    assert os.listdir(tmp_path) == [f"directory{suffix}"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_npz_is_refused_where_it_would_lose_the_dtype(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "cache.npz"
    with pytest.raises(
        FileFault, match=rf"cache\.npz; an \.npz file does not keep {dtype}: use \.safetensors"
    ):
        write(path, cache(dtype))
    assert not os.listdir(tmp_path)
    whole = cache(dtype, layers=(0,))
    members: dict[str, Any] = {"layers.0.k": whole.layers[0][0], "layers.0.v": whole.layers[0][1]}
    np.savez(path, tokens=whole.tokens, descriptor=np.array(whole.descriptor.json), **members)
    # numpy wrote void elements, or a dtype that it does not read itself.
    with pytest.raises(
        FileFault, match=rf"(expected .* of {dtype}, got .* of void|descr).*use \.safetensors"
    ):
        read(path)


# What is wrong with a file, in words


def saved(tmp_path: Path, **changes: Any) -> Path:
    """A file that `write` would not have written: `...` takes a tensor away."""
    whole = cache("float16", layers=(0, 1))
    tensors: dict[str, Any] = {"tokens": whole.tokens}
    for layer, (k, v) in whole.layers.items():
        tensors |= {f"layers.{layer}.k": k, f"layers.{layer}.v": v}
    metadata = {"descriptor": changes.pop("descriptor", whole.descriptor.json)}
    tensors = {name: value for name, value in {**tensors, **changes}.items() if value is not ...}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors", metadata=metadata)
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": ...}, 'no tensor "tokens"'),
        ({"tokens": np.arange(8)}, "layers.0.k: expected 8 tokens, as many as token ids, got 9"),
        ({"tokens": np.zeros(9, np.float32)}, "token ids are integers"),
        ({"tokens": np.full(9, -1)}, "got -1 at position 0"),
        ({"tokens": np.zeros((3, 3), np.int64)}, "got shape (3, 3)"),
        ({"layers.0.v": ...}, "layers.0 has no v"),
        ({"layers.1.k": ...}, "layers.1 has no k"),
        ({f"layers.{layer}.{name}": ... for layer in (0, 1) for name in "kv"}, "no layers"),
        ({f"layers.3.{name}": np.zeros((9, 2, 6), "f2") for name in "kv"}, "has layers 0 to 2"),
        ({"layers.0.k": np.zeros((2, 9, 6), "f2")}, "layers.0.k: k tensor in order thd: expected"),
        ({"layers.1.v": np.zeros((9, 2, 6), "f4")}, "of float16, got [9, 2, 6] of float32"),
        ({"descriptor": "{}"}, "Compatibility Descriptor: no member"),
        ({"descriptor": described("bfloat16").json}, "of bfloat16, got [9, 2, 6] of float16"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_wrong_file(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = saved(tmp_path, **changes)
    with pytest.raises(FileFault) as caught:
        read(path)
    assert f"cache file {path}: " in str(caught.value)
    assert says in str(caught.value)


def test_intact_file_of_that_helper_is_read(tmp_path: Path) -> None:
    assert_same(read(saved(tmp_path, **{"layers.01.k": np.zeros(3)})), cache("float16", layers=(0, 1)))


@pytest.mark.parametrize(
    "content", [b"", b"x", bytes(8), b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b"PK\x03\x04broken"]
)
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_garbage(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    with pytest.raises(
        FileFault, match=f"cache file .*: not an? {'safetensors' if suffix != '.npz' else '.npz'} file"
    ):
        read(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_cut_or_changed_file_never_raises_anything_else(
    tmp_path: Path, suffix: str, data: st.DataObject
) -> None:
    path = tmp_path / f"x{suffix}"
    write(path, cache("float16", layers=(0,)))
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, min(len(content), 1200) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(FileFault):
        read(path).check()


@pytest.mark.parametrize("name", ["cache", "cache.pt", "cache.npy"])
def test_unknown_kind_of_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileFault, match=r"ends in \.safetensors or \.npz"):
        read(tmp_path / name)
    with pytest.raises(FileFault, match=r"ends in \.safetensors or \.npz"):
        write(tmp_path / name, cache())


def test_missing_file(tmp_path: Path) -> None:
    for name in ("a.safetensors", "a.npz"):
        with pytest.raises(FileFault, match=f"{name}: No such file or directory$"):
            read(tmp_path / name)


def test_a_single_array_is_no_cache(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    with pytest.raises(FileFault, match="single array"):
        read(tmp_path / "a.npz")


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", tokens=np.array([{}], object), allow_pickle=True)
    with pytest.raises(FileFault, match=r"not an \.npz file of arrays"):
        read(tmp_path / "a.npz")


def test_cache_that_does_not_fit_its_descriptor_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(InvalidTensor, match="expected 4 tokens"):
        write(path, replace(cache(), tokens=np.arange(4)))
    with pytest.raises(InvalidTokens):
        write(path, replace(cache(), tokens=np.full(9, -1)))
    with pytest.raises(InvalidTensor, match=r"layers\.0\.k: k tensor"):
        write(path, replace(cache(), layers={0: (np.zeros((9, 2, 6), np.float16),) * 2}))
    with pytest.raises(InvalidTensor, match="no layers"):
        write(path, replace(cache(), layers={}))
    assert not os.listdir(tmp_path)


# Token files and descriptor files


def test_tokens_from_json_and_npy(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text("[1, 2, 4294967295]\n")
    assert read_tokens(tmp_path / "tokens.json").tolist() == [1, 2, 2**32 - 1]
    np.save(tmp_path / "tokens.npy", np.array([1, 2, 3], ">u2"))
    tokens = read_tokens(str(tmp_path / "tokens.npy"))
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [1, 2, 3]
    (tmp_path / "none.json").write_text("[]")
    assert read_tokens(tmp_path / "none.json").shape == (0,)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1.5]", "[true]", "[[1]]", '["1"]', "[-1]", "[4294967296]", "[1,", "7", "[1e3]"]
)
def test_token_file_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    with pytest.raises(FileFault, match=f"tokens file {path}: "):
        read_tokens(path)


def test_token_array_file_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    for content in (b"", b"\x93NUMPY", b"[1]"):
        path.write_bytes(content)
        with pytest.raises(FileFault, match=r"tokens file .*tokens\.npy: "):
            read_tokens(path)
    np.save(path, np.zeros(3, np.float32))
    with pytest.raises(FileFault, match="got float32 values"):
        read_tokens(path)
    with pytest.raises(FileFault, match=r"missing.npy: No such file or directory$"):
        read_tokens(tmp_path / "missing.npy")


def test_descriptor_file(tmp_path: Path) -> None:
    path = tmp_path / "descriptor.json"
    path.write_text(json.dumps(VECTORS["descriptor"], indent=1))
    assert read_descriptor(path) == Descriptor.parse(VECTORS["descriptor"])
    path.write_text("{}")
    with pytest.raises(FileFault, match=r"descriptor file .*descriptor\.json: .*no member 'profile'"):
        read_descriptor(path)
    with pytest.raises(FileFault, match=r"missing: No such file or directory$"):
        read_descriptor(tmp_path / "missing")
