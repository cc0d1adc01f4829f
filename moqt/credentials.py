"""The token of a client, in a file that somebody keeps fresh: read for each session, and again as long as the
session lasts (moqt 2.7, 5.3).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from moqt.cat import CAT, MAX_TOKEN_SIZE
from moqt.errors import (
    RequestCode,
    RequestRejected,
    ResetCode,
    SessionClosed,
    SessionCode,
    StreamReset,
    UsageError,
)
from moqt.names import printable
from moqt.session import Session
from moqt.wire import AliasType, Token

__all__ = ["TokenFile"]

logger = logging.getLogger(__name__)

LOOK_AGAIN: Final = 5.0
"""Seconds between two looks at the file: much less than tokens live (security 3.3)."""


class TokenFile:
    """A C4M token in the file `path`; with None there is none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> tuple[Token, ...]:
        """What the file holds now, for SETUP and each request. Raises UsageError."""
        if self._path is None:
            return ()
        try:
            with self._path.open("rb") as file:
                value = file.read(MAX_TOKEN_SIZE + 1)
        except OSError as error:
            raise UsageError(f"token file {self._path}: {error.strerror}") from error
        if not 0 < len(value) <= MAX_TOKEN_SIZE:
            raise UsageError(f"token file {self._path}: a token has 1 to {MAX_TOKEN_SIZE} octets")
        return (Token(AliasType.USE_VALUE, type=CAT, value=value),)

    @asynccontextmanager
    async def renewing(self, session: Session) -> AsyncIterator[None]:
        """While the block runs, give the peer of `session` each further token that the file comes to hold."""
        task = asyncio.create_task(self._renew(session), name=f"{session.connection.id} tokens")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def advice(self, error: Exception) -> str | None:
        """What to tell somebody to whom the peer has denied something by `error`; None if it is no denial."""
        if isinstance(error, RequestRejected):
            what, code, reason = error.what, error.code, error.reason
        elif isinstance(error, SessionClosed) and error.remote:
            what, code, reason = "a session", _OF_SESSIONS.get(error.code, -1), error.reason
        elif isinstance(error, StreamReset) and error.code == ResetCode.EXPIRED_AUTH_TOKEN:
            what, code, reason = "this any longer", int(RequestCode.EXPIRED_AUTH_TOKEN), "the right has ended"
        else:
            return None
        if code not in _REMEDIES:
            return None
        denied = f"the peer does not allow {what}: {printable(reason)}"
        if self._path is None:
            return f"{denied}. No token was given: name a file that holds one with --token"
        return f"{denied}. The token in {self._path} {_REMEDIES[code]}"

    async def _renew(self, session: Session) -> None:
        while self._path is not None:
            await asyncio.sleep(LOOK_AGAIN)
            try:
                fresh = await asyncio.to_thread(self.read)
            except UsageError as error:
                logger.warning("%s", error)
                continue
            if fresh != session.tokens:
                logger.info("%s: a fresh token", session.connection.id)
                await session.renew(fresh)


_REMEDIES: Final[dict[int, str]] = {
    RequestCode.UNAUTHORIZED: "does not give this right, or not at this peer: put one there that does",
    RequestCode.EXPIRED_AUTH_TOKEN: "is not in force any more: put a fresh one there",
    RequestCode.MALFORMED_AUTH_TOKEN: "is from no issuer that the peer trusts: put one there that is",
}
_OF_SESSIONS: Final[dict[int, int]] = {
    SessionCode.UNAUTHORIZED: RequestCode.UNAUTHORIZED,
    SessionCode.EXPIRED_AUTH_TOKEN: RequestCode.EXPIRED_AUTH_TOKEN,
    SessionCode.MALFORMED_AUTH_TOKEN: RequestCode.MALFORMED_AUTH_TOKEN,
}
