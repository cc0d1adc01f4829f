"""QUIC for the rest of moqt: the only place that imports a QUIC library.

`api` says what a connection and a stream are and imports nothing of aioquic. `udp` dials and listens, over
`datagrams` (one socket), `connection` (streams over aioquic) and `engine` (aioquic with our flow control,
made quicker by `sending` and `receiving`). `link`, with its ends in `memory`, and `virtual`, a clock that
jumps, are the same thing inside one process, for tests. What both kinds share is in `base`.
"""
