"""Hosts of a job, and commands on all of them at once, over ssh."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from shardlib.cli import on_host
from shardlib.cli.usage import UsageError
from shardlib.errors import nearest, printable

__all__ = ["chosen", "is_this_machine", "run_on"]

# Variables that programs need on other hosts. No others are sent.
_LIBRARIES = "LD_LIBRARY_PATH"
_TRAVEL = ("PATH", "PYTHONPATH", _LIBRARIES, "VIRTUAL_ENV", "OMP_NUM_THREADS")
_TRAVEL_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "UCX_", "SHARDLIB_")
_SSH_FAILED = 255
# torchrun gives its ranks half a minute, and the far side's watcher a little more.
_PATIENCE = 45.0


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the hosts of `--host` or `--hostfile`, after `--include`, `--exclude` and `--num_nodes`; none without
    either.

    Raises:
        UsageError: no such file, a name that is not in it, fewer hosts than `--num_nodes`.
    """
    if options.host and options.hostfile:
        raise UsageError("Give the hosts once: with --host or with --hostfile, not both.")
    if (options.include or options.exclude) and not options.hostfile:
        raise UsageError("--include and --exclude choose from the hosts of a --hostfile; give one, or --host alone.")
    if options.include and options.exclude:
        raise UsageError("Give --include or --exclude, not both.")
    hosts = _from_file(Path(options.hostfile)) if options.hostfile else _named(options.host or "", "--host")
    if options.include:
        wanted = _among(hosts, options.include, "--include")
        hosts = [host for host in hosts if host in wanted]
    if options.exclude:
        unwanted = _among(hosts, options.exclude, "--exclude")
        hosts = [host for host in hosts if host not in unwanted]
    if (options.host or options.hostfile) and not hosts:
        raise UsageError("No host is left to run on; look at --host, --hostfile and --exclude.")
    return _first(hosts, options.num_nodes)


def is_this_machine(host: str) -> bool:
    """Return whether a name is one of this machine's names."""
    return host in ("localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn())


def run_on(hosts: Sequence[str], commands: Sequence[Sequence[str]], ssh_port: int | None) -> int:
    """Run a command on each host at once, and print their output with the host before each line.

    Returns:
        The exit status of the first that fails, the others having been ended; 0 if none does.
    """
    ended: queue.Queue[tuple[int, int]] = queue.Queue()
    labels, started, followers = _labels(hosts), [], []
    try:
        for index, (host, command) in enumerate(zip(hosts, commands, strict=True)):
            started.append(_start(host, command, ssh_port))
            followers.append(threading.Thread(target=_follow, args=(started[-1], index, labels[index], ended)))
            followers[-1].start()
        return _first_failure(ended, hosts, labels)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        _end(started)
        for follower in followers:
            follower.join()


def _from_file(path: Path) -> list[str]:
    try:
        lines = path.read_bytes().decode("utf-8-sig").splitlines()
    except OSError as error:
        raise UsageError(f'The hostfile "{path}" cannot be read: {error.strerror}.') from error
    except UnicodeDecodeError as error:
        at = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(f'The hostfile "{path}" is not UTF-8 text (line {at}); save it as UTF-8.') from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if len(words) > 1:
            raise UsageError(
                f'"{path}", line {number}: "{line.strip()}"; give one host on each line and nothing else. How many '
                "processes run on each is said by --nproc_per_node."
            )
        hosts += words
    for host in hosts:
        _check(host, f'"{path}"')
    return hosts


def _named(text: str, option: str) -> list[str]:
    names = [name for name in (part.strip() for part in text.split(",")) if name]
    for name in names:
        _check(name, option)
    return names


def _check(host: str, where: str) -> None:
    if host.startswith("-") or not host.isprintable() or any(map(str.isspace, host)):
        raise UsageError(
            f'{where} names "{printable(host)}", which is not a host; give names or addresses, separated by commas.'
        )


def _among(hosts: Sequence[str], text: str, option: str) -> list[str]:
    names = _named(text, option)
    for name in names:
        if name not in hosts:
            raise UsageError(f'{option} names "{name}"; the hostfile has {", ".join(hosts)}.{nearest(name, hosts)}')
    return names


def _first(hosts: list[str], count: int | None) -> list[str]:
    if count is None:
        return hosts
    if not 1 <= count <= max(len(hosts), 1):
        raise UsageError(f"--num_nodes {count} was given, and {len(hosts)} hosts; give --host or --hostfile for more.")
    return hosts[:count]


def _labels(hosts: Sequence[str]) -> list[str]:
    """Label each host, with a number where it has several nodes."""
    return [f"{host}/{i}" if hosts.count(host) > 1 else host for i, host in enumerate(hosts)]


def _start(host: str, command: Sequence[str], ssh_port: int | None) -> subprocess.Popen[bytes]:
    # BatchMode: no one could answer a password prompt. stdin stays open: its end ends the remote side.
    ssh = ["ssh", "-o", "BatchMode=yes", *(["-p", str(ssh_port)] if ssh_port else []), host, _shell_line(command)]
    try:
        process = subprocess.Popen(ssh, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError:
        raise UsageError("There is no ssh on this machine, by which other hosts are reached; install it.") from None
    _send_environment(process)
    return process


def _send_environment(process: subprocess.Popen[bytes]) -> None:
    """Send variables by stdin: all users of a host can read command lines."""
    assert process.stdin is not None
    travelling = {name: value for name, value in os.environ.items() if _travels(name)}
    with contextlib.suppress(BrokenPipeError):  # ssh has ended, and its status says why
        os.write(process.stdin.fileno(), json.dumps(travelling).encode() + b"\n")


def _shell_line(command: Sequence[str]) -> str:
    # The interpreter itself may need the path of its libraries. By its path, not as a module: it would wait for torch
    # to be imported.
    libraries = [f"{_LIBRARIES}={os.environ[_LIBRARIES]}"] if _LIBRARIES in os.environ else []
    watched = ["env", *libraries, sys.executable, on_host.__file__, *command]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(watched)}"


def _travels(name: str) -> bool:
    return name in _TRAVEL or name.startswith(_TRAVEL_PREFIXES)


def _first_failure(ended: queue.Queue[tuple[int, int]], hosts: Sequence[str], labels: list[str]) -> int:
    for _ in hosts:
        index, status = ended.get()
        if status:
            hint = f"; if ssh itself failed, `ssh {hosts[index]} true` says why" if status == _SSH_FAILED else ""
            print(f"shardlib: {labels[index]} ended with status {status}{hint}.", file=sys.stderr, flush=True)
            return 128 - status if status < 0 else status
    return 0


def _follow(process: subprocess.Popen[bytes], index: int, label: str, ended: queue.Queue[tuple[int, int]]) -> None:
    """Print what one host says, line by line, until it is silent; then tell how it ended."""
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        errors = threading.Thread(target=_relay, args=(process.stderr, sys.stderr, label))
        errors.start()
        _relay(process.stdout, sys.stdout, label)
        errors.join()
    ended.put((index, process.wait()))


def _relay(lines: IO[bytes], to: IO[str], label: str) -> None:
    for line in lines:
        to.write(f"{label}: {line.decode(errors='replace').rstrip()}\n")  # one write: lines of hosts do not mix
        to.flush()


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    """End the running commands: the remote watcher sees its stdin closed, and ends its part."""
    for process in started:
        assert process.stdin is not None
        process.stdin.close()
    for process in started:
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
