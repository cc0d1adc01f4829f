"""The demo as its users run it: whole, on the tiny model, in processes."""

import argparse
import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from examples.child import ROOT, Child, ChildFailed, Event
from examples.demo import Demo
from examples.screen import Screen

SVG = "{http://www.w3.org/2000/svg}"
PROMPT = "Two short flashes and then one long pause: a captain who sees this knows where the rocks are. " * 8
COMMANDS = {"module": (["-m", "examples.demo"], ROOT), "file": ([str(ROOT / "examples" / "demo.py")], None)}


def demo(folder: Path, *options: str, how: str = "module") -> subprocess.Popen[str]:
    """The demo on the tiny model and a prompt of 751 tokens, two blocks and a tail."""
    prompt = folder / "prompt.txt"
    prompt.write_text(PROMPT)
    command, place = COMMANDS[how]
    return subprocess.Popen(
        [
            *(sys.executable, *command, "--model", "tiny", "--prompt", str(prompt)),
            *("--picture", str(folder / "timeline.svg"), *options),
        ],
        cwd=place or folder,
        env=os.environ | {"TMPDIR": str(folder), "PYTHONIOENCODING": "utf-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def read_until(process: subprocess.Popen[str], what: str) -> str:
    assert process.stdout is not None
    text = ""
    while what not in text:
        piece = process.stdout.read(1)
        assert piece, f"ended before it said {what!r}: {text}"
        text += piece
    return text


def pids(output: str) -> dict[str, int]:
    found = re.search(r"producer (\d+) and consumer (\d+)", output)
    assert found is not None
    return {"producer": int(found[1]), "consumer": int(found[2])}


def relay_pids(output: str) -> list[int]:
    found = re.search(r"relays +([\d, ]+): a chain", output)
    assert found is not None
    return [int(pid) for pid in found[1].split(",")]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("how", COMMANDS)
def test_the_consumer_writes_what_the_producer_alone_writes(tmp_path: Path, how: str) -> None:
    with demo(tmp_path, "--tokens", "40", how=how) as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert "THE SAME TEXT, token for token: all 40 agree" in output
    assert "751 tokens: 2 blocks of 256 are published, the last 239 are left to the consumer" in output
    assert "received and verified: 0 1 2 3\n" in output
    assert len(re.findall(r"^    \d +[░█◆●│ ]+ [\d.]+ ms$", output, re.MULTILINE)) == 4
    columns = [line.split("│") for line in output.splitlines() if re.fullmatch(r"  \S.* │ \S.*", line)]
    assert [cell.strip() for cell in columns[0]] == [
        "the producer alone",
        "the consumer, from the received cache",
    ]
    assert len(columns) > 1
    assert all(left.strip() == right.strip() for left, right in columns[1:])
    assert not any(map(alive, pids(output).values()))
    assert {path.name for path in tmp_path.iterdir()} == {"prompt.txt", "timeline.svg"}


def test_the_picture_shows_every_layer_and_the_first_token(tmp_path: Path) -> None:
    with demo(tmp_path, "--tokens", "1") as process:
        process.communicate(timeout=60)
    picture = ElementTree.parse(tmp_path / "timeline.svg").getroot()
    texts = [element.text or "" for element in picture.iter(f"{SVG}text")]
    assert {"0", "1", "2", "3"} <= set(texts)
    assert "not whole" not in texts
    labels = " ".join(texts)
    for mark in ("connected", "cache found", "last layer computed", "first token"):
        assert re.search(rf"{mark}  [\d.]+ m?s", labels)


@pytest.mark.parametrize(("relays", "way"), [(1, "through a relay"), (2, "through 2 relays")])
def test_a_chain_of_relays(tmp_path: Path, relays: int, way: str) -> None:
    """The consumer is named the last relay alone, and all processes are gone in the end."""
    with demo(tmp_path, "--tokens", "5", "--relays", str(relays)) as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert "THE SAME TEXT, token for token: all 5 agree" in output
    chain = relay_pids(output)
    assert len(chain) == relays
    assert not any(map(alive, [*chain, *pids(output).values()]))
    assert f"on one machine, {way}." in (tmp_path / "timeline.svg").read_text()


def test_a_relay_killed_midway_is_reported(tmp_path: Path) -> None:
    with demo(tmp_path, "--layer-interval", "1", "--relays", "2") as process:
        output = read_until(process, "verified: 0")
        killed = relay_pids(output)[1]
        os.kill(killed, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"the relay 2 (process {killed}) was killed by SIGKILL" in errors
    assert "the consumer's cache is incomplete" in errors
    assert not any(map(alive, [*relay_pids(output), *pids(output).values()]))


def test_a_killed_demo_leaves_no_relay_behind(tmp_path: Path) -> None:
    with demo(tmp_path, "--relays", "2") as process:
        output = read_until(process, " load tiny, some seconds")
        process.kill()
        process.wait()
    deadline = time.monotonic() + 30
    while any(map(alive, [*relay_pids(output), *pids(output).values()])):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_producer_killed_midway_is_reported_with_all_that_is_missing(tmp_path: Path) -> None:
    with demo(tmp_path, "--layer-interval", "1") as process:
        output = read_until(process, "verified: 0")
        killed = time.monotonic()
        os.kill(pids(output)["producer"], signal.SIGKILL)
        rest, errors = process.communicate(timeout=60)
        took = time.monotonic() - killed
    assert process.returncode == 1
    assert took < 20  # the consumer's patience, and the start of the machine's
    assert f"the producer (process {pids(output)['producer']}) was killed by SIGKILL" in errors
    assert "the consumer's cache is incomplete: nothing came for 6 s; missing are" in errors
    missing = re.findall(r"^    layer (\d): blocks 0-1$", errors, re.MULTILINE)
    assert missing in (["1", "2", "3"], ["2", "3"], ["3"])
    assert rest.count("not whole") == len(missing)
    assert "SAME TEXT" not in rest
    assert not any(map(alive, pids(output).values()))
    picture = ElementTree.parse(tmp_path / "timeline.svg").getroot()
    assert sum(element.text == "not whole" for element in picture.iter(f"{SVG}text")) == len(missing)


def test_a_consumer_that_dies_is_reported(tmp_path: Path) -> None:
    with demo(tmp_path, "--layer-interval", "0.5") as process:
        output = read_until(process, "verified: 0")
        os.kill(pids(output)["consumer"], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"the consumer (process {pids(output)['consumer']}) was killed by SIGKILL" in errors
    assert not alive(pids(output)["producer"])


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, end: signal.Signals) -> None:
    with demo(tmp_path, "--layer-interval", "60") as process:
        output = read_until(process, "verified: 0")
        process.send_signal(end)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
    assert "interrupted; all processes have ended" in rest
    assert not any(map(alive, pids(output).values()))
    assert [path.name for path in tmp_path.iterdir()] == ["prompt.txt"]


def test_a_killed_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        output = read_until(process, " load tiny, some seconds")
        process.kill()
        process.wait()
    deadline = time.monotonic() + 30
    while any(map(alive, pids(output).values())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_prompt_that_fills_no_block_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Two short flashes.")
    with demo(tmp_path, "--prompt", str(short)) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors == "demo: a prompt of 18 tokens fills no block of 256: take a longer one\n"


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("--tokens", "0"), "--tokens takes 1 or more"),
        (("--relays", "-1"), "--relays 0 to 8"),
        (("--prompt", "nowhere.txt"), "there is no such file"),
        (("--picture", "nowhere/timeline.svg"), "there is no such folder"),
    ],
)
def test_bad_usage_is_told_at_once(tmp_path: Path, options: tuple[str, ...], fault: str) -> None:
    with demo(tmp_path, *options) as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (2, "")
    assert fault in errors


@pytest.mark.parametrize(
    ("consumer", "verdict"),
    [
        ([1, 2, 3], "= THE SAME TEXT, token for token: all 3 agree"),
        ([1, 2, 4], "x THE TEXTS DIFFER: 2 tokens are the same, of 3 by the producer and 3 by the consumer"),
        ([1, 2], "x THE TEXTS DIFFER: 2 tokens are the same, of 3 by the producer and 2 by the consumer"),
    ],
)
def test_only_the_same_tokens_count_as_the_same_text(consumer: list[int], verdict: str) -> None:
    stream = io.StringIO()
    shown = Demo(argparse.Namespace(relays=0), Screen(stream))
    shown.report.tokens = {"producer": [1, 2, 3], "consumer": consumer}
    assert shown.compare() is (consumer == [1, 2, 3])
    assert stream.getvalue() == f"\n  {verdict}\n"


def test_two_empty_texts_prove_nothing() -> None:
    stream = io.StringIO()
    assert not Demo(argparse.Namespace(relays=0), Screen(stream)).compare()
    assert "NOTHING TO COMPARE" in stream.getvalue()


async def test_the_last_words_of_a_process_are_quoted() -> None:
    seen: list[Event] = []
    async with await Child.start(
        "producer", "producer", ["--bad"], on_event=lambda _, event: seen.append(event)
    ) as child:
        with pytest.raises(ChildFailed, match=r"(?s)ended with exit code 2; its last words:.* --model"):
            await asyncio.wait_for(child.until("ready"), 60)
    assert seen == []
