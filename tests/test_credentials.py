"""The token of a client: its file, its renewal, and what is told when a peer denies something."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moqt.cat import MAX_TOKEN_SIZE
from moqt.credentials import LOOK_AGAIN, TokenFile
from moqt.errors import (
    ConnectionLost,
    MoqtError,
    RequestCode,
    RequestRejected,
    ResetCode,
    SessionClosed,
    SessionCode,
    StreamReset,
    UsageError,
)
from moqt.wire import AliasType, Token
from tests.moqt.ends import sessions

SECRET = b"very secret"


def held(value: bytes) -> tuple[Token, ...]:
    return (Token(AliasType.USE_VALUE, type=1, value=value),)


def test_what_the_file_holds_now(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(SECRET)
    token = TokenFile(file)
    assert token.read() == held(SECRET)
    file.write_bytes(b"another")
    assert token.read() == held(b"another")
    file.write_bytes(bytes(MAX_TOKEN_SIZE))
    assert token.read() == held(bytes(MAX_TOKEN_SIZE))
    assert TokenFile(None).read() == ()


def test_a_file_that_holds_no_token(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"token file {tmp_path}/none: No such file"):
        TokenFile(tmp_path / "none").read()
    for content in (b"", bytes(MAX_TOKEN_SIZE + 1)):
        (tmp_path / "token").write_bytes(content)
        with pytest.raises(UsageError, match=f"token file {tmp_path}/token: a token has 1 to 4096 octets"):
            TokenFile(tmp_path / "token").read()


@pytest.mark.virtual
async def test_a_token_that_changes_while_the_session_lasts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is used within LOOK_AGAIN seconds; a file that is gone or half written for a while changes nothing,
    and no token is logged.
    """
    caplog.set_level("DEBUG")
    file = tmp_path / "token"
    file.write_bytes(SECRET)
    token = TokenFile(file)
    async with sessions() as ends:
        session = ends.subscriber
        await session.renew(token.read())
        async with token.renewing(session):
            renewed = session.renewed
            await asyncio.sleep(3 * LOOK_AGAIN)
            assert not renewed.is_set()
            file.unlink()
            await asyncio.sleep(2 * LOOK_AGAIN)
            assert not renewed.is_set()
            assert "No such file" in caplog.text
            file.write_bytes(b"a fresh secret")
            await asyncio.sleep(LOOK_AGAIN + 0.1)
            assert renewed.is_set()
            assert session.tokens == held(b"a fresh secret")
        file.write_bytes(b"later")
        await asyncio.sleep(3 * LOOK_AGAIN)
        assert session.tokens == held(b"a fresh secret")
    assert "secret" not in caplog.text


@pytest.mark.virtual
async def test_without_a_token_nothing_is_renewed() -> None:
    async with sessions() as ends, TokenFile(None).renewing(ends.subscriber):
        await asyncio.sleep(100)
        assert ends.subscriber.tokens == ()


FILE = Path("my.token")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            RequestRejected(RequestCode.UNAUTHORIZED, "no token allows this", what="SUBSCRIBE"),
            "the peer does not allow SUBSCRIBE: no token allows this. The token in my.token does not give "
            "this right, or not at this peer: put one there that does",
        ),
        (
            RequestRejected(RequestCode.EXPIRED_AUTH_TOKEN, "the token has expired", what="FETCH"),
            "the peer does not allow FETCH: the token has expired. The token in my.token is not in force any "
            "more: put a fresh one there",
        ),
        (
            SessionClosed(SessionCode.MALFORMED_AUTH_TOKEN, "\x1b[2J", remote=True),
            "the peer does not allow a session: \\x1b[2J. The token in my.token is from no issuer that the "
            "peer trusts: put one there that is",
        ),
        (
            SessionClosed(SessionCode.UNAUTHORIZED, "not for you", remote=True),
            "the peer does not allow a session: not for you. The token in my.token does not give this right, "
            "or not at this peer: put one there that does",
        ),
        (
            StreamReset(ResetCode.EXPIRED_AUTH_TOKEN),
            "the peer does not allow this any longer: the right has ended. The token in my.token is not in "
            "force any more: put a fresh one there",
        ),
        (RequestRejected(RequestCode.DOES_NOT_EXIST, "nothing"), None),
        (SessionClosed(SessionCode.UNAUTHORIZED, "we", remote=False), None),
        (SessionClosed(SessionCode.PROTOCOL_VIOLATION, "you", remote=True), None),
        (StreamReset(ResetCode.CANCELLED), None),
        (ConnectionLost("idle"), None),
    ],
)
def test_what_is_told_when_the_peer_denies_something(error: MoqtError, text: str | None) -> None:
    """What right was missing, and what to do."""
    assert TokenFile(FILE).advice(error) == text


def test_what_is_told_without_a_token() -> None:
    error = RequestRejected(RequestCode.UNAUTHORIZED, "no token allows this", what="PUBLISH_NAMESPACE")
    assert TokenFile(None).advice(error) == (
        "the peer does not allow PUBLISH_NAMESPACE: no token allows this. No token was given: name a file "
        "that holds one with --token"
    )
