"""What a relay's cache takes for the bytes that it keeps: `python -m benchmarks.cache`.

For each size of Object, a fresh process fills a cache of --megabytes as the relay does, from one subgroup
stream for each Group of 64 Objects, and prints its resident memory, less what it had before, against the
payload; and the same by tracemalloc, in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

from moqt.filters import Location
from moqt.names import FullTrackName
from moqt.relay.cache import Cache
from moqt.relay.cached import CachedTrack
from moqt.relay.inlets import SubgroupInlet
from moqt.track import Hole
from moqt.wire import DataStreamDecoder, ObjectHeader, PayloadChunk, SubgroupEncoder, SubgroupHeader

PER_GROUP = 64
READ = 1 << 16
"""Bytes that are read from a stream at once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096, 16384, 32768, 262144])
    parser.add_argument("--one", choices=["rss", "tracemalloc"], help="fill here, and print the ratio alone")
    arguments = parser.parse_args()
    if arguments.one:
        print(asyncio.run(_fill(arguments.sizes[0], arguments.megabytes << 20, arguments.one)))
        return
    print(f"{arguments.megabytes} MiB of payload; memory against payload, and by the cache's own reckoning")
    for size in arguments.sizes:
        found = [
            subprocess.run(
                [
                    *(sys.executable, "-m", "benchmarks.cache", "--one", kind),
                    *("--sizes", str(size), "--megabytes", str(arguments.megabytes)),
                ],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.split()
            for kind in ("rss", "tracemalloc")
        ]
        print(f"{size:8d} B  RSS {found[0][0]}x  tracemalloc {found[1][0]}x  reckoned {found[1][1]}x")


async def _fill(size: int, total: int, kind: str) -> str:
    cache = Cache(1 << 40)
    track = CachedTrack(FullTrackName((b"n",), b"t"), cache, lambda _, start, end, __: Hole(start, end))
    payload = os.urandom(size)
    await asyncio.sleep(0)
    if kind == "tracemalloc":
        tracemalloc.start()
    before = _resident()
    for group in range(total // size // PER_GROUP):
        _stream(track, group, payload)
    taken = tracemalloc.get_traced_memory()[0] if kind == "tracemalloc" else _resident() - before
    kept = sum(item.size for item in track.objects(Location(0, 0), Location(1 << 60, 0)))
    return f"{taken / kept:.3f} {cache.bytes / kept:.3f}"


def _stream(track: CachedTrack, group: int, payload: bytes) -> None:
    header = SubgroupHeader(0, group, 0, 128, end_of_group=True, first_object=True)
    encoder = SubgroupEncoder(header)
    data = bytearray(encoder.header())
    for number in range(PER_GROUP):
        data += encoder.object(number, len(payload)) + payload
    decoder = DataStreamDecoder()
    inlet = SubgroupInlet(track, header)
    write = None
    for start in range(0, len(data), READ):
        for event in decoder.feed(bytes(data[start : start + READ])):
            if isinstance(event, ObjectHeader):
                write = inlet.object(event)
            elif isinstance(event, PayloadChunk) and write is not None:
                write(event.data)
    inlet.end(None)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
