"""`python -m kvcs.subscribe`: receive a KV cache into a file."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import numpy as np

import moqt
from kvcs import files
from kvcs.assembly import Layer
from kvcs.console import (
    EXIT_CODES,
    Console,
    ExitCode,
    add_common,
    counted,
    describe_missing,
    missing_blocks,
    not_negative,
    positive,
    run,
    token_of,
)
from kvcs.discovery import DISCOVERY_WAIT
from kvcs.identity import Descriptor, ScopeKey, Tokens, token_array
from kvcs.layout import Tensor
from kvcs.subscriber import CacheIncomplete, NothingFound, Reception, Subscriber
from moqt.console import options_of
from moqt.credentials import TokenFile
from moqt.errors import UsageError

DESCRIPTION = """\
Find the KV cache of a token sequence at a publisher or relay, receive it layer by layer, verify it, and write
it to a file. The longest published prefix of the tokens is taken.

  python -m kvcs.subscribe moqt://localhost:4433/ --ca certs/ca.pem --scope-key scope.key \\
      --tokens prompt.json --descriptor model.json --output cache.safetensors
"""


JSON = """\
With --json, an event "error" of what is incomplete lists under "missing" the runs of missing blocks of each
layer, first and last: {"layer": 3, "blocks": [[0, 5], [7, 7]]} are the blocks 0 to 5, and 7.

"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m kvcs.subscribe",
        description=DESCRIPTION,
        epilog=JSON + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("uri", metavar="URI", help="where to ask: moqt://host[:port]/[path]")
    result.add_argument(
        "--tokens", metavar="FILE", type=Path, required=True, help="the token ids: a JSON array, or .npy"
    )
    result.add_argument(
        "--descriptor",
        metavar="FILE",
        type=Path,
        required=True,
        help="Compatibility Descriptor of the model, JSON",
    )
    result.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        required=True,
        help="the cache file to write (.safetensors, .npz); it appears only when it is whole",
    )
    result.add_argument("--layers", metavar="A-B", help="only the layers A to B (default: all)")
    result.add_argument("--blocks", metavar="N", type=int, help="only the first N blocks (default: all)")
    result.add_argument(
        "--partial",
        action="store_true",
        help="write what is usable if something is missing (still exit code 3)",
    )
    result.add_argument(
        "--wait",
        metavar="SECONDS",
        type=not_negative,
        default=DISCOVERY_WAIT,
        help="how long to wait for a publication to be named (default: %(default)s)",
    )
    result.add_argument(
        "--patience",
        metavar="SECONDS",
        type=positive,
        default=10.0,
        help="give up when nothing has come for this long (default: %(default)s)",
    )
    result.add_argument(
        "--budget",
        metavar="SECONDS",
        type=positive,
        help="give up after this time in all (default: no bound)",
    )
    add_common(result)
    return result


async def subscribe(arguments: argparse.Namespace, token: TokenFile, console: Console) -> int:
    """Receive the cache; the exit code."""
    descriptor = files.read_descriptor(arguments.descriptor)
    tokens = files.read_tokens(arguments.tokens)
    scope_key = ScopeKey.from_file(arguments.scope_key)
    files.check_writable(arguments.output, descriptor)
    layers = _layers(arguments.layers)
    async with (
        moqt.connect(
            arguments.uri, ca=arguments.ca, tokens=token.read(), options=options_of(arguments)
        ) as session,
        token.renewing(session),
    ):
        subscriber = Subscriber(
            session, descriptor, scope_key, patience=arguments.patience, budget=arguments.budget
        )
        try:
            reception = await subscriber.receive(
                tokens, layers=layers, blocks=arguments.blocks, wait=arguments.wait
            )
        except NothingFound as error:
            console.error(str(error))
            return ExitCode.NOTHING_FOUND
        async with reception:
            return await _receive(arguments, token, console, reception, descriptor, tokens)


async def _receive(
    arguments: argparse.Namespace,
    token: TokenFile,
    console: Console,
    reception: Reception,
    descriptor: Descriptor,
    tokens: Tokens,
) -> int:
    loop = asyncio.get_running_loop()
    started = loop.time()
    first: float | None = None
    received: list[Layer] = []
    reason = ""
    reception.partial = arguments.partial
    console.tell(
        "publication",
        f"publication {reception.publication.publication_id.hex()}: {counted(reception.blocks, 'block')}",
        publication_id=reception.publication.publication_id.hex(),
        blocks=reception.blocks,
    )
    console.progress(len(range(*_span(arguments, descriptor))), "usable")
    try:
        async for layer in reception:
            received.append(layer)
            seconds = loop.time() - started
            first = seconds if first is None else first
            rate = reception.received / seconds / 1e6 if seconds else 0.0
            console.step(f"{reception.received / 1e6:.1f} MB, {rate:.1f} MB/s, layer 0 after {first:.2f} s")
            if arguments.json:
                console.tell(
                    "layer",
                    "",
                    segment=layer.segment,
                    layer=layer.layer,
                    seconds=round(seconds, 6),
                    bytes=reception.received,
                )
        reason = reception.reason
    except CacheIncomplete as error:
        reason = error.reason
    finally:
        console.close()
    seconds = loop.time() - started
    missing = reception.missing
    whole = not missing
    figures = {
        "bytes": reception.received,
        "seconds": round(seconds, 6),
        "first_layer_seconds": None if first is None else round(first, 6),
        "rejected_objects": reception.rejected,
    }
    if not whole:
        if reception.cause is not None:
            reason = token.advice(reception.cause) or reason
        console.error(
            f"incomplete: {reason}",
            lines=[f"  missing {line}" for line in describe_missing(missing)],
            missing=[{"layer": layer, "blocks": spans} for layer, spans in missing_blocks(missing).items()],
            **figures,
        )
    if received and (whole or arguments.partial):
        kept = _assemble(received, reception, descriptor, tokens)
        if kept.layers:
            await asyncio.to_thread(files.write, arguments.output, kept)
            rate = reception.received / seconds / 1e6 if seconds else 0.0
            console.tell(
                "written",
                f"{arguments.output}: {counted(len(kept.layers), 'layer')} of "
                f"{counted(len(kept.tokens), 'token')}; "
                f"{reception.received / 1e6:.1f} MB in {seconds:.2f} s ({rate:.1f} MB/s), "
                f"first layer after {first:.2f} s",
                output=str(arguments.output),
                layers=sorted(kept.layers),
                tokens=len(kept.tokens),
                **figures,
            )
    return ExitCode.OK if whole else ExitCode.INCOMPLETE


def _assemble(
    received: list[Layer], reception: Reception, descriptor: Descriptor, tokens: Tokens
) -> files.CacheFile:
    """The layers of which every segment came, the segments put together."""
    by_layer: dict[int, list[Layer]] = {}
    for part in received:
        by_layer.setdefault(part.layer, []).append(part)
    segments = max(len(parts) for parts in by_layer.values())
    layers: dict[int, tuple[Tensor, Tensor]] = {}
    for layer, parts in by_layer.items():
        if len(parts) == segments:
            parts.sort(key=lambda part: part.segment)
            k = _join([part.k for part in parts])
            layers[layer] = k, _join([k[..., :0] if part.v is None else part.v for part in parts])
    return files.CacheFile(
        descriptor, token_array(tokens)[: reception.blocks * descriptor.block_tokens], layers
    )


def _join(arrays: list[Tensor]) -> Tensor:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _layers(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise UsageError(f'--layers takes A-B or one layer, such as 0-7 or 3, not "{text}"')
    span = int(first), int(last or first)
    if span[0] > span[1]:
        raise UsageError(f"--layers {text} is the wrong way round: did you mean {last}-{first}?")
    return span


def _span(arguments: argparse.Namespace, descriptor: Descriptor) -> tuple[int, int]:
    first, last = _layers(arguments.layers) or (0, descriptor.layers - 1)
    return first, last + 1


def main() -> int:
    """The command."""
    arguments = parser().parse_args()
    console = Console(as_json=arguments.json)
    token = token_of(arguments)
    return run(lambda: subscribe(arguments, token, console), console, arguments.verbose, token)


if __name__ == "__main__":
    sys.exit(main())
