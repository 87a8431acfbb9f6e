"""`shardlib run`: a script on every device of one machine or of several, by torch's own launcher."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from shardlib.cli import hosts
from shardlib.cli.usage import UsageError, positive

__all__ = ["add_options", "run"]

_PORT = 29500
# Those that options of ours say.
_OURS = {
    "nproc_per_node": "--nproc_per_node",
    "nnodes": "--num_nodes, --host or --hostfile",
    "node_rank": "the order of the hosts",
    "master_addr": "--master_addr",
    "master_port": "--master_port",
    "module": "-m",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `shardlib run`; the script's own arguments follow the script."""
    processes = "processes on each host (default: one for each accelerator, else 1)"
    parser.add_argument("--nproc_per_node", "--nproc-per-node", type=positive, metavar="N", help=processes)
    parser.add_argument("--host", metavar="A,B", help="run on these hosts, over ssh; one named twice is two nodes")
    parser.add_argument("--hostfile", metavar="FILE", help="run on the hosts in this file, one on each line")
    parser.add_argument("--include", metavar="A,B", help="of the hostfile, only these")
    parser.add_argument("--exclude", metavar="A,B", help="of the hostfile, all but these")
    parser.add_argument("--num_nodes", type=positive, metavar="N", help="only the first N hosts")
    parser.add_argument("--master_addr", metavar="ADDRESS", help="where ranks meet (default: the first host)")
    parser.add_argument("--master_port", type=_port, metavar="PORT", help=f"and on which port (default {_PORT})")
    more = "options of torchrun, as in tee=3,log_dir=logs"
    parser.add_argument("--extra_launch_args", default="", metavar="K=V,...", help=more)
    parser.add_argument("--ssh-port", "--ssh_port", type=_port, metavar="PORT", help="where the hosts' ssh listens")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as `python -m` does")
    parser.add_argument("script", help="a Python file; with -m, a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")


def run(options: argparse.Namespace) -> int:
    """Start the ranks, and return the exit status of the first host that fails.

    On this machine alone, this process becomes torchrun.
    """
    where = hosts.chosen(options)
    if len(where) > 1 or (where and not hosts.is_this_machine(where[0])):
        address = options.master_addr or where[0].rpartition("@")[2]
        commands = [_torchrun(options, _of_several(options, address, len(where), node)) for node in range(len(where))]
        return hosts.run_on(where, commands, options.ssh_port)
    if not options.module and not Path(options.script).is_file():
        raise UsageError(f'There is no script "{options.script}" (looked for from {Path.cwd()}).')
    command = _torchrun(options, _of_one(options))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def _torchrun(options: argparse.Namespace, nodes: list[str]) -> list[str]:
    import torch  # what it shows of devices is all that needs it here, and `--help` does not wait for it

    processes = options.nproc_per_node or max(torch.accelerator.device_count(), 1)
    script = [*(["-m"] if options.module else []), options.script, *options.arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    return [*launcher, *nodes, *_extra(options.extra_launch_args), *script]


def _of_one(options: argparse.Namespace) -> list[str]:
    """Return the rendezvous options of one node: at the given address, else at any free port."""
    if options.master_addr or options.master_port:
        return _meeting(options, options.master_addr or "127.0.0.1")
    return [] if "rdzv" in options.extra_launch_args else ["--standalone"]


def _of_several(options: argparse.Namespace, address: str, count: int, node: int) -> list[str]:
    return [f"--nnodes={count}", f"--node_rank={node}", *_meeting(options, address)]


def _meeting(options: argparse.Namespace, address: str) -> list[str]:
    return [f"--master_addr={address}", f"--master_port={options.master_port or _PORT}"]


def _extra(text: str) -> list[str]:
    made = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.lstrip("-").partition("=")
        ours = _OURS.get(name.replace("-", "_"))
        if ours:
            raise UsageError(f'--extra_launch_args names "{name}"; {ours} says it here.')
        made.append(f"--{name}{equals}{value}")
    return made


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f'"{text}" is not a port, 1 to 65535')
    return int(text)
