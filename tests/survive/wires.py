"""Two machines: network namespaces with a wire between them, which can be cut."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.survive.survivor import WIRE

_ADDRESS = "10.231.7.{}"


@dataclass(frozen=True)
class Machine:
    """A namespace: `prefix` runs a command in it, under a host name of its own."""

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        rename = 'hostname $0; exec "$@"'
        return ("ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", rename, self.name)

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment that tells torchrun and gloo which address to use."""
        return {"PET_LOCAL_ADDR": self.address, "GLOO_SOCKET_IFNAME": WIRE}

    def connect(self) -> None:
        _ip("-n", self.name, "link", "set", WIRE, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Make two machines. Skips the test where the system does not let this process make them."""
    pair = tuple(Machine(f"sl-{os.getpid()}-{n}", _ADDRESS.format(n)) for n in (1, 2))
    try:
        for machine in pair:
            _ip("netns", "add", machine.name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this process may not make network namespaces: {getattr(error, 'stderr', None) or error}")
    try:
        _ip("link", "add", WIRE, "netns", pair[0].name, "type", "veth", "peer", "name", WIRE, "netns", pair[1].name)
        for machine in pair:
            _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", WIRE)
            _ip("-n", machine.name, "link", "set", "lo", "up")
            machine.connect()
        yield pair
    finally:
        for machine in pair:
            subprocess.run(["ip", "netns", "del", machine.name], check=False)
