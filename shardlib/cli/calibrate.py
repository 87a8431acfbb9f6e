"""`shardlib calibrate`: what this machine computes, holds and sends, measured and written as a cluster file."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlib._plan import Cluster
from shardlib.booster import launch_from_torch
from shardlib.cli.files import write_new
from shardlib.cli.measure import SOURCE, Effort, measure_device, measure_job
from shardlib.cli.usage import UsageError

__all__ = ["calibrate"]


def calibrate(options: argparse.Namespace) -> int:
    """Measure, and write or print the cluster: on rank 0 of torchrun, else in this process."""
    if dist.is_torchelastic_launched():
        cluster, rank = _of_job(options), dist.get_rank()
        dist.destroy_process_group()  # its threads end before the process does
        if rank > 0:
            return 0
    else:
        cluster = _of_this_machine(options)
    text = cluster.to_toml()
    if options.output:
        write_new(Path(options.output), text, force=options.force)
    if options.json:
        print(json.dumps({"file": options.output, "toml": text}, indent=2))
    elif options.output:
        print(f"{cluster}\n\nWrote {options.output}.")
    else:
        print(text, end="")
    return 0


def _of_job(options: argparse.Namespace) -> Cluster:
    """Measure the devices and links of a job that torchrun started."""
    device = launch_from_torch(verbose=False).device
    node = int(os.environ["LOCAL_WORLD_SIZE"])
    figures = measure_job(device, _effort(device, options), node)
    return _cluster(options, device, node, figures)


def _of_this_machine(options: argparse.Namespace) -> Cluster:
    """Measure one accelerator; or the CPU with ranks over gloo."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    effort = _effort(device, options)
    if device.type != "cpu" or options.ranks == 1:
        return _cluster(options, device, max(torch.accelerator.device_count(), 1), measure_device(device, effort))
    try:
        from shardlib.testing import shared_pool
    except ImportError as error:
        raise UsageError(
            f"`shardlib calibrate` needs {error.name} for ranks on CPU: pip install 'shardlib[testing]', or give "
            "--ranks 1, or start it under torchrun."
        ) from error
    figures = shared_pool(options.ranks, timeout=1800.0).run(measure_job, device, effort, options.ranks)
    return _cluster(options, device, options.ranks, figures[0])


def _effort(device: torch.device, options: argparse.Namespace) -> Effort:
    return Effort.of(accelerator=device.type != "cpu", quick=options.quick)


def _cluster(options: argparse.Namespace, device: torch.device, node: int, figures: dict[str, Any]) -> Cluster:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" and node == 1 else ""
    return Cluster(
        name=options.name,
        description=f"{node} of {where} a node{threads}, torch {torch.__version__}",
        devices=node,
        memory=_memory(device, node),
        source=SOURCE,
        **figures,
    )


def _memory(device: torch.device, node: int) -> int:
    """Return the bytes of a device; of the CPU, each rank's part of them."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // node
