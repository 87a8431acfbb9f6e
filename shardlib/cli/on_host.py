"""`python on_host.py command...`: one host's part of a job that `shardlib run` started over ssh.

The first line of stdin has the variables of the command's environment, as JSON: all users of a host can read command
lines. Runs the command until it ends, or until whoever started it is gone: ssh kills nothing on the far side when its
near side ends, but it closes stdin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence

__all__ = ["main"]

# torchrun gives its ranks half a minute to end by themselves.
_PATIENCE = 40.0


def main(command: Sequence[str]) -> int:
    """Run a command while stdin is open, and return its exit status as a shell does."""
    environment = os.environ | json.loads(_first_line() or "{}")
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    threading.Thread(target=_end_with_stdin, args=(child,), daemon=True).start()
    status = child.wait()
    return 128 - status if status < 0 else status


def _first_line() -> bytes:
    """Return the first line of stdin, and leave what follows it unread."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(sys.stdin.fileno(), 1)):
        line += byte
    return line


def _end_with_stdin(child: subprocess.Popen[bytes]) -> None:
    # The descriptor, not sys.stdin: an interpreter that ends while a thread reads that aborts.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    child.terminate()
    try:
        child.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
