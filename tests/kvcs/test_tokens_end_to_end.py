"""Tokens as their users use them: issuer, publisher, relays and subscribers in processes of their own."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvcs.token import Role, claims_for, issue
from moqt.cose import Algorithm, Key
from tests.kvcs.test_commands import BLOCK_TOKENS, BLOCKS, LAYERS, Command, Place, place, run, running, same

__all__ = ["place"]  # The fixture.

ISSUER, RELAY = "https://auth.example", "relay-1"


class Issuer:
    """Makes tokens with the command, and those that it would not make."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.key = place.folder / "issuer.pem"

    async def token(self, role: str, name: str = "token", *more: str, audience: str = RELAY) -> Path:
        """A token of our scope, for five minutes."""
        file = self.place.folder / name
        scope = () if "--scope-id" in more else ("--scope-key", str(self.place.folder / "scope.key"))
        arguments = ("--issuer", ISSUER, "--audience", audience, "--role", role, "--output", str(file))
        command = ["kvcs.token", "issue", "--key", str(self.key), *scope, *arguments, *more, "--json"]
        code, _, errors = await run(command)
        assert (code, errors) == (0, "")
        return file

    def expired(self) -> Path:
        """A token that is out of force since ten minutes."""
        claims = claims_for(
            [self.place.scope_key.scope_id],
            [Role.CONSUMER],
            issuer=ISSUER,
            audience=RELAY,
            ttl=300,
            now=time.time() - 900,
        )
        file = self.place.folder / "expired"
        file.write_bytes(issue(claims, Key.from_file(self.key)))
        return file

    def policy(self, *more: str) -> Path:
        file = self.place.folder / "policy.toml"
        file.write_text(
            "\n".join(
                [
                    'load = "kvcs.policy:from_config"',
                    f'audience = "{RELAY}"',
                    *more,
                    "[issuers]",
                    f'"{ISSUER}" = ["{self.key}.pub"]',
                ]
            )
        )
        return file


@pytest.fixture
def issuer(place: Place) -> Issuer:
    made = Issuer(place)
    key = Key.generate(Algorithm.EDDSA)
    made.key.write_text(key.text())
    made.key.chmod(0o600)
    Path(f"{made.key}.pub").write_text(key.public().text())
    return made


@asynccontextmanager
async def relaying(place: Place, *more: str) -> AsyncIterator[tuple[Command, str]]:
    """A relay with these options, and its address."""
    certificates = ("--cert", str(place.certificates.chain), "--key", str(place.certificates.key))
    ca = ("--ca", str(place.certificates.ca))
    command = ["moqt.relay", "--listen", "127.0.0.1:0", *certificates, *ca, "--json", *more]
    async with running(command) as relay:
        port = (await relay.until("listening"))["port"]
        yield relay, f"moqt://localhost:{port}"


@asynccontextmanager
async def publishing(place: Place, uri: str, *more: str) -> AsyncIterator[Command]:
    async with running(place.publish("--connect", uri, "--ca", str(place.certificates.ca), *more)) as command:
        yield command


def port_of(uri: str) -> int:
    return int(uri.rpartition(":")[2])


@pytest.mark.requirement("R10d")
async def test_publisher_relay_and_subscribers(
    place: Place, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A good token opens the scope. An expired one, one for another scope, one for another relay and none do
    not, though all is in the relay's cache: exit code 5, and what to do.
    """
    producer = await issuer.token("producer", "producer")
    async with (
        relaying(place, "--policy", str(issuer.policy())) as (_, uri),
        publishing(place, uri, "--token", str(producer)) as publisher,
    ):
        await publisher.until("announced")
        await publisher.until("complete")
        good = await issuer.token("consumer", "good")
        code, _, errors = await run(place.subscribe(port_of(uri), "--token", str(good)))
        assert (code, errors) == (0, "")
        assert same(place, range(LAYERS), BLOCKS * BLOCK_TOKENS)
        place.output.unlink()
        foreign = await issuer.token("consumer", "foreign", "--scope-id", "ab" * 16)
        elsewhere = await issuer.token("consumer", "elsewhere", audience="relay-2")
        for token, said in (
            (issuer.expired(), "a session: the token has expired"),
            (foreign, "SUBSCRIBE_NAMESPACE: no token allows this"),
            (elsewhere, "a session: the token is not for this relay"),
        ):
            code, events, errors = await run(place.subscribe(port_of(uri), "--token", str(token)))
            assert code == 5, errors
            assert f"the peer does not allow {said}" in errors
            assert f"The token in {token}" in errors
            assert [event["event"] for event in events] == ["error"]
        code, _, errors = await run(place.subscribe(port_of(uri)))
        assert (code, "no token allows this. No token was given" in errors) == (5, True), errors
        monkeypatch.setenv("KVCS_TOKEN", str(foreign))
        code, _, errors = await run(place.subscribe(port_of(uri)))
        assert (code, f"no token allows this. The token in {foreign}" in errors) == (5, True), errors
        assert not place.output.exists()


@pytest.mark.requirement("R10d")
async def test_a_publisher_without_the_right(place: Place, issuer: Issuer) -> None:
    consumer = await issuer.token("consumer")
    elsewhere = await issuer.token("producer", "elsewhere", audience="relay-2")
    async with relaying(place, "--policy", str(issuer.policy())) as (_, uri):
        for options, said in (
            (("--token", str(consumer)), f"PUBLISH_NAMESPACE: no token allows this. The token in {consumer}"),
            (("--token", str(elsewhere)), "a session: the token is not for this relay"),
            ((), "PUBLISH_NAMESPACE: no token allows this. No token was given"),
        ):
            async with publishing(place, uri, *options) as publisher:
                code, _, errors = await publisher.end()
            assert code == 5
            assert said in errors


async def test_a_chain_of_relays_each_with_a_policy(place: Place, issuer: Issuer) -> None:
    """The lower relay shows its own token; without one its subscribers find nothing, whatever theirs are."""
    policy = ("--policy", str(issuer.policy()))
    producer, relay = await issuer.token("producer", "producer"), await issuer.token("relay", "relay")
    consumer = ("--token", str(await issuer.token("consumer", "consumer")))
    async with (
        relaying(place, *policy) as (_, upper),
        relaying(place, *policy, "--upstream", upper, "--token", str(relay)) as (lower, below),
        relaying(place, *policy, "--upstream", upper) as (bare, without),
        publishing(place, upper, "--token", str(producer)) as publisher,
    ):
        await publisher.until("announced")
        await lower.until("connected")
        await bare.until("connected")
        code, _, errors = await run(place.subscribe(port_of(below), *consumer))
        assert (code, errors) == (0, "")
        assert same(place, range(LAYERS), BLOCKS * BLOCK_TOKENS)
        code, _, errors = await run(place.subscribe(port_of(without), *consumer))
        assert code == 4, errors


async def test_with_a_policy_any_address_may_be_listened_on(place: Place, issuer: Issuer) -> None:
    """What fails is to bind it: it is nobody's (RFC 5737)."""
    files = ("--cert", str(place.certificates.chain), "--key", str(place.certificates.key))
    relay = ["moqt.relay", "--listen", "192.0.2.1:4433", *files]
    code, _, errors = await run(relay)
    assert (code, "does not listen on 192.0.2.1: give it a --policy" in errors) == (2, True)
    code, _, errors = await run([*relay, "--policy", str(issuer.policy())])
    assert (code, "192.0.2.1" in errors) == (1, True), errors
