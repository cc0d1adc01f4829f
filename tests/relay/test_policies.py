"""The policy file of a relay (`--policy`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcs.policy import KvcsPolicy
from moqt.authorization import AccessRequest, Action, AllowAll, Policy
from moqt.cat import CatPolicy, Claims, Scope, issue
from moqt.cose import Algorithm, Key
from moqt.errors import UsageError
from moqt.relay.policies import load_policy

KEY = Key.generate(Algorithm.EDDSA)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "issuer.pub").write_text(KEY.public().text())
    return tmp_path / "policy.toml"


def made(options: dict[str, Any]) -> Policy:
    assert options == {"one": 1, "table": {"two": "x"}}
    return AllowAll()


def test_the_function_that_is_named_gets_the_rest(file: Path) -> None:
    file.write_text('load = "tests.relay.test_policies:made"\none = 1\n[table]\ntwo = "x"\n')
    assert type(load_policy(file)).__name__ == "AllowAll"


@pytest.mark.parametrize(("name", "kind"), [("kvcs.policy", KvcsPolicy), ("moqt.cat", CatPolicy)])
def test_those_that_are_there(file: Path, name: str, kind: type) -> None:
    issuers = f'[issuers]\n"me" = ["{file.parent}/issuer.pub"]\n'
    file.write_text(f'load = "{name}:from_config"\naudience = "relay-1"\n{issuers}')
    assert isinstance(load_policy(file), kind)


@pytest.fixture
def by_tokens(file: Path) -> Policy:
    issuers = f'[issuers]\n"me" = ["{file.parent}/issuer.pub"]\n'
    file.write_text(f'load = "moqt.cat:from_config"\naudience = "relay-1"\n{issuers}')
    return load_policy(file)


async def test_tokens_about_any_namespaces(by_tokens: Policy) -> None:
    """For relays of those who are not KVCS."""
    scope = Scope.of([Action.SUBSCRIBE], (b"room", b"1"))
    token = issue(Claims(issuer="me", audience=("relay-1",), expires=1 << 40, scopes=(scope,)), KEY)
    for namespace, allowed in (((b"room", b"1", b"x"), True), ((b"room", b"2"), False)):
        request = AccessRequest(action=Action.SUBSCRIBE, namespace=namespace, name=b"v", tokens=((1, token),))
        assert (type(await by_tokens.decide(request)).__name__ == "Allowed") is allowed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("load = ", "is not TOML"),
        ("", '"load" must name what makes the policy, such as "kvcs.policy:from_config"'),
        ("load = 7", '"load" must name'),
        ('load = "kvcs.policy"', '"load" must name'),
        ('load = ":from_config"', '"load" must name'),
        ('load = "no.such.module:x"', "no.such.module:x, which is not there: No module named 'no'"),
        ('load = "kvcs.policy:nothing"', "kvcs.policy:nothing, which is not there"),
        ('load = "kvcs.policy:from_config"\naudience = "a"', '"issuers" must be a table'),
        ('load = "moqt.cat:from_config"\naudience = "a"\n[issuers]\n"me" = ["/no/such"]', "/no/such"),
    ],
)
def test_what_is_wrong_is_told_with_the_file(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_policy(file)
    assert str(caught.value).startswith(f"--policy {file}")
    assert says in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_policy(tmp_path / "none.toml")
