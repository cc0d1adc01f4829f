"""Dialling and listening: our UDP endpoints under aioquic.

A client has one connected socket per dial; a listener one socket per address it listens at. All datagrams of
a batch go to their connections first, then each connection that got some makes one pass: events, feeder,
packets.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Network
from pathlib import Path
from typing import Any, Final, Literal

from aioquic._buffer import Buffer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.logger import QuicFileLogger
from aioquic.quic.packet import (
    QuicHeader,
    QuicPacketType,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.retry import QuicRetryTokenHandler
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import Certificate, load_pem_x509_certificates

from moqt.errors import ConnectionLost, DeadlineExceeded, UsageError
from moqt.names import printable
from moqt.quic.api import Connection, QuicOptions
from moqt.quic.connection import AioquicConnection
from moqt.quic.datagrams import Address, Datagram, UdpSocket

__all__ = ["ListenLimits", "Listener", "certificates_in", "dial", "listen"]

ATTEMPT: Final = 2.0
"""Seconds that an address gets before the next one is tried; the last one gets all that is left."""

MAX_DATAGRAM_FRAME: Final = 65536  # moqt 12.5: every MOQT endpoint takes DATAGRAMs
INITIAL_SIZE: Final = 1200
CONNECTION_ID_SIZE: Final = 8


async def dial(
    host: str,
    port: int,
    *,
    alpn: Sequence[str],
    options: QuicOptions | None = None,
    ca: str | Path | None = None,
    server_name: str | None = None,
    deadline: float = 10.0,
) -> Connection:
    """Connect to the first address of `host` that answers.

    `ca` is a PEM file with the only CA certificates to trust (None: the public ones of certifi). The server's
    certificate must be made for `server_name` (None: for `host`), a DNS name or an IP address. `deadline` is
    in seconds, for everything.

    Raises ConnectionLost with the reason for each address, DeadlineExceeded, UsageError (the CA file).
    """
    options = options or QuicOptions()
    name = (server_name or host).partition("%")[0]  # an IPv6 zone is no part of the name
    loop = asyncio.get_running_loop()
    until = loop.time() + deadline
    what = f"connecting to {_show((host, port))}"
    failures: list[str] = []
    try:
        async with asyncio.timeout_at(until):
            addresses = await _resolve(host, port)
            for index, (family, address) in enumerate(addresses):
                configuration = _client_configuration(alpn, options, ca, name)
                last = index == len(addresses) - 1
                seconds = until - loop.time() if last else min(ATTEMPT, until - loop.time())
                try:
                    return await _Dial(family, address, configuration, options).run(None if last else seconds)
                except ConnectionLost as error:
                    failures.append(error.reason)
    except TimeoutError:
        hint = "no answer: is the server running, and does UDP get through to it?"
        raise DeadlineExceeded("; ".join([what, *failures, hint]), deadline) from None
    raise ConnectionLost(f"{what}: " + "; ".join(failures))


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenLimits:
    """What a listener allows. A client that comes when `connections` are open, in all or from its address
    (of IPv6: from its network of 64 bits), gets no answer; one whose handshake takes more than
    `handshake_seconds` is forgotten.

    `retry` tells when clients must prove their address first, by a Retry packet that costs a round trip
    (RFC 9000 8.1.2): "load" is while `busy` or more handshakes are under way. Tickets are never issued, so
    there is no 0-RTT, which could be replayed.
    """

    connections: int = 1000
    connections_per_address: int = 256
    handshake_seconds: float = 5.0
    retry: Literal["never", "load", "always"] = "never"
    busy: int = 32


async def listen(
    host: str,
    port: int,
    *,
    certificate: str | Path,
    key: str | Path,
    alpn: Sequence[str],
    options: QuicOptions | None = None,
    on_connection: Callable[[Connection], None],
    limits: ListenLimits | None = None,
) -> Listener:
    """Listen at all addresses of `host`; "" and "::" mean every address, IPv4 and IPv6. Port 0 takes a free
    one.

    `certificate` is a PEM file with the server's certificate and its chain, `key` one with its private key.
    `on_connection` is called with each connection whose handshake is complete.

    Raises UsageError (files), OSError (the address is taken or not ours).
    """
    options = options or QuicOptions()
    configuration = _server_configuration(alpn, options, certificate, key)
    sockets = await _bind(host, port)
    return Listener(sockets, configuration, options, on_connection, limits or ListenLimits())


class Listener:
    """Accepts connections until it is closed. `addresses` are texts like [::]:4433; all have one `port`."""

    def __init__(
        self,
        sockets: list[socket.socket],
        configuration: QuicConfiguration,
        options: QuicOptions,
        on_connection: Callable[[Connection], None],
        limits: ListenLimits,
    ) -> None:
        self.port: int = sockets[0].getsockname()[1]
        self.addresses = [_show(sock.getsockname()) for sock in sockets]
        self._configuration = configuration
        self._options = options
        self._on_connection = on_connection
        self._limits = limits
        self._retry = QuicRetryTokenHandler()
        self.refused = 0
        """First packets that a limit left without an answer."""
        self._loop = asyncio.get_running_loop()
        self._refusing = False
        self._closing = False
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._ports = [_ServerPort(sock, self) for sock in sockets]

    @property
    def versions(self) -> list[int]:
        """QUIC versions."""
        return self._configuration.supported_versions

    @property
    def connections(self) -> int:
        """Connections that live, those in their handshake included."""
        return sum(len(port.connections) for port in self._ports)

    @property
    def handshakes(self) -> int:
        """Connections whose handshake is not complete."""
        return sum(not connection.ready for port in self._ports for connection in port.connections)

    def refuse(self) -> None:
        """Take no more connections; those that are here stay."""
        self._refusing = True

    def close(self, code: int = 0, reason: str = "") -> None:
        """Take no more connections and close all with an application code. Idempotent."""
        if not self._closing:
            self._closing = self._refusing = True
            for port in self._ports:
                for connection in list(port.connections):
                    connection.close(code, reason)
            self.port_idle()

    async def wait_closed(self) -> None:
        """Wait until every connection is over and the sockets are closed."""
        await asyncio.shield(self._over)

    # For the ports.

    def port_idle(self) -> None:
        """A port has lost a connection: perhaps the last."""
        if self._closing and not self.connections:
            for port in self._ports:
                port.close()
            if not self._over.done():
                self._over.set_result(None)

    def _must_prove(self, header: QuicHeader) -> bool:
        """Whether the client must prove its address. One that brings a token is held to it, since its Retry
        may have come while there was more load.
        """
        if self._limits.retry == "load":
            return bool(header.token) or self.handshakes >= self._limits.busy
        return self._limits.retry == "always"

    def admit(self, port: _ServerPort, header: QuicHeader, address: Address) -> AioquicConnection | None:
        """A client's first packet: make a connection of it, ask for proof of its address, or drop it."""
        limits = self._limits
        host = _holder(address[0])
        if self._refusing:
            return None
        if (
            self.connections >= limits.connections
            or sum(connection.host == host for p in self._ports for connection in p.connections)
            >= limits.connections_per_address
        ):
            self.refused += 1
            return None
        original, retry_source = header.destination_cid, None
        if self._must_prove(header):
            now = self._loop.time()
            if not header.token:
                retry_source = os.urandom(CONNECTION_ID_SIZE)
                token = self._retry.create_token(
                    address=address,
                    original_destination_connection_id=header.destination_cid,
                    retry_source_connection_id=retry_source,
                    now=now,
                )
                packet = encode_quic_retry(
                    version=header.version or 0,
                    source_cid=retry_source,
                    destination_cid=header.source_cid,
                    original_destination_cid=header.destination_cid,
                    retry_token=token,
                )
                port.send([(packet, address)])
                return None
            try:
                original = self._retry.validate_token(
                    address=address, destination_cid=header.destination_cid, token=header.token, now=now
                )
            except ValueError:
                return None
            retry_source = header.destination_cid
        connection = AioquicConnection(
            configuration=self._configuration,
            options=self._options,
            port=port,
            peer=_show(address),
            on_ready=self._on_connection,
            original_destination_connection_id=original,
            retry_source_connection_id=retry_source,
        )
        connection.host = host
        connection.expect_handshake(limits.handshake_seconds)
        return connection


class _ServerPort:
    """One socket of a listener and the connections that use it."""

    def __init__(self, sock: socket.socket, listener: Listener) -> None:
        self.connections: set[AioquicConnection] = set()
        self._by_id: dict[bytes, AioquicConnection] = {}
        self._listener = listener
        self._socket = UdpSocket(
            sock, on_batch=self._batch, on_writable=self._writable, on_error=lambda error: None
        )

    @property
    def blocked(self) -> bool:
        return self._socket.blocked

    def send(self, datagrams: list[Datagram]) -> None:
        self._socket.send(datagrams)

    def add_id(self, connection: AioquicConnection, connection_id: bytes) -> None:
        self._by_id[connection_id] = connection

    def remove_id(self, connection: AioquicConnection, connection_id: bytes) -> None:
        self._by_id.pop(connection_id, None)

    def remove(self, connection: AioquicConnection) -> None:
        self.connections.discard(connection)
        for connection_id in [i for i, other in self._by_id.items() if other is connection]:
            del self._by_id[connection_id]
        self._listener.port_idle()

    def close(self) -> None:
        self._socket.close()

    def _batch(self, batch: list[Datagram]) -> None:
        touched: dict[AioquicConnection, list[Datagram]] = {}
        for datagram in batch:
            data = datagram[0]
            if len(data) > CONNECTION_ID_SIZE and not data[0] & 0x80:
                connection = self._by_id.get(data[1 : 1 + CONNECTION_ID_SIZE])
            else:
                connection = self._handshake_packet(*datagram)
            if connection is not None:
                touched.setdefault(connection, []).append(datagram)
        for connection, datagrams in touched.items():
            connection.datagrams_received(datagrams)
            if connection.engine.started:
                connection.transport_pass()
            else:
                connection.lost("the first packet was not one of a handshake")

    def _handshake_packet(self, data: bytes, address: Address) -> AioquicConnection | None:
        """The connection that a packet with a long header belongs to; a new one for a client's first."""
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=CONNECTION_ID_SIZE)
        except ValueError:
            return None
        connection = self._by_id.get(header.destination_cid)
        if connection is not None or len(data) < INITIAL_SIZE:
            return connection
        versions = self._listener.versions
        if header.version and header.version not in versions:
            answer = encode_quic_version_negotiation(
                source_cid=header.destination_cid,
                destination_cid=header.source_cid,
                supported_versions=versions,
            )
            self.send([(answer, address)])
        elif header.packet_type is QuicPacketType.INITIAL:
            connection = self._listener.admit(self, header, address)
            if connection is not None:
                self.connections.add(connection)
                self._by_id[header.destination_cid] = connection
                self._by_id[connection.engine.host_cid] = connection
        return connection

    def _writable(self) -> None:
        for connection in list(self.connections):
            connection.transport_pass()


class _Dial:
    """One attempt at one address, and then the socket of the connection."""

    def __init__(
        self,
        family: socket.AddressFamily,
        address: Address,
        configuration: QuicConfiguration,
        options: QuicOptions,
    ) -> None:
        self._address = address
        self._name = _show(address)
        sock = socket.socket(family, socket.SOCK_DGRAM)
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            raise ConnectionLost(f"{self._name}: {error.strerror}") from error
        self._socket = UdpSocket(
            sock,
            on_batch=self._batch,
            on_writable=self._writable,
            on_error=self._error,
            peer=address,
        )
        self._connection = AioquicConnection(
            configuration=configuration,
            options=options,
            port=self,
            peer=self._name,
            on_ready=lambda connection: None,
        )

    async def run(self, seconds: float | None) -> Connection:
        """The connection when its handshake is complete. Raises ConnectionLost, also after `seconds`."""
        connection = self._connection
        taken = False
        try:
            connection.engine.connect(self._address, asyncio.get_running_loop().time())
            connection.transport_pass()
            async with asyncio.timeout(seconds):
                await asyncio.shield(connection.settled)
            taken = connection.closed is None
        except TimeoutError:
            raise ConnectionLost(f"{self._name}: no answer within {seconds:.1f} s") from None
        finally:
            # Also when the dial was cancelled just as the handshake had completed.
            if not taken:
                connection.close()
                connection.lost("given up")
        if connection.closed is not None:
            raise ConnectionLost(f"{self._name}: {connection.closed.reason}")
        return connection

    @property
    def blocked(self) -> bool:
        return self._socket.blocked

    def send(self, datagrams: list[Datagram]) -> None:
        self._socket.send(datagrams)

    def add_id(self, connection: AioquicConnection, connection_id: bytes) -> None:
        """The socket has one connection: all that comes is its."""

    def remove_id(self, connection: AioquicConnection, connection_id: bytes) -> None:
        """See `add_id`."""

    def remove(self, connection: AioquicConnection) -> None:
        self._socket.close()

    def _batch(self, batch: list[Datagram]) -> None:
        self._connection.datagrams_received(batch)
        self._connection.transport_pass()

    def _writable(self) -> None:
        self._connection.transport_pass()

    def _error(self, error: OSError) -> None:
        # Once connected, ICMP is only a hint that anyone on the way can forge; the idle time-out decides.
        if not self._connection.ready and self._connection.closed is None:
            if isinstance(error, ConnectionRefusedError):
                port = self._address[1]
                self._connection.lost(f"nothing listens on UDP port {port} there (ICMP port unreachable)")
            else:
                self._connection.lost(error.strerror or str(error))


def _configuration(alpn: Sequence[str], options: QuicOptions, *, is_client: bool) -> QuicConfiguration:
    logger = None
    if options.qlog_dir is not None:
        options.qlog_dir.mkdir(parents=True, exist_ok=True)
        logger = QuicFileLogger(str(options.qlog_dir))
    return QuicConfiguration(
        alpn_protocols=list(alpn),
        connection_id_length=CONNECTION_ID_SIZE,
        idle_timeout=options.idle_timeout,
        is_client=is_client,
        max_data=options.max_data,
        max_datagram_frame_size=MAX_DATAGRAM_FRAME,
        max_datagram_size=options.max_datagram_size,
        max_stream_data=options.max_stream_data,
        quic_logger=logger,
    )


def _client_configuration(
    alpn: Sequence[str], options: QuicOptions, ca: str | Path | None, server_name: str
) -> QuicConfiguration:
    """For one dial only: aioquic keeps the server's name in it."""
    configuration = _configuration(alpn, options, is_client=True)
    configuration.server_name = server_name
    if ca is not None:
        certificates_in(ca)
        configuration.load_verify_locations(cafile=str(ca))
    return configuration


def _server_configuration(
    alpn: Sequence[str], options: QuicOptions, certificate: str | Path, key: str | Path
) -> QuicConfiguration:
    configuration = _configuration(alpn, options, is_client=False)
    chain = certificates_in(certificate)
    private_key = _private_key(key)
    if chain[0].public_key() != private_key.public_key():
        raise UsageError(f"the key in {key} does not belong to the first certificate in {certificate}")
    configuration.certificate, *configuration.certificate_chain = chain
    configuration.private_key = private_key
    return configuration


def certificates_in(file: str | Path) -> list[Certificate]:
    """At least one. Raises UsageError."""
    try:
        return load_pem_x509_certificates(Path(file).read_bytes())
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{file}: no certificates in PEM form in it") from error


def _private_key(file: str | Path) -> Any:
    """Of any kind: what is no certificate's key is found by comparing. Raises UsageError."""
    try:
        return load_pem_private_key(Path(file).read_bytes(), None)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    except TypeError as error:
        raise UsageError(
            f"{file}: the key is encrypted, and there is nobody to ask for its password"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{file}: no private key in PEM form in it") from error


async def _resolve(host: str, port: int, *, flags: int = 0) -> list[tuple[socket.AddressFamily, Address]]:
    """The addresses of a host without repeats. Raises ConnectionLost."""
    kind = socket.SOCK_DGRAM
    try:
        found = socket.getaddrinfo(host, port, type=kind, flags=flags | socket.AI_NUMERICHOST)
    except socket.gaierror:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=kind, flags=flags)
        except socket.gaierror as error:
            raise ConnectionLost(f"{printable(host)}: {error.strerror}") from error
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


async def _bind(host: str, port: int) -> list[socket.socket]:
    if host in ("", "::", "*"):
        with contextlib.suppress(OSError):
            return [_bound(socket.AF_INET6, ("::", port), dual=True)]
        return [_bound(socket.AF_INET, ("0.0.0.0", port))]
    addresses = await _resolve(host, port, flags=socket.AI_PASSIVE)
    for last in (False,) * 9 + (True,):
        sockets: list[socket.socket] = []
        failure: OSError | None = None
        for family, address in addresses:
            # A free port is chosen for the first address; it may be taken at the others.
            chosen = sockets[0].getsockname()[1] if sockets else port
            try:
                sockets.append(_bound(family, (address[0], chosen, *address[2:])))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) or failure is None:
                    failure = error
        if sockets and (failure is None or failure.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)):
            return sockets
        for sock in sockets:
            sock.close()
        if last or port:
            break
    assert failure is not None
    raise failure


def _bound(family: socket.AddressFamily, address: Address, *, dual: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"can't listen on {_show(address)}: {error.strerror}") from error
    return sock


def _holder(host: str) -> str:
    """Whose address it is: who has one of IPv6 has all of its network."""
    if ":" not in host or host.startswith("::ffff:"):
        return host
    return str(IPv6Network((host.partition("%")[0], 64), strict=False))


def _show(address: Address) -> str:
    """host:port as text, IPv6 in brackets; an IPv4 address seen through an IPv6 socket as IPv4."""
    host = str(address[0]).removeprefix("::ffff:")
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"
