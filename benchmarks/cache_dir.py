"""How fast a relay's cache on disk takes Objects, and gives them back: `python -m benchmarks.cache_dir DIR`.

For each size of Object, --megabytes are handed over as fast as the store takes them, in a new directory under
DIR, and read back as the relay does for a fetch. Processor time is of this process, both threads; that of the
event loop's thread is told apart, since there it is the relay's. What is read has just been written, so the
disk itself may not be asked.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import tempfile
import time
from pathlib import Path

from moqt.fetching import LAST, successor
from moqt.filters import Location
from moqt.names import FullTrackName
from moqt.relay.cache import CachedObject
from moqt.relay.store import DiskTrack, Store

PER_GROUP = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="on the disk that is to be measured")
    parser.add_argument("--megabytes", type=int, default=512, help="bytes of payload, in 10^6")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32_836, 262_144, 1 << 20], help="bytes each")
    arguments = parser.parse_args()
    print(f"{'Object':>8}  {'write MB/s':>10}  {'CPU s/GB':>8}  {'its loop':>8}  {'read MB/s':>9}")
    for size in arguments.sizes:
        directory = Path(tempfile.mkdtemp(prefix="cache_dir-", dir=arguments.directory))
        try:
            asyncio.run(measure(directory, size, max(1, arguments.megabytes * 1_000_000 // size)))
        finally:
            shutil.rmtree(directory)


async def measure(directory: Path, size: int, count: int) -> None:
    """One line."""
    store = Store(directory, 4 * size * count + (64 << 20))
    track = store.track(FullTrackName((b"benchmark",), b"track"))
    payload = os.urandom(size)
    gigabytes = size * count / 1e9
    began, processor, loop = time.perf_counter(), time.process_time(), time.thread_time()
    for number in range(count):
        item = CachedObject(Location(*divmod(number, PER_GROUP)), (payload,), size, 0, 128, b"")
        while True:
            track.keep(item)
            if item.busy:
                break
            await one_batch(store)  # The queue is full.
    loop = time.thread_time() - loop
    while store.unwritten:
        await one_batch(store)
    took, processor = time.perf_counter() - began, time.process_time() - processor
    began = time.perf_counter()
    assert await read(track) == size * count
    reading = time.perf_counter() - began
    await store.close()
    print(
        f"{size:8}  {gigabytes * 1e3 / took:10.0f}  {processor / gigabytes:8.2f}  {loop / gigabytes:8.2f}"
        f"  {gigabytes * 1e3 / reading:9.0f}"
    )


async def one_batch(store: Store) -> None:
    """Wait until the next one is written."""
    written = asyncio.Event()
    store.on_written = written.set
    await written.wait()


async def read(track: DiskTrack) -> int:
    """Bytes of all payloads."""
    found, start = 0, Location(0, 0)
    while items := await track.read(start, LAST):
        found += sum(item.size for item in items)
        start = successor(items[-1].location)
    return found


if __name__ == "__main__":
    main()
