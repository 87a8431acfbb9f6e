"""Where sockets of this machine listen, as Linux lists them."""

from __future__ import annotations

import ipaddress
import struct
from pathlib import Path

_LISTENS = "0A"


def addresses(port: int) -> set[str]:
    """The addresses at which a port of this machine is listened at."""
    found = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            address, _, number = line.split()[1].partition(":")
            if line.split()[3] == _LISTENS and int(number, 16) == port:
                found.add(_address(address))
    return found


def _address(text: str) -> str:
    """An address in words of the machine's own byte order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words)))
