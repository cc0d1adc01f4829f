"""CAT-4-MOQT (C4M) tokens: Common Access Tokens that say which actions on which namespaces they allow.

A token is a CWT in a COSE_Sign1 or COSE_Mac0 (security 3). `Verifier` makes the checks of security 3.2 in
their order, `CatPolicy` decides by what is left, `issue` makes tokens. All numbers of C4M stand in the first
table: they are not registered yet.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

from moqt.authorization import AccessRequest, Action, Allowed, Decision, Denied, TokenPair
from moqt.cbor import Cbor, CborError, decode, encode
from moqt.cose import Algorithm, CoseError, Key, Message, seal
from moqt.errors import MoqtError, RequestCode, UsageError
from moqt.names import TrackNamespace, printable

__all__ = [
    "ACTION_NUMBERS",
    "CAT",
    "CatError",
    "CatPolicy",
    "Claims",
    "Match",
    "MatchKind",
    "Scope",
    "Verifier",
    "from_config",
    "issue",
]

CAT: Final = 1
"""The Token Type of C4M in AUTHORIZATION_TOKEN (security 2.1)."""


class Claim(IntEnum):
    """Keys of the claims that are understood (security 3.1)."""

    ISS = 1
    SUB = 2
    AUD = 3
    EXP = 4
    NBF = 5
    IAT = 6
    CTI = 7
    CATV = 310
    MOQT = 327
    MOQT_REVAL = 328


ACTION_NUMBERS: Final[Mapping[Action, tuple[int, ...]]] = {
    Action.SETUP: (1, 0),  # 0 and 1 were CLIENT_SETUP and SERVER_SETUP in -01
    Action.PUBLISH_NAMESPACE: (2,),
    Action.SUBSCRIBE_NAMESPACE: (3,),
    Action.SUBSCRIBE: (4,),
    Action.REQUEST_UPDATE: (5,),
    Action.PUBLISH: (6,),
    Action.FETCH: (7,),
    Action.TRACK_STATUS: (8,),
    Action.SUBSCRIBE_TRACKS: (9,),
}
"""The first number of each is the one to write."""

CAT_VERSION: Final = 1
COSE_TYPE: Final = "CAT"


class MatchKind(IntEnum):
    """How a match object compares; EXACT is never written."""

    EXACT = 0
    PREFIX = 1
    SUFFIX = 2


Members: TypeAlias = Mapping[int | str, Cbor]

MAX_TOKEN_SIZE: Final = 4096  # octets, security 3.2
MAX_TOKENS: Final = 16  # in one message: each costs a signature check
SKEW: Final = 5.0  # seconds that clocks may differ, security 3.2
MIN_REVALIDATION: Final = 1.0  # seconds

_VERIFIED_TOKENS: Final = 1024  # remembered, so that they need not be verified again (C4M: SHOULD)


class CatError(MoqtError):
    """A token that is not accepted: the code for REQUEST_ERROR, and a reason that shows no value of it.

    MALFORMED_AUTH_TOKEN: not a token, or not genuine. EXPIRED_AUTH_TOKEN. UNAUTHORIZED: genuine, but not for
    here or now.
    """

    def __init__(self, code: RequestCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Match:
    """What one field of a namespace, or a Track Name, has to be."""

    value: bytes
    kind: MatchKind = MatchKind.EXACT

    def matches(self, name: bytes) -> bool:
        """Octet by octet, without any normalisation."""
        match self.kind:
            case MatchKind.EXACT:
                return name == self.value
            case MatchKind.PREFIX:
                return name.startswith(self.value)
            case MatchKind.SUFFIX:
                return name.endswith(self.value)

    def to_cbor(self) -> Cbor:
        """The match object."""
        return self.value if self.kind is MatchKind.EXACT else (int(self.kind), self.value)

    @classmethod
    def from_cbor(cls, value: Cbor) -> Match:
        """Raises ValueError for anything else than a match object."""
        match value:
            case bytes():
                return cls(value)
            case (int() as kind, bytes() as text) if type(kind) is int and kind in (1, 2):
                return cls(text, MatchKind(kind))
            case _:
                raise ValueError("a match is neither octets nor [1 or 2, octets]")


@dataclass(frozen=True, slots=True)
class Scope:
    """Actions, and the tracks on which a token allows them.

    Raises UsageError for a `name` without a `namespace`, which cannot be written.
    """

    actions: frozenset[int]
    """Numbers as in ACTION_NUMBERS; unknown ones allow nothing."""
    namespace: tuple[Match, ...] = ()
    """For the fields of a namespace in order. With `exact_length` False, longer namespaces match too, and so
    none at all matches all.
    """
    exact_length: bool = False
    name: Match | None = None
    """For the Track Name; None: any."""

    def __post_init__(self) -> None:
        if self.name is not None and not self.namespace and not self.exact_length:
            raise UsageError("a scope that matches the Track Name must match the namespace too")

    @classmethod
    def of(cls, actions: Collection[Action], namespace: TrackNamespace) -> Scope:
        """`actions` on all tracks whose namespace begins with exactly these fields."""
        return cls(frozenset(ACTION_NUMBERS[known][0] for known in actions), tuple(map(Match, namespace)))

    @property
    def exact_prefix(self) -> TrackNamespace:
        """The fields with which every namespace in this scope begins."""
        fields = []
        for known in self.namespace:
            if known.kind is not MatchKind.EXACT:
                break
            fields.append(known.value)
        return tuple(fields)

    def allows(self, action: Action, namespace: TrackNamespace, name: bytes | None) -> bool:
        """Whether `action` is allowed there. SETUP is about no namespace: it only has to be listed."""
        if not self.actions.intersection(ACTION_NUMBERS[action]):
            return False
        if action is Action.SETUP:
            return True
        longer = len(namespace) - len(self.namespace)
        if longer < 0 or (longer and self.exact_length):
            return False
        if not all(known.matches(part) for known, part in zip(self.namespace, namespace, strict=False)):
            return False
        return self.name is None or (name is not None and self.name.matches(name))

    def to_cbor(self) -> Cbor:
        """The scope in the claim."""
        parts: list[Cbor] = [tuple(sorted(self.actions))]
        if self.namespace or self.exact_length:
            end = (None,) if self.exact_length else ()
            parts.append(tuple(known.to_cbor() for known in self.namespace) + end)
        if self.name is not None:
            parts.append(self.name.to_cbor())
        return tuple(parts)

    @classmethod
    def from_cbor(cls, value: Cbor) -> Scope:
        """Raises ValueError for anything else than a scope."""
        if not isinstance(value, tuple) or not 1 <= len(value) <= 3:
            raise ValueError("a scope is not an array of one to three")
        actions, *rest = value
        if not isinstance(actions, tuple) or not actions or not all(type(known) is int for known in actions):
            raise ValueError("the actions of a scope are not integers")
        fields: Sequence[Cbor] = ()
        if rest:
            if not isinstance(rest[0], tuple) or not rest[0]:
                raise ValueError("the namespace of a scope is not an array of matches")
            fields = rest[0]
        exact_length = bool(fields) and fields[-1] is None
        if exact_length:
            fields = fields[:-1]
        return cls(
            frozenset(known for known in actions if isinstance(known, int)),
            tuple(map(Match.from_cbor, fields)),
            exact_length,
            Match.from_cbor(rest[1]) if len(rest) == 2 else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a token says. Times are Unix times in seconds."""

    issuer: str
    expires: float
    audience: tuple[str, ...] = ()
    scopes: tuple[Scope, ...] = ()
    revalidate: float = 0.0
    """The most seconds between two checks while an action goes on; 0: it is not checked again, and outlives
    `expires`.
    """
    subject: str | None = None
    not_before: float | None = None
    issued_at: float | None = None
    token_id: bytes | None = None
    restrictions: tuple[int | str, ...] = ()
    """Keys of claims that are not understood: the token is for nobody who does not."""
    fault: str = ""
    """Why `scopes` could not be read; such claims still decode, since other checks come first."""

    @property
    def who(self) -> str:
        """The subject, or else the issuer and the token's own name."""
        if self.subject is not None:
            return self.subject
        return self.issuer if self.token_id is None else f"{self.issuer}#{self.token_id.hex()[:8]}"

    def encode(self) -> bytes:
        """The claims set."""
        claims: dict[int | str, Cbor] = {
            Claim.ISS: self.issuer,
            Claim.SUB: self.subject,
            Claim.AUD: self.audience or None,
            Claim.EXP: self.expires,
            Claim.NBF: self.not_before,
            Claim.IAT: self.issued_at,
            Claim.CTI: self.token_id,
            Claim.MOQT: tuple(known.to_cbor() for known in self.scopes) or None,
            Claim.MOQT_REVAL: self.revalidate or None,
        }
        return encode({int(key): value for key, value in claims.items() if value is not None})

    @classmethod
    def decode(cls, payload: bytes) -> Claims:
        """Read a claims set. Raises CatError, MALFORMED_AUTH_TOKEN, for claims of the wrong form."""
        return cls.read(_members(payload))

    @classmethod
    def read(cls, claims: Members) -> Claims:
        """Read a claims set that was decoded already. Raises CatError as `decode` does."""
        expires = _number(claims, Claim.EXP)
        if expires is None:
            raise _malformed("the token has no expiry (exp)")
        version = claims.get(Claim.CATV, CAT_VERSION)
        scopes, fault = _scopes(claims[Claim.MOQT]) if Claim.MOQT in claims else ((), "")
        unknown = {key for key in claims if key not in _KNOWN_CLAIMS}
        if type(version) is not int or version != CAT_VERSION:
            unknown.add(int(Claim.CATV))
        return cls(
            issuer=_text(claims, Claim.ISS) or "",
            expires=expires,
            audience=_audience(claims[Claim.AUD]) if Claim.AUD in claims else (),
            scopes=scopes,
            revalidate=_number(claims, Claim.MOQT_REVAL) or 0.0,
            subject=_text(claims, Claim.SUB),
            not_before=_number(claims, Claim.NBF),
            issued_at=_number(claims, Claim.IAT),
            token_id=_octets(claims, Claim.CTI),
            restrictions=tuple(sorted(unknown, key=repr)),
            fault=fault,
        )


_KNOWN_CLAIMS: Final = frozenset(map(int, Claim))


def issue(claims: Claims, key: Key) -> bytes:
    """A token: the Token Value of MOQT. Raises UsageError for a public key, and for claims that don't fit."""
    try:
        token = seal(claims.encode(), key, type=COSE_TYPE)
    except CborError as error:
        raise UsageError(f"claims that cannot be written: {error}") from None
    if len(token) > MAX_TOKEN_SIZE:
        raise UsageError(f"the token would have {len(token)} octets; {MAX_TOKEN_SIZE} are taken")
    return token


class Verifier:
    """Checks tokens: genuine, by one of `issuers`, for this `audience`, and in force (security 3.2 #1 to #3).

    `issuers` are names (iss) with their keys; a token is accepted only under a key of the issuer it names.
    `audience` is what this endpoint is called in tokens (aud); without `require_audience`, tokens that are
    for anyone are accepted as well. `skew` is how many seconds clocks may differ. A token that asks for
    checks more often than every `min_revalidation` seconds is refused. Raises UsageError for other times.
    """

    def __init__(
        self,
        issuers: Mapping[str, Sequence[Key]],
        *,
        audience: str | Collection[str],
        require_audience: bool = True,
        skew: float = SKEW,
        min_revalidation: float = MIN_REVALIDATION,
    ) -> None:
        if not skew >= 0 or not min_revalidation > 0:
            raise UsageError("skew can't be negative, and min_revalidation must be more than 0 s")
        self.skew = skew
        self.min_revalidation = min_revalidation
        self._issuers = {name: tuple(keys) for name, keys in issuers.items()}
        self._audience = frozenset([audience] if isinstance(audience, str) else audience)
        self._require_audience = require_audience
        self._known: OrderedDict[bytes, Claims] = OrderedDict()

    @classmethod
    def from_config(cls, options: Mapping[str, object]) -> Verifier:
        """From a table of a configuration file: "issuers", a table of names with a list of key files each,
        "audience", text or a list, and at will "require-audience", "skew" and "min-revalidation".

        Raises UsageError for anything else.
        """
        known = dict(options)
        issuers = known.pop("issuers", None)
        audience = known.pop("audience", None)
        if not isinstance(issuers, Mapping) or not issuers:
            raise UsageError(
                '"issuers" must be a table: the name of each issuer, and a list of its key files'
            )
        names = [audience] if isinstance(audience, str) else audience
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise UsageError('"audience" must be the name of this relay in tokens, or a list of its names')
        required = known.pop("require-audience", True)
        if not isinstance(required, bool):
            raise UsageError('"require-audience" must be true or false')
        skew = _seconds(known.pop("skew", SKEW), "skew")
        revalidation = _seconds(known.pop("min-revalidation", MIN_REVALIDATION), "min-revalidation")
        if known:
            raise UsageError(f"unknown: {', '.join(sorted(known))}")
        return cls(
            {name: _key_files(name, files) for name, files in issuers.items()},
            audience=names,
            require_audience=required,
            skew=skew,
            min_revalidation=revalidation,
        )

    def verify(self, token: bytes, now: float) -> Claims:
        """The claims of `token` if it is in force at the Unix time `now`. Raises CatError."""
        claims = self._genuine(token)
        if now >= claims.expires + self.skew:
            raise CatError(RequestCode.EXPIRED_AUTH_TOKEN, "the token has expired")
        for start in (claims.not_before, claims.issued_at):
            if start is not None and now < start - self.skew:
                raise _refused("the token is not valid yet")
        if self._audience.isdisjoint(claims.audience) and (claims.audience or self._require_audience):
            raise _refused("the token is not for this relay (aud)")
        if claims.restrictions:  # Never ignore a restriction.
            raise _refused(f"the token has claims that are not known: {_listed(claims.restrictions)}")
        if 0 < claims.revalidate < self.min_revalidation:
            raise _refused("the token asks to be checked again more often than this relay does")
        if claims.fault:
            raise _malformed(claims.fault)
        return claims

    def _genuine(self, token: bytes) -> Claims:
        """The claims of a token whose signature is good; signatures are checked once (C4M: SHOULD)."""
        if len(token) > MAX_TOKEN_SIZE:
            raise _malformed(f"a token has at most {MAX_TOKEN_SIZE} octets")
        digest = hashlib.sha256(token).digest()
        if digest in self._known:
            self._known.move_to_end(digest)
            return self._known[digest]
        try:
            message = Message.parse(token)
        except CoseError as error:
            raise _malformed(f"not a token: {error}") from None
        if message.type not in (None, COSE_TYPE):
            raise _malformed("not a token: it is of another type")
        members = _members(message.payload)
        issuer = members.get(Claim.ISS)
        keys = self._issuers.get(issuer, ()) if isinstance(issuer, str) else ()
        if not any(map(message.verified_by, keys)):
            raise _malformed("the token was not made by an issuer that is trusted here")
        claims = Claims.read(members)
        self._known[digest] = claims
        if len(self._known) > _VERIFIED_TOKENS:
            self._known.popitem(last=False)
        return claims


class CatPolicy:
    """Decides by C4M tokens alone: what no token allows is denied (C4M: the default is "blocked").

    Any token of the request, of SETUP, or of the request that goes on may allow it. `counts` narrows which
    scopes do. `clock` gives Unix time. Tokens of other types are ignored; a SETUP without a token is allowed.
    """

    def __init__(
        self,
        verifier: Verifier,
        *,
        clock: Callable[[], float] = time.time,
        counts: Callable[[Scope], bool] = lambda _scope: True,
    ) -> None:
        self._verifier = verifier
        self._clock = clock
        self._counts = counts

    async def decide(self, request: AccessRequest) -> Decision:
        """Whether a token allows this now."""
        now = self._clock()
        presented = _cats(request.tokens)
        held = [token for token in _cats(request.held_tokens) if token not in presented]
        if request.action is Action.SETUP and not presented:
            return Allowed()
        if len(presented) > MAX_TOKENS:
            return Denied(RequestCode.MALFORMED_AUTH_TOKEN, f"more than {MAX_TOKENS} tokens")
        denied = Denied(RequestCode.UNAUTHORIZED, "no token allows this")
        valid = []
        for token in presented:
            try:
                valid.append(self._verifier.verify(token, now))
            except CatError as error:
                denied = Denied(error.code, error.reason)
                if error.code is not RequestCode.UNAUTHORIZED:
                    return denied  # moqt 2.7: a message with an invalid or expired token is rejected.
        for token in held:
            try:
                valid.append(self._verifier.verify(token, now))
            except CatError as error:
                if error.code is RequestCode.EXPIRED_AUTH_TOKEN:
                    denied = Denied(error.code, error.reason)
        grants: list[Claims] = []
        for action in request.needs:
            grants = [claims for claims in valid if self._allows(claims, action, request)]
            if not grants:
                return denied
        return self._allowed(grants, now)

    def _allows(self, claims: Claims, action: Action, request: AccessRequest) -> bool:
        return any(
            scope.allows(action, request.namespace, request.name)
            and (action is Action.SETUP or self._counts(scope))
            for scope in claims.scopes
        )

    def _allowed(self, grants: Sequence[Claims], now: float) -> Allowed:
        """`grants` allow what goes on; the others of `needs` only had to be allowed now."""
        who = grants[0].who
        if not all(claims.revalidate for claims in grants):
            return Allowed(subject=who)  # C4M: without moqt-reval it must not be validated again.
        expires = max(claims.expires for claims in grants)
        # Checking sooner is allowed: so that an expiry is noticed when it comes.
        after = min(
            min(claims.revalidate for claims in grants),
            max(expires + self._verifier.skew - now, self._verifier.min_revalidation),
        )
        return Allowed(revalidate_after=after, expires_after=expires - now, subject=who)


def from_config(options: Mapping[str, object]) -> CatPolicy:
    """The policy of a configuration file: all as tokens say, in any namespace. The options are those of
    `Verifier.from_config`. Raises UsageError.
    """
    return CatPolicy(Verifier.from_config(options))


def _cats(tokens: Sequence[TokenPair]) -> list[bytes]:
    """The C4M tokens, each once. Other types are not ours to judge (moqt 2.7: the registry is greased)."""
    return list(dict.fromkeys(value for kind, value in tokens if kind == CAT))


def _malformed(reason: str) -> CatError:
    return CatError(RequestCode.MALFORMED_AUTH_TOKEN, reason)


def _refused(reason: str) -> CatError:
    return CatError(RequestCode.UNAUTHORIZED, reason)


def _listed(keys: Sequence[int | str]) -> str:
    return ", ".join(str(key) if isinstance(key, int) else f'"{printable(key, 20)}"' for key in keys[:8])


def _scopes(value: Cbor) -> tuple[tuple[Scope, ...], str]:
    """The scopes of either form of the claim, and what is wrong with it."""
    if isinstance(value, dict):  # { 0: [ + scope ], * int => any }
        if not all(isinstance(key, int) for key in value):
            return (), "the moqt claim has keys that are not integers"
        value = value.get(0)
    if not isinstance(value, tuple) or not value:
        return (), "the moqt claim has no scopes"
    try:
        return tuple(map(Scope.from_cbor, value)), ""
    except ValueError as error:
        return (), str(error)


def _audience(value: Cbor) -> tuple[str, ...]:
    names = value if isinstance(value, tuple) else (value,)
    if not names or not all(isinstance(name, str) for name in names):
        raise _malformed("the audience (aud) is neither text nor an array of text")
    return tuple(name for name in names if isinstance(name, str))


def _members(payload: bytes) -> Members:
    try:
        members = decode(payload)
    except CborError as error:
        raise _malformed(f"the claims are not CBOR as it is taken here: {error}") from None
    if not isinstance(members, dict):
        raise _malformed("the claims are not a map")
    return members


def _number(claims: Members, claim: Claim) -> float | None:
    """A finite number, as all numbers are that `decode` takes; no bool, though bool is an int."""
    value = claims.get(claim)
    if claim not in claims:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise _malformed(f"claim {int(claim)} is not a number of seconds")
    return value


def _text(claims: Members, claim: Claim) -> str | None:
    value = claims.get(claim)
    if claim in claims and not isinstance(value, str):
        raise _malformed(f"claim {int(claim)} is not text")
    return value if isinstance(value, str) else None


def _octets(claims: Members, claim: Claim) -> bytes | None:
    value = claims.get(claim)
    if claim in claims and not isinstance(value, bytes):
        raise _malformed(f"claim {int(claim)} is not octets")
    return value if isinstance(value, bytes) else None


def _seconds(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 86400:
        raise UsageError(f'"{name}" must be seconds, 0 to a day')
    return float(value)


def _key_files(issuer: str, files: object) -> list[Key]:
    names = [files] if isinstance(files, str) else files
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UsageError(f'the keys of issuer "{issuer}" must be a list of files')
    keys = [Key.from_file(name) for name in names]
    for name, key in zip(names, keys, strict=True):
        if key.private and key.algorithm is not Algorithm.HS256:
            raise UsageError(
                f'key file {name} of issuer "{issuer}": it is the private key, with which tokens are made; '
                f"what checks them needs the public one alone, such as {name}.pub"
            )
    return keys
