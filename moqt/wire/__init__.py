"""MOQT draft-22 between bytes and values: no asyncio, no clock, no I/O."""
