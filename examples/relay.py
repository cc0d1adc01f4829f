"""`python -m moqt.relay`, with its options, as a process that leaves when the example that started it is
gone: then standard input ends.
"""

from __future__ import annotations

import os
import runpy
import signal
import threading


def leave_with_the_example() -> None:
    """Have the relay leave as SIGTERM makes it leave."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=leave_with_the_example, daemon=True).start()
    runpy.run_module("moqt.relay", run_name="__main__", alter_sys=True)
