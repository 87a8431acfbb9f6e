"""Public faults of sharded training, small enough to run on two or four CPU ranks, on which `shardlib audit` is tried.

A file of this folder is a case. It has

- `build()`: the model on one device; the caller seeds it,
- `batch(step)`: the global batch, equal on all ranks, drawn from a generator of its own,
- `MESH`, and `FAULT`: the public report, and what an audit should say,
- `shard(model, mesh)`: the faulty sharding. It returns the model, or a tuple with what else trains it. Its first
  parameter is called `folder` where the library loads from a checkpoint.

It may have what follows; `parts` is what `shard` returned.

- `right(model, mesh)`: the same sharding without the fault, where that is ours to mend,
- `optimizer(params)`: the user's optimizer; it is that of the single device too,
- `clip(model)`: the user's own clipping, which returns the norm; `clip_right(model)` is the mended one,
- `accumulate(parts, batches)`: the user's way to run the backward passes of a step; `accumulate_right` is mended,
- `save(parts, folder)`: the user's way to save; `save_right` is mended,
- `load(folder)`: the state dict that one device reads; by default that of `from_pretrained`,
- `resume(parts, folder)`: the user's way to load on the same mesh; `resume_right` is mended,
- `generate(model, ids)`: what the user calls to generate.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from types import ModuleType

__all__ = ["KINDS", "Fault", "case", "cases"]

# What differs first, in the order of an audit; "error" is a forward that raises.
KINDS = (
    "error", "values", "output", "loss", "gradient", "norm", "two passes", "one token", "parameter", "generate", "save",
    "load",
)  # fmt: skip
_NOT_CASES = {"accelerated", "context", "models", "pretrained"}


@dataclass(frozen=True)
class Fault:
    """A public fault, and what an audit should say of it.

    Attributes:
        report: the address of the public report, or of the nearest one; the docstring of the case says which.
        host: the library in which it was reported or whose interface is misused.
        versions: the versions that have it, as far as the report and a run here say.
        kind: what differs first, one of `KINDS`.
        module: the module that is named; "" is the model itself.
        line: a word of the line of the interface that decides it.
        own: True if the installed version of the library has the fault itself; False if our code re-creates it.
    """

    report: str
    host: str
    versions: str
    kind: str
    module: str
    line: str
    own: bool = False


def cases() -> list[str]:
    """Return the names of all cases, sorted."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if name not in _NOT_CASES)


def case(name: str) -> ModuleType:
    """Return the module of a case."""
    return importlib.import_module(f"{__name__}.{name}")
