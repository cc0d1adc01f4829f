"""`python -m tests.fuzz --count 10000 --seed 1`: attack a relay, a publisher and subscribers."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from certs.make import make
from tests.fuzz.run import run
from tests.fuzz.stage import Failure


def main() -> int:
    """The command: exit code 1 if something happened that must not."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="attacks to make (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="where they come from (default: %(default)s)")
    parser.add_argument("--case", type=int, help="make only those of one case, to look at a failure again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        files = make(Path(directory) / "certs")
        try:
            report = asyncio.run(
                run(files, seed=arguments.seed, count=arguments.count, case=arguments.case, tell=print)
            )
        except Failure as failure:
            print(f"FAILED: {failure}", file=sys.stderr)
            return 1
    for line in report.lines():
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
