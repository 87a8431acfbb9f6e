"""Search for the first module, in the order of execution, whose result differs: the case runs again, and the inputs and
outputs of every module are recorded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardlib._progress import Progress
from shardlib.engine.ranks import agree
from shardlib.engine.sharded import wait_for_updates
from shardlib.testing.equivalence import cause, measure, parts
from shardlib.testing.equivalence.case import Case
from shardlib.testing.equivalence.cause import Evidence
from shardlib.testing.equivalence.compare import START, Key, Measured, compare, limits, wrong
from shardlib.testing.equivalence.trace import Call, Side, Trace, Where
from shardlib.testing.equivalence.train import Run, Trained
from shardlib.testing.equivalence.twins import Twins, twins

__all__ = ["Origin", "locate", "of_norm", "of_passes", "of_tensor", "of_update", "values_before"]

MODEL = "(the model's own forward)"
ALL = "(every module)"


@dataclass(frozen=True)
class Origin:
    """The origin of a difference between the sharded run and the single device.

    Attributes:
        module: its dotted name; "" is the model itself, "(every module)" where all gradients are wrong alike.
        what: the value that differs, in words.
        step: the training step; -1 is before the first.
        error: the largest difference on any rank, relative to the largest value.
        ranks: the ranks on which it differs.
        global_shape: the shape of the value on a single device.
        layout: the value's layout in the sharded run.
        planned: the plan's layouts of the module's tensors, inputs and outputs: a line each, with its rule.
        found: without a plan, the layouts that the module's tensors, inputs and outputs had: a line each.
        causes: likely causes, the likeliest first.
    """

    module: str
    what: str
    step: int
    error: float
    ranks: tuple[int, ...] = ()
    global_shape: tuple[int, ...] = ()
    layout: str = ""
    planned: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    found: tuple[str, ...] = ()

    def __str__(self) -> str:
        when = "before the first step" if self.step == START else f"step {self.step}"
        lines = [f"First difference, {when}: {self.what}"]
        if self.global_shape:
            lines.append(f"  global shape   {self.global_shape}, off by {self.error:.3g} of its largest value")
        if self.ranks:
            lines.append(f"  on ranks       {', '.join(map(str, self.ranks))}")
        if self.layout:
            lines.append(f"  layout         {self.layout}")
        lines += [f"  {'as found' if i == 0 else '        '}       {line}" for i, line in enumerate(self.found)]
        lines += [f"  {'rule' if i == 0 else '    '}           {line}" for i, line in enumerate(self.planned)]
        lines += [f"  {'looks like' if i == 0 else '          '}     {line}" for i, line in enumerate(self.causes)]
        return "\n".join(lines)


def locate(case: Case, measured: Measured, failed: list[Key]) -> Origin:
    """Locate the origin, on every rank with the same `failed`, in the order of a training step; return the same on
    all."""
    step = min(key[0] for key in failed)
    if case.mesh.pipeline_axes and step != START:
        return _of_stages(measured, failed[0])
    if case.options.get("compile") is not None:
        case = dataclasses.replace(case, options={**case.options, "compile": None})
        ((case, measured),) = compare(case)
        failed = wrong(measured, limits(case, measured))
        if not failed:
            return Origin("", "compiled blocks alone: with compile=None everything agrees", step, math.inf)
        step = min(key[0] for key in failed)
    with Progress("locating the first difference", unit="passes") as progress:
        return _of_step_again(case, measured, [key for key in failed if key[0] == step], progress)


def _of_step_again(case: Case, measured: Measured, at_step: list[Key], progress: Progress) -> Origin:
    """Train up to the first step that differs, and trace that one."""
    step, both = at_step[0][0], twins(case)
    if step == START:
        return of_tensor(both, at_step[0], measured)
    progress.total = (step + 1) * both.case.accumulate
    for earlier in range(step):
        _train_step(both, earlier)
        progress.advance(both.case.accumulate)
    origin = of_passes(both, measured, at_step, progress.advance)
    if origin is not None:
        return origin
    before = values_before(both)
    for run in _two(both):
        run.clip()
        run.step()
        wait_for_updates(run.model.parameters())
    return of_update(both, at_step, measured, before)


def of_passes(
    both: Twins, measured: Measured, at_step: list[Key], advance: Callable[[], None] = lambda: None
) -> Origin | None:
    """Run the passes of a step with every module recorded, on every rank; return the origin of the differences
    `at_step`, or None where all is right up to the gradients and their norm."""
    step = at_step[0][0]
    for run in both.runs:
        run.begin(step)
    with both.single.tracing() as want, both.sharded.tracing() as got:
        losses_made = []
        for micro in range(both.case.accumulate):
            losses_made.append([run.forward_backward(step, micro) for run in _two(both)])
            advance()
    origin = _in_traces(both, measured, at_step, want, got, losses_made)
    if origin is None or both.sharded.plan is not None:
        return origin
    return dataclasses.replace(origin, found=_as_found(both, got, origin.module))


def _in_traces(
    both: Twins, measured: Measured, at_step: list[Key], want: Trace, got: Trace, losses_made: list[list[torch.Tensor]]
) -> Origin | None:
    step = at_step[0][0]
    losses = [key for key in at_step if key[1] in ("loss", "output")]
    watched = _Watched(both, want, got, step, _limit(both.case), outcome_is_right=not losses)
    if (found := watched.forward()) is not None:
        return found
    if losses:
        return _of_losses(both, losses[0], measured, losses_made)
    if (found := watched.backward()) is not None:
        return found
    gradients = [key for key in at_step if key[1] == "gradient"]
    if gradients:
        return _of_gradients(both, want, gradients, measured)
    return of_norm(both, at_step[0], measured) if at_step[0][1] == "norm" else None


def _of_stages(measured: Measured, key: Key) -> Origin:
    """Return the tensor that differs in a pipeline, whose modules cannot be compared with the single device's."""
    step, kind, name = key
    module = name.split(": ")[0].rpartition(".")[0] if kind in ("gradient", "state", "parameter", "buffer") else ""
    causes = ("modules are not traced through the stages of a pipeline: prove the model without that axis first",)
    ranks = tuple(measured.ranks.get(key, ()))
    return Origin(module, f"the {kind} {name}", step, measured.errors[key], ranks, causes=causes)


def _limit(case: Case) -> float:
    return 1e-9 if case.dtype is torch.float64 else 64 * torch.finfo(case.dtype).eps


def _train_step(both: Twins, step: int) -> None:
    for run in both.runs:
        run.begin(step)
        for micro in range(both.case.accumulate):
            run.forward_backward(step, micro)
        run.clip()
        run.step()


class _Watched:
    """The places in a trace where any rank differs."""

    def __init__(
        self, both: Twins, want: Trace, got: Trace, step: int, limit: float, *, outcome_is_right: bool
    ) -> None:
        self.both, self.want, self.got, self.step = both, want, got, step
        self.outcome_is_right = outcome_is_right
        self.values, self.judged = _everywhere(self._off(want.values, got.values), limit)
        self.gradients, self.judged_gradients = _everywhere(self._off(want.gradients, got.gradients), limit)

    def _off(self, want: dict[Where, torch.Tensor], got: dict[Where, torch.Tensor]) -> dict[Where, float]:
        largest = max((measure.size(t) for t in want.values() if t.ndim), default=0.0)
        shared = self.both.rank_coordinate.data[1] > 1
        found = {}
        for where, full in want.items():
            if where in got:
                due = self._due(full, got[where]) if want is self.want.gradients else full
                if due is None or (shared and not due.ndim):
                    continue  # a mean over each rank's own rows
                scale = measure.scale_of(measure.size(due), largest if want is self.want.gradients else 0.0)
                mine, part = parts.pair(got[where], due, self.both.rank_coordinate)
                if part is None and shared:
                    continue  # as many rows as a rank's data make: tokens that are routed to an expert
                found[where] = measure.distance(mine, part, scale)
            elif want is self.want.gradients and where in self.got.values:
                found[where] = 0.0 if not measure.size(full) else math.inf
        return found

    def _due(self, full: torch.Tensor, got: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient that this run should have of an activation whose single-device gradient is `whole`.

        Each data rank's loss is the mean over its own rows, of which there are so many times fewer. What does not
        belong to rows (a position table) has on each rank a part of its gradient, which is not judged here.
        """
        count = self.both.rank_coordinate.data[1]
        if count == 1:
            return full
        return None if got.shape == full.shape else full * count

    def forward(self) -> Origin | None:
        for call in self.want.ended:
            bad = [where for where in call.outputs if where in self.values]
            if bad and not self._made_good(call):
                guilty, before = self._computed_by(call)
                if guilty is call and self._put_together_later(call, bad[0]):
                    continue
                if guilty is call:
                    return self._origin(call, bad[0], self.values, f"the output of {_named(call)}")
                first = next(where for where in before.inputs if where in self.values)
                text = f"what {_named(guilty)} computes for {_named(before)}" if guilty else "the input of the model"
                return self._origin(guilty, first, self.values, text)
        return None

    def _made_good(self, call: Call) -> bool:
        """Return whether an enclosing module still returns right values, by joining shards or in an order of its
        own."""
        around = self._right_around(call, "output", self.values, self.judged)
        return around is not None and (around.parent is not None or self.outcome_is_right)

    def _right_around(
        self, call: Call, side: Side, wrong: Mapping[Where, Any], judged: frozenset[Where]
    ) -> Call | None:
        """Return the nearest call around this one whose values on that side were judged, and are right."""
        around = call.parent
        while around is not None:
            known = [where for where in (around.inputs if side == "input" else around.outputs) if where in judged]
            if known and not any(where in wrong for where in known):
                return around
            around = around.parent
        return None

    def _put_together_later(self, call: Call, where: Where) -> bool:
        """Return whether a manual layer returns differing shards, and the next wrong value around it is equal on all
        ranks.

        Pieces are then summed or gathered by the module around, which is the one to look into.
        """
        if call.parent is None or not self._unlike(where):
            return False
        later = self.want.begun[self.want.begun.index(call) + 1 :]
        handed = [w for other in later if other.parent is call.parent for w in other.inputs if w in self.values]
        left = [w for w in call.parent.outputs if w in self.values]
        return not self._unlike((handed + left)[0]) if handed or left else False

    def _unlike(self, where: Where) -> bool:
        """Return whether a plain tensor differs between ranks of the same data coordinate."""
        got = self.got.values.get(where)
        mine = None if got is None or isinstance(got, DTensor) else agree.fingerprint(got)
        every = agree.exchange((self.both.rank_coordinate.data[0], mine))
        return len(set(every)) > len({data for data, _ in every})

    def _computed_by(self, call: Call) -> tuple[Call | None, Call]:
        """Return the call that computed the first wrong value, and the call that received it (itself, for an
        output)."""
        inside = call
        guilty: Call | None = call
        while guilty is not None and any(where in self.values for where in guilty.inputs):
            inside, guilty = guilty, guilty.parent
        return guilty, inside

    def backward(self) -> Origin | None:
        """Find the last module, in execution order, that receives a right gradient and passes on a wrong one."""
        for call in reversed(self.want.begun):
            bad = [where for where in call.inputs if where in self.gradients]
            if (
                bad
                and not any(where in self.gradients for where in call.outputs)
                and self._right_around(call, "input", self.gradients, self.judged_gradients) is None
            ):
                text = f"the gradient that {_named(call)} passes on to its input"
                return self._origin(call, bad[0], self.gradients, text)
        return None

    def _origin(
        self, call: Call | None, where: Where, errors: dict[Where, tuple[float, list[int]]], text: str
    ) -> Origin:
        is_value = errors is self.values
        want: torch.Tensor | None = (self.want.values if is_value else self.want.gradients)[where]
        got = (self.got.values if is_value else self.got.gradients).get(where)
        if want is not None and got is not None and not is_value:
            want = self._due(want, got)
        module = call.module if call is not None else ""
        if call is not None and call.index:
            text += f" (call {call.index + 1})"
        return _origin(self.both, self.step, module, text, want, got, errors[where])


def _everywhere(
    errors: dict[Where, float], limit: float
) -> tuple[dict[Where, tuple[float, list[int]]], frozenset[Where]]:
    """Return the errors above the limit on any rank, each with its maximum and ranks, and the values judged on all."""
    every = agree.exchange(errors, classes=[Where])
    found: dict[Where, tuple[float, list[int]]] = {}
    for rank, of_rank in enumerate(every):
        for where, error in of_rank.items():
            if error <= limit:
                continue
            before, ranks = found.get(where, (0.0, []))
            found[where] = (max(before, error), [*ranks, rank])
    return found, frozenset.intersection(*map(frozenset, every))


def _named(call: Call) -> str:
    return call.module or MODEL


# --- values that belong to a parameter ------------------------------------------------------------------------------


def _of_gradients(both: Twins, trace: Trace, failed: list[Key], measured: Measured) -> Origin:
    """Locate wrong gradients of parameters, where activations and their gradients are right: the first in execution
    order."""
    order = {call.module: i for i, call in enumerate(trace.begun)}
    names = [key[2] for key in failed]
    first = min(names, key=lambda name: (order.get(_owner(name), len(order)), names.index(name)))
    key = next(key for key in failed if key[2] == first)
    want, got = both.single.gradients()[first], both.sharded.gradients()[first]
    trained = [name for name, gradient in both.single.gradients().items() if gradient is not None]
    text = f"the gradient of {first}"
    if len(names) > 1:
        text += f" ({len(names)} of {len(trained)} parameters' gradients differ, and no activation does)"
    origin = _origin(both, key[0], _owner(first), text, want, got, _error(measured, key))
    if len(names) == len(trained) > 1:
        text = f"the gradients of all {len(trained)} parameters, and no activation; the first is {first}"
        return dataclasses.replace(origin, module=ALL, what=text)
    return origin


def of_tensor(both: Twins, key: Key, measured: Measured) -> Origin:
    step, kind, name = key
    error = _error(measured, key)
    tensor_name = name.split(": ")[0]
    tables = [_tensors_of(run, kind) for run in (both.single, both.sharded)]
    text = {
        "parameter": f"the parameter {name}"
        + ("" if step == START else " after the optimizer's step; its gradient is right"),
        "buffer": f"the buffer {name}",
        "state": f"the optimizer's state {name}",
        "gradient": f"the gradient of {name}",
    }[kind]
    return _origin(both, step, _owner(tensor_name), text, tables[0].get(name), tables[1].get(name), error)


def _of_losses(both: Twins, key: Key, measured: Measured, made: list[list[torch.Tensor]]) -> Origin:
    """Locate wrong losses; where data ranks have different rows, the single device computes the loss of these rows."""
    step, kind, name = key
    what = "the loss, of outputs that are right" if kind == "loss" else f"the {name}, a mean over rows"
    case = both.case
    if not _has_ranks(both):
        return Origin("", what, step, measured.errors[key])
    shares = both.sharded.shares if isinstance(both.sharded, Run) else 1
    alone = Run(case, both.single.model, both.rank_coordinate.data, shares=shares)
    of_rows = [alone.forward_backward(step, micro) for micro in range(case.accumulate)]
    mine = [(float(got), float(want), float(expected)) for (want, got), expected in zip(made, of_rows, strict=True)]
    every = agree.exchange(mine)
    causes: tuple[str, ...] = ()
    for of_pass in zip(*every, strict=True):
        got, want, expected = zip(*of_pass, strict=True)
        if not math.isclose(math.fsum(got) / len(got), want[0], rel_tol=1e-9):
            causes = cause.of_losses(got, want[0], expected, case.mesh)
            break
    error, ranks = _error(measured, key)
    return Origin("", what, step, error, tuple(ranks), causes=causes)


def of_update(both: Twins, failed: list[Key], measured: Measured, before: list[dict[str, torch.Tensor]]) -> Origin:
    """Locate a wrong optimizer step, where gradients are right."""
    origin = of_tensor(both, failed[0], measured)
    changed = [key[2] for key in failed if key[1] == "parameter"]
    if not changed:
        return origin
    first = failed[0][2] if failed[0][1] == "parameter" else failed[0][2].split(": ")[0]
    tables = [run.tensors()[0] for run in _two(both)]
    if failed[0][1] == "parameter" and _has_ranks(both):
        moved = [tables[i][first].detach() - before[i][first] for i in range(2)]
        causes = cause.of_updates(_evidence(both, *moved), both.case)
        origin = dataclasses.replace(origin, causes=causes or origin.causes)
    trained = [name for name, p in tables[0].items() if p.grad is not None]
    if len(changed) == len(trained) > 1:
        text = f"the optimizer's step of all {len(trained)} parameters; their gradients are right; the first is {first}"
        return dataclasses.replace(origin, module=ALL, what=text)
    return origin


def values_before(both: Twins) -> list[dict[str, torch.Tensor]]:
    """Copy the parameters of the single device and of the sharded run, before a step of their optimizers."""
    return [{name: p.detach().clone() for name, p in run.tensors()[0].items()} for run in _two(both)]


def _tensors_of(run: Trained, kind: str) -> dict[str, torch.Tensor]:
    if kind == "state":
        return run.state()
    if kind == "gradient":
        return {name: gradient for name, gradient in run.gradients().items() if gradient is not None}
    params, buffers = run.tensors()
    return {**params, **buffers}


def of_norm(both: Twins, key: Key, measured: Measured) -> Origin:
    """Locate a wrong norm of right gradients."""
    tables = [{n: g.detach().clone() for n, g in run.gradients().items() if g is not None} for run in _two(both)]
    norms = [run.clip() for run in _two(both)]
    causes = cause.of_norm(tables[0], tables[1], norms[0], norms[1], both.rank_coordinate) if _has_ranks(both) else ()
    error, ranks = _error(measured, key)
    return Origin("", "the norm of all gradients; each of them is right", key[0], error, tuple(ranks), causes=causes)


def _two(both: Twins) -> tuple[Trained, Trained]:
    return both.single, both.sharded


def _has_ranks(both: Twins) -> bool:
    """Return whether ranks hold shards of their own to compare; on JAX one process holds all."""
    return both.case.engine == "torch"


def _error(measured: Measured, key: Key) -> tuple[float, list[int]]:
    return measured.errors[key], measured.ranks.get(key, [])


def _owner(tensor: str) -> str:
    return tensor.rpartition(".")[0]


# --- putting an origin together -------------------------------------------------------------------------------------


def _origin(
    both: Twins,
    step: int,
    module: str,
    text: str,
    want: torch.Tensor | None,
    got: torch.Tensor | None,
    error: tuple[float, list[int]],
) -> Origin:
    """Exchange what every rank holds of the value, and say what the difference looks like. Called on all ranks."""
    return Origin(
        module,
        text,
        step,
        error[0],
        tuple(error[1]),
        () if want is None else tuple(want.shape),
        _layout_of(got),
        _planned(both, module),
        cause.likely(_evidence(both, want, got), both.case, _own_tensors(both, module)) if _has_ranks(both) else (),
    )


def _evidence(both: Twins, want: torch.Tensor | None, got: torch.Tensor | None) -> list[Evidence]:
    mine, part = (None, None) if got is None or want is None else parts.pair(got, want, both.rank_coordinate)
    every = agree.exchange((mine, part))
    return [Evidence(both.case.mesh.coordinate(rank), *pair_of_rank) for rank, pair_of_rank in enumerate(every)]


def _own_tensors(both: Twins, module: str) -> dict[str, torch.Tensor]:
    """Return the module's biases on the single device, which a wrong result may add too often or not at all."""
    try:
        owner = both.single.model.get_submodule(module)
    except AttributeError:
        return {}
    return {name: p.detach() for name, p in owner.named_parameters() if p.ndim == 1 and name.endswith("bias")}


def _layout_of(got: torch.Tensor | None) -> str:
    if got is None:
        return "nothing"
    if not isinstance(got, DTensor):
        return f"a plain tensor of local shape {tuple(got.shape)}"
    layout, _, _ = parts.layout_of(got)
    return f'"{layout}" of local shape {tuple(parts.local(got).shape)}'


def _as_found(both: Twins, got: Trace, module: str) -> tuple[str, ...]:
    """Describe the layouts of a module's inputs, parameters and outputs in the sharded run."""
    call = next((call for call in got.begun if call.module == module), None)
    prefix = f"{module}." if module else ""
    own = {n: p for n, p in both.sharded.tensors()[0].items() if n.startswith(prefix) and "." not in n[len(prefix) :]}
    lines = [(f"input{where.position}", got.values[where]) for where in (call.inputs if call else ())]
    lines += [(name.removeprefix(prefix), p.detach()) for name, p in own.items()]
    lines += [(f"output{where.position}", got.values[where]) for where in (call.outputs if call else ())]
    return tuple(f"{what}: {_layout_of(value)}" for what, value in lines)[:8]


def _planned(both: Twins, module: str) -> tuple[str, ...]:
    plan = both.sharded.plan
    if plan is None:
        return ()
    prefix = f"{module}." if module else ""
    lines = []
    for row in plan.rows:
        own = [name for name in row.tied if name.startswith(prefix) and "." not in name[len(prefix) :]]
        if own:
            by = f'"{row.rule}"' if row.rule is not None else "no rule"
            lines.append(f'{by}: {own[0].removeprefix(prefix)} "{row.stored}"')
    for border in plan.borders:
        if border.module == module:
            by = f'"{border.rule}"' if border.rule is not None else "follows"
            lines.append(f"{by}: {border.side} " + (f'"{border.layout}"' if border.layout else border.reason))
    return tuple(lines[:6])
