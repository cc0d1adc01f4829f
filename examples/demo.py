"""KV cache streaming, shown with a language model: `python -m examples.demo`.

A producer process runs a long prompt through SmolLM2-135M and publishes the key-value cache of each layer as
soon as it is computed. A consumer process, which has the same prompt and the scope key, finds the cache,
receives and verifies it layer by layer, and goes on writing from it. It must write, token for token, what the
producer alone writes: the exit code is 0 only if it does. With --relays the cache travels through that many
relays, each a process of its own. Nothing else has to run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import runpy
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # also as a file: python examples/demo.py
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.child import ROOT, Child, ChildFailed, Event
from examples.report import Report
from examples.screen import BOLD, FAINT, GREEN, RED, Screen, side_by_side
from examples.timeline import render_text
from examples.timeline_svg import render_svg

MODELS = ("smollm2-135m", "tiny")
PROMPT = Path(__file__).with_name("prompt.txt")
PICTURE = Path("kvcs-timeline.svg")

LOADING = 300.0  # seconds for both processes to have the model
STREAMING = 300.0  # seconds for the cache to be computed and received
WRITING = 60.0  # seconds for the texts, and one more for each token
PATIENCE = 5.0  # seconds without an Object after which the consumer takes the rest for lost
AFTERMATH = 10.0  # seconds for a process to say what it makes of the end of the other
INDENT = 15  # columns left of facts
FRAME = 0.1  # seconds between two drawings of what moves


class Failed(Exception):
    """The demo can't go on; the message says why."""


class Demo:
    """The demo, told on `screen`."""

    def __init__(self, arguments: argparse.Namespace, screen: Screen) -> None:
        self.arguments = arguments
        self.screen = screen
        self.report = Report(relays=arguments.relays)
        self._span = 0.0
        self._relays: list[asyncio.Task[Event]] = []

    async def run(self) -> bool:
        """All of it; whether both processes wrote the same. Raises Failed."""
        self.screen.say(self.screen.paint("KV cache streaming: two processes, one prompt, one text", BOLD))
        self.screen.say()
        with tempfile.TemporaryDirectory(prefix="kvcs-demo-") as directory:
            async with AsyncExitStack() as stack:
                files, scope_key = self._secrets(Path(directory))
                ends = await self._start_relays(stack, files)
                producer, consumer = [
                    await stack.enter_async_context(await self._start(name, options))
                    for name, options in self._options(files, scope_key, ends).items()
                ]
                pids = f"producer {producer.pid} and consumer {consumer.pid}"
                self._fact("processes", f"{pids} load {self.arguments.model}, some seconds ...")
                try:
                    await self._load(producer, consumer, ends[1:])
                    await self._stream(producer, consumer)
                    await self._write(producer, consumer)
                except Failed as error:
                    lost = [str(relay.exception()) for relay in self._relays if relay.done()]
                    raise Failed("\n".join([str(error), *lost])) from None
        return self.compare()

    def _secrets(self, directory: Path) -> tuple[Any, Path]:
        """Make certificates and the scope key."""
        files = runpy.run_path(str(ROOT / "certs" / "make.py"))["make"](directory)
        scope_key = directory / "scope.key"
        scope_key.touch(0o600)
        scope_key.write_text(secrets.token_hex(32))
        self._fact("secrets", f"a throw-away CA, server certificate and scope key in {directory}")
        return files, scope_key

    async def _start_relays(self, stack: AsyncExitStack, files: Any) -> list[str]:
        """Start a chain of relays; the URIs of the first, for the producer, and of the last, for the
        consumer; nothing if there are none. Raises Failed.
        """
        uris: list[str] = []
        told = []
        for number in range(1, self.arguments.relays + 1):
            arguments = [
                *("--listen", "127.0.0.1:0", "--cert", str(files.certificate), "--key", str(files.key)),
                *("--ca", str(files.ca), "--json"),
                *(("--upstream", uris[-1]) if uris else ()),
            ]
            name = f"relay {number}"
            relay = await stack.enter_async_context(await Child.start(name, "relay", arguments))
            (listening,) = await _all(LOADING, f"the start of {name}", relay.until("listening"))
            if uris:
                await _all(LOADING, f"the start of {name}", relay.until("connected"))
            uris.append(f"moqt://127.0.0.1:{listening['port']}")
            watch = asyncio.create_task(relay.until("end"))
            stack.callback(watch.cancel)
            self._relays.append(watch)
            told.append(f"{relay.pid}")
        if told:
            self._fact("relays", f"{', '.join(told)}: a chain from the producer to the consumer")
        return [uris[0], uris[-1]] if uris else []

    def _options(self, files: Any, scope_key: Path, ends: Sequence[str]) -> dict[str, list[str]]:
        """The command line of each process, which is all that it knows of the others."""
        arguments = self.arguments
        interval: float = arguments.layer_interval
        common = [
            *("--model", arguments.model, "--prompt", str(arguments.prompt)),
            *("--tokens", str(arguments.tokens), "--scope-key", str(scope_key), "--ca", str(files.ca)),
        ]
        where = (
            ["--connect", ends[0]] if ends else ["--cert", str(files.certificate), "--key", str(files.key)]
        )
        producer = [*where, "--layer-interval", str(interval)]
        consumer = ["--patience", str(PATIENCE + interval)]
        return {"producer": common + producer, "consumer": common + consumer}

    async def _start(self, name: str, options: Sequence[str]) -> Child:
        return await Child.start(
            name, name, options, threads=max(_processors() // 2, 1), on_event=self._on_event
        )

    def _on_event(self, name: str, event: Event) -> None:
        self.report.note(name, event)
        if event["event"] == "step" and event["step"] == "verified" and not self._timeline_moves:
            self.screen.add(f" {event['layer']}")

    async def _load(self, producer: Child, consumer: Child, last: Sequence[str]) -> None:
        """Have both ready, then let both begin at once. The consumer asks the `last` relay, if any."""
        ready, loaded = await _all(
            LOADING, "loading the model", producer.until("ready"), consumer.until("loaded")
        )
        serves = f"publishes to {ready['uri']}" if last else f"listens on {ready['uri']}"
        states = {"producer": serves, "consumer": "has the prompt and the scope key"}
        for name, state in states.items():
            seconds = self.report.events[name, "loaded"]["seconds"]
            self._fact(name, f"ready after {seconds:.1f} s; {state}")
        tokens, size = loaded["tokens"], loaded["block_tokens"]
        blocks, tail = divmod(tokens, size)
        rest = f", the last {tail} are left to the consumer" if tail else ""
        self._fact("prompt", f"{tokens:,} tokens: {blocks} blocks of {size} are published{rest}")
        self.screen.say()
        consumer.order(uri=last[0] if last else ready["uri"])
        producer.order(start=True)

    async def _stream(self, producer: Child, consumer: Child) -> None:
        """See the cache travel, up to the consumer's first token."""
        moves = self._timeline_moves
        if not moves:
            self.screen.add("  layers computed, published, received and verified:")
        try:
            async with self._moving(self._growing_timeline if moves else None):
                await _all(STREAMING, "the cache", producer.until("published"), consumer.until("received"))
                producer.order(write=True)
                await _all(WRITING, "the first token", consumer.until("token", "written"))
        except Failed:
            self._show_timeline()  # with what is missing
            raise
        self._show_timeline()

    async def _write(self, producer: Child, consumer: Child) -> None:
        """See both write."""
        writing = [
            child.until("written")
            for child in (producer, consumer)
            if (child.name, "written") not in self.report.events
        ]
        async with self._moving(self._texts if self.screen.moves(20) else None):
            await _all(WRITING + self.arguments.tokens, "writing", *writing)
        self.screen.draw(self._texts())

    def compare(self) -> bool:
        """Say whether the texts are the same."""
        screen, report = self.screen, self.report
        written = [len(tokens) for tokens in report.tokens.values()]
        screen.say()
        if report.same:
            verdict = f"THE SAME TEXT, token for token: all {written[0]} agree"
        elif not any(written):
            verdict = "NOTHING TO COMPARE: after this prompt the model has nothing to say"
        else:
            verdict = (
                f"THE TEXTS DIFFER: {report.agreeing} tokens are the same, "
                f"of {written[0]} by the producer and {written[1]} by the consumer"
            )
        signs = "=x" if screen.ascii_only else "✔✘"
        screen.say(screen.paint(f"  {signs[not report.same]} {verdict}", GREEN if report.same else RED))
        return report.same

    @asynccontextmanager
    async def _moving(self, lines: Callable[[], list[str]] | None) -> AsyncIterator[None]:
        """Draw `lines` again and again meanwhile, where things can move."""
        if lines is None:
            yield
            return

        async def draw() -> None:
            while True:
                self.screen.draw(lines())
                await asyncio.sleep(FRAME)

        drawing = asyncio.create_task(draw())
        try:
            yield
        finally:
            drawing.cancel()
            await asyncio.wait((drawing,))

    @property
    def _timeline_moves(self) -> bool:
        return self.screen.moves(self.report.timeline.layers + 8)

    def _growing_timeline(self) -> list[str]:
        """The timeline so far, on a scale for the whole as far as that can be foreseen."""
        if self.report.timeline.start is None:
            return []
        foreseen = self.report.foreseen()
        if not 0.8 * self._span < foreseen < self._span:
            self._span = foreseen * 1.1
        return self._timeline(self._span)

    def _timeline(self, live_span: float = 0.0) -> list[str]:
        screen = self.screen
        return render_text(
            self.report.timeline,
            width=screen.width,
            span=live_span,
            live=live_span > 0,
            ascii_only=screen.ascii_only,
            colour=screen.colour,
        ).splitlines()

    def _show_timeline(self) -> None:
        """The timeline as it ended, as text and as a picture, and the figures."""
        report = self.report
        if not self._timeline_moves:
            self.screen.say()
        picture: Path = self.arguments.picture
        picture.write_text(
            render_svg(report.timeline, title=report.title(), subtitle=report.subtitle()), encoding="utf-8"
        )
        self.screen.draw(self._timeline())
        self.screen.say()
        for name, text in report.figures():
            self._fact(name, text)
        self._fact("picture", str(picture))
        self.screen.say()

    def _texts(self) -> list[str]:
        """What both have written, side by side."""
        screen, report = self.screen, self.report
        divider = "|" if screen.ascii_only else "│"
        width = screen.width - 2
        heads = side_by_side(
            "the producer alone", "the consumer, from the received cache", width=width, divider=divider
        )
        texts = side_by_side(report.text("producer"), report.text("consumer"), width=width, divider=divider)
        return [f"  {screen.paint(line, FAINT)}" for line in heads] + [f"  {line}" for line in texts]

    def _fact(self, name: str, text: str) -> None:
        first, *more = self.screen.wrap(text, INDENT)
        self.screen.say("\n".join([f"  {self.screen.paint(f'{name:<12}', FAINT)} {first}", *more]))


async def _all(seconds: float, what: str, *events: Coroutine[Any, Any, Event]) -> list[Event]:
    """Wait for all: where one process fails, what the other has to say belongs to it. Raises Failed."""
    tasks = [asyncio.create_task(event) for event in events]
    try:
        done, waiting = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        if waiting and any(task.exception() for task in done):
            done, waiting = await asyncio.wait(tasks, timeout=AFTERMATH)
    finally:
        for task in tasks:
            task.cancel()
    faults: dict[str, None] = {}  # in order, and each once
    for task in tasks:
        if task in done and isinstance(error := task.exception(), ChildFailed):
            faults[str(error)] = None
    if waiting and not faults:
        faults[f"{what} took more than {seconds:g} s"] = None
    if faults:
        raise Failed("\n".join(faults))
    return [task.result() for task in tasks]


def _processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "--model",
        choices=MODELS,
        default=MODELS[0],
        help="tiny: random weights, nonsense, and no further packages (default: %(default)s)",
    )
    result.add_argument(
        "--prompt",
        metavar="FILE",
        type=Path,
        default=PROMPT,
        help="the prompt, as text (default: %(default)s)",
    )
    result.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        default=100,
        help="how many tokens to write at most (default: %(default)s)",
    )
    result.add_argument(
        "--picture",
        metavar="FILE",
        type=Path,
        default=PICTURE,
        help="where to put the picture of the timeline, SVG (default: %(default)s)",
    )
    result.add_argument(
        "--layer-interval",
        metavar="SECONDS",
        type=float,
        default=0.0,
        help="let the producer rest after each layer, to see it all more slowly",
    )
    result.add_argument(
        "--relays",
        metavar="N",
        type=int,
        default=0,
        help="let the cache travel through a chain of so many relays (default: none)",
    )
    return result


def main() -> int:
    """The command. 0: the same text twice; 1: not so, or something failed; 2: bad usage; 130: interrupted."""
    options = parser()
    arguments = options.parse_args()
    if arguments.tokens < 1 or not 0 <= arguments.layer_interval <= 60 or not 0 <= arguments.relays <= 8:
        options.error("--tokens takes 1 or more, --layer-interval 0 to 60, --relays 0 to 8")
    if not arguments.prompt.is_file():
        options.error(f"--prompt {arguments.prompt}: there is no such file")
    if not arguments.picture.absolute().parent.is_dir():
        options.error(f"--picture {arguments.picture}: there is no such folder")
    screen = Screen(sys.stdout)

    async def run() -> bool:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await Demo(arguments, screen).run()

    try:
        return 0 if asyncio.run(run()) else 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        screen.say("\ninterrupted; all processes have ended")
        return 130
    except Failed as error:
        fault = str(error)
    except ModuleNotFoundError as error:
        fault = f"the package {error.name} is missing: pip install -e '.[demo]'"
    except OSError as error:
        fault = str(error)
    print(f"demo: {fault}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
