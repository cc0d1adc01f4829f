"""C4M tokens: vectors, every check of security 3.2 in its order, scopes, and the policy that goes by them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from moqt.authorization import AccessRequest, Action, Allowed, Decision, Denied
from moqt.cat import (
    ACTION_NUMBERS,
    CAT,
    MAX_TOKEN_SIZE,
    MAX_TOKENS,
    SKEW,
    CatError,
    CatPolicy,
    Claims,
    Match,
    MatchKind,
    Scope,
    Verifier,
    issue,
)
from moqt.cbor import Cbor, encode
from moqt.cose import Algorithm, Key, seal
from moqt.errors import RequestCode, UsageError

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors/c4m.json").read_text())
MALFORMED = RequestCode.MALFORMED_AUTH_TOKEN
EXPIRED = RequestCode.EXPIRED_AUTH_TOKEN
UNAUTHORIZED = RequestCode.UNAUTHORIZED

NOW = 1_700_003_600
ISSUER = "https://auth.example.com"
RELAY = "https://relay.example.com"
KEYS = {algorithm: Key.generate(algorithm) for algorithm in Algorithm}
KEY = KEYS[Algorithm.EDDSA]
SCOPE = Scope.of(list(Action), (b"example", b"room"))
CLAIMS = Claims(
    issuer=ISSUER, audience=(RELAY,), expires=NOW + 300, issued_at=NOW, scopes=(SCOPE,), revalidate=30
)
TRACK: dict[str, Any] = {"namespace": (b"example", b"room"), "name": b"video"}


def checker(key: Key) -> Key:
    return key if key.algorithm is Algorithm.HS256 else key.public()


def verifier(*keys: Key, **options: Any) -> Verifier:
    return Verifier({ISSUER: [checker(key) for key in keys or (KEY,)]}, **{"audience": RELAY} | options)


def token(key: Key = KEY, **changes: Any) -> bytes:
    """A token whose claims set is that of CLAIMS with other members, by number; `...` takes one away."""
    members: dict[int | str, Any] = {
        1: ISSUER,
        3: (RELAY,),
        4: NOW + 300,
        6: NOW,
        327: (SCOPE.to_cbor(),),
        328: 30,
    }
    for name, value in changes.items():
        members[int(name[1:]) if name[1:].isdigit() else name] = value
    return sealed({number: value for number, value in members.items() if value is not ...}, key)


def sealed(members: Cbor, key: Key = KEY) -> bytes:
    return seal(encode(members), key, type="CAT")


def refusal(data: bytes, *, now: float = NOW, by: Verifier | None = None) -> tuple[RequestCode, str]:
    with pytest.raises(CatError) as caught:
        (by or verifier()).verify(data, now)
    assert str(caught.value) == caught.value.reason
    return caught.value.code, caught.value.reason


# Vectors.


def vector_verifier() -> Verifier:
    x, y = (int(VECTORS["es256_public"][name], 16) for name in "xy")
    public = ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()
    return Verifier(
        {ISSUER: [Key(bytes.fromhex(VECTORS["hmac_key"])), Key(public)]},
        audience=[RELAY, "https://moq-relay.example.com"],
        require_audience=False,
    )


def test_the_tokens_of_the_vectors() -> None:
    by = vector_verifier()
    mac = by.verify(bytes.fromhex(VECTORS["mac0_plain"]), NOW)
    assert mac == Claims(issuer=ISSUER, audience=(RELAY,), expires=1_700_086_400)
    signed = by.verify(bytes.fromhex(VECTORS["es256_sign1"]), NOW)
    assert signed == Claims(
        issuer=ISSUER,
        audience=("https://moq-relay.example.com",),
        expires=1_700_086_400,
        not_before=1_700_000_000,
    )
    assert refusal(bytes.fromhex(VECTORS["es256_sign1"]), now=1_700_086_400 + SKEW, by=by)[0] is EXPIRED


@pytest.mark.parametrize("vector", VECTORS["scopes"], ids=lambda vector: vector["name"])
async def test_the_scopes_of_the_vectors(vector: dict[str, Any]) -> None:
    by = vector_verifier()
    data = bytes.fromhex(vector["token"])
    claims = by.verify(data, NOW)
    assert vector["cases"]
    actions = {number: action for action, numbers in ACTION_NUMBERS.items() for number in numbers}
    policy = CatPolicy(by, clock=lambda: NOW)
    for case in vector["cases"]:
        action = actions[case["action"]]
        namespace = tuple(part.encode() for part in case["namespace"])
        name = case["track"].encode()
        assert any(known.allows(action, namespace, name) for known in claims.scopes) == case["allowed"], case
        request = AccessRequest(action=action, namespace=namespace, name=name, tokens=((CAT, data),))
        assert isinstance(await policy.decide(request), Allowed) == case["allowed"], case
    # What is issued from the same claims is the same claims set.
    assert Claims.decode(claims.encode()) == claims


def test_all_vectors_are_used() -> None:
    assert sum(len(vector["cases"]) for vector in VECTORS["scopes"]) == 19
    assert set(VECTORS) == {"about", "hmac_key", "mac0_plain", "es256_sign1", "es256_public", "scopes"}


# Round trips.

MATCHES = st.builds(Match, st.binary(max_size=4), st.sampled_from(MatchKind))
SCOPES = st.builds(
    Scope,
    st.frozensets(st.integers(-20, 20), min_size=1),
    st.lists(MATCHES, min_size=1, max_size=4).map(tuple),
    st.booleans(),
    st.none() | MATCHES,
)


@given(st.lists(SCOPES, min_size=1, max_size=4))
def test_what_is_issued_is_read(scopes: list[Scope]) -> None:
    claims = Claims(
        issuer=ISSUER,
        audience=("a", RELAY),
        expires=NOW + 0.5,
        scopes=tuple(scopes),
        revalidate=1.5,
        subject="someone",
        not_before=NOW,
        issued_at=NOW - 1,
        token_id=b"\x00" * 16,
    )
    for key in KEYS.values():
        assert verifier(key).verify(issue(claims, key), NOW) == claims


def test_the_size_of_a_token_for_a_scope() -> None:
    """Security 3.3: a MAX_AUTH_TOKEN_CACHE_SIZE of 4096 holds about 20 of them."""
    claims = Claims(
        issuer="https://auth.example",
        audience=("relay-1",),
        expires=NOW + 300,
        issued_at=NOW,
        token_id=bytes(16),
        scopes=(Scope.of([Action.SETUP, Action.SUBSCRIBE, Action.FETCH], (b"kvcs-1", bytes(16))),),
        revalidate=30,
    )
    assert 4096 // (16 + len(issue(claims, KEY))) >= 19


# Check 1: size, form, algorithm, key, signature.


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_every_flipped_bit_and_every_cut(algorithm: Algorithm) -> None:
    by = verifier(KEYS[algorithm])
    data = token(KEYS[algorithm])
    by.verify(data, NOW)
    for position in range(len(data)):
        assert refusal(data[:position], by=by)[0] is MALFORMED, position
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            assert refusal(bytes(changed), by=by)[0] is MALFORMED, (position, bit)
    for tail in (b"\x00", b"\xf6", data):
        assert refusal(data + tail, by=by)[0] is MALFORMED


def test_size() -> None:
    def padded(size: int) -> bytes:
        return token(_2="x" * size)

    room = MAX_TOKEN_SIZE - len(padded(1000)) + 1000
    assert len(padded(room)) == MAX_TOKEN_SIZE
    verifier().verify(padded(room), NOW)
    assert "4096 octets" in refusal(padded(room + 1))[1]
    with pytest.raises(UsageError, match="4096 are taken"):
        issue(Claims(issuer="x" * 5000, expires=NOW), KEY)


@pytest.mark.parametrize("signer", list(Algorithm))
@pytest.mark.parametrize("trusted", list(Algorithm))
def test_the_algorithm_is_the_keys(signer: Algorithm, trusted: Algorithm) -> None:
    by = verifier(KEYS[trusted])
    data = token(KEYS[signer])
    if signer is trusted:
        by.verify(data, NOW)
    else:
        assert refusal(data, by=by) == (MALFORMED, "the token was not made by an issuer that is trusted here")


def test_a_mac_made_with_the_public_key() -> None:
    for algorithm in (Algorithm.EDDSA, Algorithm.ES256):
        public = KEYS[algorithm].public()
        by = Verifier({ISSUER: [public]}, audience=RELAY)
        for secret in (public.text(), public.text().strip()):
            assert refusal(token(Key(secret.encode())), by=by)[0] is MALFORMED


def test_an_issuer_signs_for_itself_only() -> None:
    evil = Key.generate(Algorithm.EDDSA)
    by = Verifier({ISSUER: [KEY.public()], "https://evil.example": [evil.public()]}, audience=RELAY)
    by.verify(token(), NOW)
    by.verify(token(evil, _1="https://evil.example"), NOW)
    for data in (token(evil), token(KEY, _1="https://evil.example"), token(_1="https://auth.example.com/")):
        assert "not made by an issuer that is trusted" in refusal(data, by=by)[1]
    for issuer in (..., None, 7, ISSUER.encode(), (ISSUER,)):
        assert "not made by an issuer that is trusted" in refusal(token(_1=issuer), by=by)[1]


def test_keys_are_rolled_over() -> None:
    old, new = Key.generate(Algorithm.EDDSA), Key.generate(Algorithm.ES256)
    by = verifier(old, new)
    by.verify(token(old), NOW)
    by.verify(token(new), NOW)
    refusal(token(Key.generate(Algorithm.EDDSA)), by=by)


def test_a_signature_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """C4M: re-validation should not check signatures again; times it must."""
    calls = []
    verifies = Key.verifies

    def counted(key: Key, data: bytes, signature: bytes) -> bool:
        calls.append(key)
        return verifies(key, data, signature)

    monkeypatch.setattr(Key, "verifies", counted)
    by = verifier()
    data = token()
    by.verify(data, NOW)
    by.verify(data, NOW + 1)
    assert len(calls) == 1
    assert refusal(data, now=NOW + 1000, by=by)[0] is EXPIRED
    by.verify(data, NOW)
    assert len(calls) == 1
    refusal(data[:-1] + b"\x00", by=by)
    refusal(data[:-1] + b"\x00", by=by)
    assert len(calls) == 3  # What is not genuine is not remembered.


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moqt.cat._VERIFIED_TOKENS", 3)
    by = verifier()
    for number in range(10):
        by.verify(token(_7=bytes([number])), NOW)
    assert len(by._known) == 3


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xf6",
        encode((1, ISSUER)),
        encode({1: ISSUER, 3: RELAY, 4: NOW + 300}) + b"\x00",
        b"\xa2\x01" + encode(ISSUER) + b"\x01" + encode(ISSUER),
        b"\xbf\x01" + encode(ISSUER) + b"\xff",
        b"\xa1\x01" + b"\x81" * 17 + b"\x00",
        b"\xa2\x01" + encode(ISSUER) + b"\x04\xc1\x1a\x70\x00\x00\x00",
        b"\xa2\x01" + encode(ISSUER) + b"\x04\xf9\x7e\x00",  # NaN: it would never expire
        b"\xa2\x01" + encode(ISSUER) + b"\x04\xfb\x7f\xf8\x00\x00\x00\x00\x00\x00",
        b"\xa2\x01" + encode(ISSUER) + b"\x04\xf9\x7c\x00",  # infinity
        b"\xa2\x01" + encode(ISSUER) + b"\x04\xc2\x49\x01" + bytes(8),  # a bignum
        b"\xa2\x01" + encode(ISSUER) + b"\x04\xc4\x82\x1a\x3b\x9a\xca\x00\x01",  # Decimal 1e1000000000
        b"\xa2\x01" + encode(ISSUER) + b"\x19\x01\x47\x9b" + b"\x00\xff" * 4,
    ],
)
def test_claims_that_are_not_strict_cbor(payload: bytes) -> None:
    """Well signed all the same."""
    assert refusal(seal(payload, KEY, type="CAT"))[0] is MALFORMED


def test_the_type_of_the_message() -> None:
    payload = CLAIMS.encode()
    for kind, taken in (("CAT", True), (None, True), ("JWT", False), ("cat", False)):
        data = seal(payload, KEY, type=kind)
        if taken:
            verifier().verify(data, NOW)
        else:
            assert "another type" in refusal(data)[1]


def test_the_older_text_form_is_refused() -> None:
    """The vectors of June 2026: base64 of three parts (security 3.1)."""
    assert refusal(b"ogEjEGNDQVQ.owF4GGh0dHBzOi8vYXV0aC5leGFtcGxlLmNvbQ.W17GD7Gj")[0] is MALFORMED


# Check 2: times, audience, claims that restrict.


@pytest.mark.parametrize(
    ("changes", "now", "code"),
    [
        ({}, NOW + 300, None),
        ({}, NOW + 300 + SKEW - 0.001, None),
        ({}, NOW + 300 + SKEW, EXPIRED),
        ({}, NOW + 10**9, EXPIRED),
        ({"_4": NOW + 0.5}, NOW + SKEW, None),
        ({"_4": NOW + 0.5}, NOW + SKEW + 0.5, EXPIRED),
        ({"_4": 0}, NOW, EXPIRED),
        ({"_4": 2**64 - 1}, NOW, None),
        ({"_4": 1e300}, NOW, None),
        ({"_4": ...}, NOW, MALFORMED),
        ({"_4": None}, NOW, MALFORMED),
        ({"_4": True}, NOW, MALFORMED),
        ({"_4": str(NOW + 300)}, NOW, MALFORMED),
        ({"_4": (NOW + 300,)}, NOW, MALFORMED),
        ({"_4": -1}, NOW, MALFORMED),
        ({"_5": NOW + SKEW}, NOW, None),
        ({"_5": NOW + SKEW + 1}, NOW, UNAUTHORIZED),
        ({"_5": NOW + SKEW + 1}, NOW + 1, None),
        ({"_5": "now"}, NOW, MALFORMED),
        ({"_6": NOW + SKEW + 1}, NOW, UNAUTHORIZED),
        ({"_6": None}, NOW, MALFORMED),
        ({"_6": ...}, NOW, None),
    ],
)
def test_times(changes: dict[str, Any], now: float, code: RequestCode | None) -> None:
    if code is None:
        verifier().verify(token(**changes), now)
    else:
        assert refusal(token(**changes), now=now)[0] is code


def test_the_skew_is_an_option() -> None:
    verifier(skew=60).verify(token(), NOW + 359)
    assert refusal(token(), now=NOW + 300, by=verifier(skew=0))[0] is EXPIRED
    for options in ({"skew": -1}, {"skew": float("nan")}, {"min_revalidation": 0}):
        with pytest.raises(UsageError):
            verifier(**options)


@pytest.mark.parametrize(
    ("audience", "code"),
    [
        ((RELAY,), None),
        (RELAY, None),
        (("https://other.example", RELAY), None),
        (("https://other.example",), UNAUTHORIZED),
        ("https://other.example", UNAUTHORIZED),
        (RELAY.upper(), UNAUTHORIZED),
        (RELAY + "/", UNAUTHORIZED),
        ("", UNAUTHORIZED),
        (..., UNAUTHORIZED),
        ((), MALFORMED),
        ((RELAY, 7), MALFORMED),
        (RELAY.encode(), MALFORMED),
        ({0: RELAY}, MALFORMED),
        (None, MALFORMED),
    ],
)
def test_audience(audience: Any, code: RequestCode | None) -> None:
    if code is None:
        verifier().verify(token(_3=audience), NOW)
    else:
        assert refusal(token(_3=audience))[0] is code


def test_tokens_for_anyone_where_they_are_wanted() -> None:
    by = verifier(require_audience=False)
    by.verify(token(_3=...), NOW)
    assert refusal(token(_3="https://other.example"), by=by)[0] is UNAUTHORIZED


@pytest.mark.parametrize(
    "claim",
    [8, 282, 308, 309, 311, 312, 313, 314, 315, 316, 321, 323, 324, 325, 326, 0, -1, 999, "text"],
)
def test_no_restriction_is_ignored(claim: int | str) -> None:
    members: Any = {1: ISSUER, 3: RELAY, 4: NOW + 300, 327: (SCOPE.to_cbor(),), claim: {3: bytes(32)}}
    code, reason = refusal(sealed(members))
    assert code is UNAUTHORIZED
    assert "claims that are not known" in reason
    assert (str(claim) if isinstance(claim, int) else "te") in reason


def test_the_version() -> None:
    verifier().verify(token(_310=1), NOW)
    for version in (0, 2, True, 1.0, "1", None):
        assert refusal(token(_310=version)) == (UNAUTHORIZED, "the token has claims that are not known: 310")


@pytest.mark.parametrize(
    ("claim", "value"), [(2, b"someone"), (7, "id"), (7, 7), (2, None), (328, "30"), (328, True)]
)
def test_claims_of_another_type(claim: int, value: Cbor) -> None:
    changes: dict[str, Any] = {f"_{claim}": value}
    code, reason = refusal(token(**changes))
    assert code is MALFORMED
    assert f"claim {claim} is not" in reason


@pytest.mark.parametrize(
    ("interval", "code"), [(0, None), (1, None), (0.5, UNAUTHORIZED), (1e300, None), (-1, MALFORMED)]
)
def test_the_interval_of_validation(interval: float, code: RequestCode | None) -> None:
    if code is None:
        assert verifier().verify(token(_328=interval), NOW).revalidate == interval
        verifier(min_revalidation=0.1).verify(token(_328=interval), NOW)
    else:
        assert refusal(token(_328=interval))[0] is code


# Check 3: the moqt claim.


def test_both_forms_of_the_claim() -> None:
    scopes = (SCOPE.to_cbor(),)
    for claim in (scopes, {0: scopes}, {0: scopes, 1: "later", -5: None}):
        assert verifier().verify(token(_327=claim), NOW).scopes == (SCOPE,)
    assert verifier().verify(token(_327=...), NOW).scopes == ()


@pytest.mark.parametrize(
    "claim",
    [
        (),
        {},
        {1: (((4,),),)},
        {"0": (((4,),),)},
        {0: ()},
        {0: {0: (((4,),),)}},
        None,
        7,
        "scopes",
        True,
        ((),),
        ((4,),),
        (((),),),
        ((("4",),),),
        (((True,),),),
        (((4.0,),),),
        (((4,), ()),),
        (((4,), None),),
        (((4,), b"example"),),
        (((4,), ("text",)),),
        (((4,), (None, b"example")),),
        (((4,), (b"example", None, None)),),
        (((4,), ({0: b"example"},)),),
        (((4,), ((0, b"example"),)),),
        (((4,), ((3, b"example"),)),),
        (((4,), ((True, b"example"),)),),
        (((4,), ((1, "example"),)),),
        (((4,), ((1, b"example", b""),)),),
        (((4,), (b"example",), None),),
        (((4,), (b"example",), "name"),),
        (((4,), (b"example",), (None,)),),
        (((4,), (b"example",), b"name", b"more"),),
        (((4,), (b"example",)), 7),
    ],
)
def test_scopes_that_cannot_be_read(claim: Cbor) -> None:
    code, reason = refusal(token(_327=claim))
    assert code is MALFORMED
    assert "scope" in reason or "match" in reason or "moqt claim" in reason


def test_the_order_of_the_checks() -> None:
    """Each check speaks before the next one (security 3.2: order matters)."""
    wrong: dict[str, Any] = {
        "_4": NOW - 100,
        "_5": NOW + 100,
        "_3": "other",
        "_311": 1,
        "_328": 0.5,
        "_327": 7,
    }
    right: dict[str, Any] = {
        "_4": NOW + 300,
        "_5": NOW,
        "_3": RELAY,
        "_311": ...,
        "_328": 30,
        "_327": (SCOPE.to_cbor(),),
    }
    forged = bytearray(token(**wrong))
    forged[-1] ^= 1
    assert "issuer" in refusal(bytes(forged))[1]
    for claim, complaint in (
        ("_4", "expired"),
        ("_5", "not valid yet"),
        ("_3", "aud"),
        ("_311", "311"),
        ("_328", "more often"),
        ("_327", "moqt claim"),
    ):
        assert complaint in refusal(token(**wrong))[1]
        wrong[claim] = right[claim]
    verifier().verify(token(**wrong), NOW)


# Scopes: the examples of the text, on [namespace, name].

EXAMPLES: list[tuple[Cbor, list[tuple[str, str]], list[tuple[str, str]]]] = [
    (
        ((2,), (b"example", b"com", None), b"/bob"),
        [("example com", "/bob")],
        [
            ("example com", ""),
            ("example com", "/bob/123"),
            ("alternate example com", "/bob"),
            ("12345", ""),
            ("example", "com/bob"),
            ("example com /bob", ""),
            ("example com x", "/bob"),
        ],
    ),
    (
        ((2,), (b"example", b"com", None), (1, b"/bob")),
        [("example com", "/bob"), ("example com", "/bob/123")],
        [("example com", ""), ("example com", "/alice"), ("alternate example com", "/bob")],
    ),
    (
        ((2,), (b"example", b"com")),
        [("example com", "/bob"), ("example com bob", "/bob"), ("example com", ""), ("example com /bob", "")],
        [("alternate example com", "/bob"), ("12345", ""), ("example", "com/bob"), ("", "")],
    ),
    (
        ((2,), (b"example", (1, b"user-"), None), b"/data"),
        [("example user-alice", "/data"), ("example user-", "/data")],
        [
            ("example alice", "/data"),
            ("example user-alice extra", "/data"),
            ("example USER-alice", "/data"),
            ("example", "/data"),
        ],
    ),
    (
        ((2,), (b"example", b"com", None), (2, b".json")),
        [("example com", "data.json"), ("example com", ".json")],
        [("example com", "json"), ("example com", "data.JSON"), ("example com", "data.json.bak")],
    ),
    (((2,),), [("", ""), ("anything at all", "x")], []),
    (((2,), (None,)), [("", ""), ("", "x")], [("example", "")]),
    (((2,), ((1, b""), (2, b""))), [("a b", ""), ("a b c", "")], [("a", "")]),
]


@pytest.mark.parametrize(("scope", "permits", "prohibits"), EXAMPLES)
def test_matching(scope: Cbor, permits: list[tuple[str, str]], prohibits: list[tuple[str, str]]) -> None:
    known = Scope.from_cbor(scope)
    assert known.to_cbor() == scope
    for expected, cases in ((True, permits), (False, prohibits)):
        for fields, name in cases:
            namespace = tuple(fields.encode().split())
            assert known.allows(Action.PUBLISH_NAMESPACE, namespace, name.encode()) == expected, (
                fields,
                name,
            )
            assert not known.allows(Action.SUBSCRIBE, namespace, name.encode())


def test_a_match_of_the_name_needs_a_name() -> None:
    scope = Scope(frozenset({2, 3}), (Match(b"example"),), name=Match(b"", MatchKind.PREFIX))
    assert scope.allows(Action.PUBLISH_NAMESPACE, (b"example",), b"")
    assert not scope.allows(Action.PUBLISH_NAMESPACE, (b"example",), None)
    assert not scope.allows(Action.SUBSCRIBE_NAMESPACE, (b"example",), None)


def test_setup_is_about_no_namespace() -> None:
    for number, allowed in ((0, True), (1, True), (2, False)):
        scope = Scope(frozenset({number}), (Match(b"example"),), name=Match(b"x"))
        assert scope.allows(Action.SETUP, (), None) == allowed


def test_exact_prefix() -> None:
    fields = (Match(b"a"), Match(b"b"), Match(b"", MatchKind.PREFIX), Match(b"c"))
    assert Scope(frozenset({2}), fields).exact_prefix == (b"a", b"b")
    assert Scope(frozenset({2})).exact_prefix == ()


def test_a_scope_that_cannot_be_written() -> None:
    with pytest.raises(UsageError, match="must match the namespace too"):
        Scope(frozenset({2}), name=Match(b"x"))


def test_what_cannot_be_issued() -> None:
    with pytest.raises(UsageError, match="public key can't sign"):
        issue(CLAIMS, KEY.public())
    for expires in (float("nan"), float("inf"), 2**64):
        with pytest.raises(UsageError, match="cannot be written"):
            issue(Claims(issuer=ISSUER, expires=expires), KEY)


# The policy.


def asked(
    *tokens: bytes, held: tuple[bytes, ...] = (), action: Action = Action.SUBSCRIBE, **changes: Any
) -> AccessRequest:
    details: dict[str, Any] = TRACK | changes
    return AccessRequest(
        action=action,
        tokens=tuple((CAT, known) for known in tokens),
        held_tokens=tuple((CAT, known) for known in held),
        **details,
    )


async def decide(request: AccessRequest, *, now: float = NOW, by: Verifier | None = None) -> Decision:
    return await CatPolicy(by or verifier(), clock=lambda: now).decide(request)


def only(*actions: Action, **changes: Any) -> bytes:
    return token(_327=(Scope.of(actions, (b"example", b"room")).to_cbor(),), **changes)


@pytest.mark.parametrize("action", list(Action))
async def test_each_action_by_itself(action: Action) -> None:
    for granted in Action:
        updates = Action.SUBSCRIBE if action is Action.REQUEST_UPDATE else None
        request = asked(only(granted), action=action, updates=updates)
        decision = await decide(request)
        assert isinstance(decision, Allowed) == (granted is action and updates is None), granted
    updates = Action.FETCH if action is Action.REQUEST_UPDATE else None
    needed = {action, updates or action}
    assert isinstance(await decide(asked(only(*needed), action=action, updates=updates)), Allowed)
    everything_else = only(*set(Action) - {action})
    assert await decide(asked(everything_else, action=action, updates=updates)) == Denied(
        UNAUTHORIZED, "no token allows this"
    )


async def test_no_token() -> None:
    for action in set(Action) - {Action.SETUP, Action.REQUEST_UPDATE}:
        assert await decide(asked(action=action)) == Denied(UNAUTHORIZED, "no token allows this")
    assert await decide(asked(action=Action.SETUP)) == Allowed()


async def test_setup_with_a_token_that_is_not_good() -> None:
    for data, code in (
        (token(_4=0), EXPIRED),
        (b"rubbish", MALFORMED),
        (token(_3="other"), UNAUTHORIZED),
        (only(Action.SUBSCRIBE), UNAUTHORIZED),
    ):
        decision = await decide(asked(data, action=Action.SETUP))
        assert isinstance(decision, Denied)
        assert decision.code is code


async def test_other_types_of_token_are_ignored() -> None:
    good = only(Action.SUBSCRIBE)
    foreign = tuple((kind, good) for kind in (0, 2, 0x9D, 0x9D + 0x7F))
    request = AccessRequest(action=Action.SUBSCRIBE, **TRACK, tokens=foreign)
    assert isinstance(await decide(request), Denied)
    request = AccessRequest(action=Action.SUBSCRIBE, **TRACK, tokens=((0x9D, b"x"), (CAT, good)))
    assert isinstance(await decide(request), Allowed)


async def test_any_token_may_allow() -> None:
    subscribe, fetch = only(Action.SUBSCRIBE), only(Action.FETCH)
    for request in (
        asked(subscribe, fetch),
        asked(fetch, subscribe),
        asked(fetch, held=(subscribe,)),
        asked(held=(subscribe,)),
    ):
        assert isinstance(await decide(request), Allowed)
    assert isinstance(await decide(asked(fetch, held=(fetch,))), Denied)


async def test_rights_to_an_update_may_come_from_two_tokens() -> None:
    tokens = only(Action.REQUEST_UPDATE), only(Action.SUBSCRIBE)
    request = asked(*tokens, action=Action.REQUEST_UPDATE, updates=Action.SUBSCRIBE)
    assert isinstance(await decide(request), Allowed)


async def test_a_message_with_a_bad_token_is_rejected_whatever_else_it_has() -> None:
    """moqt 2.7. Tokens from before are not of the message: they only do not help."""
    good = only(Action.SUBSCRIBE)
    for bad, code in (
        (b"rubbish", MALFORMED),
        (token(_4=0), EXPIRED),
        (token(KEYS[Algorithm.ES256]), MALFORMED),
    ):
        for request in (asked(good, bad), asked(bad, good), asked(bad)):
            decision = await decide(request)
            assert isinstance(decision, Denied)
            assert decision.code is code
        assert isinstance(await decide(asked(good, held=(bad,))), Allowed)
        assert isinstance(await decide(asked(held=(bad, good))), Allowed)
    # A genuine token that is for elsewhere, or for later, does no harm.
    for harmless in (token(_3="other"), token(_5=NOW + 100), token(_311=1)):
        assert isinstance(await decide(asked(harmless, good)), Allowed)


async def test_a_token_from_before_has_expired() -> None:
    """The peer is told that a fresh one would do."""
    decision = await decide(asked(held=(token(_4=0),)))
    assert isinstance(decision, Denied)
    assert decision.code is EXPIRED
    assert await decide(asked(held=(b"rubbish",))) == Denied(UNAUTHORIZED, "no token allows this")


async def test_tokens_in_one_message_are_bounded() -> None:
    many = [only(Action.SUBSCRIBE, _7=bytes([number])) for number in range(MAX_TOKENS + 1)]
    assert isinstance(await decide(asked(*many[:-1])), Allowed)
    assert isinstance(await decide(asked(*many[:-1], *many[:-1])), Allowed)
    assert await decide(asked(*many)) == Denied(MALFORMED, "more than 16 tokens")


async def test_how_long_a_decision_holds() -> None:
    by = verifier()
    held = CLAIMS.expires
    for now, after in ((NOW, 30), (held - 20, 25), (held, SKEW), (held + SKEW - 0.1, 1)):
        decision = await decide(asked(token()), now=now, by=by)
        assert isinstance(decision, Allowed)
        assert decision.expires_after == pytest.approx(held - now)
        assert decision.revalidate_after == pytest.approx(after)
    assert isinstance(await decide(asked(token()), now=held + SKEW, by=by), Denied)


async def test_without_moqt_reval_it_holds_for_ever() -> None:
    for interval in (0, ...):
        decision = await decide(asked(token(_328=interval)))
        assert decision == Allowed(subject=ISSUER)
    # So it does if one of two tokens has none.
    assert await decide(asked(token(), token(_328=0))) == Allowed(subject=ISSUER)


async def test_several_tokens_hold_as_long_as_the_longest() -> None:
    decision = await decide(asked(token(_4=NOW + 100, _328=50), token(_4=NOW + 200, _328=60)))
    assert decision == Allowed(revalidate_after=50, expires_after=200, subject=ISSUER)


async def test_an_update_holds_as_long_as_the_right_that_goes_on() -> None:
    short = only(Action.REQUEST_UPDATE, _4=NOW + 10)
    long = only(Action.SUBSCRIBE, _4=NOW + 1000, _328=100)
    decision = await decide(asked(short, long, action=Action.REQUEST_UPDATE, updates=Action.SUBSCRIBE))
    assert decision == Allowed(revalidate_after=100, expires_after=1000, subject=ISSUER)


async def test_who_it_was() -> None:
    for changes, who in (
        ({}, ISSUER),
        ({"_7": b"\x01\x02\x03\x04\x05"}, f"{ISSUER}#01020304"),
        ({"_2": "node-7", "_7": bytes(16)}, "node-7"),
    ):
        decision = await decide(asked(token(**changes)))
        assert isinstance(decision, Allowed)
        assert decision.subject == who


# Configuration.


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "issuer.pub"
    path.write_text(KEY.public().text())
    return str(path)


def test_a_verifier_from_a_configuration_file(key_file: str) -> None:
    by = Verifier.from_config(
        {"issuers": {ISSUER: [key_file]}, "audience": RELAY, "skew": 0, "min-revalidation": 20}
    )
    by.verify(token(), NOW)
    assert refusal(token(), now=NOW + 300, by=by)[0] is EXPIRED
    assert refusal(token(_328=10), by=by)[0] is UNAUTHORIZED
    by = Verifier.from_config(
        {"issuers": {ISSUER: key_file}, "audience": ["a", RELAY], "require-audience": False}
    )
    by.verify(token(_3=...), NOW)


def test_the_keys_of_issuers_are_public_or_shared(tmp_path: Path) -> None:
    """A private key has no business at a relay."""
    file = tmp_path / "key"
    for algorithm in (Algorithm.EDDSA, Algorithm.ES256, Algorithm.HS256):
        key = Key.generate(algorithm)
        file.write_text(key.text())
        options = {"issuers": {ISSUER: [str(file)]}, "audience": RELAY}
        if algorithm is Algorithm.HS256:
            Verifier.from_config(options)
            continue
        with pytest.raises(UsageError, match=f"it is the private key.* {re.escape(str(file))}.pub"):
            Verifier.from_config(options)
        file.write_text(key.public().text())
        Verifier.from_config(options)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"issuers": {}}, "issuers"),
        ({"issuers": [ISSUER]}, "issuers"),
        ({"issuers": {ISSUER: []}}, "list of files"),
        ({"issuers": {ISSUER: [7]}}, "list of files"),
        ({"issuers": {ISSUER: "/nowhere/key.pem"}}, "/nowhere/key.pem: No such file"),
        ({"audience": None}, "audience"),
        ({"audience": []}, "audience"),
        ({"audience": [7]}, "audience"),
        ({"require-audience": "no"}, "true or false"),
        ({"skew": "5"}, "seconds"),
        ({"skew": -1}, "seconds"),
        ({"min-revalidation": True}, "seconds"),
        ({"min-revalidation": 0}, "more than 0"),
        ({"issuer": ISSUER}, "unknown: issuer"),
    ],
)
def test_configurations_that_are_refused(changes: dict[str, Any], complaint: str, key_file: str) -> None:
    options = {"issuers": {ISSUER: [key_file]}, "audience": RELAY} | changes
    with pytest.raises(UsageError, match=complaint):
        Verifier.from_config(options)
