"""The event loop with the jumping clock."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from moqt.quic.virtual import EverythingWaits, VirtualLoop, run_virtual


@pytest.mark.virtual
async def test_a_day_less_a_second_takes_no_time() -> None:
    began = time.monotonic()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    assert loop.time() == 0.0
    await asyncio.sleep(86399)
    assert loop.time() == pytest.approx(86399)
    assert time.monotonic() - began < 60


@pytest.mark.virtual
async def test_timers_fire_in_order() -> None:
    seen: list[float] = []

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append(seconds)

    await asyncio.gather(*(wait(seconds) for seconds in (3, 1, 2, 0.5)))
    assert seen == [0.5, 1, 2, 3]


def test_a_hang_says_who_waits_where() -> None:
    async def never() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        asyncio.create_task(never(), name="the one that hangs").add_done_callback(lambda _: None)
        await asyncio.Event().wait()

    with pytest.raises(EverythingWaits) as caught:
        run_virtual(main())
    text = str(caught.value)
    assert "the one that hangs: " in text
    assert "never" in text
    assert "main" in text


def test_a_timer_that_repeats_for_ever_is_a_hang() -> None:
    async def main() -> None:
        def again() -> None:
            asyncio.get_running_loop().call_later(100, again)

        again()
        await asyncio.Event().wait()

    with pytest.raises(EverythingWaits, match="a virtual day has passed"):
        run_virtual(main())


def test_a_thread_is_waited_for() -> None:
    release = threading.Event()

    async def main() -> float:
        task = asyncio.create_task(asyncio.to_thread(release.wait))
        await asyncio.sleep(0)
        release.set()
        await task
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 0.0
