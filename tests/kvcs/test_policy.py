"""The policy for kvcs-1: each action against each role, scopes, shapes, and rights that end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.names import FIELD_SIZES, PublicationName
from kvcs.policy import KvcsPolicy, from_config, names_one_scope
from kvcs.token import ROLES, Role, claims_for, issue
from moqt import cat
from moqt.authorization import AccessRequest, Action, AllowAll, Allowed, Authority, Decision, Denied
from moqt.cat import ACTION_NUMBERS, CAT, Match, MatchKind, Scope, Verifier
from moqt.cose import Algorithm, Key
from moqt.errors import DoneCode, RequestCode, RequestRefused, UsageError

NOW = 1_700_000_000
KEY = Key.generate(Algorithm.EDDSA)
ISSUER, RELAY = "https://auth.example", "relay-1"
OURS, THEIRS = b"\x01" * 16, b"\x02" * 16
CONTENT = (b"\x03" * 32, b"\x04" * 32, b"\x05" * 16)
UNAUTHORIZED = RequestCode.UNAUTHORIZED
PREFIX_ACTIONS = (Action.SUBSCRIBE_NAMESPACE, Action.SUBSCRIBE_TRACKS)
TRACK_ACTIONS = (Action.SUBSCRIBE, Action.PUBLISH, Action.FETCH, Action.TRACK_STATUS)
REQUESTS = [action for action in Action if action not in (Action.SETUP, Action.REQUEST_UPDATE)]
EVERY_RIGHT = frozenset(Action)


def namespace(scope_id: bytes = OURS, fields: int = 5) -> tuple[bytes, ...]:
    return PublicationName(scope_id, *CONTENT).namespace[:fields]


def verifier() -> Verifier:
    return Verifier({ISSUER: [KEY.public()]}, audience=RELAY)


def policy(**options: Any) -> KvcsPolicy:
    return KvcsPolicy(verifier(), clock=lambda: NOW, **options)


def token(*roles: Role, scopes: tuple[bytes, ...] = (OURS,), **changes: Any) -> bytes:
    details: dict[str, Any] = {"issuer": ISSUER, "audience": RELAY, "now": NOW}
    return issue(claims_for(scopes, roles, **details | changes), KEY)


def raw_token(*scopes: Scope) -> bytes:
    """A token that our issuer would not issue."""
    return cat.issue(cat.Claims(issuer=ISSUER, audience=(RELAY,), expires=NOW + 300, scopes=scopes), KEY)


def full_token(*prefixes: tuple[bytes, ...]) -> bytes:
    return raw_token(*(Scope.of(EVERY_RIGHT, prefix) for prefix in prefixes or [(b"kvcs-1", OURS)]))


def asked(
    action: Action, fields: tuple[bytes, ...], *tokens: bytes, updates: Action | None = None
) -> AccessRequest:
    return AccessRequest(
        action=action,
        namespace=fields,
        name=b"k.raw.s0" if (updates or action) in TRACK_ACTIONS else None,
        updates=updates,
        tokens=tuple((CAT, known) for known in tokens),
    )


async def allowed(request: AccessRequest, by: KvcsPolicy | None = None) -> bool:
    decision = await (by or policy()).decide(request)
    if isinstance(decision, Denied):
        assert decision.code is UNAUTHORIZED
        return False
    return True


# Actions and roles.


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("action", list(Action))
async def test_each_action_of_each_role(role: Role, action: Action) -> None:
    consumer = {"SETUP", "SUBSCRIBE_NAMESPACE", "SUBSCRIBE", "REQUEST_UPDATE", "FETCH", "TRACK_STATUS"}
    producer = {"SETUP", "PUBLISH_NAMESPACE", "PUBLISH", "REQUEST_UPDATE"}
    rights = {Role.CONSUMER: consumer, Role.RELAY: consumer, Role.PRODUCER: producer}[role]
    updated = REQUESTS if action is Action.REQUEST_UPDATE else [None]
    for updates in updated:
        expected = action.name in rights and (updates is None or updates.name in rights)
        request = asked(action, () if action is Action.SETUP else namespace(), token(role), updates=updates)
        assert await allowed(request) == expected, updates
        if action is not Action.SETUP:
            foreign = asked(action, namespace(THEIRS), token(role), updates=updates)
            assert not await allowed(foreign), updates
            without = asked(action, namespace(), updates=updates)
            assert not await allowed(without), updates


def test_the_numbers_of_the_roles() -> None:
    """Security 3.3; for a producer REQUEST_UPDATE (5) as well, so that it can renew its token."""
    numbers = {role: sorted(ACTION_NUMBERS[action][0] for action in ROLES[role]) for role in Role}
    assert numbers == {
        Role.CONSUMER: [1, 3, 4, 5, 7, 8],
        Role.PRODUCER: [1, 2, 5, 6],
        Role.RELAY: [1, 3, 4, 5, 7, 8],
    }


async def test_a_producer_that_also_reads() -> None:
    both = token(Role.CONSUMER, Role.PRODUCER)
    for action in REQUESTS:
        assert await allowed(asked(action, namespace(), both)) == (action is not Action.SUBSCRIBE_TRACKS)


async def test_setup_needs_no_token_and_takes_no_bad_one() -> None:
    assert await allowed(asked(Action.SETUP, ()))
    assert await allowed(asked(Action.SETUP, (), token(Role.CONSUMER)))
    assert not await allowed(asked(Action.SETUP, (), token(Role.CONSUMER, audience="relay-2")))


async def test_a_setup_alone_gives_no_right() -> None:
    for action in REQUESTS:
        assert not await allowed(asked(action, namespace()))


# Scopes.


@pytest.mark.parametrize("action", REQUESTS)
async def test_two_scopes(action: Action) -> None:
    ours, theirs = full_token((b"kvcs-1", OURS)), full_token((b"kvcs-1", THEIRS))
    both = full_token((b"kvcs-1", OURS), (b"kvcs-1", THEIRS))
    for scope_id, right, wrong in ((OURS, ours, theirs), (THEIRS, theirs, ours)):
        assert await allowed(asked(action, namespace(scope_id), right))
        assert await allowed(asked(action, namespace(scope_id), wrong, right))
        assert await allowed(asked(action, namespace(scope_id), both))
        assert not await allowed(asked(action, namespace(scope_id), wrong))
    assert not await allowed(asked(action, namespace(b"\x07" * 16), both))


@pytest.mark.parametrize("action", REQUESTS)
async def test_a_denial_is_the_same_for_every_scope(action: Action) -> None:
    """It says nothing of the scope or of what is published there."""
    mine = full_token()
    decisions = [
        await policy().decide(asked(action, namespace(bytes([number]) * 16), mine)) for number in range(2, 9)
    ]
    assert len(set(decisions)) == 1
    assert isinstance(decisions[0], Denied)


WIDE = [
    Scope(frozenset(range(10))),
    Scope.of(EVERY_RIGHT, (b"kvcs-1",)),
    Scope(frozenset(range(10)), (Match(b"kvcs-1"), Match(b"", MatchKind.PREFIX))),
    Scope(frozenset(range(10)), (Match(b"kvcs-1"), Match(OURS, MatchKind.PREFIX))),
    Scope(frozenset(range(10)), (Match(b"kvcs-1"), Match(OURS[1:], MatchKind.SUFFIX))),
    Scope(frozenset(range(10)), (Match(b"kvcs", MatchKind.PREFIX), Match(OURS))),
    Scope(frozenset(range(10)), (Match(b"", MatchKind.SUFFIX), Match(OURS))),
]


@pytest.mark.parametrize("scope", WIDE)
async def test_a_token_that_is_wider_than_a_scope_gives_no_right(scope: Scope) -> None:
    assert not names_one_scope(scope)
    for action in REQUESTS:
        assert not await allowed(asked(action, namespace(), raw_token(scope)))
    # Beside one that names the scope, it does no harm.
    assert await allowed(
        asked(Action.FETCH, namespace(), raw_token(scope, Scope.of(EVERY_RIGHT, namespace()[:2])))
    )


async def test_a_token_that_is_narrower_than_a_scope() -> None:
    one = full_token(namespace(fields=4))
    assert await allowed(asked(Action.SUBSCRIBE, namespace(), one))
    assert await allowed(asked(Action.SUBSCRIBE_NAMESPACE, namespace(fields=4), one))
    assert not await allowed(asked(Action.SUBSCRIBE_NAMESPACE, namespace(fields=3), one))
    other = (*namespace(fields=3), b"\x09" * 32, CONTENT[2])
    assert not await allowed(asked(Action.SUBSCRIBE, other, one))
    by_name = raw_token(
        Scope(frozenset({4}), tuple(map(Match, namespace(fields=2))), name=Match(b"k.raw.s0"))
    )
    assert await allowed(asked(Action.SUBSCRIBE, namespace(), by_name))


# Shapes.


@pytest.mark.parametrize("action", REQUESTS)
async def test_how_many_fields(action: Action) -> None:
    shortest = 2 if action in PREFIX_ACTIONS else 5
    for fields in range(6):
        shape = namespace(fields=fields)
        assert await allowed(asked(action, shape, full_token())) == (fields >= shortest), fields
        update = asked(Action.REQUEST_UPDATE, shape, full_token(), updates=action)
        assert await allowed(update) == (fields >= shortest), fields
    assert not await allowed(asked(action, (*namespace(), b"more"), full_token()))


@pytest.mark.parametrize("action", REQUESTS)
@pytest.mark.parametrize("field", range(5))
@pytest.mark.parametrize("change", [-1, 1])
async def test_lengths_of_fields(action: Action, field: int, change: int) -> None:
    fields = list(namespace())
    fields[field] = fields[field] + b"x" if change == 1 else fields[field][:-1]
    shape = tuple(fields)
    everything = raw_token(Scope(frozenset(range(10))), Scope.of(EVERY_RIGHT, shape[:2]))
    assert not await allowed(asked(action, shape, everything))


@given(st.lists(st.sampled_from([16, 31, 32, 33]).map(bytes), max_size=4), st.sampled_from(REQUESTS))
def test_no_other_shape_is_allowed(fields: list[bytes], action: Action) -> None:
    shape = (b"kvcs-1", OURS, *fields)
    sizes = tuple(map(len, shape))
    fits = sizes == FIELD_SIZES[: len(sizes)] and (len(sizes) == 5 or action in PREFIX_ACTIONS)
    assert asyncio.run(allowed(asked(action, shape, full_token()))) == fits


# Elsewhere.


@pytest.mark.parametrize("action", REQUESTS)
async def test_other_namespaces(action: Action) -> None:
    everything = raw_token(Scope(frozenset(range(10))), Scope.of(EVERY_RIGHT, (b"other",)))
    open_elsewhere = policy(elsewhere=AllowAll())
    for other in ((b"other", b"room"), (b"kvcs-2", OURS), (b"kvcs",), (b"KVCS-1", OURS), (b"kvcs-10",)):
        assert not await allowed(asked(action, other, everything))
        assert await allowed(asked(action, other), open_elsewhere)
    # Whatever holds elsewhere: nothing that includes a scope of KVCS, or more than one.
    for wide in ((), (b"kvcs-1",)):
        assert not await allowed(asked(action, wide, everything), open_elsewhere)
        assert not await allowed(
            asked(Action.REQUEST_UPDATE, wide, everything, updates=action), open_elsewhere
        )
    assert not await allowed(asked(action, namespace()), open_elsewhere)


# Rights that end.


class LoopClock:
    """Unix time that goes with the loop's."""

    def __call__(self) -> float:
        return NOW + asyncio.get_running_loop().time()


def timed() -> KvcsPolicy:
    return KvcsPolicy(verifier(), clock=LoopClock())


@pytest.mark.virtual
async def test_a_subscription_ends_soon_after_its_token() -> None:
    loop = asyncio.get_running_loop()
    request = asked(Action.SUBSCRIBE, namespace(), token(Role.CONSUMER, ttl=300, revalidate=30))
    authority = await Authority.obtain(timed(), request)
    assert authority.allowed.expires_after == 300
    lost = await authority.lost()
    assert (lost.code, lost.done_code) == (RequestCode.EXPIRED_AUTH_TOKEN, DoneCode.EXPIRED)
    assert 300 <= loop.time() <= 300 + cat.SKEW + cat.MIN_REVALIDATION


@pytest.mark.virtual
@pytest.mark.parametrize(
    ("role", "action"), [(Role.CONSUMER, Action.FETCH), (Role.PRODUCER, Action.PUBLISH_NAMESPACE)]
)
async def test_a_renewed_token_keeps_it(role: Role, action: Action) -> None:
    loop = asyncio.get_running_loop()
    authority = await Authority.obtain(timed(), asked(action, namespace(), token(role)))
    lost = asyncio.create_task(authority.lost())
    await asyncio.sleep(290)
    fresh = token(role, now=NOW + 290)
    await authority.update([(CAT, fresh)])
    assert authority.allowed.expires_after == 300
    assert (await lost).code is RequestCode.EXPIRED_AUTH_TOKEN
    assert 590 <= loop.time() <= 600


@pytest.mark.virtual
async def test_it_cannot_be_renewed_with_the_token_of_another_scope_or_an_old_one() -> None:
    authority = await Authority.obtain(timed(), asked(Action.FETCH, namespace(), token(Role.CONSUMER)))
    await asyncio.sleep(100)
    for useless, code in (
        (token(Role.CONSUMER, scopes=(THEIRS,)), UNAUTHORIZED),
        (token(Role.PRODUCER), UNAUTHORIZED),
        (token(Role.CONSUMER, now=NOW - 500), RequestCode.EXPIRED_AUTH_TOKEN),
        (b"rubbish", RequestCode.MALFORMED_AUTH_TOKEN),
    ):
        with pytest.raises(RequestRefused) as caught:
            await authority.update([(CAT, useless)])
        assert caught.value.code is code
    await authority.lost()
    assert 300 <= asyncio.get_running_loop().time() <= 310


@pytest.mark.virtual
async def test_a_token_that_is_not_to_be_checked_again_is_outlived() -> None:
    authority = await Authority.obtain(
        timed(), asked(Action.SUBSCRIBE, namespace(), token(Role.CONSUMER, revalidate=0))
    )
    assert authority.allowed.expires_after is None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10_000):
            await authority.lost()
    with pytest.raises(RequestRefused):  # A new action is another thing.
        await authority.update()


@pytest.mark.virtual
async def test_a_watch_moves_within_its_scope_only() -> None:
    request = asked(Action.SUBSCRIBE_NAMESPACE, namespace(fields=4), token(Role.CONSUMER))
    authority = await Authority.obtain(timed(), request)
    await authority.update(namespace=namespace(fields=2))
    for beyond in (namespace(THEIRS, 4), namespace(fields=1), ()):
        with pytest.raises(RequestRefused):
            await authority.update(namespace=beyond)


async def test_the_right_may_come_from_the_session() -> None:
    held = ((CAT, token(Role.CONSUMER)),)
    request = AccessRequest(
        action=Action.SUBSCRIBE, namespace=namespace(), name=b"manifest", held_tokens=held
    )
    decision: Decision = await policy().decide(request)
    assert isinstance(decision, Allowed)
    assert decision.revalidate_after == 30
    assert decision.subject.startswith(ISSUER)


# Configuration.


async def test_a_policy_from_a_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "issuer.pub"
    path.write_text(KEY.public().text())
    options: dict[str, object] = {"issuers": {ISSUER: [str(path)]}, "audience": RELAY}
    now = claims_for([OURS], [Role.CONSUMER], issuer=ISSUER, audience=RELAY).issued_at
    assert now is not None
    other = cat.issue(
        cat.Claims(
            issuer=ISSUER, audience=(RELAY,), expires=now + 3600, scopes=(Scope.of(EVERY_RIGHT, (b"other",)),)
        ),
        KEY,
    )
    for choice, with_token, without in (
        ("deny", False, False),
        ("tokens", True, False),
        ("allow", True, True),
    ):
        by = from_config(options | {"elsewhere": choice})
        assert await allowed(asked(Action.FETCH, namespace(), token(Role.CONSUMER, now=now)), by)
        assert await allowed(asked(Action.FETCH, (b"other",), other), by) == with_token
        assert await allowed(asked(Action.FETCH, (b"other",)), by) == without
        assert not await allowed(asked(Action.FETCH, namespace(), other), by)
    assert not await allowed(asked(Action.FETCH, (b"other",), other), from_config(options))
    for wrong in ({"elsewhere": "open"}, {"audience": 7}, {"scope": "x"}):
        with pytest.raises(UsageError):
            from_config(options | wrong)
