"""Identity of a token prefix: Compatibility Descriptor, scope keys, Block Keys (profile kvsp-lp1, kvsp 2).

The three identifiers of a namespace are functions of the descriptor, the scope key and the tokens alone, so
that every member of a scope computes the same ones. `KvspProfile` is the seam at which the KV Cache Storage
Protocol proper can take the place of our profile.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias, cast

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvcs import strict_json
from kvcs.errors import InvalidDescriptor, InvalidScopeKey, InvalidTokens
from kvcs.strict_json import Json, is_hex64, is_integer
from moqt.names import printable

PROFILE_NAME: Final = "kvsp-lp1"
SCOPE_ID_SIZE: Final = 16
COMPAT_ID_SIZE: Final = 32
BLOCK_KEY_SIZE: Final = 32
MIN_SCOPE_KEY: Final = 16  # octets, kvsp 2.2
MAX_SCOPE_KEY: Final = 64
MAX_DESCRIPTOR_SIZE: Final = 65536  # octets, kvsp 2.1
MAX_DESCRIPTOR_DEPTH: Final = 16
MAX_TOKEN: Final = 2**32 - 1  # kvsp 2.3

DTYPES: Final = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")  # torch's names
ATTENTIONS: Final = ("mha", "gqa", "mqa", "mla")

Tokens: TypeAlias = Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]

_LABEL: Final = PROFILE_NAME.encode()
_MAX_VALUES: Final = 32768  # JSON values that fit into 64 KiB
_HEX64 = "64 lower-case hex digits"
_POSITION = '{"kind":"rope","applied":true or false,"config_sha256":hex} or {"kind":"none"}'
_RANGES: Final = (
    ("layers", 1, 2**31 - 1),
    ("kv_heads", 1, 65535),
    ("head_dim", 1, 65535),
    ("block_tokens", 1, 65536),
)
_REQUIRED: Final = (
    "profile", "model", "model_sha256", "tokenizer_sha256", "adapter_sha256", "attention", "layers",
    "kv_heads", "head_dim", "dtype", "block_tokens", "layout", "position", "window", "kv_scales_sha256",
)  # fmt: skip
_HEX_KEY = re.compile(r"[0-9A-Fa-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True, repr=False)
class Descriptor:
    """A validated Compatibility Descriptor (kvsp 2.1): what must agree for one engine to use another's cache.

    Equal descriptors are those with equal `json`. Members that kvsp-lp1 does not name are kept and hashed.
    """

    json: str
    """The canonical form (RFC 8785); what Compatibility ID and manifest are made from."""
    compat_id: bytes
    """The Compatibility ID, 32 octets."""
    model: str
    attention: str
    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    """Dimension of a value head: `head_dim` if the descriptor does not say otherwise, 0 for "mla"."""
    dtype: str
    """One of DTYPES."""
    block_tokens: int
    window: int | tuple[int, ...]
    """The sliding window in tokens, 0 being full attention; of all layers, or of each one."""

    @classmethod
    def parse(cls, source: str | bytes | Mapping[str, Json]) -> Descriptor:
        """Read a descriptor from JSON text or from an object. Raises InvalidDescriptor with a sentence."""
        try:
            if isinstance(source, Mapping):
                source = dict(source)
            else:
                source = strict_json.loads(source, max_size=MAX_DESCRIPTOR_SIZE, max_values=_MAX_VALUES)
                if not isinstance(source, dict):
                    raise ValueError(f"expected a JSON object, got {type(source).__name__}")
            strict_json.check_plain(source, max_depth=MAX_DESCRIPTOR_DEPTH, narrow=True)
            _check_members(source)
            text = strict_json.canonical(source)
            if len(text.encode()) > MAX_DESCRIPTOR_SIZE:
                raise ValueError(f"more than {MAX_DESCRIPTOR_SIZE} octets")
        except ValueError as error:
            raise InvalidDescriptor(f"Compatibility Descriptor: {error}") from None
        head_dim, window = source["head_dim"], source["window"]
        return cls(
            json=text,
            compat_id=hashlib.sha256(_LABEL + b" compat-id\x00" + text.encode()).digest(),
            model=source["model"],
            attention=source["attention"],
            layers=source["layers"],
            kv_heads=source["kv_heads"],
            head_dim=head_dim,
            v_head_dim=0 if source["attention"] == "mla" else source.get("v_head_dim", head_dim),
            dtype=source["dtype"],
            block_tokens=source["block_tokens"],
            window=tuple(window) if isinstance(window, list | tuple) else window,
        )

    def members(self) -> dict[str, Json]:
        """The descriptor as a JSON object, a fresh one with every call."""
        members = strict_json.loads(self.json, max_size=MAX_DESCRIPTOR_SIZE, max_values=_MAX_VALUES)
        return cast(dict[str, Json], members)

    def __repr__(self) -> str:
        # Not the JSON: its member "blind" is a secret of the scope.
        return f"Descriptor({printable(self.model, 60)}, compat_id={self.compat_id.hex()})"


class ScopeKey:
    """The secret that the members of a scope share: 16 to 64 octets, 32 random ones as a rule (kvsp 2.2).

    Neither `repr` nor any error shows it. `scope_id` (16 octets) is public and says nothing about it.
    """

    __slots__ = ("_block_key_subkey", "_key", "scope_id")

    def __init__(self, key: bytes) -> None:
        if not isinstance(key, bytes) or not MIN_SCOPE_KEY <= len(key) <= MAX_SCOPE_KEY:
            came = f"{len(key)} octets" if isinstance(key, bytes) else type(key).__name__
            raise InvalidScopeKey(
                f"a scope key is {MIN_SCOPE_KEY} to {MAX_SCOPE_KEY} octets of type bytes, got {came}"
            )
        self._key = key
        self.scope_id = self._derive(b" scope-id", SCOPE_ID_SIZE)
        self._block_key_subkey = self._derive(b" block-key", 32)

    @classmethod
    def random(cls) -> ScopeKey:
        """A new scope key of 32 octets."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def from_file(cls, path: str | Path) -> ScopeKey:
        """Read a key file: 64 hex digits, and white space around them. Raises InvalidScopeKey."""
        try:
            with Path(path).open("rb") as file:
                text = file.read(257).decode("ascii", "replace").strip()
        except OSError as error:
            raise InvalidScopeKey(f"scope key file {path}: {error.strerror}") from error
        if not _HEX_KEY.fullmatch(text):
            raise InvalidScopeKey(
                f"scope key file {path}: expected 64 hex digits and nothing else; "
                "`openssl rand -hex 32` writes such a key"
            )
        return cls(bytes.fromhex(text))

    def _derive(self, label: bytes, length: int) -> bytes:
        return HKDF(SHA256(), length, salt=_LABEL, info=_LABEL + label).derive(self._key)

    def mac(self, data: bytes) -> bytes:
        """HMAC-SHA-256 under the subkey for Block Keys (kvsp 2.3)."""
        return hmac.digest(self._block_key_subkey, data, "sha256")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScopeKey) and hmac.compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        return hash(self.scope_id)

    def __repr__(self) -> str:
        return f"ScopeKey(scope_id={self.scope_id.hex()})"


@dataclass(frozen=True, slots=True)
class Extra:
    """Content in place of tokens, such as an image: `length` tokens from absolute position `start` on."""

    start: int
    length: int
    id: bytes
    """SHA-256 of the content (kvsp 2.3); 1 to 65535 octets."""


def block_keys(
    scope_key: ScopeKey, descriptor: Descriptor, tokens: Tokens, extras: Iterable[Extra] = ()
) -> list[bytes]:
    """The Block Keys (32 octets) of the complete blocks of `tokens`, in order from token 0 on (kvsp 2.3).

    Each key depends on all tokens before it: the key of block i names the prefix of (i+1) x block_tokens
    tokens. Tokens after the last complete block have no key. Raises InvalidTokens.
    """
    ids = token_array(tokens)
    size = descriptor.block_tokens
    count = len(ids) // size
    encoded = memoryview(ids[: count * size].astype(">u4").tobytes())
    extra_parts = _encode_extras(extras, len(ids), size)
    without_extras = struct.pack(">I", 0)
    length = struct.pack(">I", size)
    mac = scope_key.mac
    previous = mac(b"\x00" + descriptor.compat_id)
    keys = []
    for block in range(count):
        part = encoded[block * size * 4 : (block + 1) * size * 4]
        extra = extra_parts.get(block)
        tail = without_extras if extra is None else struct.pack(">I", len(extra)) + extra
        previous = mac(b"".join((b"\x01", previous, length, part, tail)))
        keys.append(previous)
    return keys


def token_array(tokens: Tokens) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Token ids as a one-dimensional int64 array. Raises InvalidTokens for anything outside 0..2^32-1."""
    expected = f"token ids are integers 0..{MAX_TOKEN} in one dimension"
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise InvalidTokens(f"{expected}, got {error}") from None
    if array.ndim != 1:
        raise InvalidTokens(f"{expected}, got shape {array.shape}")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise InvalidTokens(f"{expected}, got {array.dtype.name} values (or integers beyond 64 bits)")
    outside = (array < 0) | (array > MAX_TOKEN)
    if outside.any():
        position = int(outside.argmax())
        raise InvalidTokens(f"{expected}, got {int(array[position])} at position {position}")
    return array.astype(np.int64, copy=False)


def block_keys_digest(keys: Iterable[bytes]) -> bytes:
    """SHA-256 of the concatenated Block Keys: the manifest's "block_keys_sha256" of a segment (kvcs 5)."""
    return hashlib.sha256(b"".join(keys)).digest()


def layer_digest(k_section: bytes | memoryview, v_section: bytes | memoryview) -> bytes:
    """The KVSP layer digest of one block and layer: SHA-256 of its raw K section and V section (kvsp 2.4)."""
    digest = hashlib.sha256(k_section)
    digest.update(v_section)
    return digest.digest()


class BlockKeys(Protocol):
    """The signature of `block_keys`."""

    def __call__(
        self, scope_key: ScopeKey, descriptor: Descriptor, tokens: Tokens, extras: Iterable[Extra] = ()
    ) -> list[bytes]: ...


@dataclass(frozen=True, slots=True)
class KvspProfile:
    """What KVCS takes from the KV Cache Storage Protocol (kvsp 1); another profile brings its own."""

    name: str
    parse_descriptor: Callable[[str | bytes | Mapping[str, Json]], Descriptor]
    scope_key: Callable[[bytes], ScopeKey]
    block_keys: BlockKeys
    layer_digest: Callable[[bytes | memoryview, bytes | memoryview], bytes]
    codec_values: Mapping[str, int]
    """The "KVSP Codecs" registry: name to 16-bit value; 0 is reserved."""


KVSP_LP1: Final = KvspProfile(
    name=PROFILE_NAME,
    parse_descriptor=Descriptor.parse,
    scope_key=ScopeKey,
    block_keys=block_keys,
    layer_digest=layer_digest,
    codec_values=MappingProxyType(  # kvsp 2.5
        {
            "raw": 1,
            "x-shuffle-zlib": 0xFF01,
            "x-zstd": 0xFF02,
            "x-shuffle-zstd": 0xFF03,
            "x-int8-th": 0xFF04,
            "x-fp8-e4m3-h": 0xFF05,
        }
    ),
)


def _encode_extras(extras: Iterable[Extra], token_count: int, block_tokens: int) -> dict[int, bytes]:
    """E of kvsp 2.3 for every block that an extra overlaps."""
    by_block: dict[int, list[tuple[int, bytes]]] = {}
    for extra in extras:
        end = extra.start + extra.length
        if not (0 <= extra.start < end <= token_count):
            raise InvalidTokens(
                f"an extra lies within the {token_count} tokens and covers one or more of them, "
                f"got {extra.length} tokens from position {extra.start}"
            )
        if not 1 <= len(extra.id) <= 0xFFFF:
            raise InvalidTokens(f"the id of an extra is 1 to 65535 octets, got {len(extra.id)}")
        first, offset = divmod(extra.start, block_tokens)
        by_block.setdefault(first, []).append((offset, extra.id))
        for block in range(first + 1, (end - 1) // block_tokens + 1):
            by_block.setdefault(block, []).append((0, extra.id))
    return {
        block: b"".join(struct.pack(">IH", offset, len(name)) + name for offset, name in sorted(overlaps))
        for block, overlaps in by_block.items()
    }


def _check_members(members: Mapping[str, Json]) -> None:
    """Every rule of kvsp 2.1 on single members; raises ValueError."""

    def require(name: str, fits: bool, expected: str) -> None:
        if not fits:
            # The value of "blind" is a secret, so that one is not shown.
            came = "another value" if name == "blind" else printable(repr(members.get(name)), 80)
            raise ValueError(f'"{name}": expected {expected}, got {came}')

    missing = [name for name in _REQUIRED if name not in members]
    if missing:
        raise ValueError(f"no member {', '.join(map(repr, missing))}")
    require("profile", members["profile"] == PROFILE_NAME, f'"{PROFILE_NAME}"')
    require("model", isinstance(members["model"], str) and members["model"] != "", "a name")
    for name in ("model_sha256", "tokenizer_sha256"):
        require(name, is_hex64(members[name]), _HEX64)
    for name in ("adapter_sha256", "kv_scales_sha256"):
        require(name, members[name] is None or is_hex64(members[name]), f"{_HEX64}, or null")
    require("attention", members["attention"] in ATTENTIONS, " or ".join(ATTENTIONS))
    require("dtype", members["dtype"] in DTYPES, " or ".join(DTYPES))
    require("layout", members["layout"] == "thd-le", '"thd-le"')
    for name, low, high in _RANGES:
        require(name, is_integer(members[name], low, high), f"an integer {low}..{high}")
    if members["attention"] == "mla":
        require("kv_heads", members["kv_heads"] == 1, '1 with attention "mla"')
        require("v_head_dim", "v_head_dim" not in members, 'no such member with attention "mla"')
    if "v_head_dim" in members:
        fits = is_integer(members["v_head_dim"], 1, 65535) and members["v_head_dim"] != members["head_dim"]
        require("v_head_dim", fits, "an integer 1..65535 that differs from head_dim, or no such member")
    window, layers = members["window"], members["layers"]
    windows = window if isinstance(window, list | tuple) else [window]
    fits = all(is_integer(one, 0, strict_json.MAX_INTEGER) for one in windows)
    fits = fits and (windows is not window or len(windows) == layers)
    require("window", fits, f"an integer of 0 or more, or an array of {layers} such integers")
    require("position", _is_position(members["position"]), _POSITION)
    if "shard" in members:
        require("shard", _is_shard(members["shard"]), '{"index":r,"count":n} with 0 <= r < n')
    if "blind" in members:
        require("blind", is_hex64(members["blind"]), _HEX64)
    if "ext" in members:
        require("ext", isinstance(members["ext"], dict), "an object")


def _is_position(value: Json) -> bool:
    if not isinstance(value, dict):
        return False
    if value.get("kind") == "rope":
        return isinstance(value.get("applied"), bool) and is_hex64(value.get("config_sha256"))
    return value.get("kind") == "none"


def _is_shard(value: Json) -> bool:
    return (
        isinstance(value, dict)
        and is_integer(value.get("count"), 1, 65535)
        and is_integer(value.get("index"), 0, value["count"] - 1)
    )
