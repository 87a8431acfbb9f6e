"""The result of a search: the best plans, why they are, and the call that uses each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, overload

from shardlib._mesh_shape import MeshShape
from shardlib._plan import Cluster, StepTime
from shardlib._plan.quantities import spell_quantity
from shardlib._plan.readable import aligned, human_bytes
from shardlib.planner import page, script
from shardlib.transforms import Transform

__all__ = ["NEAR", "BestPlans", "Choice", "difference"]

NEAR = 0.03
"""Plans whose times differ by less are near ties: the predicted times are not more exact (docs/planner.md)."""


@dataclass(frozen=True)
class Choice:
    """A plan that fits, with its predicted time.

    Attributes:
        mesh: names and sizes of the axes.
        mode: the mode of the rules, or None.
        transforms: all of them, in one.
        stages: the blocks on each stage of a pipeline; empty without one.
        rows: examples in a microbatch of a data rank.
        microbatches: of a data rank in a step: those of a pipeline, or passes whose gradients are accumulated.
        time: the predicted step.
        rules: the Python expression of the rules that were given; empty for those that are found for the model.
        reasons: why each of its settings is as it is, in sentences.
        behind: why it is slower than the best, in words; empty for the best.
    """

    mesh: MeshShape
    mode: str | None
    transforms: Transform
    stages: tuple[int, ...]
    rows: int
    microbatches: int
    time: StepTime
    rules: str = ""
    reasons: tuple[str, ...] = ()
    behind: str = ""

    @property
    def call(self) -> str:
        """The Python lines that shard `model` in this way."""
        return "\n".join(script.call_lines(self))

    def script(
        self, model: str, batch: int, *, seq: int = 0, sizes: Mapping[str, Any] | None = None, example: Any = None
    ) -> str:
        """Return a training script.

        Args:
            model: what the command line takes for a model: "package.module:factory", "file.py:factory", or the folder
                or config.json of a Hugging Face model.
            batch: examples in a step, of all ranks.
            seq: tokens of an example, of a language model.
            sizes: the class of transformers and its configuration, in the place of `model`.
            example: in the place of `seq`: a tensor, a tuple or a mapping of tensors, whose shapes random data get.
        """
        return script.written(self, model, batch, seq, sizes, example)

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON has of it."""
        time = self.time
        return {
            "mesh": str(self.mesh),
            "mode": self.mode,
            "transforms": repr(self.transforms),
            "stages": list(self.stages),
            "rows": self.rows,
            "microbatches": self.microbatches,
            "seconds": time.seconds,
            "compute": time.compute,
            "exposed": dict(time.exposed),
            "bubble": time.bubble,
            "optimizer": time.optimizer,
            "copies": time.copies,
            "mfu": time.mfu,
            "tokens_per_second": time.tokens_per_second,
            "memory": {"total": time.memory.total, **dataclasses.asdict(time.memory)},
            "reasons": list(self.reasons),
            "behind": self.behind,
            "call": self.call,
        }


class BestPlans(Sequence[Choice]):
    """The fastest plans that fit, best first; prints as a table with reasons.

    Attributes:
        cluster: the machines.
        world: the number of ranks.
        batch: examples in a step.
        budget: bytes that a device may hold.
        refused: the number of candidates that cannot be, or do not fit, with the reason and an example, in lines.
        priced: the number of candidates whose time was computed.

    >>> import shardlib as sl
    >>> import torch
    >>> model, row = torch.nn.Linear(4096, 4096), torch.empty(1, 4096)
    >>> found = sl.best_plans(model, "h100", world=8, batch=65536, example=row, rules={"**": None})
    >>> len(found), str(found[0].mesh), found.near_ties()
    (1, 'dp=8', 0)
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        *,
        cluster: Cluster,
        world: int,
        batch: int,
        budget: int,
        refused: Sequence[str],
        priced: int,
    ) -> None:
        self._choices = tuple(choices)
        self.cluster, self.world, self.batch, self.budget = cluster, world, batch, budget
        self.refused, self.priced = tuple(refused), priced

    @overload
    def __getitem__(self, index: int) -> Choice: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Choice]: ...
    def __getitem__(self, index: int | slice) -> Choice | Sequence[Choice]:
        return self._choices[index]

    def __len__(self) -> int:
        return len(self._choices)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self._choices)

    def near_ties(self) -> int:
        """Return how many plans after the best one are as good within what the predictions can tell."""
        best = self[0].time.seconds
        return sum(each.time.seconds <= (1 + NEAR) * best for each in self._choices[1:])

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(
            {
                "cluster": self.cluster.name,
                "world": self.world,
                "batch": self.batch,
                "budget": self.budget,
                "plans": [each.as_dict() for each in self],
                "near_ties": self.near_ties(),
                "refused": list(self.refused),
                "priced": self.priced,
            },
            indent=2,
        )

    def html(self, path: str | PathLike[str]) -> None:
        """Write a self-contained HTML page: the table, reasons, and a timeline of a rank's streams for each plan."""
        page.write(self, path)

    def rows(self) -> list[list[str]]:
        """Return the cells of the table, the head first."""
        head = ["", "mesh", "mode", "step", "MFU", "memory", "compute", "sends", "bubble", "rows x microbatches"]
        made = [head]
        for number, each in enumerate(self, 1):
            time = each.time
            tie = "~" if 1 < number <= 1 + self.near_ties() else ""
            made.append(
                [
                    f"{number}{tie}",
                    str(each.mesh),
                    each.mode or "",
                    _seconds(time.seconds),
                    f"{time.mfu:.1%}",
                    human_bytes(time.memory.total),
                    f"{time.compute / time.seconds:.0%}",
                    f"{time.communication / time.seconds:.0%}",
                    f"{time.bubble / time.seconds:.0%}",
                    f"{each.rows} x {each.microbatches}",
                ]
            )
        return made

    def __str__(self) -> str:
        title = (
            f"{self.world} ranks of {self.cluster.name}, {self.batch} examples a step, "
            f"{human_bytes(self.budget)} of a device to use"
        )
        lines = [title, "", aligned(self.rows(), left=3), ""]
        if self.near_ties():
            lines += [f"~ within {NEAR:.0%} of the best: predicted times are not more exact", ""]
        for number, each in enumerate(self, 1):
            lines.append(f"{number}. {each.mesh}: {each.transforms!r}")
            lines += [f"   {each.behind}"] if each.behind else []
            lines += [f"   {reason}" for reason in (each.reasons if number == 1 else ())]
        lines += ["", "To use the best one:", "", *(f"    {line}" for line in self[0].call.splitlines())]
        if self.refused:
            lines += ["", f"{self.priced} candidates were priced. Refused:", *(f"  {line}" for line in self.refused)]
        return "\n".join(lines)


def difference(best: StepTime, other: StepTime) -> str:
    """Say in words why one step is slower than another: the parts that cost more, the largest first."""
    gained = {
        "compute": other.compute - best.compute,
        "communication": other.communication - best.communication,
        "bubble": other.bubble - best.bubble,
        "optimizer": other.optimizer - best.optimizer,
        "host copies": other.copies - best.copies,
    }
    parts = sorted(gained.items(), key=lambda item: -item[1])
    shown = [f"{'+' if seconds > 0 else '-'}{_seconds(abs(seconds))} {what}" for what, seconds in parts
             if abs(seconds) > 0.002 * best.seconds]  # fmt: skip
    slower = other.seconds / best.seconds - 1
    return f"{slower:+.1%}: {', '.join(shown) or 'the same parts'}"


def _seconds(seconds: float) -> str:
    return spell_quantity(seconds, "s", digits=3) if seconds else "0s"
