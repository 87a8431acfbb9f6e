"""The report of a proof, as a value and as text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shardlib._mesh_shape import MeshShape
from shardlib.errors import ShardlibError, printable
from shardlib.testing.equivalence.compare import START, Key
from shardlib.testing.equivalence.locate import Origin
from shardlib.testing.equivalence.paths import Paths

__all__ = ["Difference", "NotEquivalentError", "Report"]


@dataclass(frozen=True)
class Difference:
    """The distance of one value of the sharded run from the single device's.

    Attributes:
        step: the training step, -1 for what training starts from.
        kind: "parameter", "buffer", "output", "loss", "gradient", "norm" or "state" (of the optimizer).
        name: the name of the tensor or module.
        error: the largest absolute difference on any rank, over the largest absolute value. float64: against the
            single device; other dtypes: against a single device in float64.
        limit: the largest allowed `error`.
        alone: the error of the single device in the same dtype against float64; None in float64.
    """

    step: int
    kind: str
    name: str
    error: float
    limit: float
    alone: float | None = None

    @property
    def ok(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        when = "at the start" if self.step == START else f"step {self.step}"
        beside = "" if self.alone is None else f", a single device's {self.alone:.2g}"
        return f"{self.kind} {self.name}, {when}: {self.error:.2g} (limit {self.limit:.1g}{beside})"


@dataclass(frozen=True)
class Report:
    """The outcome of `equivalent`. True in a condition where everything agrees; prints as a table.

    Attributes:
        mesh, steps, dtype: those of the run.
        differences: everything that was compared, in the order of a training step.
        replicas: tensors of which ranks hold the same elements with other bits, with a sentence.
        layouts: tensors whose layout differs from the plan's, with a sentence.
        origin: the origin of the difference; None without one.
        tensors: the number of parameters and buffers of the model.
        gathered: ops that had no sharding rule for what they were given, so that every rank computed them in full.
        notes: remarks on the verdict.
        warnings: the warnings of the sharded run, on the first rank, each once.
        seconds: the seconds that the ranks took.
        engine: the engine of the sharded run, "torch" or "jax".
        paths: the paths of the engine that sharded runs have taken: at sizes of buckets by which this model takes those
            of a large one and, where they differ, at the plan's own sizes. The differences are those of the first run
            that differs, else of the last one.
    """

    mesh: MeshShape
    steps: int
    dtype: torch.dtype
    differences: tuple[Difference, ...]
    replicas: dict[str, str]
    layouts: dict[str, str]
    origin: Origin | None
    tensors: int
    gathered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    engine: str = "torch"
    paths: tuple[Paths, ...] = ()

    @property
    def failures(self) -> tuple[Difference, ...]:
        return tuple(d for d in self.differences if not d.ok)

    @property
    def ok(self) -> bool:
        return not (self.failures or self.replicas or self.layouts)

    def __bool__(self) -> bool:
        return self.ok

    def worst(self) -> dict[str, Difference]:
        """Return for each kind the difference that is nearest to its limit, or farthest beyond."""
        found: dict[str, Difference] = {}
        for d in self.differences:
            if d.kind not in found or _strain(d) > _strain(found[d.kind]):
                found[d.kind] = d
        return found

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        head = (
            f"{'equivalent' if self.ok else 'NOT equivalent'} to a single device: mesh {self.mesh}"
            f"{' on JAX' if self.engine == 'jax' else ''}, "
            f"{self.steps} steps, {dtype}, {self.tensors} tensors, {self.seconds:.2f} s"
        )
        lines = [head]
        if self.origin is not None:
            lines += ["", str(self.origin)]
        lines += ["", *self._table()]
        for title, found in (
            ("Replicas that differ", self.replicas),
            ("Layouts that are not the plan's", self.layouts),
        ):
            if found:
                lines += ["", f"{title}: {len(found)}"]
                lines += [f"  {name}: {text}" for name, text in list(found.items())[:5]]
        notes = (
            *self.notes,
            *self._few_units(),
            *self._eager_blocks(),
            *(
                f"{op} had no sharding rule: every rank all-gathered its operands and computed it in full"
                for op in self.gathered
            ),
        )
        lines += [str(paths) for paths in self.paths]
        lines += [*(f"Note: {note}" for note in notes), *(f"Warning: {warning}" for warning in self.warnings)]
        return printable("\n".join(lines))

    def _few_units(self) -> Iterator[str]:
        """Say where parameters are stored in shards, and all were in one unit."""
        if self.paths and max(paths.units for paths in self.paths) == 1:
            yield "one unit holds all parameters that are stored in shards: nothing was proved of several units"

    def _eager_blocks(self) -> Iterator[str]:
        """Say where blocks ran eagerly that are compiled in training."""
        if self.paths and (count := max(paths.eager for paths in self.paths)):
            yield (
                f'{count} repeated blocks ran eagerly, and shard_model compiles them by default: compile="auto" '
                "proves them compiled"
            )

    def _table(self) -> list[str]:
        rows = [("", "worst", "error", "limit", "wrong of")]
        for kind, d in self.worst().items():
            same = [other for other in self.differences if other.kind == kind]
            wrong = sum(not other.ok for other in same)
            name = d.name if d.step == START else f"{d.name} (step {d.step})"
            rows.append((kind, name, f"{d.error:.1e}", f"{d.limit:.0e}", f"{wrong} of {len(same)}"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _strain(d: Difference) -> float:
    return math.inf if not math.isfinite(d.error) else d.error / d.limit if d.limit else d.error


class NotEquivalentError(ShardlibError, AssertionError):
    """A sharded run that does not compute what a single device computes; `report` has everything.

    Args:
        report: the report of `equivalent`.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return str(self.report)


def differences(errors: dict[Key, float], limits: dict[Key, float], alone: dict[Key, float]) -> tuple[Difference, ...]:
    return tuple(Difference(*key, error, limits[key], alone.get(key)) for key, error in errors.items())
