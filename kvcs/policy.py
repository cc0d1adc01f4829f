"""Who may do what with KV caches: the policy for the namespaces of `kvcs-1` (kvcs 3.1, 8, 10).

Rights are given for whole scopes: ("kvcs-1", Scope ID) is the unit, and nothing that is wider is granted,
whatever a token says. A relay is given a `KvcsPolicy`; it need not know KVCS.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from kvcs.names import FIELD_SIZES, KVCS_FIELD
from moqt.authorization import AccessRequest, Action, AllowAll, Decision, Denied, DenyAll, Policy
from moqt.cat import CatPolicy, Scope, Verifier
from moqt.errors import UsageError
from moqt.names import TrackNamespace

__all__ = ["SCOPE_FIELDS", "KvcsPolicy", "from_config", "names_one_scope"]

SCOPE_FIELDS: Final = 2
"""The fields of ("kvcs-1", Scope ID)."""

_PREFIX_ACTIONS: Final = (Action.SUBSCRIBE_NAMESPACE, Action.SUBSCRIBE_TRACKS)


class KvcsPolicy:
    """Decides by C4M tokens about namespaces of `kvcs-1`, and leaves others to `elsewhere` (default: denied).

    Of a namespace or prefix it wants the shape of kvcs 3.1: all five fields, or for SUBSCRIBE_NAMESPACE and
    SUBSCRIBE_TRACKS two to five. Of a token it takes the scopes of C4M that name "kvcs-1" and one Scope ID
    exactly. The empty prefix, which includes every scope, is denied even where `elsewhere` would allow it.
    """

    def __init__(
        self,
        verifier: Verifier,
        *,
        elsewhere: Policy | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tokens = CatPolicy(verifier, clock=clock, counts=names_one_scope)
        self._elsewhere = DenyAll() if elsewhere is None else elsewhere

    async def decide(self, request: AccessRequest) -> Decision:
        """Whether the peer may do this now."""
        if request.action is Action.SETUP:
            return await self._tokens.decide(request)
        namespace = request.namespace
        if not namespace:
            return Denied(reason="a namespace without fields includes every scope")
        if namespace[0] != KVCS_FIELD:
            return await self._elsewhere.decide(request)
        shortest = SCOPE_FIELDS if request.needs[-1] in _PREFIX_ACTIONS else len(FIELD_SIZES)
        if not _has_shape(namespace, shortest):
            return Denied(reason="not a namespace of kvcs-1, or a prefix that is shorter than a scope")
        return await self._tokens.decide(request)


def names_one_scope(scope: Scope) -> bool:
    """Whether a scope of a token is about exactly one scope of KVCS (security 3.3).

    A match by prefix in field 1 could be about all of them.
    """
    return _has_shape(scope.exact_prefix[: len(FIELD_SIZES)], SCOPE_FIELDS)


def from_config(options: Mapping[str, object]) -> KvcsPolicy:
    """The policy of a configuration file: what `Verifier.from_config` takes, and "elsewhere", which says what
    holds for namespaces other than kvcs-1: "deny" (default), "tokens" (as C4M tokens say), or "allow".

    Raises UsageError.
    """
    rest = dict(options)
    choice = rest.pop("elsewhere", "deny")
    verifier = Verifier.from_config(rest)
    match choice:
        case "deny":
            return KvcsPolicy(verifier)
        case "tokens":
            return KvcsPolicy(verifier, elsewhere=CatPolicy(verifier))
        case "allow":
            return KvcsPolicy(verifier, elsewhere=AllowAll())
        case _:
            raise UsageError('"elsewhere" must be "deny", "tokens" or "allow"')


def _has_shape(namespace: TrackNamespace, shortest: int) -> bool:
    """Whether this is kvcs-1 with at least `shortest` of its fields, each of its length (kvcs 3.1)."""
    return (
        shortest <= len(namespace) <= len(FIELD_SIZES)
        and namespace[0] == KVCS_FIELD
        and all(len(part) == size for part, size in zip(namespace, FIELD_SIZES, strict=False))
    )
