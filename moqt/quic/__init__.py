"""QUIC for the rest of moqt: the only place that imports a QUIC library.

`api` says what a connection and a stream are and imports nothing of aioquic; `connection` and `udp` are the
real thing over aioquic; `memory` is the same thing inside one process, for tests.
"""
