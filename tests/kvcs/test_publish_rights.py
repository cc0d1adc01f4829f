"""What `python -m kvcs.publish` makes of a relay that denies it something, before and after it was let in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import moqt
from kvcs.console import Console
from kvcs.publish import parser, publish
from moqt import credentials
from moqt.authorization import AccessRequest, Action, Allowed, Decision, Denied
from moqt.credentials import TokenFile
from moqt.errors import RequestCode, RequestRejected, SessionClosed
from moqt.names import TrackNamespace
from tests.kvcs.test_commands import Place, place

__all__ = ["place"]  # The fixture.


class Door:
    """A policy that lets in who shows the `key` of the moment, and looks again twice a second."""

    def __init__(self) -> None:
        self.key = b"first"
        self.at_setup = False
        """Whether it looks at SETUP too."""
        self._asked: asyncio.Queue[AccessRequest] = asyncio.Queue()

    async def until(self, action: Action) -> AccessRequest:
        """The next question about this."""
        async with asyncio.timeout(30):
            while (asked := await self._asked.get()).action is not action:
                pass
        return asked

    async def decide(self, request: AccessRequest) -> Decision:
        self._asked.put_nowait(request)
        if request.action is Action.REQUEST_UPDATE:
            self.key = request.tokens[0][1]  # That of a renewal is the key from now on.
        if request.action is Action.SETUP and not self.at_setup:
            return Allowed()
        # The last that was shown counts, as it would with tokens that end.
        shown = [value for _, value in (request.tokens or request.held_tokens)[:1]]
        if shown == [self.key]:
            return Allowed(revalidate_after=0.5)
        return Denied(RequestCode.EXPIRED_AUTH_TOKEN, "another key now")


class Told(Console):
    """Notes what is told."""

    def __init__(self) -> None:
        super().__init__(as_json=True)
        self.events: asyncio.Queue[tuple[str, str, dict[str, Any]]] = asyncio.Queue()

    def tell(self, event: str, text: str, **details: object) -> None:
        self.events.put_nowait((event, text, details))

    async def until(self, event: str) -> str:
        """The text of the next event of this name."""
        async with asyncio.timeout(30):
            while (found := await self.events.get())[0] != event:
                pass
        return found[1]


class Relay(moqt.Tracks):
    """What the relay knows of namespaces."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[TrackNamespace] = []

    def offered(self, peer: object, namespace: TrackNamespace, present: bool) -> None:
        (self.known.append if present else self.known.remove)(namespace)


@asynccontextmanager
async def running(
    place: Place, door: Door, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[asyncio.Task[int], Told, Relay, moqt.Server]]:
    """The command, and a relay with the policy. The token file holds b"first"."""
    monkeypatch.setattr(credentials, "LOOK_AGAIN", 0.05)
    monkeypatch.setattr("kvcs.publish.BACK_OFF", (0.05,))
    token, told, relay = place.folder / "token", Told(), Relay()
    await asyncio.to_thread(token.write_bytes, b"first")
    chain, key = place.certificates.chain, place.certificates.key
    async with moqt.serve("localhost", 0, certificate=chain, key=key, tracks=relay, policy=door) as server:
        uri = f"moqt://localhost:{server.port}/"
        ca = ("--ca", str(place.certificates.ca))
        arguments = parser().parse_args([*place.publish("--connect", uri, *ca)[1:]])
        task = asyncio.create_task(publish(arguments, TokenFile(token), told))
        try:
            yield task, told, relay, server
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("at_setup", [True, False])
async def test_denied_from_the_start_it_ends(
    place: Place, monkeypatch: pytest.MonkeyPatch, at_setup: bool
) -> None:
    """With what its exit code is made of, which is told then, and not before as well."""
    door = Door()
    door.key, door.at_setup = b"another", at_setup
    async with running(place, door, monkeypatch) as (task, told, relay, _):
        with pytest.raises(SessionClosed if at_setup else RequestRejected) as caught:
            await asyncio.wait_for(task, 30)
        assert TokenFile(Path("t")).advice(caught.value) is not None
        assert "refused" not in [told.events.get_nowait()[0] for _ in range(told.events.qsize())]
        assert relay.known == []


async def test_denied_later_it_tells_so_and_goes_on_with_the_next_token(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = Door()
    async with running(place, door, monkeypatch) as (task, told, relay, server):
        await told.until("announced")
        assert len(relay.known) == 1
        door.key = b"second"
        text = await told.until("refused")
        assert "this any longer" in text
        assert "put a fresh one there" in text
        assert relay.known == []
        await asyncio.to_thread((place.folder / "token").write_bytes, b"second")
        await told.until("announced")
        assert len(relay.known) == 1
        # A session that is lost, and denied while the relay does not know the token: the same.
        door.key, door.at_setup = b"third", True
        (session,) = server.sessions
        await session.close()
        assert "NO_ERROR" in await told.until("lost")
        assert "a session: another key now. The token in" in await told.until("lost")
        await asyncio.to_thread((place.folder / "token").write_bytes, b"third")
        await told.until("announced")
        assert len(relay.known) == 1
        assert not task.done()


async def test_a_token_that_is_renewed_in_time_is_noticed_by_nobody(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The announcement stays, though the old token is no good any more."""
    door = Door()
    async with running(place, door, monkeypatch) as (task, told, relay, _):
        await told.until("complete")
        await asyncio.to_thread((place.folder / "token").write_bytes, b"second")
        update = await door.until(Action.REQUEST_UPDATE)
        assert (update.updates, update.tokens) == (Action.PUBLISH_NAMESPACE, ((1, b"second"),))
        for _ in range(2):
            look = await door.until(Action.PUBLISH_NAMESPACE)
            assert look.held_tokens[0] == (1, b"second")
        assert len(relay.known) == 1
        assert told.events.empty()
        assert not task.done()
