"""Signed and authenticated messages: COSE_Sign1 and COSE_Mac0 (RFC 9052), with ES256, EdDSA and HS256.

The signature is made and checked by `cryptography` over the structure that COSE defines. That structure is
all that a COSE library would add: libraries take messages with trailing octets, without an algorithm, or with
one that does not fit the key (security 4.1), so that all around it has to be checked here in any case.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final, TypeAlias

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from moqt.cbor import Cbor, CborError, decode, encode
from moqt.errors import MoqtError, UsageError

__all__ = ["Algorithm", "CoseError", "Key", "Message", "seal"]

Material: TypeAlias = (
    ed25519.Ed25519PrivateKey
    | ed25519.Ed25519PublicKey
    | ec.EllipticCurvePrivateKey
    | ec.EllipticCurvePublicKey
    | bytes
)

MIN_MAC_KEY: Final = 32  # octets
KID_SIZE: Final = 8  # octets of the thumbprint that name a key

_MAX_KEY_FILE: Final = 16384
_MAC_KEY = re.compile(rb"(HS256 )?([0-9A-Fa-f]{64})")
_ES256_SIZE: Final = 64  # r and s; never DER

# Labels of header parameters: RFC 9052 3.1, RFC 9596 (typ).
_ALG, _CRIT, _KID, _TYP = 1, 2, 4, 16
_UNDERSTOOD: Final = (_ALG, _KID, _TYP)


class CoseError(MoqtError, ValueError):
    """Octets that are not a COSE message as this module takes it. The text never shows any of them."""


class Algorithm(IntEnum):
    """How a message is protected, by its number in COSE."""

    HS256 = 5
    ES256 = -7
    EDDSA = -8
    """With Ed25519."""

    @property
    def tag(self) -> int:
        """The CBOR tag of its messages: 17, COSE_Mac0, or 18, COSE_Sign1."""
        return 17 if self is Algorithm.HS256 else 18


class Key:
    """A key for one algorithm, private or public; a MAC key is both. Neither repr nor any error shows it.

    A key with a `kid` does not check messages that name another one; without, it checks any.
    Raises UsageError for keys of other kinds: on another curve, or shorter than MIN_MAC_KEY.
    """

    __slots__ = ("_material", "algorithm", "kid")

    def __init__(self, material: Material, *, kid: bytes | None = None) -> None:
        self._material = material
        self.algorithm = _algorithm(material)
        self.kid = kid

    @classmethod
    def generate(cls, algorithm: Algorithm) -> Key:
        """A new private key."""
        match algorithm:
            case Algorithm.EDDSA:
                return cls(ed25519.Ed25519PrivateKey.generate())
            case Algorithm.ES256:
                return cls(ec.generate_private_key(ec.SECP256R1()))
            case Algorithm.HS256:
                return cls(secrets.token_bytes(MIN_MAC_KEY))

    @classmethod
    def from_file(cls, path: str | Path, *, kid: bytes | None = None) -> Key:
        """Read a key: PEM, private (PKCS #8, not encrypted) or public, or "HS256 " and the 64 hex digits of a
        MAC key: digits alone may be a secret of another kind.

        Raises UsageError.
        """
        try:
            with Path(path).open("rb") as file:
                data = file.read(_MAX_KEY_FILE)
        except OSError as error:
            raise UsageError(f"key file {path}: {error.strerror}") from error
        try:
            return cls(_read_material(data), kid=kid)
        except UsageError as error:
            raise UsageError(f"key file {path}: {error}") from None

    @property
    def private(self) -> bool:
        """Whether it can sign."""
        return isinstance(self._material, bytes | ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey)

    @property
    def thumbprint(self) -> bytes | None:
        """The first octets of the COSE Key Thumbprint (RFC 9679): a name for the key. None for a MAC key."""
        public = self._public()
        if isinstance(public, bytes):
            return None
        key: dict[int | str, Cbor]
        if isinstance(public, ed25519.Ed25519PublicKey):
            key = {1: 1, -1: 6, -2: public.public_bytes_raw()}
        else:
            numbers = public.public_numbers()
            key = {1: 2, -1: 1, -2: numbers.x.to_bytes(32), -3: numbers.y.to_bytes(32)}
        return hashlib.sha256(encode(key)).digest()[:KID_SIZE]

    def public(self) -> Key:
        """The public half. Raises UsageError for a MAC key, which has none."""
        material = self._public()
        if isinstance(material, bytes):
            raise UsageError("a MAC key has no public half: who can check a token can make one")
        return Key(material, kid=self.kid)

    def text(self) -> str:
        """What `from_file` reads. It is a secret, unless the key is public."""
        material = self._material
        if isinstance(material, bytes):
            return f"HS256 {material.hex()}\n"
        pem = serialization.Encoding.PEM
        if isinstance(material, ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey):
            return material.public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo).decode()
        return material.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()

    def sign(self, data: bytes) -> bytes:
        """The signature, or the MAC, in the form of COSE. Raises UsageError for a public key."""
        match self._material:
            case bytes() as secret:
                return hmac.digest(secret, data, "sha256")
            case ed25519.Ed25519PrivateKey() as edwards:
                return edwards.sign(data)
            case ec.EllipticCurvePrivateKey() as curve:
                r, s = decode_dss_signature(curve.sign(data, ec.ECDSA(hashes.SHA256())))
                return r.to_bytes(32) + s.to_bytes(32)
            case _:
                raise UsageError("a public key can't sign: name the file of the private key")

    def verifies(self, data: bytes, signature: bytes) -> bool:
        """Whether `signature` was made of `data` with this key."""
        public = self._public()
        try:
            match public:
                case bytes() as secret:
                    return hmac.compare_digest(hmac.digest(secret, data, "sha256"), signature)
                case ed25519.Ed25519PublicKey():
                    public.verify(signature, data)
                case _ if len(signature) != _ES256_SIZE:
                    return False
                case _:
                    numbers = int.from_bytes(signature[:32]), int.from_bytes(signature[32:])
                    public.verify(encode_dss_signature(*numbers), data, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True

    def _public(self) -> ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey | bytes:
        if isinstance(self._material, ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey):
            return self._material.public_key()
        return self._material

    def __repr__(self) -> str:
        kid = None if self.kid is None else self.kid.hex()
        return f"Key({self.algorithm.name}, {'private' if self.private else 'public'}, kid={kid})"


@dataclass(frozen=True, slots=True)
class Message:
    """A COSE_Sign1 or COSE_Mac0 that was taken apart; whether it is genuine, `verified_by` tells."""

    tag: int
    algorithm: int
    kid: bytes | None
    type: str | int | None
    """The header parameter "typ", None if there is none."""
    payload: bytes = field(repr=False)
    protected: bytes = field(repr=False)
    signature: bytes = field(repr=False)

    @classmethod
    def parse(cls, data: bytes) -> Message:
        """Take apart a tagged message with an attached payload that fills `data`. Raises CoseError for all
        that security 4.1 wants rejected.
        """
        if data[:1] not in (b"\xd1", b"\xd2"):
            raise CoseError("neither a tagged COSE_Sign1 nor a tagged COSE_Mac0")
        try:
            parts = decode(data[1:])
            if not isinstance(parts, tuple) or len(parts) != 4:
                raise CoseError("not an array of four")
            protected, unprotected, payload, signature = parts
            if not (
                isinstance(protected, bytes) and isinstance(payload, bytes) and isinstance(signature, bytes)
            ):
                raise CoseError(
                    "protected headers, payload and signature must be octets; none may be left out"
                )
            headers = decode(protected)
        except CborError as error:
            raise CoseError(f"not CBOR as it is taken here: {error}") from None
        # dict: `decode` makes maps of no other type.
        if not isinstance(headers, dict) or not isinstance(unprotected, dict):
            raise CoseError("headers are not a map")
        if headers.keys() & unprotected.keys():
            raise CoseError("a header is both protected and not")
        if {_ALG, _CRIT, _TYP} & unprotected.keys():
            raise CoseError("the algorithm, the type or what is critical is not protected")
        algorithm = headers.get(_ALG)
        if not isinstance(algorithm, int) or isinstance(algorithm, bool):
            raise CoseError("no algorithm")
        kid = headers.get(_KID, unprotected.get(_KID))
        if not isinstance(kid, bytes | None):
            raise CoseError("the key's name (kid) is not octets")
        kind = headers.get(_TYP)
        if isinstance(kind, bool) or not isinstance(kind, str | int | None):
            raise CoseError("the type (typ) is neither text nor a number")
        if _CRIT in headers:
            critical = headers[_CRIT]
            if (
                not isinstance(critical, tuple)
                or not critical
                or any(label not in _UNDERSTOOD for label in critical)
            ):
                raise CoseError("a critical header is not known")
        return cls(data[0] & 0x1F, algorithm, kid, kind, payload, protected, signature)

    def verified_by(self, key: Key) -> bool:
        """Whether it was made with `key`. The key says which algorithm; the message only may not disagree."""
        return (
            (self.tag, self.algorithm) == (key.algorithm.tag, key.algorithm)
            and (key.kid is None or self.kid is None or key.kid == self.kid)
            and key.verifies(_structure(self.tag, self.protected, self.payload), self.signature)
        )


def seal(payload: bytes, key: Key, *, type: str | None = None) -> bytes:
    """A tagged COSE_Sign1 or COSE_Mac0, as the key's algorithm is; `type` becomes the header "typ".

    The key is named by its kid, or else by its thumbprint. Raises UsageError for a public key.
    """
    headers: dict[int | str, Cbor] = {_ALG: int(key.algorithm)}
    kid = key.thumbprint if key.kid is None else key.kid
    if kid is not None:
        headers[_KID] = kid
    if type is not None:
        headers[_TYP] = type
    protected = encode(headers)
    tag = key.algorithm.tag
    signature = key.sign(_structure(tag, protected, payload))
    return bytes([0xC0 | tag]) + encode((protected, {}, payload, signature))


def _structure(tag: int, protected: bytes, payload: bytes) -> bytes:
    """What is signed: RFC 9052 4.4 and 6.3, without external data."""
    return encode(("Signature1" if tag == 18 else "MAC0", protected, b"", payload))


def _algorithm(material: Material) -> Algorithm:
    match material:
        case bytes():
            if len(material) < MIN_MAC_KEY:
                raise UsageError(f"a MAC key has at least {MIN_MAC_KEY} octets, not {len(material)}")
            return Algorithm.HS256
        case ed25519.Ed25519PrivateKey() | ed25519.Ed25519PublicKey():
            return Algorithm.EDDSA
        case _:
            if not isinstance(material.curve, ec.SECP256R1):
                raise UsageError(f"of the elliptic curves, P-256 is taken, not {material.curve.name}")
            return Algorithm.ES256


def _read_material(data: bytes) -> Material:
    if match := _MAC_KEY.fullmatch(data.strip()):
        if match[1] is None:
            raise UsageError(
                "hex digits alone, as a scope key has them: a shared secret for tokens has "
                '"HS256 " before them'
            )
        return bytes.fromhex(match[2].decode())
    try:
        if b"PUBLIC KEY-----" in data:
            key: object = serialization.load_pem_public_key(data)
        else:
            key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UsageError(
            'expected a PEM key that is not encrypted (Ed25519 or P-256), or "HS256 " and 64 hex digits'
        ) from None
    if isinstance(
        key,
        ed25519.Ed25519PrivateKey
        | ed25519.Ed25519PublicKey
        | ec.EllipticCurvePrivateKey
        | ec.EllipticCurvePublicKey,
    ):
        return key
    raise UsageError("a key for another algorithm: Ed25519 and P-256 are taken")
