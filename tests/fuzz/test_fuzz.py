"""A small run of the fuzzer; by hand: `python -m tests.fuzz --count 10000 --seed 1`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

from certs.make import make
from moqt.errors import ProtocolError
from moqt.wire import MessageDecoder, read_vi64
from tests.fuzz.material import REQUESTS, Material, padded
from tests.fuzz.run import run
from tests.fuzz.stage import SERVED


async def test_nobody_is_disturbed(tmp_path: Path) -> None:
    """No crash, no unbounded memory, other sessions undisturbed, every hostile session closed as it should be
    (issue 3).
    """
    report = await run(make(tmp_path / "certs"), seed=1, count=200, case=None, tell=lambda _line: None)
    assert report.attacks >= 200
    assert report.objects > 20
    # It is of no use if all it says is refused at once.
    outcomes = Counter[str]()
    for (_, outcome), count in report.outcomes.items():
        outcomes[outcome] += count
    assert outcomes["lives"] > 40
    assert sum(count for outcome, count in outcomes.items() if outcome.startswith("closed")) > 40


def test_the_same_seed_says_the_same() -> None:
    first, second = (
        [m.spoil(m.request(kind, 0)) + m.data_stream() + m.datagram() for kind in REQUESTS * 20]
        for m in (Material(Random("5/1"), SERVED) for _ in range(2))
    )
    assert first == second


def test_most_requests_are_valid() -> None:
    """Else nothing would be fuzzed but the decoder."""
    m = Material(Random(1), SERVED)
    valid = 0
    for number in range(1000):
        try:
            valid += len(MessageDecoder().feed(m.request(REQUESTS[number % len(REQUESTS)], 0)))
        except ProtocolError:
            continue
    assert 700 < valid < 1000


def test_padded_numbers() -> None:
    for length in range(1, 10):
        assert read_vi64(padded(5, length), 0) == (5, length)
