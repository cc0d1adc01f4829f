"""The figure of kvcs 8, as four processes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import pytest

from examples.child import ROOT
from examples.two_relays import CACHED, EVERY, LAYERS, TRACKS, Outcome, Received

DATA_TRACKS = [str(track) for track in TRACKS]


@pytest.mark.requirement("R8d", "R7.2a", "R7.2d")
def test_part_from_the_cache_of_relay_b_and_part_live() -> None:
    """What the example itself checks makes its exit code; what it prints are the counts."""
    run = subprocess.run(
        [sys.executable, "-m", "examples.two_relays"], cwd=ROOT, capture_output=True, text=True, timeout=90
    )
    assert (run.returncode, run.stderr) == (0, "")
    asked = re.findall(r"^(\S+): (.+) was asked by (\d+) SUBSCRIBE, (\d+) FETCH$", run.stdout, re.MULTILINE)
    hops = {"publisher": ("1", "0"), "Relay A": ("1", "0"), "Relay B": ("2", "0")}
    assert {(track, process): counts for track, process, *counts in asked} == {
        (track, process): list(counts) for track in DATA_TRACKS for process, counts in hops.items()
    }
    got = re.findall(r"^(\S+): the second consumer got (.+)$", run.stdout, re.MULTILINE)
    assert got == [(track, "48 Objects, layers 0 to 4 from the cache, 5 to 11 live") for track in DATA_TRACKS]
    assert len(set(re.findall(r"process (\d+)", run.stdout))) == 3  # And the example's own is the fourth.


def as_in_the_figure() -> Outcome:
    outcome = Outcome()
    for track in TRACKS:
        outcome.early[track] = Received(Counter(EVERY), set(), set(range(LAYERS)), True)
        outcome.late[track] = Received(Counter(EVERY), set(range(CACHED)), set(range(CACHED, LAYERS)), True)
        for process, subscriptions in (("publisher", 1), ("Relay A", 1), ("Relay B", 2)):
            for _ in range(subscriptions):
                outcome.read_log(process, f"DEBUG moqt.answering: 0a: Subscribe of kvcs.2d1-x--{track}")
    return outcome


def test_what_is_not_as_in_the_figure_is_told() -> None:
    """The example can fail."""
    assert list(as_in_the_figure().faults()) == []
    first = TRACKS[0]
    twice, lost, open_ended, wrong_way, twice_asked, fetched = (as_in_the_figure() for _ in range(6))
    twice.late[first].objects[next(iter(EVERY))] += 1
    del lost.early[first].objects[next(iter(EVERY))]
    open_ended.late[first].ended = False
    wrong_way.late[first].filled.add(CACHED)
    twice_asked.read_log("Relay A", "DEBUG moqt.answering: 0b: Subscribe of kvcs.2d1-x--k.2eraw.2es0")
    fetched.read_log("publisher", "DEBUG moqt.answering: 0b: Fetch of kvcs.2d1-x--k.2eraw.2es0")
    for outcome in (twice, lost, open_ended, wrong_way, twice_asked, fetched):
        assert len(list(outcome.faults())) == 1
