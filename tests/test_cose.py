"""COSE messages and keys: round trips, other implementations, and all that security 4.1 wants rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, rsa
from hypothesis import given
from hypothesis import strategies as st

from moqt.cbor import encode
from moqt.cose import Algorithm, CoseError, Key, Message, seal
from moqt.errors import UsageError

PAYLOAD = b"what is signed"
KEYS = {algorithm: Key.generate(algorithm) for algorithm in Algorithm}
PEM = serialization.Encoding.PEM
PKCS8 = serialization.PrivateFormat.PKCS8


@pytest.fixture(params=list(Algorithm), ids=lambda known: known.name)
def key(request: pytest.FixtureRequest) -> Key:
    return KEYS[request.param]


def other(algorithm: Algorithm) -> Key:
    return Key.generate(algorithm)


def checker(key: Key) -> Key:
    """What a verifier has of a key."""
    return key if key.algorithm is Algorithm.HS256 else key.public()


def made(
    key: Key,
    *,
    protected: Any = None,
    unprotected: Any = None,
    payload: Any = PAYLOAD,
    raw_protected: bytes | None = None,
    tag: int | None = None,
) -> bytes:
    """A message with a good signature, whatever its headers."""
    headers: Any = {1: int(key.algorithm)} if protected is None else protected
    packed = encode(headers) if raw_protected is None else raw_protected
    tag = key.algorithm.tag if tag is None else tag
    structure = encode(("Signature1" if tag == 18 else "MAC0", packed, b"", payload))
    parts = (packed, {} if unprotected is None else unprotected, payload, key.sign(structure))
    return bytes([0xC0 | tag]) + encode(parts)


def test_what_is_sealed_is_genuine(key: Key) -> None:
    message = Message.parse(seal(PAYLOAD, key, type="CAT"))
    assert message.payload == PAYLOAD
    assert (message.tag, message.algorithm) == (key.algorithm.tag, key.algorithm)
    assert message.kid == key.thumbprint
    assert message.type == "CAT"
    assert message.verified_by(key)
    assert message.verified_by(checker(key))
    assert not message.verified_by(other(key.algorithm))


def test_every_flipped_bit_and_every_cut_is_noticed(key: Key) -> None:
    sealed = seal(PAYLOAD, key, type="CAT")

    def genuine(data: bytes) -> bool:
        try:
            return Message.parse(data).verified_by(checker(key))
        except CoseError:
            return False

    assert genuine(sealed)
    for position in range(len(sealed)):
        assert not genuine(sealed[:position]), position
        for bit in range(8):
            changed = bytearray(sealed)
            changed[position] ^= 1 << bit
            assert not genuine(bytes(changed)), (position, bit)
    assert not genuine(sealed + b"\x00")


@pytest.mark.parametrize("signer", list(Algorithm))
@pytest.mark.parametrize("claimed", list(Algorithm))
@pytest.mark.parametrize("tag", [17, 18])
def test_the_key_fixes_the_algorithm(signer: Algorithm, claimed: Algorithm, tag: int) -> None:
    """Only where tag, header and key agree: a good signature is not enough."""
    message = Message.parse(made(KEYS[signer], protected={1: int(claimed)}, tag=tag))
    for algorithm, known in KEYS.items():
        agree = algorithm is signer is claimed and tag == signer.tag
        assert message.verified_by(checker(known)) == agree


def test_a_public_key_is_no_mac_key(key: Key) -> None:
    """The classic confusion: a MAC made with what everyone knows."""
    if key.algorithm is Algorithm.HS256:
        with pytest.raises(UsageError, match="no public half"):
            key.public()
        return
    public = key.public()
    for text in (public.text().encode(), public.text().strip().encode()):
        message = Message.parse(made(Key(text), tag=17))
        assert not message.verified_by(public)
        message = Message.parse(made(Key(text), protected={1: int(key.algorithm)}, tag=18))
        assert not message.verified_by(public)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"protected": {16: "CAT"}}, "no algorithm"),
        ({"protected": {1: "ES256"}}, "no algorithm"),
        ({"protected": {1: True}}, "no algorithm"),
        ({"protected": {}, "unprotected": {1: -8}}, "not protected"),
        ({"protected": {1: -8}, "unprotected": {1: -8}}, "both"),
        ({"protected": {1: -8}, "unprotected": {2: (1,)}}, "not protected"),
        ({"protected": {1: -8}, "unprotected": {16: "CAT"}}, "not protected"),
        ({"protected": {1: -8, 4: b"a"}, "unprotected": {4: b"b"}}, "both"),
        ({"protected": {1: -8, 4: b"a"}, "unprotected": {4: b"a"}}, "both"),
        ({"protected": {1: -8, 4: "a"}}, "kid"),
        ({"protected": {1: -8}, "unprotected": {4: 7}}, "kid"),
        ({"protected": {1: -8, 16: b"CAT"}}, "typ"),
        ({"protected": {1: -8, 16: True}}, "typ"),
        ({"protected": {1: -8, 2: (99,)}}, "critical"),
        ({"protected": {1: -8, 2: (1, "x")}}, "critical"),
        ({"protected": {1: -8, 2: ({},)}}, "critical"),
        ({"protected": {1: -8, 2: ()}}, "critical"),
        ({"protected": {1: -8, 2: 1}}, "critical"),
        ({"protected": (1, -8)}, "not a map"),
        ({"unprotected": ()}, "not a map"),
        ({"payload": None}, "octets"),
        ({"payload": "text"}, "octets"),
        ({"raw_protected": b""}, "cut off"),
        ({"raw_protected": b"\xa1\x01\x27\x00"}, "follow"),
        ({"raw_protected": b"\xa2\x01\x27\x01\x27"}, "twice"),
        ({"raw_protected": b"\xbf\x01\x27\xff"}, "indefinite"),
    ],
)
def test_headers_that_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CoseError, match=complaint):
        Message.parse(made(KEYS[Algorithm.EDDSA], **changes))


def test_headers_that_are_taken() -> None:
    signer = KEYS[Algorithm.EDDSA]
    for headers in ({1: -8, 2: (1, 4), 4: b"a"}, {1: -8, 99: "not critical"}, {1: -8, 3: 61}):
        assert Message.parse(made(signer, protected=headers)).verified_by(signer.public())
    message = Message.parse(made(signer, unprotected={4: b"kid"}))
    assert message.kid == b"kid"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xd2",
        b"\xd2\xf6",
        b"\x84\x43\xa1\x01\x27\xa0\x40\x40",  # untagged
        b"\xd8\x12\x84\x43\xa1\x01\x27\xa0\x40\x40",  # tag 18 in a longer form
        b"\xd8\x3d\xd2\x84\x43\xa1\x01\x27\xa0\x40\x40",  # the CWT tag before it
        b"\xd8\x62\x84\x43\xa1\x01\x27\xa0\x40\x80",  # COSE_Sign
        b"\xd0\x83\x43\xa1\x01\x27\xa0\x40",  # COSE_Encrypt0
        b"\xd2\x83\x43\xa1\x01\x27\xa0\x40",
        b"\xd2\x85\x43\xa1\x01\x27\xa0\x40\x40\x40",
        b"\xd2\x9f\x43\xa1\x01\x27\xa0\x40\x40\xff",
        b"\xd2\x84\xa1\x01\x27\xa0\x40\x40",
        b"\xd2\x84\x43\xa1\x01\x27\xa0\x40\xf6",
        b"\xd2" + b"\x81" * 5000,
        b"\xd2\xd2\x84\x43\xa1\x01\x27\xa0\x40\x40",
    ],
)
def test_shapes_that_are_refused(data: bytes) -> None:
    with pytest.raises(CoseError):
        Message.parse(data)


@given(st.binary(max_size=200))
def test_any_octets_raise_the_one_error(data: bytes) -> None:
    for tag in (b"", b"\xd1", b"\xd2", b"\xd2\x84"):
        try:
            message = Message.parse(tag + data)
        except CoseError:
            continue
        assert not any(message.verified_by(known) for known in KEYS.values())


@pytest.mark.parametrize("size", [0, 31, 32, 63, 65, 128])
def test_signatures_of_another_length(key: Key, size: int) -> None:
    if key.algorithm is Algorithm.HS256 and size == 32:
        size = 33
    parts: Any = (encode({1: int(key.algorithm)}), {}, PAYLOAD, bytes(size))
    assert not Message.parse(bytes([0xC0 | key.algorithm.tag]) + encode(parts)).verified_by(key)


def test_numbers_that_no_signature_has() -> None:
    """r and s of 0, and beyond the order of the curve."""
    key = KEYS[Algorithm.ES256]
    for signature in (bytes(64), b"\xff" * 64, bytes(32) + b"\x01" * 32):
        assert not key.verifies(b"data", signature)


def test_a_key_with_a_name_checks_only_its_own() -> None:
    signer = KEYS[Algorithm.ES256]
    public = signer.public()
    material = public._material
    named = Key(material, kid=b"prod-1")
    for headers, checks in (
        ({1: -7, 4: b"prod-1"}, True),
        ({1: -7, 4: b"prod-2"}, False),
        ({1: -7, 4: b""}, False),
        ({1: -7}, True),
    ):
        message = Message.parse(made(signer, protected=headers))
        assert message.verified_by(named) == checks
        assert message.verified_by(public)


def test_a_public_key_signs_nothing() -> None:
    with pytest.raises(UsageError, match="public key can't sign"):
        seal(PAYLOAD, KEYS[Algorithm.ES256].public())
    assert not KEYS[Algorithm.EDDSA].public().private
    assert KEYS[Algorithm.EDDSA].private


# Files.


def test_keys_in_files(key: Key, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(key.text())
    again = Key.from_file(path)
    assert again.private
    assert Message.parse(seal(PAYLOAD, again)).verified_by(checker(key))
    if key.algorithm is not Algorithm.HS256:
        path.write_text(key.public().text())
        public = Key.from_file(path, kid=b"name")
        assert (public.private, public.kid, public.algorithm) == (False, b"name", key.algorithm)
        assert public.thumbprint == key.thumbprint
        assert public.verifies(b"data", key.sign(b"data"))


def test_the_thumbprint_of_the_standard() -> None:
    """RFC 9679, section 6: its example, cut to eight octets."""
    x = int("65eda5a12577c2bae829437fe338701a10aaa375e1bb5b5de108de439c08551d", 16)
    y = int("1e52ed75701163f7f9e40ddf9f341b3dc9ba860af7e0ca7ca7e9eecd0084d19c", 16)
    key = Key(ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key())
    assert key.thumbprint is not None
    assert key.thumbprint.hex() == "496bd8afadf307e5"


def private_pem(key: Any, password: bytes | None = None) -> bytes:
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    data: bytes = key.private_bytes(PEM, PKCS8, encryption)
    return data


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "expected a PEM key"),
        (b"00" * 31, "expected a PEM key"),
        (b"00" * 32, "hex digits alone, as a scope key has them"),
        (b"HS256 " + b"00" * 31, "expected a PEM key"),
        (b"00" * 32 + b"zz", "expected a PEM key"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "expected a PEM key"),
        (private_pem(ec.generate_private_key(ec.SECP256R1()), b"secret"), "not encrypted"),
        (private_pem(ec.generate_private_key(ec.SECP384R1())), "P-256"),
        (private_pem(ed448.Ed448PrivateKey.generate()), "another algorithm"),
        (private_pem(rsa.generate_private_key(65537, 2048)), "another algorithm"),
    ],
)
def test_files_that_are_no_keys(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=complaint) as caught:
        Key.from_file(path)
    assert str(path) in str(caught.value)
    if content:
        assert content.decode() not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Key.from_file(tmp_path / "key")


def test_short_mac_keys_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 32 octets, not 31"):
        Key(bytes(31))


def test_nothing_shows_a_key(key: Key) -> None:
    sealed = seal(PAYLOAD, key)
    message = Message.parse(sealed)
    shown = repr(key) + str(key) + repr(message)
    assert key.text().strip() not in shown
    assert message.signature.hex() not in shown
    assert repr(message.signature) not in shown
    assert repr(PAYLOAD)[2:-1] not in shown


# Another implementation as the judge.


def cose_key(key: Key) -> Any:
    from cwt import COSEKey

    if key.algorithm is Algorithm.HS256:
        return COSEKey.from_symmetric_key(bytes.fromhex(key.text().removeprefix("HS256 ")), alg="HS256")
    return COSEKey.from_pem(key.text(), kid=key.thumbprint or b"")


def test_cwt_takes_what_is_sealed(key: Key) -> None:
    from cwt import COSE

    assert COSE.new().decode(seal(PAYLOAD, key), cose_key(key)) == PAYLOAD


def test_what_cwt_makes_is_taken(key: Key) -> None:
    from cwt import COSE

    sealed = COSE.new().encode(
        PAYLOAD, cose_key(key), protected={1: int(key.algorithm), 4: b"kid", 16: "CAT"}
    )
    message = Message.parse(sealed)
    assert (message.payload, message.kid, message.type) == (PAYLOAD, b"kid", "CAT")
    assert message.verified_by(checker(key))
