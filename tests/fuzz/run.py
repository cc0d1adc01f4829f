"""One run of the fuzzer: so many attacks, drawn from a seed, and what came of them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Final

from certs.make import CertificateFiles
from moqt import FullTrackName
from moqt.errors import MoqtError, SessionCode
from moqt.quic.api import Connection, QuicOptions
from moqt.quic.udp import listen
from moqt.wire import DRAFT_22
from tests.fuzz.attacks import ATTACKS, FIRST, FRESH, LIVES, PLAIN, Attacker, Verdict
from tests.fuzz.imposters import Imposter, wish
from tests.fuzz.stage import GROWTH, LARGE, LIMITS, PATIENCE, Failure, Stage, resident, stage

__all__ = ["Report", "run"]

MIGHT_TAKE: Final = 6.0
"""Seconds that an attack gets; one that waits for room that never comes is left then."""
LANES: Final = 6
"""Cases that run at the same time."""
LURKERS: Final = 6
"""Hostile connections that are kept, and neither read nor close."""
WARM: Final = 0.2
"""The share of the run after which memory must not grow."""

NAMED: Final = frozenset(SessionCode) - {SessionCode.NO_ERROR, SessionCode.INTERNAL_ERROR}
"""Codes with which a session may be closed (moqt 17.1)."""


@dataclass(slots=True)
class Report:
    """What a run has done. Memory is in bytes, times are in seconds."""

    seed: int
    attacks: int = 0
    sent: int = 0
    """Messages, streams and datagrams."""
    connections: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: float = 0.0
    memory_before: int = 0
    memory_warm: int = 0
    memory_most: int = 0
    memory_after: int = 0
    objects: int = 0
    slowest: float = 0.0
    busiest: float = 0.0

    def lines(self) -> Iterable[str]:
        """For people."""
        mib = 1 << 20
        yield (
            f"seed {self.seed}: {self.attacks} attacks, {self.sent} messages and streams on "
            f"{self.connections} connections in {self.seconds:.0f} s"
        )
        yield (
            f"memory: {self.memory_before / mib:.0f} MiB before, {self.memory_warm / mib:.0f} warm, "
            f"{self.memory_most / mib:.0f} at most, {self.memory_after / mib:.0f} after"
        )
        yield (
            f"peers that behave: {self.objects} Objects, the slowest {self.slowest:.2f} s; "
            f"longest turn of the event loop {self.busiest:.2f} s of CPU"
        )
        totals: Counter[str] = Counter()
        for (_, outcome), count in self.outcomes.items():
            totals[outcome] += count
        yield "; ".join(f"{outcome}: {count}" for outcome, count in totals.most_common())
        for attack in sorted({attack for attack, _ in self.outcomes}):
            found = sorted((o, c) for (a, o), c in self.outcomes.items() if a == attack)
            yield f"  {attack}: " + ", ".join(f"{outcome} {count}" for outcome, count in found)


class _Run:
    def __init__(self, place: Stage, report: Report) -> None:
        self._stage = place
        self._report = report
        self._lurkers: deque[Attacker] = deque()

    async def case(self, number: int) -> None:
        """One hostile connection, or a pair. Raises Failure."""
        random = Random(f"{self._report.seed}/{number}")
        kind = random.random()
        try:
            if kind < 0.12:
                await self._imposter_at_relay(random, number)
            elif kind < 0.24:
                await self._hostile_server(random)
            else:
                port = self._stage.relay_port if kind < 0.8 else self._stage.publisher_port
                await self._attack(random, port)
            self._stage.check()
        except Failure as failure:
            told = "\n".join([str(failure), *self._stage.judge.faults])
            raise Failure(f"case {number} of seed {self._report.seed}, or one beside it: {told}") from failure

    async def close(self) -> None:
        for attacker in self._lurkers:
            await self._leave(attacker)

    # A hostile client.

    async def _attack(self, random: Random, port: int) -> None:
        small = QuicOptions(max_data=8192, max_stream_data=4096, idle_timeout=10.0, keepalive=None)
        connection = await self._stage.dial(port, small if random.random() < 0.3 else None)
        attacker = Attacker(connection, random, reads=random.random() < 0.6)
        self._report.connections += 1
        kind = random.random()
        sure = True
        if kind < 0.15:
            await self._one(attacker, random.choice(FRESH), sure)
        else:
            await attacker.open_control(PLAIN)
            attacks = [random.choice(FIRST)] if kind < 0.35 else []
            attacks += [random.choice(ATTACKS) for _ in range(random.randint(not attacks, 5))]
            for attack in attacks:
                sure = await self._one(attacker, attack, sure)
                if connection.closed is not None:
                    break
        if connection.closed is None and random.random() < 0.3:
            self._lurkers.append(attacker)
            if len(self._lurkers) > LURKERS:
                await self._leave(self._lurkers.popleft())
        else:
            await self._leave(attacker)

    async def _one(self, attacker: Attacker, attack: Callable[[Attacker], object], sure: bool) -> bool:
        """One attack and what came of it; `sure` says that nothing before it can have been the cause, and
        what is returned says so for the next one.
        """
        name = attack.__name__
        verdict: Verdict = None
        outcome = ""
        try:
            async with asyncio.timeout(MIGHT_TAKE):
                verdict = await attack(attacker)  # type: ignore[misc]
                await attacker.settle()
        except MoqtError:
            pass
        except TimeoutError:
            outcome = "stuck, "
        self._report.attacks += 1
        closed = attacker.connection.closed
        outcome += "lives"
        if closed is not None and closed.remote:
            outcome = f"closed {closed.code:#x}"
            if not closed.application or closed.code not in NAMED:
                raise Failure(f"{name}: {closed}")
            if sure and verdict is not None and verdict != closed.code:
                raise Failure(f"{name}: closed with {closed.code:#x} and not {verdict:#x}: {closed}")
        elif closed is not None:
            outcome = "left" if closed.application else f"lost: {closed}"
        elif sure and verdict is not None and verdict != LIVES:
            raise Failure(f"{name}: it lives, and should have been closed with {verdict:#x}")
        self._report.outcomes[name, outcome] += 1
        return sure and verdict is not None

    async def _leave(self, attacker: Attacker) -> None:
        self._report.sent += attacker.sent
        await attacker.gone()

    # Hostile publishers and servers.

    async def _imposter_at_relay(self, random: Random, number: int) -> None:
        """It dials the relay and offers a Track, which somebody who behaves wants."""
        imposter = Imposter(await self._stage.dial(self._stage.relay_port), random)
        self._report.connections += 1
        track = FullTrackName((b"imposter", b"%d" % number), b"t")
        try:
            async with self._stage.session(self._stage.relay_port) as victim:
                with suppress(MoqtError):
                    await imposter.begin(honest=True)
                    if random.random() < 0.6:
                        await imposter.announce(track.namespace)
                    else:
                        imposter.run(imposter.offer(imposter.material, track))
                    await imposter.settle()
                await wish(victim, track, random, seconds=0.6)
                async with asyncio.timeout(PATIENCE):
                    await victim.track_status(LARGE)
        except (MoqtError, TimeoutError) as error:
            raise Failure(f"imposter: the session of another one was disturbed: {error!r}") from error
        finally:
            self._judge_imposter("imposter at the relay", imposter)
            await self._leave(imposter)

    async def _hostile_server(self, random: Random) -> None:
        """Somebody who behaves dials a server that does not."""
        dialled: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        listener = await listen(
            "127.0.0.1",
            0,
            certificate=self._stage.certificates.certificate,
            key=self._stage.certificates.key,
            alpn=[DRAFT_22.alpn],
            on_connection=dialled.set_result,
        )
        self._report.connections += 1
        honest = random.random() < 0.9
        imposter: Imposter | None = None

        async def answer() -> None:
            nonlocal imposter
            imposter = Imposter(await dialled, random)
            with suppress(MoqtError):
                await imposter.begin(honest=honest)

        answering = asyncio.create_task(answer(), name="imposter")
        wishes = Random(random.getrandbits(64))
        try:
            with suppress(MoqtError, TimeoutError):
                async with self._stage.session(listener.port, LIMITS) as victim:
                    await wish(victim, FullTrackName((b"a", b"b"), b"t"), wishes, seconds=0.6)
                    if imposter is not None:
                        await imposter.settle()
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            if imposter is not None:
                self._judge_imposter("hostile server", imposter)
                await self._leave(imposter)
            listener.close()
            await listener.wait_closed()

    def _judge_imposter(self, name: str, imposter: Imposter) -> None:
        closed = imposter.connection.closed
        self._report.attacks += 1
        outcome = "lives"
        if closed is not None and closed.remote:
            outcome = f"closed {closed.code:#x}"
            if not closed.application or closed.code not in NAMED | {SessionCode.NO_ERROR}:
                raise Failure(f"{name}: {closed}")
        self._report.outcomes[name, outcome] += 1


async def run(
    certificates: CertificateFiles, *, seed: int, count: int, case: int | None, tell: Callable[[str], None]
) -> Report:
    """Make `count` attacks, or all of one `case`. Raises Failure."""
    report = Report(seed)
    started = time.monotonic()
    async with stage(certificates) as place:
        report.memory_before = resident()
        runner = _Run(place, report)
        numbers = itertools.count()

        async def lane() -> None:
            while report.attacks < count:
                number = next(numbers)
                await runner.case(number)
                note(number)

        def note(number: int) -> None:
            memory = resident()
            report.memory_most = max(report.memory_most, memory)
            if not report.memory_warm and report.attacks >= count * WARM:
                report.memory_warm = memory
            elif report.memory_warm and memory > report.memory_warm + GROWTH:
                grown = f"from {report.memory_warm >> 20} to {memory >> 20} MiB"
                raise Failure(f"case {number} of seed {seed}: the process has grown {grown}")
            if number % 200 == 0:
                tell(f"{report.attacks} attacks, {report.sent} messages, {memory >> 20} MiB")

        try:
            if case is not None:
                await runner.case(case)
            else:
                async with asyncio.TaskGroup() as lanes:
                    for _ in range(LANES):
                        lanes.create_task(lane())
        except* Failure as failures:
            raise failures.exceptions[0] from None
        finally:
            await runner.close()
        report.objects = len(place.good.arrived)
        report.slowest = place.good.slowest
        report.busiest = place.judge.busiest
    report.memory_after = resident()
    report.seconds = time.monotonic() - started
    return report
