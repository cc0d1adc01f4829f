"""The question, the answer, and the right to a request that goes on; with a clock that jumps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from moqt.authorization import (
    AccessRequest,
    Action,
    AllowAll,
    Allowed,
    Authority,
    Decision,
    Denied,
    DenyAll,
    Policy,
    ask,
)
from moqt.errors import DoneCode, RequestCode, RequestRefused, ResetCode, SessionCode
from moqt.names import FullTrackName
from moqt.wire import (
    Fetch,
    Publish,
    PublishNamespace,
    Request,
    Subscribe,
    SubscribeNamespace,
    SubscribeTracks,
    TrackStatus,
)

pytestmark = pytest.mark.virtual

NAMESPACE = (b"example", b"room")
TRACK = FullTrackName(NAMESPACE, b"video")
SECRET = b"this-is-a-token"
OLD, NEW, SETUP = (1, b"old"), (1, b"new"), (1, b"of-setup")
EXPIRED = Denied(RequestCode.EXPIRED_AUTH_TOKEN, "the token has expired")


class Scripted:
    """Gives its answers in turn, the last one for ever; notes when it was asked what."""

    def __init__(self, *answers: Decision | Exception | Callable[[], Decision], takes: float = 0.0) -> None:
        self.answers = list(answers)
        self.takes = takes
        self.asked: list[AccessRequest] = []
        self.times: list[float] = []

    async def decide(self, request: AccessRequest) -> Decision:
        self.asked.append(request)
        self.times.append(asyncio.get_running_loop().time())
        if self.takes:
            await asyncio.sleep(self.takes)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Allowed | Denied) else answer()


def wanted(**changes: Any) -> AccessRequest:
    details: dict[str, Any] = {
        "action": Action.SUBSCRIBE,
        "namespace": NAMESPACE,
        "name": b"video",
        "tokens": (OLD,),
        "held_tokens": (SETUP,),
    }
    return AccessRequest(**details | changes)


# What is asked.


@pytest.mark.parametrize(
    ("message", "action", "namespace", "name"),
    [
        (Subscribe(0, TRACK), Action.SUBSCRIBE, NAMESPACE, b"video"),
        (Fetch(0, TRACK), Action.FETCH, NAMESPACE, b"video"),
        (TrackStatus(0, TRACK), Action.TRACK_STATUS, NAMESPACE, b"video"),
        (Publish(0, TRACK, 1), Action.PUBLISH, NAMESPACE, b"video"),
        (PublishNamespace(0, NAMESPACE), Action.PUBLISH_NAMESPACE, NAMESPACE, None),
        (SubscribeNamespace(0, NAMESPACE[:1]), Action.SUBSCRIBE_NAMESPACE, NAMESPACE[:1], None),
        (SubscribeTracks(0, ()), Action.SUBSCRIBE_TRACKS, (), None),
    ],
)
def test_what_each_request_asks_for(
    message: Request, action: Action, namespace: tuple[bytes, ...], name: bytes | None
) -> None:
    request = AccessRequest.of(message, [OLD], held_tokens=[SETUP], session="c1", peer="::1")
    assert request == AccessRequest(
        action=action,
        namespace=namespace,
        name=name,
        tokens=(OLD,),
        held_tokens=(SETUP,),
        session="c1",
        peer="::1",
    )
    assert request.needs == (action,)


def test_an_update_needs_both_rights() -> None:
    request = wanted(action=Action.REQUEST_UPDATE, updates=Action.FETCH)
    assert request.needs == (Action.REQUEST_UPDATE, Action.FETCH)
    for changes in ({"action": Action.REQUEST_UPDATE}, {"updates": Action.FETCH}):
        with pytest.raises(ValueError, match="which action it updates"):
            wanted(**changes)


def test_nothing_shows_a_token() -> None:
    request = wanted(tokens=((1, SECRET),), held_tokens=((1, SECRET),))
    assert SECRET.decode() not in repr(request) + str(request)


# What is answered.


def test_codes_of_a_denial() -> None:
    table = {
        RequestCode.UNAUTHORIZED: (SessionCode.UNAUTHORIZED, DoneCode.UNAUTHORIZED),
        RequestCode.MALFORMED_AUTH_TOKEN: (SessionCode.MALFORMED_AUTH_TOKEN, DoneCode.UNAUTHORIZED),
        RequestCode.EXPIRED_AUTH_TOKEN: (SessionCode.EXPIRED_AUTH_TOKEN, DoneCode.EXPIRED),
        RequestCode.TIMEOUT: (SessionCode.INTERNAL_ERROR, DoneCode.INTERNAL_ERROR),
        RequestCode.INTERNAL_ERROR: (SessionCode.INTERNAL_ERROR, DoneCode.INTERNAL_ERROR),
    }
    for code, (session_code, done_code) in table.items():
        denied = Denied(code, "why")
        assert (denied.session_code, denied.done_code) == (session_code, done_code)
        assert denied.reset_code is ResetCode.EXPIRED_AUTH_TOKEN
        assert (denied.refusal.code, denied.refusal.reason) == (code, "why")
    assert Denied().code is RequestCode.UNAUTHORIZED


@pytest.mark.parametrize("after", [0, -1, float("nan")])
def test_a_policy_cannot_be_asked_all_the_time(after: float) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        Allowed(revalidate_after=after)


@pytest.mark.parametrize("action", list(Action))
async def test_the_two_simple_policies(action: Action) -> None:
    request = wanted(action=action, updates=Action.FETCH if action is Action.REQUEST_UPDATE else None)
    assert await AllowAll().decide(request) == Allowed()
    assert await DenyAll().decide(request) == (Allowed() if action is Action.SETUP else Denied())


async def test_a_policy_that_fails_denies(caplog: pytest.LogCaptureFixture) -> None:
    decision = await ask(Scripted(RuntimeError("database")), wanted(session="c7"))
    assert decision == Denied(RequestCode.INTERNAL_ERROR, "internal error")
    assert "c7: the policy failed for SUBSCRIBE" in caplog.text


async def test_a_policy_that_is_slow_denies() -> None:
    loop = asyncio.get_running_loop()
    policy = Scripted(Allowed(), takes=3600)
    assert await ask(policy, wanted(), deadline=2) == Denied(
        RequestCode.TIMEOUT, "the decision took too long"
    )
    assert loop.time() == 2
    assert await ask(Scripted(Allowed(), takes=1), wanted(), deadline=2) == Allowed()
    assert await ask(Scripted(TimeoutError()), wanted()) == Denied(
        RequestCode.TIMEOUT, "the decision took too long"
    )


async def test_asking_can_be_cancelled() -> None:
    task = asyncio.create_task(ask(Scripted(Allowed(), takes=1), wanted()))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Who was denied what kind of request and why; not which content, and no token (kvcs 11)."""
    caplog.set_level(logging.DEBUG)
    request = wanted(
        namespace=(b"kvcs-1", b"scope-id"),
        name=b"k.raw.s0",
        tokens=((1, SECRET),),
        held_tokens=((1, SECRET),),
        session="c3",
        peer="192.0.2.1:4433",
    )
    await ask(Scripted(Denied(RequestCode.UNAUTHORIZED, "no\x1b[2J")), request)
    await ask(Scripted(Allowed(subject="node\x1b[2J")), request)
    await ask(Scripted(RuntimeError()), request)
    assert "c3 (192.0.2.1:4433): SUBSCRIBE denied with UNAUTHORIZED: no\\x1b[2J" in caplog.text
    assert "c3: SUBSCRIBE allowed to node\\x1b[2J" in caplog.text
    assert "\x1b" not in caplog.text
    for hidden in (SECRET.decode(), "scope-id", "k.raw", SECRET.hex()):
        assert hidden not in caplog.text


# A request that goes on.


async def test_no_authority_without_a_right() -> None:
    with pytest.raises(RequestRefused) as caught:
        await Authority.obtain(Scripted(EXPIRED), wanted())
    assert (caught.value.code, caught.value.reason) == (EXPIRED.code, EXPIRED.reason)


async def test_it_is_asked_again_in_time_until_it_is_lost() -> None:
    policy = Scripted(Allowed(revalidate_after=30), Allowed(revalidate_after=10), EXPIRED)
    authority = await Authority.obtain(policy, wanted())
    assert await authority.lost() == EXPIRED
    assert policy.times == [0, 30, 40]
    # What is asked again: the same, by tokens that are of no new message.
    assert policy.asked[1] == policy.asked[2] == wanted(tokens=(), held_tokens=(OLD, SETUP))


async def test_what_is_not_to_be_checked_again_is_kept() -> None:
    policy = Scripted(Allowed(revalidate_after=30), Allowed())
    authority = await Authority.obtain(policy, wanted())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(80000):
            await authority.lost()
    assert policy.times == [0, 30]


async def test_a_policy_that_fails_later_ends_it() -> None:
    authority = await Authority.obtain(Scripted(Allowed(revalidate_after=1), RuntimeError()), wanted())
    assert (await authority.lost()).done_code is DoneCode.INTERNAL_ERROR


async def test_an_update_renews_it() -> None:
    policy = Scripted(
        Allowed(revalidate_after=30),
        Allowed(revalidate_after=30, expires_after=900),
        Allowed(revalidate_after=5),
        EXPIRED,
    )
    authority = await Authority.obtain(policy, wanted())
    lost = asyncio.create_task(authority.lost())
    await asyncio.sleep(20)
    await authority.update([NEW])
    assert authority.allowed.expires_after == 900
    assert await lost == EXPIRED
    assert policy.times == [0, 20, 50, 55]
    assert policy.asked[1] == wanted(
        action=Action.REQUEST_UPDATE, updates=Action.SUBSCRIBE, tokens=(NEW,), held_tokens=(SETUP,)
    )
    # The token of the update has taken the place of the request's.
    assert policy.asked[2] == wanted(tokens=(), held_tokens=(NEW, SETUP))


async def test_an_update_without_a_token_goes_by_those_from_before() -> None:
    policy = Scripted(Allowed(revalidate_after=30), Allowed(revalidate_after=30), EXPIRED)
    authority = await Authority.obtain(policy, wanted(action=Action.SUBSCRIBE_NAMESPACE, name=None))
    await authority.update(namespace=NAMESPACE[:1])
    assert policy.asked[1] == wanted(
        action=Action.REQUEST_UPDATE,
        updates=Action.SUBSCRIBE_NAMESPACE,
        namespace=NAMESPACE[:1],
        name=None,
        tokens=(),
        held_tokens=(OLD, SETUP),
    )
    await authority.lost()
    assert policy.asked[2] == wanted(
        action=Action.SUBSCRIBE_NAMESPACE,
        namespace=NAMESPACE[:1],
        name=None,
        tokens=(),
        held_tokens=(OLD, SETUP),
    )


async def test_an_update_that_is_denied_changes_nothing() -> None:
    policy = Scripted(Allowed(revalidate_after=30, subject="a"), Denied(), EXPIRED)
    authority = await Authority.obtain(policy, wanted())
    lost = asyncio.create_task(authority.lost())
    await asyncio.sleep(20)
    with pytest.raises(RequestRefused):
        await authority.update([NEW], namespace=(b"elsewhere",))
    assert authority.allowed.subject == "a"
    assert await lost == EXPIRED
    assert policy.times == [0, 20, 30]
    assert policy.asked[2] == wanted(tokens=(), held_tokens=(OLD, SETUP))


async def test_a_renewal_that_overtakes_a_check_wins() -> None:
    """The old token is being checked, and found expired, while the new one is allowed."""

    class Slow:
        async def decide(self, request: AccessRequest) -> Decision:
            if request.action is Action.REQUEST_UPDATE or request.tokens:
                return Allowed(revalidate_after=30)
            await asyncio.sleep(2)
            return EXPIRED

    policy: Policy = Slow()
    authority = await Authority.obtain(policy, wanted())
    lost = asyncio.create_task(authority.lost())
    await asyncio.sleep(31)
    await authority.update([NEW])
    await asyncio.sleep(5)
    assert not lost.done()
    assert await lost == EXPIRED
    assert asyncio.get_running_loop().time() == 32 + 30 + 2


async def test_what_is_told_when_it_is_lost() -> None:
    """Whoever asked for it, then or later; and updates come too late."""
    told: list[Denied] = []
    policy = Scripted(Allowed(revalidate_after=30), EXPIRED)
    authority = await Authority.obtain(policy, wanted())
    authority.check()
    authority.when_lost(told.append)
    await authority.watch()
    assert told == [EXPIRED]
    authority.when_lost(told.append)
    assert told == [EXPIRED, EXPIRED]
    with pytest.raises(RequestRefused):
        authority.check()
    with pytest.raises(RequestRefused) as caught:
        await authority.update([NEW])
    assert caught.value.code is EXPIRED.code
    assert len(policy.asked) == 2


async def test_a_renewal_that_is_decided_after_the_loss() -> None:
    class Slow:
        async def decide(self, request: AccessRequest) -> Decision:
            await asyncio.sleep(4 if request.action is Action.REQUEST_UPDATE else 0)
            return EXPIRED if asyncio.get_running_loop().time() == 30 else Allowed(revalidate_after=30)

    authority = await Authority.obtain(Slow(), wanted())
    watching = asyncio.create_task(authority.watch())
    await asyncio.sleep(28)
    with pytest.raises(RequestRefused):
        await authority.update([NEW])
    await watching


@pytest.mark.parametrize(("lasts", "told"), [(300.0, 280_000), (20.0004, 1), (5.0, 1), (None, None)])
async def test_expires(lasts: float | None, told: int | None) -> None:
    """In milliseconds; never 0, which would mean: for ever (moqt 5.3)."""
    authority = await Authority.obtain(Scripted(Allowed(expires_after=lasts)), wanted())
    await asyncio.sleep(20)
    assert authority.expires == told
