"""aiomoqt as a publisher: a server that serves the Tracks of a JSON file.

    {"tracks": [{"namespace": ["6b7663732d31", ...],   fields in hex
                 "name": "k.raw.s0",
                 "priority": 128,                       optional
                 "before": 5,                           optional: so many Objects exist when the server
                                                        starts; the others are published once the first
                                                        subscription is there. Default: all exist
                 "end_of_track": true,                  optional, default true: End of Track and PUBLISH_DONE
                                                        follow the last Object; else subscriptions stay open
                 "groups": [{"group": 0, "objects": [{"object": 0, "hex": "00ff"},
                                                     {"object": 1, "file": "x.bin"}]}]}]}

It answers SUBSCRIBE (with fills), FETCH (with OBJECTID_FILTER and the other range filters), TRACK_STATUS and
SUBSCRIBE_NAMESPACE (with NAMESPACE for each namespace of the file). All on the wire is aiomoqt's: this script
calls its session, its SubgroupDelivery (one Subgroup stream a Group, closed by an End of Group Object and
FIN), its serve_fill and its serve_fetch.

Lines: ready {port}; subscribed {name, largest, fill}; published {name} (all Objects exist now);
subscription_done {name, streams}; cancelled {name}; fetched {name, start, end, objects}.

What aiomoqt 0.13.3 can't do here:
- Its track layer (PublishedTrack) can't join a subscriber inside a Group: it starts at the next one, and the
  Objects between the fill's end and that Group are lost. So the handlers here drive the session themselves.
- It takes no bind address: it listens on 0.0.0.0 and [::]. serve() returns before it listens: `ready` waits
  for an answer on the port.
- REQUEST_UPDATE of a subscription is refused with NOT_SUPPORTED, which ends it (the session's default).
- SUBSCRIBE_TRACKS is acknowledged, and no PUBLISH follows.
- aiomoqt has no call for End of Track: it is written here, as Object 0 of a Group after the last.
- It sends no PUBLISH_STATE_NOTIFY, and no PUBLISH_NAMESPACE, GOAWAY or range filter unless told to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

from aiomoqt.delivery import ObjectHistory, SubgroupDelivery
from aiomoqt.messages import SubgroupHeader
from aiomoqt.messages.data import ObjectStatus
from aiomoqt.messages.params import D20ParamType, LocationFilter, RangeFilters, fill_range
from aiomoqt.messages.request import RequestOk
from aiomoqt.server import MOQTServer
from aiomoqt.types import (
    D18MessageType,
    GroupOrder,
    MOQTMessageType,
    ParamType,
    RequestErrorCode,
    SubscribeDoneCode,
)
from peer import DRAFT, common_arguments, emit, run

MAX_FILTER_RANGES = 16
HISTORY_BYTES = 1 << 30
Location = tuple[int, int]


class Subscription:
    """One subscription of one session."""

    def __init__(self, session: Any, request: Any, delivery: SubgroupDelivery) -> None:
        self.session = session
        self.request = request
        self.delivery = delivery
        self.fill: asyncio.Future[Any] | None = None
        self.cancelled = False


class ServedTrack:
    """One Track of the file: what exists, and who is subscribed."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.namespace = tuple(bytes.fromhex(field) for field in entry["namespace"])
        self.name = entry["name"].encode()
        self.priority = entry.get("priority", 128)
        self.end_of_track = entry.get("end_of_track", True)
        self.pending: list[tuple[int, int, bytes]] = []
        for group in entry["groups"]:
            for item in group["objects"]:
                payload = bytes.fromhex(item["hex"]) if "hex" in item else Path(item["file"]).read_bytes()
                self.pending.append((group["group"], item["object"], payload))
        self.last_group = max((group for group, _, _ in self.pending), default=-1)
        self.largest: Location | None = None
        self.history = ObjectHistory(HISTORY_BYTES)
        self.subscriptions: list[Subscription] = []
        self.publishing: asyncio.Future[None] | None = None
        for _ in range(entry.get("before", len(self.pending))):
            self._take_next()

    @property
    def ended(self) -> bool:
        return self.end_of_track and not self.pending

    def _take_next(self) -> tuple[int, int, bytes]:
        """The next Object exists from now on."""
        group, object_id, payload = self.pending.pop(0)
        self.history.add(group, object_id, payload, priority=self.priority)
        self.largest = max(self.largest or (0, 0), (group, object_id))
        return group, object_id, payload

    def start_publishing(self) -> None:
        if self.publishing is None:
            self.publishing = asyncio.ensure_future(self._publish())

    async def _publish(self) -> None:
        """Publishes what is pending to the subscriptions there are; ends them if the Track ends."""
        while self.pending:
            group, object_id, payload = self._take_next()
            for subscription in self._open():
                await subscription.delivery.write(group, object_id, payload, group_start=object_id == 0)
            if not self.pending or self.pending[0][0] != group:
                for subscription in self._open():
                    subscription.delivery.end_group()
        emit("published", name=self.name.decode())
        while self.ended and self.subscriptions:
            await self._finish(self.subscriptions.pop(0))
        self.publishing = None

    def _open(self) -> list[Subscription]:
        return [subscription for subscription in self.subscriptions if not subscription.cancelled]

    async def _finish(self, subscription: Subscription) -> None:
        """End of Track on a stream of its own, and PUBLISH_DONE with the number of streams opened."""
        if subscription.cancelled:
            return
        session = subscription.session
        streams = subscription.delivery.stream_count
        if subscription.fill is not None:
            await subscription.fill
            streams += 1
        header = SubgroupHeader(
            track_alias=subscription.delivery.track_alias,
            group_id=self.last_group + 1,
            subgroup_id=0,
            publisher_priority=self.priority,
            prof=session._profile,
        )
        stream = await session.open_uni_stream()
        await session.stream_write_drain(stream, header.serialize().data)
        end = header.next_object(status=ObjectStatus.END_OF_TRACK, object_id=0)
        await session.stream_write_drain(stream, end.data, end_stream=True)
        streams += 1
        session.subscribe_done(
            subscription.request.request_id,
            status_code=SubscribeDoneCode.TRACK_ENDED,
            stream_count=streams,
            reason="track ended",
        )
        emit("subscription_done", name=self.name.decode(), streams=streams)

    async def on_subscribe(self, session: Any, request: Any) -> None:
        largest = self.largest  # one snapshot for SUBSCRIBE_OK, the fill and the start of the subscription
        exists: dict[str, int] = {}
        if largest is not None:
            exists = {"content_exists": 1, "largest_group_id": largest[0], "largest_object_id": largest[1]}
        ok = session.subscribe_ok(request_msg=request, **exists)
        wanted = request.location_filter or LocationFilter.none()
        start, end = wanted.resolve(largest)
        delivery = SubgroupDelivery(session, ok.track_alias, priority=self.priority)
        delivery.passes = lambda group, object_id: (
            start <= (group, object_id) and (end is None or (group, object_id) <= end)
        )
        subscription = Subscription(session, request, delivery)
        fill = (request.parameters or {}).get(D20ParamType.FILL_PARAMETERS)
        if fill is not None and fill_range(fill, wanted, largest) is not None:
            subscription.fill = asyncio.ensure_future(
                session.serve_fill(request, self.history, largest, subscription_filter=wanted)
            )
        session.register_request_cancel_handler(request.request_id, lambda _: self._cancel(subscription))
        emit("subscribed", name=self.name.decode(), largest=largest, fill=subscription.fill is not None)
        self.subscriptions.append(subscription)
        self.start_publishing()

    def _cancel(self, subscription: Subscription) -> None:
        subscription.cancelled = True
        subscription.delivery.cancel()
        if subscription.fill is not None:
            subscription.fill.cancel()
        if subscription in self.subscriptions:
            self.subscriptions.remove(subscription)
        emit("cancelled", name=self.name.decode())

    async def on_fetch(self, session: Any, request: Any) -> None:
        wanted = request.location_filter or LocationFilter.none()
        start, end = wanted.resolve(self.largest, fetch=True)
        if self.largest is None or start > self.largest or end is None or end < start:
            session.fetch_error(
                request_id=request.request_id,
                error_code=RequestErrorCode.INVALID_RANGE,
                reason="no such Objects",
            )
            return
        filters = RangeFilters.from_params(request.parameters)
        descending = request.group_order == GroupOrder.DESCENDING
        objects = [
            item
            for item in self.history.fetch(start, end, session, descending=descending)
            if filters.admits(item.subgroup_id, item.object_id, item.publisher_priority, item.extensions)
        ]
        if end[1] >= 2**62:  # a whole End Group ends at its last Object
            end = (end[0], self.history.last_object(end[0]) or 0)
        session.fetch_ok(
            request_id=request.request_id,
            end_of_track=int(self.ended and end == self.largest),
            largest_group_id=end[0],
            largest_object_id=end[1] + 1,  # the library's form: one more than the last Object
        )
        serving = asyncio.ensure_future(
            session.serve_fetch(
                request.request_id,
                objects,
                group_order=GroupOrder.DESCENDING if descending else GroupOrder.ASCENDING,
            )
        )
        session.register_request_cancel_handler(request.request_id, lambda _: serving.cancel())
        await serving
        emit("fetched", name=self.name.decode(), start=start, end=end, objects=len(objects))

    async def on_track_status(self, session: Any, request: Any) -> None:
        parameters = {} if self.largest is None else {ParamType.LARGEST_OBJECT: self.largest}
        reply = RequestOk(request_id=request.request_id, parameters=parameters)
        session._send_reply(request.request_id, reply, fin=True)  # aiomoqt has no public call for this reply


async def answering(port: int) -> None:
    """Returns when a QUIC server answers on `port`: Version Negotiation, to a version that nobody knows."""
    packet = b"\xc0\x1a\x2a\x3a\x4a" + 2 * (b"\x08" + bytes(8))
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setblocking(False)
        probe.connect(("127.0.0.1", port))
        while True:
            try:
                probe.send(packet.ljust(1200, b"\x00"))
                await asyncio.wait_for(loop.sock_recv(probe, 2048), 0.1)
                return
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)
            except TimeoutError:
                continue


async def main(options: argparse.Namespace) -> int:
    entries = json.loads(options.tracks.read_text())["tracks"]
    tracks = {(track.namespace, track.name): track for track in map(ServedTrack, entries)}

    async def on_subscribe(session: Any, request: Any) -> None:
        track = tracks.get((tuple(request.track_namespace), request.track_name))
        if track is None:
            session.subscribe_error(
                request.request_id, error_code=RequestErrorCode.DOES_NOT_EXIST, reason="no such track"
            )
        else:
            await track.on_subscribe(session, request)

    async def on_fetch(session: Any, request: Any) -> None:
        track = tracks.get((tuple(request.namespace), request.track_name))
        if track is None:
            session.fetch_error(
                request.request_id, error_code=RequestErrorCode.DOES_NOT_EXIST, reason="no such track"
            )
        else:
            await track.on_fetch(session, request)

    async def on_track_status(session: Any, request: Any) -> None:
        track = tracks.get((tuple(request.track_namespace), request.track_name))
        if track is None:
            session.subscribe_error(
                request.request_id, error_code=RequestErrorCode.DOES_NOT_EXIST, reason="no such track"
            )
        else:
            await track.on_track_status(session, request)

    async def on_subscribe_namespace(session: Any, request: Any) -> None:
        prefix = tuple(request.namespace_prefix)
        session.subscribe_namespace_ok(request)
        for namespace in sorted({namespace for namespace, _ in tracks}):
            if namespace[: len(prefix)] == prefix:
                session.namespace(namespace[len(prefix) :], request_id=request.request_id)

    port = options.port
    if port == 0:  # the library tells nobody which port it got
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("0.0.0.0", 0))
            port = probe.getsockname()[1]
    server = MOQTServer(
        "127.0.0.1",
        port,
        certificate=options.cert,
        private_key=options.key,
        use_quic=True,
        supported_drafts=DRAFT,
        max_filter_ranges=MAX_FILTER_RANGES,
    )
    server.register_handler(MOQTMessageType.SUBSCRIBE, on_subscribe)
    server.register_handler(MOQTMessageType.FETCH, on_fetch)
    server.register_handler(MOQTMessageType.TRACK_STATUS, on_track_status)
    server.register_handler(D18MessageType.SUBSCRIBE_NAMESPACE, on_subscribe_namespace)
    listener = await server.serve()
    try:
        await answering(port)
        emit("ready", port=port)
        await asyncio.Event().wait()  # until it is stopped
    finally:
        await server.close_sessions()
        listener.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_arguments(parser)
    parser.add_argument("tracks", type=Path, help="the JSON file described above")
    parser.add_argument("--port", type=int, default=0, help="0: a free one; the line `ready` tells it")
    parser.add_argument("--cert", required=True)
    parser.add_argument("--key", required=True)
    arguments = parser.parse_args()
    sys.exit(run(main(arguments), debug=arguments.debug))
