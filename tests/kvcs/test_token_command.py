"""`python -m kvcs.token`: keys, tokens, and what is printed of them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcs import token as command
from kvcs.errors import InvalidValue
from kvcs.identity import ScopeKey
from kvcs.token import Role, claims_for, issue
from moqt import cat
from moqt.authorization import Action
from moqt.cat import Claims, Match, MatchKind, Scope, Verifier
from moqt.cbor import encode
from moqt.cose import Algorithm, Key, seal

ROOT = Path(__file__).parents[2]
ISSUER, RELAY = "https://auth.example", "relay-1"
SCOPE_ID = bytes(range(16))
ISSUE = ("--issuer", ISSUER, "--audience", RELAY, "--scope-id", SCOPE_ID.hex(), "--role", "consumer")

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs the command in an empty directory: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["token", *arguments])
        try:
            code = command.main()
        except SystemExit as exit:  # argparse
            code = exit.code if isinstance(exit.code, int) else -1
        out, err = capsys.readouterr()
        return code, out, err

    return run


def made(run: Command, name: str = "issuer.pem", *options: str) -> Path:
    code, _, err = run("keygen", "--output", name, *options)
    assert (code, err) == (0, "")
    return Path(name)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("algorithm", ["EdDSA", "ES256", "HS256"])
def test_from_key_to_token(algorithm: str, run: Command) -> None:
    key = made(run, "issuer.pem", "--algorithm", algorithm)
    before = time.time()
    code, out, err = run("issue", "--key", str(key), *ISSUE, "--output", "consumer.token")
    assert (code, err) == (0, "")
    token = Path("consumer.token")
    public = key if algorithm == "HS256" else Path("issuer.pem.pub")
    claims = Verifier({ISSUER: [Key.from_file(public)]}, audience=RELAY).verify(
        token.read_bytes(), time.time()
    )
    assert claims.scopes == (Scope(frozenset({1, 3, 4, 5, 7, 8}), (Match(b"kvcs-1"), Match(SCOPE_ID))),)
    assert claims.revalidate == 30
    assert claims.issued_at is not None
    assert before - 1 <= claims.issued_at <= time.time()
    assert claims.expires == claims.issued_at + 300
    assert claims.token_id is not None
    assert len(claims.token_id) == 16
    code, shown, err = run("show", str(token), "--key", str(public))
    assert (code, err) == (0, "")
    for part in (
        algorithm.upper(),
        "signature good",
        ISSUER,
        RELAY,
        SCOPE_ID.hex(),
        "SUBSCRIBE",
        "every 30 s",
    ):
        assert part in shown
        assert part in out


def test_secrets_are_in_files_for_their_owner_only_and_nowhere_else(run: Command) -> None:
    old = os.umask(0)
    try:
        printed = [
            run("keygen", "--output", "issuer.pem"),
            run("keygen", "--algorithm", "hs256", "--output", "mac"),
        ]
        printed += [
            run("issue", "--key", name, *ISSUE, "--output", f"{name}.token") for name in ("issuer.pem", "mac")
        ]
        printed += [
            run("show", f"{name}.token", *rest)
            for name in ("issuer.pem", "mac")
            for rest in ((), ("--json",))
        ]
    finally:
        os.umask(old)
    assert {path.name: mode(path) for path in Path().iterdir()} == {
        "issuer.pem": 0o600,
        "issuer.pem.pub": 0o644,
        "issuer.pem.token": 0o600,
        "mac": 0o600,
        "mac.token": 0o600,
    }
    text = "".join(out + err for _, out, err in printed)
    for name in ("issuer.pem", "mac"):
        token = Path(f"{name}.token").read_bytes()
        for secret in (token, token[-64:], token[-32:]):
            assert secret.hex() not in text
        body = Path(name).read_text().strip().splitlines()
        assert (body[1] if len(body) > 1 else body[0]) not in text


def test_a_token_is_replaced_and_a_key_is_not(run: Command) -> None:
    key = made(run)
    content = key.read_bytes()
    for _ in range(2):
        assert run("issue", "--key", "issuer.pem", *ISSUE)[0] == 0
    assert mode(Path("token.cwt")) == 0o600
    code, out, err = run("keygen", "--output", "issuer.pem")
    assert (code, out) == (2, "")
    assert "exists already, and is not overwritten" in err
    assert key.read_bytes() == content
    Path("issuer.pem.pub").unlink()
    assert run("keygen", "--output", "issuer.pem")[0] == 2
    assert key.read_bytes() == content
    assert not Path("issuer.pem.pub").exists()


def test_scopes_from_keys_several_of_them_and_several_roles(run: Command) -> None:
    made(run)
    keys = [ScopeKey(bytes([number]) * 32) for number in (1, 2)]
    for number in (1, 2):
        Path(f"scope{number}.key").write_text(f"{number:02x}" * 32)
    arguments = ["--issuer", ISSUER, "--audience", RELAY, "--audience", "relay-2", "--subject", "node-7"]
    for number in (1, 2):
        arguments += ["--scope-key", f"scope{number}.key"]
    arguments += ["--role", "producer", "--role", "relay", "--ttl", "60", "--reval", "0"]
    code, out, _ = run("issue", "--key", "issuer.pem", *arguments, "--json")
    assert code == 0
    event = json.loads(out)
    assert event["event"] == "token"
    assert event["file"] == "token.cwt"
    assert event["verified"] is True
    assert event["audience"] == [RELAY, "relay-2"]
    assert event["subject"] == "node-7"
    assert event["expires"] - event["issued_at"] == 60
    assert event["revalidate"] == 0
    assert event["expired"] is False
    assert event["algorithm"] == "EDDSA"
    assert event["kid"] == (Key.from_file("issuer.pem").thumbprint or b"").hex()
    actions = [action.name for action in Action if action is not Action.SUBSCRIBE_TRACKS]
    assert event["scopes"] == [
        {
            "actions": actions,
            "namespace": [{"exact": b"kvcs-1".hex()}, {"exact": key.scope_id.hex()}],
            "exact_length": False,
            "name": None,
        }
        for key in keys
    ]
    for key in keys:
        assert key.scope_id.hex() in run("show", "token.cwt")[1]


def test_a_key_that_others_can_read_is_told(run: Command, caplog: pytest.LogCaptureFixture) -> None:
    made(run)
    assert run("issue", "--key", "issuer.pem", *ISSUE)[0] == 0
    assert caplog.text == ""
    Path("issuer.pem").chmod(0o640)
    assert run("issue", "--key", "issuer.pem", *ISSUE)[0] == 0
    assert "chmod 600 issuer.pem" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "arguments are required"),
        (("issue", *ISSUE), "--key"),
        (("issue", "--key", "issuer.pem", *ISSUE[2:]), "--issuer"),
        (("issue", "--key", "issuer.pem", *ISSUE[:2], *ISSUE[4:]), "--audience"),
        (("issue", "--key", "issuer.pem", *ISSUE[:4], *ISSUE[6:]), "--scope-id"),
        (("issue", "--key", "issuer.pem", *ISSUE[:6]), "--role"),
        (("issue", "--key", "issuer.pem", *ISSUE, "--scope-key", "scope.key"), "not allowed with"),
        (("issue", "--key", "issuer.pem", *ISSUE, "--role", "admin"), "invalid choice: 'admin'"),
        (("issue", "--key", "issuer.pem", *ISSUE, "--scope-id", "00"), "32 hex digits"),
        (("issue", "--key", "issuer.pem", *ISSUE, "--scope-id", "zz" * 16), "32 hex digits"),
        (("issue", "--key", "issuer.pem", *ISSUE, "--ttl", "0"), "more than 0"),
        (("issue", "--key", "issuer.pem", *ISSUE, "--ttl", "-5"), "invalid seconds value"),
        (("issue", "--key", "issuer.pem", *ISSUE, "--ttl", "nan"), "invalid seconds value"),
        (("issue", "--key", "issuer.pem", *ISSUE, "--ttl", "1e10"), "invalid seconds value"),
        (("issue", "--key", "issuer.pem", *ISSUE, "--reval", "0.5"), "at least 1"),
        (("issue", "--key", "nowhere.pem", *ISSUE), "nowhere.pem: No such file"),
        (("issue", "--key", "issuer.pem.pub", *ISSUE), "public key can't sign"),
        (
            ("issue", "--key", "issuer.pem", *ISSUE[:4], *ISSUE[6:], "--scope-key", "issuer.pem"),
            "64 hex digits",
        ),
        (("issue", "--key", "issuer.pem", *ISSUE, "--subject", "x" * 5000), "4096 are taken"),
        (("show", "nowhere.token"), "nowhere.token: No such file"),
        (("show", "good.token", "--key", "nowhere.pem"), "nowhere.pem: No such file"),
        (("keygen", "--output", "new.pem", "--algorithm", "RS256"), "invalid choice"),
    ],
)
def test_bad_usage(arguments: tuple[str, ...], complaint: str, run: Command) -> None:
    made(run)
    assert run("issue", "--key", "issuer.pem", *ISSUE, "--output", "good.token")[0] == 0
    files = sorted(Path().iterdir())
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert complaint in err
    assert sorted(Path().iterdir()) == files


def test_a_directory_that_cannot_be_written(run: Command) -> None:
    made(run)
    code, out, err = run("issue", "--key", "issuer.pem", *ISSUE, "--output", "nowhere/token.cwt")
    assert (code, out) == (1, "")
    assert "nowhere" in err


@pytest.mark.parametrize(
    "content", [b"", b"rubbish", b"\xd2\x84", bytes(4097), b"\xd2\x84\x43\xa1\x01\x27\xa0\x41\xf6\x40"]
)
def test_what_is_no_token(content: bytes, run: Command) -> None:
    Path("some.token").write_bytes(content)
    code, out, err = run("show", "some.token")
    assert (code, out) == (1, "")
    assert err.startswith("token: some.token: not a token: ")
    code, out, err = run("show", "some.token", "--json")
    assert code == 1
    assert json.loads(out)["event"] == "error"


def test_a_token_of_another_key(run: Command) -> None:
    made(run)
    made(run, "other.pem")
    assert run("issue", "--key", "issuer.pem", *ISSUE)[0] == 0
    code, out, err = run("show", "token.cwt", "--key", "other.pem.pub")
    assert code == 1
    assert "signature WRONG" in out
    assert "other.pem.pub did not make this token" in err


def test_show_tells_what_would_be_refused_and_escapes_it(run: Command) -> None:
    members: Any = {
        1: "issuer\x1b[2J",
        4: 1_700_000_000,
        5: 1e300,
        311: 1,
        "\x1b[2J": 1,
        327: (((1, 42), (b"kvcs-1", (1, b"\xff"), None), (2, b".s0")),),
    }
    Path("odd.token").write_bytes(seal(encode(members), Key.generate(Algorithm.ES256)))
    code, out, err = run("show", "odd.token")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    for part in (
        "ES256, signature not checked",
        "issuer\\x1b[2J",
        "anyone",
        "2023-11-14 22:13:20 UTC, EXPIRED",
        "only at the start",
        "not until Unix time 1e+300",
        "claims \\x1b[2J, 311: relays refuse it",
        'SETUP, action 42 on ("kvcs-1", ff*), tracks *".s0"',
    ):
        assert part in out, part
    event = json.loads(run("show", "odd.token", "--json")[1])
    assert (event["verified"], event["expired"]) == (None, True)
    assert event["scopes"][0]["namespace"] == [{"exact": b"kvcs-1".hex()}, {"prefix": "ff"}]
    assert event["scopes"][0]["exact_length"] is True
    members[327] = 7
    Path("odd.token").write_bytes(seal(encode(members), Key.generate(Algorithm.ES256)))
    assert "faulty    the moqt claim has no scopes: relays refuse it" in run("show", "odd.token")[1]


def test_the_help_teaches(run: Command) -> None:
    for arguments in ((), ("keygen",), ("issue",), ("show",)):
        code, out, _ = run(*arguments, "--help")
        assert code == 0
        assert "exit codes:" in out
    out = run("--help")[1]
    for line in ("kvcs.token keygen --output", "kvcs.token issue --key", "kvcs.token show"):
        assert line in out


def test_as_a_process(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvcs.token", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )

    assert run("keygen", "--output", "issuer.pem").returncode == 0
    assert run("issue", "--key", "issuer.pem", *ISSUE).returncode == 0
    shown = run("show", "token.cwt", "--key", "issuer.pem.pub")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "signature good" in shown.stdout
    assert run("show", "issuer.pem").returncode == 1
    assert run("issue").returncode == 2


# The library.


def test_the_issuer_refuses_scopes_that_are_wider_than_a_scope() -> None:
    key = Key.generate(Algorithm.EDDSA)
    for scopes in (
        (),
        (Scope(frozenset({4})),),
        (Scope(frozenset({4}), (Match(b"kvcs-1"),)),),
        (Scope(frozenset({4}), (Match(b"kvcs-1"), Match(SCOPE_ID, MatchKind.PREFIX))),),
        (Scope(frozenset({4}), (Match(b"kvcs-1"), Match(b"", MatchKind.SUFFIX))),),
        (Scope(frozenset({4}), (Match(b"kvcs", MatchKind.PREFIX), Match(SCOPE_ID))),),
        (Scope(frozenset({4}), (Match(b"kvcs-2"), Match(SCOPE_ID))),),
        (Scope(frozenset({4}), (Match(b"kvcs-1"), Match(SCOPE_ID[1:]))),),
        (Scope(frozenset({4}), (Match(b"kvcs-1"), Match(SCOPE_ID))), Scope(frozenset({4}))),
    ):
        with pytest.raises(InvalidValue, match="one Scope ID exactly"):
            issue(Claims(issuer=ISSUER, expires=1, scopes=scopes), key)


def test_claims_need_all_their_parts() -> None:
    for scope_ids, roles, audience in (
        ([], [Role.RELAY], RELAY),
        ([SCOPE_ID], [], RELAY),
        ([SCOPE_ID], [Role.RELAY], []),
    ):
        with pytest.raises(InvalidValue, match="a scope, a role and an audience"):
            claims_for(scope_ids, roles, issuer=ISSUER, audience=audience)
    with pytest.raises(ValueError, match="16 octets"):
        claims_for([b"short"], [Role.RELAY], issuer=ISSUER, audience=RELAY)


def test_a_claims_set_is_never_the_same_twice() -> None:
    one, two = (
        claims_for([SCOPE_ID], [Role.RELAY], issuer=ISSUER, audience=RELAY, now=5.7) for _ in range(2)
    )
    assert one.token_id != two.token_id
    assert (one.issued_at, one.expires, one.audience) == (5, 305, (RELAY,))
    assert (
        claims_for([SCOPE_ID], [Role.RELAY], issuer=ISSUER, audience=["a", "b"], ttl=0.5, now=5).expires == 6
    )
    assert cat.CAT == 1
