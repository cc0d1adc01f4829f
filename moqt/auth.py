"""Authorization on one session: tokens that the peer registers, and the policy that is asked (moqt 2.7)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from moqt.authorization import AccessRequest, Action, Authority, Denied, Policy, TokenPair, ask
from moqt.errors import ProtocolError, RequestCode, RequestRefused, SessionCode
from moqt.quic.api import Connection
from moqt.wire import AliasType, Message, Parameters, Request, RequestUpdate, Token

__all__ = ["Gate", "TokenCache"]

_ENTRY_COST = 16


class TokenCache:
    """Tokens that the peer registered under an alias, `limit` bytes of them at most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._tokens: dict[int, TokenPair] = {}

    def resolve(self, tokens: Iterable[Token], *, setup_at_server: bool | None = None) -> list[TokenPair]:
        """The (type, value) pairs that a message's tokens stand for, after their REGISTER and DELETE took
        effect.

        `setup_at_server` is None but for the tokens of a SETUP, where it tells whether we are the server.
        Raises ProtocolError where the session must close (moqt 20 #5, #32), RequestRefused for an unknown
        alias.
        """
        resolved: list[TokenPair] = []
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


class Gate:
    """Asks `policy` what the peer of one session may do. It may register `cache_size` bytes of tokens."""

    def __init__(self, policy: Policy, connection: Connection, cache_size: int) -> None:
        self._policy = policy
        self._connection = connection
        self._cache = TokenCache(cache_size)
        self._of_setup: tuple[TokenPair, ...] = ()

    async def admit(self, tokens: Iterable[Token]) -> None:
        """The peer's SETUP came, with `tokens`, which hold for all its requests. Raises ProtocolError to
        close the session.

        It is decided once: nothing can renew a SETUP, while each request is asked about again as it goes on.
        """
        try:
            resolved = self._cache.resolve(tokens, setup_at_server=not self._connection.is_client)
        except RequestRefused as refusal:
            raise ProtocolError(SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS, refusal.reason) from None
        self._of_setup = tuple(resolved)
        decision = await ask(
            self._policy,
            AccessRequest(
                action=Action.SETUP,
                tokens=self._of_setup,
                session=self._connection.id,
                peer=self._connection.peer,
            ),
        )
        if isinstance(decision, Denied):
            raise ProtocolError(decision.session_code, decision.reason)

    def tokens_of(self, parameters: Parameters) -> list[TokenPair]:
        """The (type, value) pairs of a message's tokens. Raises as `TokenCache.resolve`.

        To be called as soon as the message is looked at: an alias means what it means then.
        """
        return self._cache.resolve(parameters.tokens)

    def heed(self, message: Message) -> None:
        """A message about a request that is over: its REGISTER and DELETE take effect (moqt 2.7)."""
        if isinstance(message, RequestUpdate):
            with suppress(RequestRefused):
                self.tokens_of(message.parameters)

    async def authority(self, request: Request, tokens: Sequence[TokenPair]) -> Authority:
        """The right to `request`, which came with `tokens`. Raises RequestRefused if the policy denies it."""
        return await Authority.obtain(
            self._policy,
            AccessRequest.of(
                request,
                tokens,
                held_tokens=self._of_setup,
                session=self._connection.id,
                peer=self._connection.peer,
            ),
        )


def _cost(value: bytes) -> int:
    return _ENTRY_COST + len(value)
