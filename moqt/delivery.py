"""What goes out: the Objects of one subscription of the peer, and the bytes of fetch and fill streams (moqt
6, 7, 10, 12).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moqt.authorization import Denied
from moqt.errors import DoneCode, RequestCode, RequestRefused, ResetCode, StreamStopped, UsageError
from moqt.fetching import LAST, Puller, passes, seconds_of
from moqt.filters import (
    MAX_VARINT,
    GroupOrder,
    Location,
    LocationFilter,
    RangeFilter,
    check_range_filters,
)
from moqt.quic.api import Buffer, ConnectionClosed
from moqt.requests import RequestStream
from moqt.scheduler import Outgoing, Urgency
from moqt.timeouts import Timeouts
from moqt.track import StoredObject, Track, TrackWatcher
from moqt.wire import (
    ObjectDatagram,
    ObjectStatus,
    Parameters,
    PublishDone,
    PublishStateNotify,
    RequestUpdate,
    SubgroupEncoder,
    SubgroupHeader,
    decode_properties,
    encode_datagram,
)

if TYPE_CHECKING:
    from moqt.session import Session

__all__ = ["DEFAULT_PRIORITY", "LAST", "Delivery", "rank"]

DEFAULT_PRIORITY = 128

_CHUNK = 64 * 1024
"""Bytes that count as one push, when it is time to look how much waits."""


def rank(order: GroupOrder, group: int) -> int:
    """Where a Group stands among others of the same priorities: lower goes first (moqt 14 step 3)."""
    return group if order is GroupOrder.ASCENDING else MAX_VARINT - group


@dataclass(slots=True)
class _Subgroup:
    """A subgroup stream that is open. `version` is that of the filters when it was opened; `owed` is how many
    bytes of the Object `last` have not come: nothing may follow before, no FIN either (moqt 12.6).
    """

    outgoing: Outgoing
    encoder: SubgroupEncoder
    version: int
    timeouts: Timeouts
    last: StoredObject | None = None
    owed: int = 0


class Delivery(TrackWatcher):
    """One subscription of the peer to a Track of ours, from SUBSCRIBE or PUBLISH to PUBLISH_DONE.

    `over` is set when nothing more is sent. Each Subgroup has one stream; `stream_count` is how many streams,
    fills included, the peer has got to see and that have ended.
    """

    def __init__(
        self, session: Session, stream: RequestStream, parameters: Parameters, track: Track, alias: int
    ) -> None:
        self.session = session
        self.request = stream
        self.track = track
        self.alias = alias
        self.stream_count = 0
        self.over = asyncio.Event()
        self._scheduler = session.scheduler
        self._forward = parameters.forward is not False
        self._priority = _or_default(parameters.subscriber_priority, DEFAULT_PRIORITY)
        self._order = parameters.group_order or track.order
        self._range_filters = parameters.range_filters
        self._filter = LocationFilter.none()
        self._start, self._end = Location(0, 0), LAST
        self._select(parameters.location_filter or self._filter)
        self._version = 0
        self._timeouts = Timeouts.asked(parameters)
        self._subgroups: dict[tuple[int, int], _Subgroup] = {}
        self._fills: set[Outgoing] = set()
        self._sending: set[Outgoing] = set()
        self._refused: set[tuple[int, int]] = set()
        self._unweighed = 0
        """Pushes since it was looked how much waits."""
        self._drained = asyncio.Event()
        self._ending: DoneCode | None = None
        self._finisher: asyncio.Task[None] | None = None

    # What the Track tells.

    def on_object(self, item: StoredObject) -> None:
        """Send what the peer has asked for."""
        if item.datagram:
            self._send_datagram(item)
            return
        key = (item.location.group, item.subgroup)
        wanted = self._selects(item)
        if wanted and self._forward and key not in self._refused:
            current = self._subgroups.get(key)
            last = current.last if current else None
            if current and (current.owed or (last and not self.track.follows(last.location.object, item))):
                self._reset(key, ResetCode.CANCELLED)  # moqt 12.6
            self._send(key, item)
        elif (
            item.status is ObjectStatus.NORMAL
            and key in self._subgroups
            and (not self._forward or self._subgroups[key].version != self._version)
        ):
            # moqt 12.6: a stream from which an Object was left out by a pause, or by a range that was
            # narrowed, must not end with FIN.
            self._reset(key, ResetCode.CANCELLED)

    def on_piece(self, item: StoredObject, data: Buffer) -> None:
        """Pass on what has come, at once (cut-through)."""
        if item.datagram:
            self._send_datagram(item)
            return
        subgroup = self._subgroups.get((item.location.group, item.subgroup))
        if subgroup is not None and subgroup.last is item:
            self._push(subgroup, item, data)

    def on_failed(self, item: StoredObject, code: int) -> None:
        """A stream that is inside an Object can't go on without the rest."""
        key = (item.location.group, item.subgroup)
        if key in self._subgroups and self._subgroups[key].last is item:
            self._reset(key, code)

    def on_subgroup_end(self, group: int, subgroup: int, code: int | None) -> None:
        """FIN when all of the Subgroup was passed on, else a reset (moqt 12.6)."""
        current = self._subgroups.get((group, subgroup))
        if current is not None and current.owed and code is None:
            code = ResetCode.INTERNAL_ERROR
        if current is not None and code is None:
            self._scheduler.push(current.outgoing, fin=True)
            if current.timeouts.of_subgroup:
                outgoing = current.outgoing
                self._later(
                    current.timeouts.of_subgroup, self._scheduler.reset, outgoing, ResetCode.DELIVERY_TIMEOUT
                )
        elif code is not None:
            self._reset((group, subgroup), code)
        if code is None:
            self._refused.discard((group, subgroup))

    def on_largest(self) -> None:
        """Say so."""
        if self._ending is None and not self.request.over:
            notify = PublishStateNotify(Parameters(largest=self.track.largest))
            self.session.spawn(self.request.send(notify), "PUBLISH_STATE_NOTIFY")

    def on_removed(self, code: DoneCode) -> None:
        """End the subscription with PUBLISH_DONE `code`, once its streams are closed."""
        if self._ending is None and not self.over.is_set():
            self._ending = code
            self._finisher = self.session.spawn(self._finish(code), "PUBLISH_DONE")

    def _send_datagram(self, item: StoredObject) -> None:
        """Send an Object whose delivery mode is Datagram, when it is whole, or never (moqt 12.5)."""
        if item.missing or not self._forward or not self._selects(item):
            return
        datagram = ObjectDatagram(
            self.alias,
            item.location,
            item.priority,
            decode_properties(item.properties),
            item.status,
            item.status is ObjectStatus.NORMAL and self._holds_group_end(item),
            b"".join(item.since(0)),
        )
        with suppress(UsageError, ConnectionClosed):  # Too large for the path: dropped.
            self.session.connection.send_datagram(encode_datagram(datagram))

    def _selects(self, item: StoredObject) -> bool:
        """Whether the filters let an Object pass."""
        return self._start <= item.location <= self._end and passes(item, self._range_filters)

    def _send(self, key: tuple[int, int], item: StoredObject) -> None:
        subgroup = self._subgroups.get(key) or self._open(key, item)
        header = subgroup.encoder.object(
            item.location.object, item.size, status=item.status, properties=item.properties
        )
        subgroup.last, subgroup.owed = item, item.size
        if subgroup.timeouts.of_object:
            self._later(subgroup.timeouts.of_object, self._too_old, key, subgroup, subgroup.outgoing.end)
        self._scheduler.push(subgroup.outgoing, header)
        self._push(subgroup, item, *item.since(0))

    def _later(self, seconds: float, callback: Callable[..., None], *arguments: object) -> None:
        asyncio.get_running_loop().call_later(seconds, callback, *arguments)

    def _too_old(self, key: tuple[int, int], subgroup: _Subgroup, start: int) -> None:
        """An Object that begins at `start` of its stream has not begun to leave in time (moqt 12.7)."""
        if self._subgroups.get(key) is subgroup and subgroup.outgoing.gone <= start:
            self._reset(key, ResetCode.DELIVERY_TIMEOUT)

    def _push(self, subgroup: _Subgroup, item: StoredObject, *pieces: Buffer) -> None:
        subgroup.owed -= sum(map(len, pieces))
        self._scheduler.push(subgroup.outgoing, *pieces)
        if not self.track.authoritative and not subgroup.outgoing.ended:
            subgroup.outgoing.hold(item)
            self._unweighed += 1 + sum(map(len, pieces)) // _CHUNK
            if self._unweighed >= len(self._sending):
                self._weigh()

    def _weigh(self) -> None:
        """Whether the peer takes less than comes; what waits for it can't stay in memory for ever (moqt 9).

        Each stream is looked at, so this is done once in as many pushes as there are streams.
        """
        self._unweighed = 0
        if self.behind > self.session.limits.max_behind:
            self.fall_behind()

    @property
    def behind(self) -> int:
        """Bytes of memory that wait for the peer, fills left aside."""
        return sum(outgoing.weight for outgoing in self._sending - self._fills)

    def fall_behind(self) -> None:
        """End the subscription: the peer takes less than comes."""
        self._cut_off(ResetCode.TOO_FAR_BEHIND, DoneCode.TOO_FAR_BEHIND)

    def revoke(self, denied: Denied) -> None:
        """The peer has lost the right to the Track: nothing more of it leaves (security 3.2)."""
        self._cut_off(denied.reset_code, denied.done_code)

    def _cut_off(self, reset: ResetCode, done: DoneCode) -> None:
        self.track.unwatch(self)
        self._subgroups.clear()
        for outgoing in list(self._sending):
            self._scheduler.reset(outgoing, reset)
        self.on_removed(done)
        self._ending = done  # Also of a subscription that was to end anyway, but not so.

    def _open(self, key: tuple[int, int], item: StoredObject) -> _Subgroup:
        header = SubgroupHeader(
            self.alias,
            item.location.group,
            item.subgroup,
            item.priority,
            end_of_group=self._holds_group_end(item),
            first_object=self.track.starts_subgroup(item),
            has_properties=True,
        )
        outgoing = Outgoing(
            (self._priority, item.priority, rank(self._order, item.location.group), 1),
            on_end=lambda code: self._subgroup_ended(key, outgoing, code),
        )
        subgroup = self._subgroups[key] = _Subgroup(
            outgoing, SubgroupEncoder(header), self._version, self._timeouts_of(item)
        )
        self._sending.add(outgoing)
        self._scheduler.push(outgoing, subgroup.encoder.header())
        return subgroup

    def _timeouts_of(self, item: StoredObject) -> Timeouts:
        """For a Subgroup of which `item` is the first that is sent."""
        said = Timeouts.said(self.track.properties)
        if item.properties and self.track.starts_subgroup(item):
            said = Timeouts.said(decode_properties(item.properties), said)
        return self._timeouts.with_(said)

    def _holds_group_end(self, item: StoredObject) -> bool:
        """Whether the stream of this Group, if it ends with FIN, ends with the Group's last Object (moqt
        12.2).
        """
        return (
            self.track.ends_group(item)
            and not self._range_filters
            and self._end >= Location(item.location.group, MAX_VARINT)
        )

    def _subgroup_ended(self, key: tuple[int, int], outgoing: Outgoing, code: int | None) -> None:
        current = self._subgroups.get(key)
        if current is not None and current.outgoing is outgoing:
            del self._subgroups[key]
            if code is not None:  # By the peer: a stream that we reset is no longer among ours.
                self._refused.add(key)  # moqt 12.6: a Subgroup that the peer stopped is not opened again.
        self._ended(outgoing)

    def _ended(self, outgoing: Outgoing) -> None:
        self._sending.discard(outgoing)
        self._fills.discard(outgoing)
        self.stream_count += outgoing.opened
        if not self._sending:
            self._drained.set()

    def _reset(self, key: tuple[int, int], code: int) -> None:
        current = self._subgroups.pop(key, None)
        if current is not None:
            self._scheduler.reset(current.outgoing, code)

    # What the peer asks.

    @property
    def paused(self) -> bool:  # type: ignore[override]  # It is not set but follows from the updates.
        """Whether the peer has asked for no Objects now (moqt 9)."""
        return not self._forward

    def _select(self, location_filter: LocationFilter) -> None:
        self._filter = location_filter
        self._start = location_filter.start(self.track.largest)
        self._end = location_filter.end or LAST

    def fill(self, request_id: int, parameters: Parameters) -> None:
        """Open the fill stream that a SUBSCRIBE or REQUEST_UPDATE asks for, if there is anything in its range
        (moqt 7.2).
        """
        largest = self.track.largest
        if not self._forward or largest is None:
            return
        location_filter = parameters.location_filter or self._filter
        start = location_filter.start(largest)
        end = min(location_filter.end or LAST, largest)
        if start > end:
            return
        order = parameters.group_order or self._order
        priority = _or_default(parameters.subscriber_priority, self._priority)

        def urgency(item: StoredObject) -> Urgency:
            # moqt 14 step 3: a fill in the other order yields to the subscription; step 4: in one Group the
            # fill goes first.
            place = rank(order, item.location.group) if order is self._order else MAX_VARINT + 1
            return priority, item.priority, place, 0

        puller = Puller(
            self.track,
            start,
            end,
            order,
            _merged(self._range_filters, parameters.range_filters),
            urgency,
            patience=seconds_of(parameters.fill_timeout),
        )
        outgoing = puller.outgoing(
            self._scheduler, request_id, (priority, 0, 0, 0), lambda _code: self._ended(outgoing)
        )
        self._fills.add(outgoing)
        self._sending.add(outgoing)
        self._scheduler.start(outgoing)

    def update(self, message: RequestUpdate) -> None:
        """Apply a REQUEST_UPDATE, wholly or, raising RequestRefused, not at all (moqt 6.2, 9)."""
        parameters = message.parameters
        range_filters = _merged(self._range_filters, parameters.range_filters)
        limits = self.session.limits
        check_range_filters(parameters.range_filters, limit=limits.max_filter_ranges)
        check_range_filters(range_filters, limit=limits.max_filter_ranges)
        if parameters.fill is not None:
            check_range_filters(parameters.fill.range_filters, limit=limits.max_filter_ranges)
            if len(self._fills) >= limits.max_fills:
                raise RequestRefused(
                    RequestCode.EXCESSIVE_LOAD, f"{limits.max_fills} fills of this subscription are running"
                )
        self._version += 1
        self._timeouts = Timeouts.asked(parameters, self._timeouts)
        self._range_filters = range_filters
        if parameters.location_filter is not None:
            self._select(parameters.location_filter)
            for key in [key for key in self._subgroups if not self._start.group <= key[0] <= self._end.group]:
                self._reset(key, ResetCode.CANCELLED)
        if parameters.forward is not None:
            if parameters.forward and not self._forward:
                self._refused.clear()  # moqt 12.6: resuming may open stopped Subgroups again.
            self._forward = parameters.forward
            self.track.steer()
        if parameters.new_group_request is not None:
            self.track.request_group(parameters.new_group_request)
        if parameters.subscriber_priority is not None:
            self._priority = parameters.subscriber_priority
            for outgoing in self._sending - self._fills:
                self._scheduler.reprioritise(outgoing, (self._priority, *outgoing.urgency[1:]))
        if parameters.fill is not None:
            self.fill(message.request_id, parameters.fill)

    def cancel(self) -> None:
        """The subscription is over: nothing more is sent, and all its streams are reset (moqt 3.4)."""
        self.track.unwatch(self)
        self._subgroups.clear()
        for outgoing in list(self._sending):
            self._scheduler.reset(outgoing, ResetCode.CANCELLED)
        if self._finisher is not None:
            self._finisher.cancel()
        self.over.set()

    async def _finish(self, code: DoneCode) -> None:
        """Send PUBLISH_DONE when all streams of the subscription are closed (moqt 4.2)."""
        self.track.unwatch(self)
        try:
            if code is DoneCode.TRACK_ENDED:
                # Nothing more comes, so what was written is the whole of each Subgroup.
                for group, subgroup in list(self._subgroups):
                    self.on_subgroup_end(group, subgroup, None)
            elif self._subgroups:
                await self._break_off(code)
            while self._sending:
                self._drained.clear()
                await self._drained.wait()
            assert self._ending is not None
            await self.request.send(PublishDone(self._ending, self.stream_count, ""), fin=True)
            self.session.stats.done[self._ending.name] += 1
        except StreamStopped:
            self.request.cancel()  # The subscriber has left meanwhile.
        finally:
            self.over.set()

    async def _break_off(self, code: DoneCode) -> None:
        """Reset the streams of Groups that have not ended, but let what was published before leave: a reset
        drops what was not sent, and what the peer has not read.
        """
        await self._scheduler.drain([subgroup.outgoing for subgroup in self._subgroups.values()])
        with suppress(TimeoutError):
            async with asyncio.timeout(self.session.limits.linger):
                await self.session.connection.ping()
        reset = ResetCode[code.name] if code.name in ResetCode.__members__ else ResetCode.CANCELLED
        for key in list(self._subgroups):
            self._reset(key, reset)


def _merged(old: tuple[RangeFilter, ...], new: tuple[RangeFilter, ...]) -> tuple[RangeFilter, ...]:
    """Range filters after an update: each kind that is given replaces all of its kind (moqt 8)."""
    kinds = {known.kind for known in new}
    return tuple(known for known in old if known.kind not in kinds) + tuple(
        known for known in new if not known.removes
    )


def _or_default(value: int | None, default: int) -> int:
    return default if value is None else value
