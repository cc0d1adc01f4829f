"""The commands as their users run them: separate processes, real files, the loopback network."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import moqt
from kvcs import Descriptor, PublicationName, ScopeKey, Subscriber, files
from kvcs.assembly import Missing
from kvcs.console import counted, describe_missing, missing_blocks
from kvcs.layout import Geometry
from kvcs.publish import parser as publish_parser
from kvcs.subscribe import parser as subscribe_parser
from moqt.authorization import AccessRequest, Allowed, Decision

if TYPE_CHECKING:
    from tests.conftest import Certificates

ROOT = Path(__file__).resolve().parents[2]
LAYERS, TOKENS, BLOCK_TOKENS = 12, 70, 16
BLOCKS = TOKENS // BLOCK_TOKENS
DEADLINE = 60.0


@dataclass(frozen=True)
class Place:
    """A folder with all that the commands need."""

    folder: Path
    certificates: Certificates
    descriptor: Descriptor
    scope_key: ScopeKey

    @property
    def cache(self) -> Path:
        return self.folder / "cache.safetensors"

    @property
    def output(self) -> Path:
        return self.folder / "received.safetensors"

    def publish(self, *more: str) -> list[str]:
        return [
            "kvcs.publish",
            str(self.cache),
            "--scope-key",
            str(self.folder / "scope.key"),
            "--json",
            *more,
        ]

    def listen(self, *more: str) -> list[str]:
        return self.publish(
            *("--listen", "localhost:0", "--cert", str(self.certificates.chain)),
            *("--key", str(self.certificates.key), *more),
        )

    def subscribe(
        self, port: int, *more: str, ca: Path | None = None, tokens: str = "tokens.json"
    ) -> list[str]:
        return [
            *("kvcs.subscribe", f"moqt://localhost:{port}/", "--ca", str(ca or self.certificates.ca)),
            *("--scope-key", str(self.folder / "scope.key"), "--tokens", str(self.folder / tokens)),
            *("--descriptor", str(self.folder / "model.json"), "--output", str(self.output), "--json", *more),
        ]


@pytest.fixture
def place(tmp_path: Path, certificates: Certificates) -> Place:
    vectors = json.loads((ROOT / "tests" / "vectors" / "kvsp-lp1.json").read_text())
    members = {**vectors["descriptor"], "layers": LAYERS, "block_tokens": BLOCK_TOKENS}
    descriptor = Descriptor.parse(members)
    geometry = Geometry.of(descriptor)
    random = np.random.default_rng(1)
    shape = (TOKENS, geometry.kv_heads, geometry.head_dim)
    layers = {
        layer: tuple(random.integers(0, 2**16, shape, np.uint16).view(geometry.dtype) for _ in "kv")
        for layer in range(LAYERS)
    }
    tokens = random.integers(0, 50_000, TOKENS)
    files.write(tmp_path / "cache.safetensors", files.CacheFile(descriptor, tokens, layers))  # type: ignore[arg-type]  # tuples of two
    (tmp_path / "tokens.json").write_text(json.dumps(tokens.tolist()))
    (tmp_path / "other.json").write_text(json.dumps(list(range(TOKENS))))
    (tmp_path / "model.json").write_text(json.dumps(members))
    (tmp_path / "scope.key").write_text("0f" * 32)
    return Place(tmp_path, certificates, descriptor, ScopeKey(bytes.fromhex("0f" * 32)))


class Command:
    """A running command, and the JSON objects that it prints."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []

    async def until(self, event: str, **details: object) -> dict[str, Any]:
        """Read on until this event comes."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            while line := await self.process.stdout.readline():
                self.events.append(json.loads(line))
                if self.events[-1]["event"] == event and details.items() <= self.events[-1].items():
                    return self.events[-1]
        raise AssertionError(f"{event} never came: {self.events}, {await self.errors()}")

    async def errors(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def end(self) -> tuple[int, list[dict[str, Any]], str]:
        """Exit code, all events, and what was written to standard error."""
        async with asyncio.timeout(DEADLINE):
            out, err = await self.process.communicate()
        self.events += [json.loads(line) for line in out.splitlines()]
        assert self.process.returncode is not None
        return self.process.returncode, self.events, err.decode()


@contextlib.asynccontextmanager
async def running(arguments: list[str]) -> AsyncIterator[Command]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, stdout=PIPE, stderr=PIPE, cwd=ROOT
    )
    try:
        yield Command(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def run(arguments: list[str]) -> tuple[int, list[dict[str, Any]], str]:
    async with running(arguments) as command:
        return await command.end()


def same(place: Place, layers: range, tokens: int) -> bool:
    sent, got = files.read(place.cache), files.read(place.output)
    return (
        sorted(got.layers) == list(layers)
        and list(got.tokens) == list(sent.tokens[:tokens])
        and all(
            np.array_equal(sent.layers[i][part][:tokens].view(np.uint16), got.layers[i][part].view(np.uint16))
            for i in layers
            for part in (0, 1)
        )
    )


async def test_whole_cache_then_told_to_go(place: Place) -> None:
    async with running(place.listen()) as publisher:
        port = (await publisher.until("listening"))["port"]
        publication = await publisher.until("publication")
        assert (publication["blocks"], publication["tail_tokens"]) == (BLOCKS, TOKENS % BLOCK_TOKENS)
        code, events, errors = await run(place.subscribe(port))
        assert (code, errors) == (0, "")
        assert [event["layer"] for event in events if event["event"] == "layer"] == list(range(LAYERS))
        assert same(place, range(LAYERS), BLOCKS * BLOCK_TOKENS)
        publisher.process.send_signal(signal.SIGTERM)
        code, events, errors = await publisher.end()
        assert (code, errors) == (0, "")
        assert events[-1] == {
            "event": "end",
            "reason": "SIGTERM",
            "delivered": True,
            "complete": True,
            "published": LAYERS,
        }


async def test_layer_range_and_first_blocks(place: Place) -> None:
    async with running(place.listen("--codec", "x-shuffle-zlib")) as publisher:
        port = (await publisher.until("listening"))["port"]
        await publisher.until("complete")
        code, _, _ = await run(place.subscribe(port, "--layers", "3-5", "--blocks", "2"))
        assert code == 0
        assert same(place, range(3, 6), 2 * BLOCK_TOKENS)


async def test_publisher_killed_after_some_layers(place: Place) -> None:
    async with running(place.listen("--layer-interval", "0.3")) as publisher:
        port = (await publisher.until("listening"))["port"]
        async with running(place.subscribe(port, "--patience", "2")) as subscriber:
            await subscriber.until("layer", layer=2)
            publisher.process.kill()
            code, events, errors = await subscriber.end()
    layers = [event["layer"] for event in events if event["event"] == "layer"]
    assert code == 3
    assert layers == list(range(len(layers)))
    assert 3 <= len(layers) < LAYERS
    # Exactly the layers that were not handed out may be missing, each with all blocks that did not come.
    error = next(event for event in events if event["event"] == "error")
    assert [one["layer"] for one in error["missing"]] == list(range(len(layers), LAYERS))
    assert error["missing"][-1]["blocks"] == [[0, BLOCKS - 1]]
    assert error["text"].startswith("incomplete: ")
    assert "\n" not in error["text"]
    assert f"layer {LAYERS - 1}: blocks 0-{BLOCKS - 1}" in errors
    assert not place.output.exists()
    assert not list(place.folder.glob(".*tmp"))


async def test_partial_keeps_what_is_usable(place: Place) -> None:
    async with running(place.listen("--layer-interval", "0.3")) as publisher:
        port = (await publisher.until("listening"))["port"]
        async with running(place.subscribe(port, "--patience", "2", "--partial")) as subscriber:
            await subscriber.until("layer", layer=1)
            publisher.process.kill()
            code, events, _ = await subscriber.end()
    assert code == 3
    written = next(event for event in events if event["event"] == "written")["layers"]
    assert same(place, range(len(written)), BLOCKS * BLOCK_TOKENS)


async def test_subscriber_killed_and_started_again_gets_everything(place: Place) -> None:
    async with running(place.listen("--layer-interval", "0.1")) as publisher:
        port = (await publisher.until("listening"))["port"]
        async with running(place.subscribe(port)) as subscriber:
            await subscriber.until("layer", layer=1)
            subscriber.process.kill()
            await subscriber.process.wait()
        code, _, _ = await run(place.subscribe(port))
        assert code == 0
        assert same(place, range(LAYERS), BLOCKS * BLOCK_TOKENS)


async def test_told_to_go_in_mid_publication(place: Place) -> None:
    """SIGINT: PUBLISH_DONE, exit 0; the subscriber is told at once, and does not wait out its patience."""
    async with running(place.listen("--layer-interval", "0.3")) as publisher:
        port = (await publisher.until("listening"))["port"]
        async with running(place.subscribe(port, "--patience", "3600")) as subscriber:
            await subscriber.until("layer", layer=1)
            publisher.process.send_signal(signal.SIGINT)
            code, events, _ = await publisher.end()
            assert code == 0
            assert events[-1]["complete"] is False
            assert 2 <= events[-1]["published"] < LAYERS
            code, _, errors = await subscriber.end()
            assert code == 3
            assert errors.startswith("incomplete: the publisher left before all was published (PUBLISH_DONE ")
            assert not place.output.exists()


async def test_who_leaves_says_how_much_was_published(place: Place) -> None:
    """For people, too."""
    arguments = [one for one in place.listen("--layer-interval", "3600") if one != "--json"]
    async with running([*arguments, "--serve-for", "0.2"]) as publisher:
        out, _ = await publisher.process.communicate()
    assert out.decode().splitlines()[-1] == f"0.2 s are over: left, 0 of {LAYERS} layers were published"


async def test_serve_for(place: Place) -> None:
    code, events, errors = await run(place.listen("--serve-for", "0.2"))
    assert (code, errors) == (0, "")
    assert events[-1]["reason"] == "0.2 s are over"


async def test_nothing_found(place: Place) -> None:
    async with running(place.listen()) as publisher:
        port = (await publisher.until("listening"))["port"]
        code, events, errors = await run(place.subscribe(port, tokens="other.json"))
        assert code == 4
        assert "no publication was found within 0.5 s: check that the scope key, the tokens" in errors
        assert len(errors.splitlines()) == 1
        assert events[-1]["event"] == "error"


async def test_untrusted_server(place: Place) -> None:
    async with running(place.listen()) as publisher:
        port = (await publisher.until("listening"))["port"]
        code, _, errors = await run(place.subscribe(port, ca=place.certificates.other_ca))
        assert code == 1
        assert "is it the right CA file?" in errors
        assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--layers", "5-99"], "layers 5-99 do not lie within 0-11"),
        (["--layers", "4-2"], "--layers 4-2 is the wrong way round: did you mean 2-4?"),
        (["--patience", "-1"], "--patience: expected a number above 0, not -1"),
        (["--tokens", "nowhere"], "tokens file nowhere: No such file or directory"),
        (["--layers", "x"], '--layers takes A-B or one layer, such as 0-7 or 3, not "x"'),
        (["--blocks", "0"], "the number of blocks is 1 or more, not 0"),
        (
            ["--datagram-size", "60000"],
            "--datagram-size: expected a whole number of at least 1200 and at most 16000",
        ),
        (["--token", "nowhere"], "token file nowhere: No such file or directory"),
        (["--output", "received.txt"], "expected a name that ends in .safetensors or .npz"),
        (["--scope-key", "nowhere"], "scope key file nowhere: No such file or directory"),
    ],
)
async def test_bad_usage(place: Place, more: list[str], message: str) -> None:
    async with running(place.listen()) as publisher:
        port = (await publisher.until("listening"))["port"]
        code, _, errors = await run(place.subscribe(port, *more))
        assert (code, message in errors) == (2, True), errors


async def test_an_output_that_cannot_be_written_is_known_before_connecting(place: Place) -> None:
    """Nobody listens on port 1: to connect would be exit code 1."""
    code, _, errors = await run(place.subscribe(1, "--output", "/proc/received.safetensors"))
    assert (code, "not written: no file can be made in /proc: " in errors) == (2, True), errors


@pytest.mark.parametrize("form", [["--json"], []])
async def test_standard_output_that_takes_nothing_loses_no_cache(place: Place, form: list[str]) -> None:
    async with running(place.listen()) as publisher:
        port = (await publisher.until("listening"))["port"]
        arguments = [one for one in place.subscribe(port) if one != "--json"] + form
        full = os.open("/dev/full", os.O_WRONLY)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *arguments, stdout=full, stderr=PIPE, cwd=ROOT
        )
        os.close(full)
        _, errors = await process.communicate()
    said = "WARNING moqt.console: standard output: No space left on device: nothing more is told there\n"
    assert (process.returncode, errors.decode()) == (0, said)
    assert files.read(place.output).layers.keys() == set(range(LAYERS))


async def test_a_publisher_says_when_not_all_was_taken(place: Place) -> None:
    async with (
        running([*place.listen(), "--layer-interval", "1"]) as publisher,
        running(place.subscribe((await publisher.until("listening"))["port"])) as subscriber,
    ):
        await subscriber.until("layer")
        subscriber.process.send_signal(signal.SIGSTOP)
        publisher.process.send_signal(signal.SIGTERM)
        assert (await publisher.until("end"))["delivered"] is False


async def test_an_output_for_which_there_is_no_room(place: Place) -> None:
    """That is no bad usage: somebody may try again."""
    async with running(place.listen()) as publisher:
        port = (await publisher.until("listening"))["port"]
        async with running(place.subscribe(port)) as subscriber:
            resource.prlimit(subscriber.process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
            code, _, errors = await subscriber.end()
    assert (code, f"cache file {place.output}: not written: " in errors) == (1, True), errors
    assert not place.output.exists()


async def test_listen_needs_a_certificate(place: Place) -> None:
    code, _, errors = await run(place.publish("--listen", "localhost:0"))
    assert code == 2
    assert "--listen needs --cert and --key" in errors


@pytest.mark.parametrize(
    ("parser", "option", "value"),
    [
        (publish_parser, "--layer-interval", "-1"),
        (publish_parser, "--retention", "0"),
        (publish_parser, "--serve-for", "-0.1"),
        (subscribe_parser, "--wait", "-1"),
        (subscribe_parser, "--wait", "nan"),
        (subscribe_parser, "--wait", "soon"),
        (subscribe_parser, "--patience", "0"),
        (subscribe_parser, "--budget", "inf"),
    ],
)
def test_seconds_that_make_no_sense(
    place: Place,
    parser: Callable[[], argparse.ArgumentParser],
    option: str,
    value: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = place.listen() if parser is publish_parser else place.subscribe(4433)
    with pytest.raises(SystemExit) as ended:
        parser().parse_args([*arguments[1:], option, value])
    assert ended.value.code == 2
    assert f"{option}: expected a number " in capsys.readouterr().err


def test_missing_blocks_are_told_in_ranges() -> None:
    missing = [Missing(0, 3, 7), Missing(1, 1, 0), *(Missing(0, 3, block) for block in (2, 0, 1, 4))]
    assert missing_blocks(missing) == {1: [(0, 0)], 3: [(0, 2), (4, 4), (7, 7)]}
    assert describe_missing(missing) == ["layer 1: block 0", "layer 3: blocks 0-2, 4, 7"]


def test_one_is_singular() -> None:
    assert [counted(number, "layer") for number in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]


async def test_whoever_serves_everybody_is_told(place: Place) -> None:
    """The address can't be bound: it is nobody's (RFC 5737)."""
    files = ("--cert", str(place.certificates.chain), "--key", str(place.certificates.key))
    code, _, errors = await run(place.publish("--listen", "192.0.2.1:4433", *files))
    assert code == 1
    assert errors.startswith("WARNING kvcs.publish: listening on 192.0.2.1: whoever can connect and knows ")


@pytest.mark.parametrize("command", ["kvcs.publish", "kvcs.subscribe"])
async def test_help_teaches(command: str) -> None:
    async with running([command, "--help"]) as process:
        out, _ = await process.process.communicate()
    text = out.decode()
    assert "exit codes:" in text
    assert f"python -m {command}" in text


@pytest.mark.requirement("R6a")
async def test_publish_to_a_relay_that_goes_and_comes_back(place: Place) -> None:
    """--connect: the full namespace is announced with the token, and again after the session was lost."""
    (place.folder / "token").write_bytes(b"let me in")

    class Watchful:
        async def decide(self, request: AccessRequest) -> Decision:
            assert request.tokens == ((1, b"let me in"),)
            return Allowed()

    sessions: asyncio.Queue[moqt.Session] = asyncio.Queue()

    async def on_session(session: moqt.Session) -> None:
        sessions.put_nowait(session)

    chain, key = place.certificates.chain, place.certificates.key
    async with moqt.serve(
        "localhost", 0, certificate=chain, key=key, on_session=on_session, policy=Watchful()
    ) as server:
        uri = f"moqt://localhost:{server.port}/relay"
        more = ("--ca", str(place.certificates.ca), "--token", str(place.folder / "token"))
        async with running(place.publish("--connect", uri, *more)) as publisher:
            identity = (await publisher.until("publication"))["publication_id"]
            for _ in range(2):
                session = await sessions.get()
                async with asyncio.timeout(DEADLINE):
                    while not session.peer_namespaces:
                        await session.connection.ping()
                (namespace,) = session.peer_namespaces
                assert PublicationName.from_namespace(namespace).publication_id.hex() == identity
                subscriber = Subscriber(session, place.descriptor, place.scope_key)
                tokens = files.read_tokens(place.folder / "tokens.json")
                async with await subscriber.receive(tokens) as reception:
                    assert [layer.layer async for layer in reception] == list(range(LAYERS))
                await session.close()
            await publisher.until("lost")
            publisher.process.send_signal(signal.SIGINT)
            code, _, _ = await publisher.end()
            assert code == 0
