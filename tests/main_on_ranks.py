"""Run a script as torchrun runs it, on the warm ranks of the pool: no launcher, and nothing is imported again."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardlib.testing import shared_pool
from tests.torchvision_on_cpu import import_torchvision


class Printed(NamedTuple):
    """Output of all ranks, to stdout and to stderr."""

    out: str
    err: str


def run_script(script: Path, *options: str, processes: int) -> Printed:
    """Return what the script prints on all ranks. They meet at a store of this process, as at torchrun's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    printed = shared_pool(processes).run(_as_main, str(script), options, store.port)
    return Printed(*map("".join, zip(*printed, strict=True)))


def _as_main(script: str, options: tuple[str, ...], port: int) -> Printed:
    import_torchvision()  # transformers imports it by the way
    dist.destroy_process_group()
    torch.seed()  # as a new process: each rank draws its own numbers
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="torchrun")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    if (state := sys.modules.get("accelerate.state")) is not None:  # as in a new process
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = [script, *options]
    try:
        with imports_of(Path(script).parent), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.argv = before
        for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
            os.environ.pop(name, None)
    return Printed(out.getvalue(), err.getvalue())


@contextlib.contextmanager
def imports_of(folder: Path) -> Iterator[None]:
    """Import from a folder first, then forget what came from there: another may have modules of the same names."""
    path = list(sys.path)
    named_alike = {file.stem: sys.modules.pop(file.stem, None) for file in folder.glob("*.py")}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = path
        forget(folder)
        sys.modules.update({name: module for name, module in named_alike.items() if module is not None})


def forget(folder: Path) -> None:
    """Forget the modules that were imported from a folder, or from one inside of it."""
    inside = f"{folder}{os.sep}", f"{folder.resolve()}{os.sep}"  # to resolve each module's own file takes half a second
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name != "__main__" and file is not None and file.startswith(inside):
            del sys.modules[name]
