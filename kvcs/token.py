"""Tokens for scopes of KV caches, and `python -m kvcs.token`, which makes keys, and issues and prints tokens.

A token is a C4M token (security 3.3) that allows the actions of a role on all of a scope, and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Collection
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvcs.console import Console, ExitCode, run
from kvcs.errors import FileFault, InvalidValue
from kvcs.identity import SCOPE_ID_SIZE, ScopeKey
from kvcs.names import scope_prefix
from kvcs.policy import names_one_scope
from moqt import cat
from moqt.authorization import Action
from moqt.cat import ACTION_NUMBERS, MAX_TOKEN_SIZE, CatError, Claims, Match, MatchKind, Scope
from moqt.cose import Algorithm, CoseError, Key, Message
from moqt.errors import UsageError
from moqt.names import printable

__all__ = ["ROLES", "Role", "claims_for", "issue"]

logger = logging.getLogger("kvcs.token")

DEFAULT_TTL: Final = 300.0  # seconds, security 3.3
DEFAULT_REVALIDATION: Final = 30.0  # seconds, security 3.1


class Role(StrEnum):
    """What the holder of a token is."""

    CONSUMER = "consumer"
    PRODUCER = "producer"
    RELAY = "relay"


_CONSUMER_ACTIONS: Final = frozenset(
    {
        Action.SETUP,
        Action.SUBSCRIBE_NAMESPACE,
        Action.SUBSCRIBE,
        Action.REQUEST_UPDATE,
        Action.FETCH,
        Action.TRACK_STATUS,
    }
)
ROLES: Final = {
    Role.CONSUMER: _CONSUMER_ACTIONS,
    # REQUEST_UPDATE, which security 3.3 does not list: without it a producer cannot renew the token of its
    # PUBLISH_NAMESPACE, which would end with the first token.
    Role.PRODUCER: frozenset({Action.SETUP, Action.PUBLISH_NAMESPACE, Action.REQUEST_UPDATE, Action.PUBLISH}),
    Role.RELAY: _CONSUMER_ACTIONS,  # towards its upstream it is a consumer
}


def claims_for(
    scope_ids: Collection[bytes],
    roles: Collection[Role],
    *,
    issuer: str,
    audience: str | Collection[str],
    ttl: float = DEFAULT_TTL,
    revalidate: float = DEFAULT_REVALIDATION,
    subject: str | None = None,
    now: float | None = None,
) -> Claims:
    """What a token says that allows all that `roles` do in the scopes, for `ttl` seconds from `now` on.

    `now` is a Unix time. While a subscription goes on the relay checks the token again every `revalidate`
    seconds; with 0 it never does, and the subscription outlives the token. Raises InvalidName for a Scope ID
    of another length, InvalidValue for no scope, role or audience.
    """
    if not (scope_ids and roles and audience):
        raise InvalidValue("a token needs a scope, a role and an audience")
    issued_at = int(time.time() if now is None else now)
    actions = frozenset().union(*(ROLES[role] for role in roles))
    return Claims(
        issuer=issuer,
        expires=issued_at + math.ceil(ttl),
        audience=(audience,) if isinstance(audience, str) else tuple(audience),
        scopes=tuple(Scope.of(actions, scope_prefix(scope_id)) for scope_id in scope_ids),
        revalidate=int(revalidate) if revalidate == int(revalidate) else revalidate,
        subject=subject,
        issued_at=issued_at,
        token_id=secrets.token_bytes(16),
    )


def issue(claims: Claims, key: Key) -> bytes:
    """A token. Raises InvalidValue for scopes that are not about exactly one scope of KVCS each: a match by
    prefix or suffix in fields 0 or 1 would open them all (security 3.3). Raises UsageError as `cat.issue`.
    """
    if not claims.scopes or not all(map(names_one_scope, claims.scopes)):
        raise InvalidValue('every scope of a token must name "kvcs-1" and one Scope ID exactly')
    return cat.issue(claims, key)


# The command.

DESCRIPTION = """\
Make keys, issue the tokens that a relay asks for, and print what a token says.

  python -m kvcs.token keygen --output issuer.pem          # the relay gets issuer.pem.pub, nobody issuer.pem
  python -m kvcs.token issue --key issuer.pem --issuer https://auth.example.com --audience relay-1 \\
      --scope-key scope.key --role consumer --output consumer.token
  python -m kvcs.token show consumer.token --key issuer.pem.pub

Give the token to its holder: python -m kvcs.subscribe ... --token consumer.token. Whoever has it may do what
it says until it expires. Keys and tokens are written to files that only their owner can read, and never
printed.
"""

EXIT_CODES = """\
exit codes:
  0  all went well; "show" says it when a token has expired, and ends so too
  1  "show": not a token, or with --key one that the key did not make; or a file could not be written
  2  bad usage, or a file that could not be read
"""

ROLE_HELP = (
    "consumer: discover, subscribe, fetch; producer: announce and publish; relay: what a relay asks of its "
    "upstream (with producer if publishers are below it). May be repeated, for one token that allows it all"
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = _with_help(argparse.ArgumentParser(prog="python -m kvcs.token"), DESCRIPTION)
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_keygen(commands.add_parser("keygen", help="make a key for an issuer of tokens"))
    _add_issue(commands.add_parser("issue", help="issue a token"))
    _add_show(commands.add_parser("show", help="print what a token says"))
    return result


def _with_help(command: argparse.ArgumentParser, description: str) -> argparse.ArgumentParser:
    command.description = description
    command.epilog = EXIT_CODES
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    return command


def _add_keygen(command: argparse.ArgumentParser) -> None:
    _with_help(
        command,
        "Make a key. Its public half, with which a relay checks tokens, is written to FILE.pub beside it.\n"
        "HS256 has no public half: a relay that checks its tokens could issue them too.",
    )
    command.add_argument(
        "--algorithm",
        type=str.upper,
        choices=[known.name for known in Algorithm],
        default=Algorithm.EDDSA.name,
        help="EdDSA (Ed25519), ES256 (P-256) or HS256 (a shared secret) (default: %(default)s)",
    )
    command.add_argument(
        "--output", metavar="FILE", type=Path, required=True, help="the key file; never overwritten"
    )
    _add_json(command)


def _add_issue(command: argparse.ArgumentParser) -> None:
    _with_help(
        command, "Issue a token that allows the actions of a role on all of a scope, and on nothing else."
    )
    command.add_argument("--key", metavar="FILE", type=Path, required=True, help="the issuer's private key")
    command.add_argument(
        "--issuer", metavar="NAME", required=True, help="the issuer's name (iss), as relays know it"
    )
    command.add_argument(
        "--audience",
        metavar="NAME",
        action="append",
        required=True,
        help="the relay that the token is for (aud), as it calls itself; may be repeated",
    )
    scope = command.add_mutually_exclusive_group(required=True)
    scope.add_argument(
        "--scope-key",
        metavar="FILE",
        type=Path,
        action="append",
        help="file with the scope key, from which the Scope ID follows; may be repeated",
    )
    scope.add_argument(
        "--scope-id", metavar="HEX", action="append", help="the Scope ID, 32 hex digits; may be repeated"
    )
    command.add_argument(
        "--role", choices=[known.value for known in Role], action="append", required=True, help=ROLE_HELP
    )
    command.add_argument("--subject", metavar="NAME", help="the holder's name (sub), for the relay's logs")
    command.add_argument(
        "--ttl",
        metavar="SECONDS",
        type=seconds,
        default=DEFAULT_TTL,
        help="how long the token can be used (default: %(default)g)",
    )
    command.add_argument(
        "--reval",
        metavar="SECONDS",
        type=seconds,
        default=DEFAULT_REVALIDATION,
        help="how often relays check it again while a subscription goes on; 0: never, so that a subscription "
        "outlives the token (default: %(default)g)",
    )
    command.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("token.cwt"),
        help="the token file, replaced if there is one (default: %(default)s)",
    )
    _add_json(command)


def _add_show(command: argparse.ArgumentParser) -> None:
    _with_help(command, "Print what a token says; with --key, also whether the key made it.")
    command.add_argument("token", metavar="FILE", type=Path, help="the token file")
    command.add_argument(
        "--key", metavar="FILE", type=Path, help="the issuer's key, public or private, to check the signature"
    )
    _add_json(command)


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object, for machines")


async def keygen(arguments: argparse.Namespace, console: Console) -> int:
    """Make a key; the exit code."""
    key = Key.generate(Algorithm[arguments.algorithm])
    output: Path = arguments.output
    public = None if key.thumbprint is None else output.with_name(output.name + ".pub")
    if public is not None and public.exists():
        raise FileFault(f"{public} exists already, and is not overwritten")
    await asyncio.to_thread(_write_new, output, key.text(), 0o600)
    if public is not None:
        await asyncio.to_thread(_write_new, public, key.public().text(), 0o644)
    console.tell(
        "key",
        f"{output}: a private key for {key.algorithm.name}"
        + (f"; {public}: its public half" if public else ", the only half there is"),
        algorithm=key.algorithm.name,
        private=str(output),
        public=None if public is None else str(public),
        kid=None if key.thumbprint is None else key.thumbprint.hex(),
    )
    return ExitCode.OK


async def issue_token(arguments: argparse.Namespace, console: Console) -> int:
    """Issue a token; the exit code."""
    if 0 < arguments.reval < cat.MIN_REVALIDATION:
        raise UsageError(f"--reval must be 0 or at least {cat.MIN_REVALIDATION:g}: relays refuse less")
    if not arguments.ttl:
        raise UsageError("--ttl must be more than 0")
    key = Key.from_file(arguments.key)
    if key.private and arguments.key.stat().st_mode & 0o077:
        logger.warning("others can read %s, and issue tokens with it: chmod 600 %s", *[arguments.key] * 2)
    claims = claims_for(
        [ScopeKey.from_file(path).scope_id for path in arguments.scope_key or ()]
        + [_scope_id(text) for text in arguments.scope_id or ()],
        [Role(name) for name in arguments.role],
        issuer=arguments.issuer,
        audience=arguments.audience,
        ttl=arguments.ttl,
        revalidate=arguments.reval,
        subject=arguments.subject,
    )
    token = issue(claims, key)
    await asyncio.to_thread(_replace, arguments.output, token)
    _tell(console, arguments.output, token, Message.parse(token), claims, verified=True)
    return ExitCode.OK


async def show(arguments: argparse.Namespace, console: Console) -> int:
    """Print what a token says; the exit code."""
    try:
        with arguments.token.open("rb") as file:
            token: bytes = file.read(MAX_TOKEN_SIZE + 1)
    except OSError as error:
        raise FileFault(f"token file {arguments.token}: {error.strerror}") from error
    try:
        if len(token) > MAX_TOKEN_SIZE:
            raise CoseError(f"more than {MAX_TOKEN_SIZE} octets")
        message = Message.parse(token)
        claims = Claims.decode(message.payload)
    except (CoseError, CatError) as error:
        console.error(f"{arguments.token}: not a token: {error}")
        return ExitCode.FAILED
    verified = message.verified_by(Key.from_file(arguments.key)) if arguments.key else None
    _tell(console, arguments.token, token, message, claims, verified=verified)
    if verified is False:
        console.error(f"{arguments.token}: {arguments.key} did not make this token")
        return ExitCode.FAILED
    return ExitCode.OK


def _tell(
    console: Console, path: Path, token: bytes, message: Message, claims: Claims, *, verified: bool | None
) -> None:
    """Print the claims: nothing from which the token could be made again."""
    algorithm = next(
        (known.name for known in Algorithm if known == message.algorithm), str(message.algorithm)
    )
    left = claims.expires - time.time()
    checked = {None: "signature not checked (no --key)", True: "signature good", False: "signature WRONG"}
    unknown = [printable(str(known)) for known in claims.restrictions]
    lines = [
        f"{path}: {len(token)} octets, {algorithm}, {checked[verified]}",
        f"  issuer    {printable(claims.issuer)}",
        f"  audience  {', '.join(map(printable, claims.audience)) or 'anyone'}",
        f"  subject   {printable(claims.subject or 'not named')}",
        f"  issued    {_date(claims.issued_at)}",
        f"  expires   {_date(claims.expires)}, "
        + (f"in {left:.0f} s" if left > 0 else f"EXPIRED {-left:.0f} s ago"),
        "  checked   "
        + (f"again every {claims.revalidate:g} s" if claims.revalidate else "only at the start"),
        *(f"  allows    {_scope_text(known)}" for known in claims.scopes),
    ]
    if claims.not_before is not None:
        lines.append(f"  not until {_date(claims.not_before)}")
    if claims.restrictions:
        lines.append(f"  unknown   claims {', '.join(unknown)}: relays refuse it")
    if claims.fault:
        lines.append(f"  faulty    {claims.fault}: relays refuse it")
    console.tell(
        "token",
        "\n".join(lines),
        file=str(path),
        octets=len(token),
        algorithm=algorithm,
        kid=None if message.kid is None else message.kid.hex(),
        verified=verified,
        issuer=claims.issuer,
        audience=claims.audience,
        subject=claims.subject,
        token_id=None if claims.token_id is None else claims.token_id.hex(),
        issued_at=claims.issued_at,
        not_before=claims.not_before,
        expires=claims.expires,
        expired=left <= 0,
        revalidate=claims.revalidate,
        scopes=[_scope_json(known) for known in claims.scopes],
        unknown_claims=unknown,
        fault=claims.fault or None,
    )


def _scope_text(scope: Scope) -> str:
    fields = [_match_text(known) for known in scope.namespace] + ([] if scope.exact_length else ["…"])
    name = "" if scope.name is None else f", tracks {_match_text(scope.name)}"
    return f"{', '.join(_action_names(scope))} on ({', '.join(fields)}){name}"


def _match_text(known: Match) -> str:
    text = f'"{known.value.decode()}"' if _is_plain(known.value) else known.value.hex()
    return {MatchKind.EXACT: text, MatchKind.PREFIX: f"{text}*", MatchKind.SUFFIX: f"*{text}"}[known.kind]


def _is_plain(value: bytes) -> bool:
    return value.isascii() and value.decode("ascii", "replace").isprintable()


def _scope_json(scope: Scope) -> dict[str, object]:
    return {
        "actions": _action_names(scope),
        "namespace": [{known.kind.name.lower(): known.value.hex()} for known in scope.namespace],
        "exact_length": scope.exact_length,
        "name": None if scope.name is None else {scope.name.kind.name.lower(): scope.name.value.hex()},
    }


def _action_names(scope: Scope) -> list[str]:
    names = {number: action.name for action, numbers in ACTION_NUMBERS.items() for number in numbers}
    return list(dict.fromkeys(names.get(number, f"action {number}") for number in sorted(scope.actions)))


def _date(seconds: float | None) -> str:
    if seconds is None:
        return "not told"
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"Unix time {seconds:g}"


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 10**9:
        raise ValueError
    return value


def _scope_id(text: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != SCOPE_ID_SIZE:
        raise InvalidValue(f'--scope-id takes {2 * SCOPE_ID_SIZE} hex digits, not "{printable(text, 40)}"')
    return value


def _write_new(path: Path, text: str, mode: int) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(text)
    except FileExistsError:
        raise FileFault(f"{path} exists already, and is not overwritten") from None


def _replace(path: Path, data: bytes) -> None:
    """Write a file for its owner alone, in one step: who reads meanwhile gets the old one or the new."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


_COMMANDS: Final = {"keygen": keygen, "issue": issue_token, "show": show}


def main() -> int:
    """The command."""
    arguments = parser().parse_args()
    console = Console(as_json=arguments.json)
    return run(lambda: _COMMANDS[arguments.command](arguments, console), console, verbose=0)


if __name__ == "__main__":
    sys.exit(main())
