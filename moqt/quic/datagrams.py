"""One non-blocking UDP socket with batches in both directions.

Each time the socket is readable it is drained into one batch; runs of datagrams of equal size leave with one
system call. GRO and GSO (Linux: one read or write for many datagrams) are used where the kernel has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final

__all__ = ["Address", "Datagram", "UdpSocket"]

Address = tuple[Any, ...]
"""What the socket module calls the address of a peer: (host, port), for IPv6 with flow and scope."""

Datagram = tuple[bytes, Address]

# <linux/udp.h>; Python's socket module does not name them.
SOL_UDP: Final = 17
UDP_SEGMENT: Final = 103
UDP_GRO: Final = 104

BUFFER_SIZE: Final = 4 * 1024 * 1024
"""Bytes asked of the kernel for each direction: with the usual 208 KiB even loopback loses packets."""

BATCH: Final = 64
"""Datagrams after which a batch is closed, so that one busy socket does not keep the event loop: what came is
acknowledged and handed on a millisecond later.
"""

MAX_SEGMENTS: Final = 64
MAX_WRITE: Final = 65000

NO_GSO: Final = frozenset({errno.EIO, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOPROTOOPT, errno.EMSGSIZE})
"""What the kernel says when segmentation is not to be had on this way after all."""


class UdpSocket:
    """Takes over a bound or connected UDP socket.

    `on_batch` is called with all datagrams that were read at once, `on_writable` when the kernel takes
    datagrams again after `blocked` was set, `on_error` with an error of the network, such as
    ConnectionRefusedError on a connected socket.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_batch: Callable[[list[Datagram]], None],
        on_writable: Callable[[], None],
        on_error: Callable[[OSError], None],
        peer: Address | None = None,
    ) -> None:
        self._socket = sock
        self._on_batch = on_batch
        self._on_writable = on_writable
        self._on_error = on_error
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._backlog: deque[Datagram] = deque()
        self._buffer = bytearray(65536)
        self._segments = True
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_SIZE)
        with contextlib.suppress(OSError):
            sock.setsockopt(SOL_UDP, UDP_GRO, 1)
        try:
            sock.getsockopt(SOL_UDP, UDP_SEGMENT)
        except OSError:
            self._segments = False
        self._loop.add_reader(sock, self._readable)

    @property
    def blocked(self) -> bool:
        """Whether datagrams wait here because the kernel took no more."""
        return bool(self._backlog)

    def send(self, datagrams: list[Datagram]) -> None:
        """Send, or keep and send when the kernel has room. Never raises; what can't be sent is lost, as in
        IP.
        """
        if self._backlog:
            self._backlog.extend(datagrams)
            return
        sent = self._write(datagrams)
        if sent < len(datagrams):
            self._backlog.extend(datagrams[sent:])
            self._loop.add_writer(self._socket, self._writable)

    def close(self) -> None:
        """Datagrams that wait are tried once more."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._write(list(self._backlog))
        self._backlog.clear()
        self._socket.close()

    def _readable(self) -> None:
        batch: list[Datagram] = []
        failure: OSError | None = None
        view = memoryview(self._buffer)
        peer = self._peer
        while len(batch) < BATCH:
            try:
                size, ancillary, _, address = self._socket.recvmsg_into((view,), 64)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                failure = error
                break
            if peer is not None:
                address = peer
            segment = size
            for level, kind, data in ancillary:
                if level == SOL_UDP and kind == UDP_GRO:
                    (segment,) = struct.unpack("i", data[:4])
            if segment >= size:
                batch.append((bytes(view[:size]), address))
            else:
                batch += [
                    (bytes(view[at : min(at + segment, size)]), address) for at in range(0, size, segment)
                ]
        if batch:
            self._on_batch(batch)
        if failure is not None:
            self._on_error(failure)

    def _writable(self) -> None:
        waiting = list(self._backlog)
        self._backlog.clear()
        sent = self._write(waiting)
        if sent < len(waiting):
            self._backlog.extend(waiting[sent:])
        else:
            self._loop.remove_writer(self._socket)
            self._on_writable()

    def _write(self, datagrams: list[Datagram]) -> int:
        """Write as many as the kernel takes. Returns how many."""
        at = 0
        while at < len(datagrams):
            count = self._run(datagrams, at) if self._segments else 1
            try:
                self._write_run(datagrams, at, count)
            except (BlockingIOError, InterruptedError):
                return at
            except OSError as error:
                if count > 1 and error.errno in NO_GSO:
                    self._segments = False
                    continue
                self._on_error(error)
                if self._socket.fileno() < 0:
                    return len(datagrams)
                # A connected socket reports an earlier ICMP error instead of sending; the datagram is lost.
            at += count
        return at

    def _write_run(self, datagrams: list[Datagram], at: int, count: int) -> None:
        first, address = datagrams[at]
        where = () if self._peer is not None else (address,)
        if count == 1:
            self._socket.sendmsg((first,), (), 0, *where)
        else:
            segment = ((SOL_UDP, UDP_SEGMENT, struct.pack("H", len(first))),)
            self._socket.sendmsg([data for data, _ in datagrams[at : at + count]], segment, 0, *where)

    def _run(self, datagrams: list[Datagram], at: int) -> int:
        """How many datagrams from `at` on may go as one write: of one size (the last may be smaller), to one
        peer.
        """
        first, address = datagrams[at]
        size = total = len(first)
        end = at + 1
        while end < len(datagrams) and end - at < MAX_SEGMENTS:
            data, other = datagrams[end]
            if len(data) > size or total + len(data) > MAX_WRITE or other != address:
                break
            total += len(data)
            end += 1
            if len(data) < size:
                break
        return end - at
