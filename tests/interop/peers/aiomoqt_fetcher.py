"""aiomoqt as a fetcher: FETCHes a range of Groups and prints the Objects.

It sends FETCH with the filter Absolute Start, Group End (0x03) and GROUP_ORDER, as kvcs 7.3 asks for a range
of layers, and OBJECTID_FILTER with --blocks.

Lines: connected {draft}; object {source: "fetch", group, object, subgroup, status, priority, length, sha256};
gap {group, object, kind}; fetch_ok {end, end_of_track, properties}; end {complete, objects}; error {kind,
code, reason}. FETCH_OK may come after Objects.

What aiomoqt 0.13.3 can't do here:
- It refuses by itself (ValueError) to send more Ranges than the publisher's MAX_FILTER_RANGES allows.
- It reads all that comes at once; it can't slow a publisher down.
- A FETCH_OK whose End is before the start closes the session (PROTOCOL_VIOLATION).
- A reset data stream is reported without its code ("complete": false).
- A request that is answered after more than 10 s has failed (fixed in the library).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from aiomoqt.messages.params import D20ParamType, LocationFilter, RangeFilter
from aiomoqt.types import GroupOrder
from peer import EXIT_DONE, EXIT_INCOMPLETE, client_arguments, connect, emit, emit_object, run


async def main(options: argparse.Namespace) -> int:
    objects = 0

    def on_object(item: Any, size: int, arrival: int, request_id: int) -> None:
        nonlocal objects
        objects += 1
        emit_object("fetch", item, item.group_id, item.subgroup_id)

    def on_gap(item: Any, request_id: int) -> None:
        emit("gap", group=item.group_id, object=item.object_id, kind=item.end_of_range)

    parameters: dict[int, Any] = {}
    if options.blocks is not None:
        parameters[D20ParamType.OBJECTID_FILTER] = RangeFilter(ranges=((0, options.blocks - 1),))
    async with connect(options) as session:
        session.on_fetch_gap = on_gap
        ok = await session.fetch(
            options.namespace,
            options.name,
            subscriber_priority=128,
            group_order=GroupOrder[options.order.upper()],
            location_filter=LocationFilter.absolute(options.first_group, 0, options.last_group),
            parameters=parameters,
            wait_response=True,
            on_object=on_object,
        )
        emit(
            "fetch_ok",
            # The library counts the Object of the End Location one up.
            end=[ok.largest_group_id, ok.largest_object_id - 1],
            end_of_track=bool(ok.end_of_track),
            properties={str(kind): str(value) for kind, value in (ok.track_extensions or {}).items()},
        )
        complete = await session.await_fetch_done(ok.request_id, timeout=options.timeout)
        emit("end", complete=complete, objects=objects)
    return EXIT_DONE if complete else EXIT_INCOMPLETE


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    client_arguments(parser)
    parser.add_argument("--first-group", type=int, required=True)
    parser.add_argument("--last-group", type=int, required=True, help="inclusive")
    parser.add_argument(
        "--blocks", type=int, metavar="N", help="only Objects 0 to N-1 of each Group (OBJECTID_FILTER)"
    )
    parser.add_argument("--order", choices=["ascending", "descending"], default="ascending")
    arguments = parser.parse_args()
    sys.exit(run(main(arguments), debug=arguments.debug))
