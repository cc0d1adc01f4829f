"""What those see who watch a relay: metrics, status and logs, also when peers say hostile things."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import moqt
from moqt import Fill, FullTrackName, LocationFilter, RequestRejected, Track, Tracks
from moqt.authorization import AccessRequest, Action, Allowed, Decision, Denied
from moqt.quic.udp import dial
from moqt.uri import MoqtUri
from moqt.wire import (
    DRAFT_22,
    AliasType,
    Parameters,
    PublishNamespace,
    RequestError,
    RequestOk,
    SetupOptions,
    Subscribe,
    Token,
)
from tests.moqt.ends import Peer, collect, objects_of
from tests.relay.running import Running, running_relay
from tests.relay.test_pages import ask, get

if TYPE_CHECKING:
    from tests.conftest import Certificates

NAMESPACE = (b"n",)
NAME = FullTrackName(NAMESPACE, b"t")
WHOLE = Fill(filter=LocationFilter.absolute_start(0, 0))


async def page(relay: Running, path: str) -> tuple[int, str]:
    address = dict(relay.events)["watching"]["address"]
    status, _, body = await ask(int(address.rpartition(":")[2]), get(path))
    return int(status.split()[1]), body.decode()


async def metrics(relay: Running) -> dict[str, float]:
    """Every sample, by name and labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families((await page(relay, "/metrics"))[1]):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return {name.removeprefix("moqt_relay_"): value for name, value in found.items()}


async def status(relay: Running) -> Any:
    return json.loads((await page(relay, "/status"))[1])


@asynccontextmanager
async def watched(certificates: Certificates, **options: Any) -> AsyncIterator[Running]:
    async with running_relay(certificates, metrics_port=0, **options) as relay:
        yield relay


async def test_what_happened_is_counted(certificates: Certificates) -> None:
    tracks, track = Tracks(), Track(NAME, one_subgroup=True)
    tracks.add(track)
    tracks.announce(NAMESPACE)
    for group in range(3):
        track.append(group, 0, bytes(1000))
        track.end_group(group, 1)
    async with watched(certificates) as relay:
        before = await metrics(relay)
        assert before["sessions{side=downstream}"] == 0
        assert before["cache_limit_bytes"] == 2 << 30
        assert before["process_resident_memory_bytes"] > 0
        async with (
            moqt.connect(relay.uri, ca=certificates.ca, tracks=tracks) as publisher,
            moqt.connect(relay.uri, ca=certificates.ca) as session,
            await session.subscribe_namespace(NAMESPACE) as watch,
        ):
            await anext(watch)
            subscription = await session.subscribe(NAME, fill=WHOLE)
            for number in range(3):
                assert len(objects_of([await anext(subscription)])) == 1, number
            with pytest.raises(RequestRejected):
                await session.subscribe(FullTrackName((b"nobody",), b""))
            again = await session.fetch(NAME, filter=LocationFilter.absolute_start(0, 0))
            assert len(objects_of(await collect(again))) == 3
            now = await metrics(relay)
            expected = {
                "sessions{side=downstream}": 2,
                "sessions{side=upstream}": 0,
                "sessions_started_total": 2,
                "requests_total{type=PublishNamespace}": 1,
                "requests_total{type=SubscribeNamespace}": 1,
                "requests_total{type=Subscribe}": 2,
                "requests_total{type=Fetch}": 1,
                "requests_refused_total{code=DOES_NOT_EXIST,type=Subscribe}": 1,
                "requests_open": 3,
                "subscriptions": 1,
                "fetches": 0,
                "namespaces": 1,
                "tracks": 1,
                "upstream_subscriptions": 1,
                "upstream_subscriptions_accepted_total": 1,
                "cache_objects": 3,
                "cache_misses_total": 3,
                "cache_hits_total": 3,
                "connections_refused_total": 0,
                "backlog_bytes": 0,
            }
            assert {name: now[name] for name in expected} == expected
            assert now["cache_bytes"] > 3000
            assert now["received_bytes_total"] > 3000
            assert now["sent_bytes_total"] > 3000
            assert 0 < now["rtt_seconds_max"] < 10
            report = await status(relay)
            assert report["cache"]["objects"] == 3
            assert report["namespaces"] == ["n"]
            (known,) = report["tracks"]
            assert (known["name"], known["largest"], known["subscribers"]) == ("n--t", [2, 0], 1)
            assert len(known["publishers"]) == 1
            by_id = {entry["id"]: entry for entry in report["sessions"]}
            assert by_id[known["publishers"][0]]["announced"] == 1
            assert by_id[known["publishers"][0]]["received"] > 3000
            assert sum(entry["subscriptions"] for entry in report["sessions"]) == 1
            assert {entry["implementation"] for entry in report["sessions"]} == {"kvcs-moqt/0"}
            tracks.remove(NAME, moqt.DoneCode.TRACK_ENDED)
            await collect(subscription)
            await publisher.close()
        async with asyncio.timeout(10):
            while (last := await metrics(relay))["sessions{side=downstream}"]:
                pass
        assert last["sessions_ended_total{code=NO_ERROR}"] == 2
        assert last["publish_done_total{code=TRACK_ENDED}"] == 1
        assert last["requests_open"] == 0
        for name in now:
            if name.endswith("_total"):
                assert last[name] >= now[name]


class NothingToRead:
    """A policy that lets everybody in, and nobody subscribe."""

    async def decide(self, request: AccessRequest) -> Decision:
        allowed = request.action is not Action.SUBSCRIBE
        return Allowed() if allowed else Denied(reason="not here")


def nothing_to_read(_options: object) -> NothingToRead:
    return NothingToRead()


async def test_denials_are_counted(certificates: Certificates, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(f'load = "{__name__}:nothing_to_read"\n')
    async with (
        watched(certificates, policy=policy) as relay,
        moqt.connect(relay.uri, ca=certificates.ca) as session,
    ):
        with pytest.raises(RequestRejected):
            await session.subscribe(NAME)
        with pytest.raises(RequestRejected):
            await session.track_status(NAME)
        now = await metrics(relay)
        assert now["requests_refused_total{code=UNAUTHORIZED,type=Subscribe}"] == 1
        assert now["requests_refused_total{code=DOES_NOT_EXIST,type=TrackStatus}"] == 1


async def test_an_upstream_is_counted(certificates: Certificates) -> None:
    async with (
        watched(certificates) as upper,
        watched(certificates, upstream=(upper.uri,), ca=certificates.ca) as lower,
    ):
        await lower.until("connected")
        now = await metrics(lower)
        assert (now["sessions{side=upstream}"], now["upstream_connects_total"]) == (1, 1)
        assert [entry["upstream"] for entry in (await status(lower))["sessions"]] == [True]
        assert (await metrics(upper))["sessions{side=downstream}"] == 1


async def test_health(certificates: Certificates) -> None:
    """From SIGTERM on, nobody new is to be sent here."""
    async with watched(certificates, drain=600.0) as relay:
        assert await page(relay, "/healthz") == (200, "ok\n")
        async with moqt.connect(relay.uri, ca=certificates.ca) as session:
            await session.subscribe_namespace((b"x",))
            signal.raise_signal(signal.SIGTERM)
            await relay.until("draining")
            assert await page(relay, "/healthz") == (503, "draining\n")


SECRET = b"correct-horse-battery-staple"
EVIL = '\x1b[2J\r\nlevel=ERROR {"event": 1} \u202e"\\'


async def test_hostile_peers_and_what_is_told_of_them(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing that a peer says gets to a terminal, a log or a page unescaped; no token gets there at all."""
    caplog.set_level(logging.DEBUG)
    evil = EVIL.encode()
    token = Token(AliasType.USE_VALUE, None, 0, SECRET)
    registered = Token(AliasType.REGISTER, 5, 0, SECRET + b"2")
    async with watched(certificates) as relay:
        uri = MoqtUri.parse(relay.uri)
        connection = await dial(uri.host, uri.port, alpn=[DRAFT_22.alpn], ca=certificates.ca)
        peer = Peer(connection)  # type: ignore[arg-type]  # it uses what all connections have
        await peer.set_up(SetupOptions(path="/", authority="localhost", tokens=(token,), implementation=EVIL))
        announced = await peer.ask(PublishNamespace(peer.id(), (evil,), Parameters(tokens=(registered,))))
        assert isinstance(await announced.next(), RequestOk)
        name = FullTrackName((evil,), evil)
        async with moqt.connect(relay.uri, ca=certificates.ca, tokens=[token]) as session:
            asking = asyncio.ensure_future(session.subscribe(name))
            talk, request = await peer.request()
            assert isinstance(request, Subscribe)
            pages = [(await page(relay, path))[1] for path in ("/metrics", "/status")]
            await talk.say(RequestError(0x1, 0, EVIL, None), fin=True)
            with pytest.raises(RequestRejected):
                await asking
        connection.close(0x1234, EVIL)
        await connection.wait_closed()
        async with asyncio.timeout(10):
            while (await metrics(relay))["sessions{side=downstream}"]:
                pass
        ours = [record for record in caplog.records if record.name.startswith("moqt")]
        texts = [record.getMessage() for record in ours]
        assert any(text.startswith(f"{connection.id}: ") and "level=ERROR" in text for text in texts)
        for text in [*texts, *pages]:
            assert SECRET.decode() not in text
            assert SECRET.hex() not in text
        for text in texts:
            assert text.isprintable()
            assert "\u202e" not in text
        assert json.loads(pages[1])["sessions"]
        for text in pages:
            assert "\x1b" not in text
            assert "\u202e" not in text
        assert all("level=" not in line[:6] for text in pages for line in text.splitlines())
