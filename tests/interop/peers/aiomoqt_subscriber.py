"""aiomoqt as a subscriber: joins a Track live and whole, and prints every Object that comes.

It sends SUBSCRIBE with the filter Next Object and FILL_PARAMETERS (the exactly-once pattern of moqt 7.3), by
default with a fill of everything from Location {0, 0}. It ends when PUBLISH_DONE has come and as many streams
have ended as it counts, or after --objects Objects with a payload.

Lines: connected {draft}; namespace {namespace} (with --discover); subscribe_ok {largest, alias, properties};
object {source: subscription or fill, group, object, subgroup, status, priority, length, sha256}; gap {group,
object, kind}; stream_end {group, subgroup, clean, code}; fill_end {clean}; publish_done {status, streams,
reason}; closed {code, reason}; end {complete, objects}; error {kind, code, reason}.

What aiomoqt 0.13.3 can't do here:
- After a status Object (End of Group, End of Track) it reads no further on that stream: an End of Track that
  follows an End of Group on one stream is never reported. It is only in PUBLISH_DONE then.
- A PUBLISH_DONE that overtakes the first byte of the fill's stream makes it take the fill for an empty one
  and refuse the stream (STOP_SENDING). That is mended here (let_publish_done_overtake), so that what is
  printed is what the publisher sent.
- Subgroup streams that are still open 5 s after PUBLISH_DONE are refused.
- It announces no MAX_FILTER_RANGES and no MAX_AUTH_TOKEN_CACHE_SIZE, so nobody may send it either.
- Its receive side never pushes back: windows open as data arrives, whatever the callback does.
- A request that is answered after more than 10 s has failed (fixed in the library).
- The priority of Objects under a DEFAULT_PRIORITY header is property 0x0E of SUBSCRIBE_OK, else 128.
- A fill that fails (reset) is reported without its code.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from aiomoqt.messages import SubscribeDone
from aiomoqt.messages.params import D20ParamType, LocationFilter
from aiomoqt.types import GroupOrder, ParamType
from peer import EXIT_DONE, EXIT_INCOMPLETE, client_arguments, connect, emit, emit_object, in_hex, run

UNKNOWN_STREAM_COUNT = 2**64 - 1


def fill(text: str) -> LocationFilter | None:
    """`all`, `none`, `groups:N` (the last N groups, the current one included) or `from:GROUP,OBJECT`."""
    kind, _, value = text.partition(":")
    if kind == "none":
        return None
    if kind == "all":
        return LocationFilter.absolute(0, 0)
    if kind == "groups":
        return LocationFilter.relative(int(value))
    if kind == "from":
        group, _, object_id = value.partition(",")
        return LocationFilter.absolute(int(group), int(object_id))
    raise argparse.ArgumentTypeError(f"no such fill: {text}")


class Received:
    """What has come so far, and whether that is all."""

    def __init__(self, wanted: int | None) -> None:
        self.wanted = wanted
        self.objects = 0
        self.streams_ended = 0
        self.streams_expected: int | None = None
        self.complete = asyncio.Event()

    def add_object(self) -> None:
        self.objects += 1
        if self.wanted is not None and self.objects >= self.wanted:
            self.complete.set()

    def stream_ended(self) -> None:
        self.streams_ended += 1
        self._check()

    def publish_done(self, streams: int) -> None:
        self.streams_expected = self.streams_ended if streams == UNKNOWN_STREAM_COUNT else streams
        self._check()

    def _check(self) -> None:
        if self.streams_expected is not None and self.streams_ended >= self.streams_expected:
            self.complete.set()


def let_publish_done_overtake(session: Any) -> None:
    """Keeps PUBLISH_DONE from being read as the reply that shows that the fill is empty."""
    route_reply = session._route_reply

    def route(message: Any) -> None:
        if not isinstance(message, SubscribeDone):
            route_reply(message)

    session._route_reply = route


async def discover(session: Any, wanted: tuple[bytes, ...], prefix_length: int) -> None:
    """SUBSCRIBE_NAMESPACE for a prefix; returns when NAMESPACE has reported the wanted namespace."""
    prefix = wanted[:prefix_length]
    await session.subscribe_namespace(prefix, wait_response=True)
    while True:
        message = await session.await_namespace()
        found = prefix + tuple(message.namespace_suffix)
        emit("namespace", namespace=in_hex(found))
        if found == wanted:
            return


async def subscribe(session: Any, options: argparse.Namespace) -> int:
    received = Received(options.objects)
    parameters: dict[int, Any] = {}
    if options.fill is not None:
        parameters[D20ParamType.FILL_PARAMETERS] = {
            ParamType.LOCATION_FILTER: options.fill,
            ParamType.GROUP_ORDER: GroupOrder.ASCENDING,
        }

    def on_object(item: Any, size: int, arrival: int, group: int, subgroup: int | None) -> None:
        emit_object("subscription", item, group, subgroup)
        if not item.status:
            received.add_object()

    def on_fill_object(item: Any, size: int, arrival: int, request_id: int) -> None:
        emit_object("fill", item, item.group_id, item.subgroup_id)
        received.add_object()

    def on_gap(item: Any, request_id: int) -> None:
        emit("gap", group=item.group_id, object=item.object_id, kind=item.end_of_range)

    def on_done(message: Any) -> None:
        emit(
            "publish_done",
            status=int(message.status_code),
            streams=message.stream_count,
            reason=str(message.reason),
        )
        received.publish_done(message.stream_count)

    def on_stream_end(group: int, subgroup: int | None, *, clean: bool, reset_code: int) -> None:
        emit("stream_end", group=group, subgroup=subgroup, clean=clean, code=reset_code)
        received.stream_ended()

    let_publish_done_overtake(session)
    session.on_fetch_object = on_fill_object
    session.on_fetch_gap = on_gap
    ok = await session.subscribe(
        options.namespace,
        options.name,
        location_filter=LocationFilter.next_object(),
        parameters=parameters,
        wait_response=True,
        on_object=on_object,
        on_done=on_done,
    )
    largest = [ok.largest_group_id, ok.largest_object_id] if ok.content_exists else None
    emit(
        "subscribe_ok",
        largest=largest,
        alias=ok.track_alias,
        properties={str(kind): str(value) for kind, value in (ok.track_extensions or {}).items()},
    )
    session.register_stream_end_handler(ok.track_alias, on_stream_end)

    async def watch_fill() -> None:
        clean = await session.await_fetch_done(ok.request_id, timeout=options.timeout)
        emit("fill_end", clean=clean)
        received.stream_ended()

    async def watch_session() -> None:
        await session.async_closed()
        code, reason = session._close_err
        emit("closed", code=int(code), reason=str(reason))

    closed = asyncio.ensure_future(watch_session())
    watchers = {closed}
    complete = asyncio.ensure_future(received.complete.wait())
    if options.fill is not None and largest is not None:
        # Every range that --fill can ask for reaches Largest Object, so a stream opens (moqt 7.2 rule 8).
        watchers.add(asyncio.ensure_future(watch_fill()))
    await asyncio.wait({closed, complete}, timeout=options.timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in (*watchers, complete):
        task.cancel()
    emit("end", complete=received.complete.is_set(), objects=received.objects)
    if received.streams_expected is None:
        session.unsubscribe(ok.request_id)
    return EXIT_DONE if received.complete.is_set() else EXIT_INCOMPLETE


async def main(options: argparse.Namespace) -> int:
    async with connect(options) as session:
        if options.discover:
            await discover(session, options.namespace, options.discover)
        return await subscribe(session, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    client_arguments(parser)
    parser.add_argument("--fill", type=fill, default="all", help=fill.__doc__)
    parser.add_argument("--objects", type=int, help="end after so many Objects with a payload")
    parser.add_argument(
        "--discover",
        type=int,
        metavar="N",
        help="SUBSCRIBE_NAMESPACE for the first N fields, and wait for NAMESPACE, before anything else",
    )
    arguments = parser.parse_args()
    sys.exit(run(main(arguments), debug=arguments.debug))
