"""Authorization tokens on one session: the aliases that the peer has registered (moqt 2.7)."""

from __future__ import annotations

from collections.abc import Iterable

from moqt.errors import ProtocolError, RequestCode, RequestRefused, SessionCode
from moqt.wire import AliasType, Token

__all__ = ["TokenCache"]

_ENTRY_COST = 16


class TokenCache:
    """Tokens that the peer registered under an alias, `limit` bytes of them at most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._tokens: dict[int, tuple[int, bytes]] = {}

    def resolve(
        self, tokens: Iterable[Token], *, setup_at_server: bool | None = None
    ) -> list[tuple[int, bytes]]:
        """The (type, value) pairs that a message's tokens stand for, after their REGISTER and DELETE took
        effect.

        `setup_at_server` is None but for the tokens of a SETUP, where it tells whether we are the server.
        Raises ProtocolError where the session must close (moqt 20 #5, #32), RequestRefused for an unknown
        alias.
        """
        resolved: list[tuple[int, bytes]] = []
        unknown = None
        for token in tokens:
            if setup_at_server and token.alias_type in (AliasType.DELETE, AliasType.USE_ALIAS):
                raise ProtocolError(
                    SessionCode.PROTOCOL_VIOLATION,
                    f"a SETUP from a client can't hold {token.alias_type.name}",
                )
            if token.alias_type is AliasType.REGISTER:
                self._register(token, in_setup=setup_at_server is not None)
            if token.alias_type.has_value:
                resolved.append((token.type or 0, token.value))
            elif token.alias not in self._tokens:
                unknown = token.alias
            elif token.alias_type is AliasType.USE_ALIAS:
                resolved.append(self._tokens[token.alias])
            else:
                self._used -= _cost(self._tokens.pop(token.alias)[1])
        if len(set(resolved)) != len(resolved):  # moqt 2.7, 20 #5
            raise ProtocolError(SessionCode.PROTOCOL_VIOLATION, "a message holds the same token twice")
        # Said last, since a REGISTER takes effect even in a message that is rejected.
        if unknown is not None:
            raise RequestRefused(
                RequestCode.UNKNOWN_AUTH_TOKEN_ALIAS, f"no token is registered under alias {unknown}"
            )
        return resolved

    def _register(self, token: Token, *, in_setup: bool) -> None:
        assert token.alias is not None
        if token.alias in self._tokens:
            raise ProtocolError(
                SessionCode.DUPLICATE_AUTH_TOKEN_ALIAS, f"token alias {token.alias} is registered already"
            )
        used = self._used + _cost(token.value)
        if used > self._limit:
            if in_setup:  # moqt 2.7: then it counts as USE_VALUE.
                return
            raise ProtocolError(
                SessionCode.AUTH_TOKEN_CACHE_OVERFLOW,
                f"registered tokens would take {used} bytes, {self._limit} are allowed",
            )
        self._tokens[token.alias] = (token.type or 0, token.value)
        self._used = used


def _cost(value: bytes) -> int:
    return _ENTRY_COST + len(value)
