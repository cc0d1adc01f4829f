"""Media over QUIC Transport (draft-22) for asyncio."""
