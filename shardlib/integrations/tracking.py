"""Reports of a sharded model for experiment trackers: numbers, a text and a page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from torch import nn

from shardlib._plan import Plan
from shardlib.engine import get_plan

__all__ = ["PlanReport", "report", "shows_text"]


@dataclass(frozen=True)
class PlanReport:
    """A plan in the forms that trackers take.

    Attributes:
        numbers: bytes by name: "plan/memory_bytes" on the rank that holds most, and its parts "plan/parameter_bytes",
            "plan/gradient_bytes", "plan/state_bytes" (two tensors for each parameter, as AdamW has) and
            "plan/buffer_bytes"; "plan/sent_bytes" that one rank sends in a step for parameters and gradients, and its
            parts, such as "plan/sent_bytes/gradients".
        text: the table that `print(plan)` shows, as Markdown.
        html: the page of `Plan.html`, as an HTML fragment.
    """

    numbers: dict[str, float]
    text: str
    html: str
    plan: Plan

    def write(self, folder: str | PathLike[str]) -> None:
        """Write the page "plan.html" into a folder, which is made if there is none."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.plan.html(Path(folder) / "plan.html")


def report(model: nn.Module) -> PlanReport:
    """Return what a tracker shows of a sharded model's plan. Nothing is sent: any rank may call it alone.

    Raises:
        ShardingError: the model is not sharded.

    >>> import shardlib as sl
    >>> model = sl.shard_model(nn.Linear(4, 2), "dp=1", {"**": None})
    >>> found = report(model)
    >>> found.numbers["plan/memory_bytes"], found.numbers["plan/sent_bytes"]
    (160.0, 0.0)
    >>> print(found.text.splitlines()[1])
    Plan on dp=1 (1 rank): 2 tensors, 10 parameters, 40 B
    """
    plan = get_plan(model)
    memory = plan.memory()
    sent: Counter[str] = Counter()
    for each in plan.traffic():
        sent[each.what] += each.bytes
    sizes = {
        "memory_bytes": memory.total,
        "parameter_bytes": memory.parameters,
        "gradient_bytes": memory.gradients,
        "state_bytes": memory.state,
        "buffer_bytes": memory.buffers,
        "sent_bytes": sent.total(),
        **{f"sent_bytes/{what.replace(' ', '_')}": size for what, size in sent.items()},
    }
    numbers = {f"plan/{name}": float(size) for name, size in sizes.items()}
    return PlanReport(numbers, f"```text\n{plan}\n```", plan._repr_html_(), plan)


def shows_text(tracker: object) -> bool:
    """Return whether a host's tracker, callback or logger is that of TensorBoard or W&B, which show texts.

    >>> class TensorBoardLogger: ...
    >>> shows_text(TensorBoardLogger()), shows_text([])
    (True, False)
    """
    return any(kind.__name__.lower().startswith(("tensorboard", "wandb")) for kind in type(tracker).__mro__)
