"""Precision: the dtypes in which parameters are stored, computed with and updated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shardlib._dtypes import dtype_named, keeps_dtype_names, name_of
from shardlib._plan import LossScale, Plan, Row, Step
from shardlib.errors import InputError, PlanError, check_flags, nearest
from shardlib.layout import Layout
from shardlib.transforms._choose import add_note, as_names, chosen, quoted, refuse_another
from shardlib.transforms._transform import Transform

if TYPE_CHECKING:
    import torch

__all__ = ["Precision", "precision"]

_LOW = {"bf16": "bfloat16", "fp16": "float16", "fp16_naive": "float16", "fp8": "bfloat16"}
_NAMES = (*_LOW, "fp32")
_SCALINGS = ("current", "delayed")


def precision(
    name: str,
    *,
    master: bool = True,
    autocast: bool = False,
    reduce: torch.dtype | str | None = None,
    grads: torch.dtype | str | None = None,
    keep: str | Sequence[str] = (),
    scaler: LossScale | None = None,
    linears: str | Sequence[str] = "**",
    scaling: str = "current",
    history: int = 16,
) -> Transform:
    """Choose the dtypes in which a model of float32 is trained.

        "bf16"         stored, compute bfloat16; grad, state float32, with a master copy of each parameter
        "fp16_naive"   the same in float16, and the loss is scaled
        "fp16"         all float32; forward under autocast to float16, and the loss is scaled
        "fp8"          as "bf16", and linear modules multiply in float8
        "fp32"         all float32

    Only parameters of float32 change: buffers, and parameters that the model defines in another dtype, stay.

    Args:
        name: one of the above.
        master: False: state in the low dtype too, without a master copy.
        autocast: all float32, and forward under autocast to bfloat16 (of "bf16" and "fp8"; "fp16" is that of float16).
        reduce: the dtype in which gradients are reduced between ranks; by default that of computation.
        grads: the dtype of gradients, in which backward passes add up; by default float32, so that small contributions
            are not lost among many passes, as in FSDP2, Megatron-LM and DeepSpeed. The low dtype takes half the memory.
            With `master=False` it is the low dtype.
        keep: patterns of parameters, or of modules, that stay float32.
        scaler: the scale of the loss; by default `LossScale()` for "fp16" and "fp16_naive", else none.
        linears: patterns of the linear modules that "fp8" applies to.
        scaling: the scaling of "fp8": "current" scales a tensor by its present absolute maximum; "delayed" by its
            absolute maximum on all ranks in earlier steps, and saturates larger values.
        history: the number of earlier steps for "delayed".

    Raises:
        PlanError: another name, arguments that contradict it; applied to a plan, if it has another precision, a model
            of float64, a model of another low dtype than that of autocast, a pattern that matches nothing.

    >>> from torch import nn
    >>> import shardlib as sl
    >>> made = sl.plan(nn.Linear(64, 64, bias=False), "dp=4", {"weight": "out in"}) | precision("bf16")
    >>> str(made["weight"].stored), str(made["weight"].state)
    ('out in : bfloat16', 'out in : float32')
    >>> made.memory().state == 3 * 4 * 64 * 64  # a master copy, and AdamW's two
    True
    """
    if name not in _NAMES:
        raise PlanError(f"precision({name!r}): give one of {quoted(_NAMES)}.{nearest(str(name), _NAMES)}")
    check_flags("precision", PlanError, master=master, autocast=autocast)
    made = Precision(
        name,
        master,
        autocast,
        _dtype(reduce, name, "reduce"),
        _dtype(grads, name, "grads"),
        as_names(keep) or (),
        scaler,
        as_names(linears) or (),
        scaling,
        history,
    )
    _check(made)
    return made


@keeps_dtype_names
@dataclass(frozen=True, repr=False)
class Precision(Transform):
    """The transform that `precision` returns."""

    call: ClassVar[str] = "precision"
    name: str
    master: bool = True
    autocast: bool = False
    reduce: torch.dtype | None = None
    grads: torch.dtype | None = None
    keep: str | tuple[str, ...] = ()
    scaler: LossScale | None = None
    linears: str | tuple[str, ...] = "**"
    scaling: str = "current"
    history: int = 16

    @property
    def low(self) -> torch.dtype | None:
        """The dtype in which parameters are stored and computed with, or None where they stay float32."""
        return None if self.autocast or self.name in ("fp16", "fp32") else dtype_named(_LOW[self.name])

    def __call__(self, plan: Plan) -> Plan:
        refuse_another(plan, self)
        _refuse_others(plan, self)
        kept = chosen(plan, self.keep, self) if self.keep else set()
        changes = [row for row in plan.rows if _changes(row) and row.name not in kept]
        if self.low is not None and not changes:
            plan = add_note(plan, f"{self} changes no tensor: no parameter is of float32.")
        names = {row.name for row in changes}
        made = plan.map_rows(lambda row: self._row(row) if row.name in names else row)
        return made.replace(step=_set(plan.step, self._step(), self))

    def _row(self, row: Row) -> Row:
        if self.low is None:
            return row
        state = dtype_named("float32") if self.master else self.low
        wanted = {"stored": self.low, "compute": self.low, "grad": self.grads or state, "state": state}
        return row.replace(**{p: _with_dtype(layout, wanted[p], row, self) for p, layout in row.layouts.items()})

    def _step(self) -> dict[str, Any]:
        """Return the settings of the step that this precision requires."""
        scaled = self.name in ("fp16", "fp16_naive")
        return {
            "autocast": dtype_named(_LOW[self.name]) if self.autocast or self.name == "fp16" else None,
            "scaler": self.scaler or (LossScale() if scaled else None),
            "reduce_dtype": self.reduce,
            "fp8": ((self.linears,) if isinstance(self.linears, str) else self.linears) if self.name == "fp8" else (),
            "fp8_history": self.history if self.scaling == "delayed" else 0,
        }


def _check(made: Precision) -> None:
    """Refuse arguments that contradict each other."""
    wrong = [
        (made.autocast and made.name in ("fp32", "fp16_naive"), "autocast=True", 'it is for "bf16", "fp16" and "fp8"'),
        (not made.master and made.low is None, "master=False", "parameters that stay float32 have no copy"),
        (made.grads is not None and made.low is None, "grads", "gradients of float32 parameters are float32"),
        (
            made.grads not in (None, made.low) and not made.master,
            "grads",
            "without a master copy the optimizer steps on low parameters, whose gradients have their dtype",
        ),
        (bool(made.keep) and made.low is None, "keep", "every parameter stays float32"),
        (made.scaler is not None and made.name == "fp32", "scaler", "gradients of float32 need none"),
        (made.linears != "**" and made.name != "fp8", "linears", 'they apply to "fp8" only'),
        (made.scaling == "delayed" and made.name != "fp8", "scaling", 'it is for "fp8"'),
        (made.history != 16 and made.scaling != "delayed", "history", 'it is for scaling="delayed"'),
    ]
    for contradiction, argument, reason in wrong:
        if contradiction:
            raise PlanError(f"{made}: {argument} contradicts the rest: {reason}. Leave it out, or choose another name.")
    if made.scaling not in _SCALINGS:
        raise PlanError(f'{made}: scaling is "current" or "delayed".{nearest(str(made.scaling), _SCALINGS)}')
    if not isinstance(made.history, int) or isinstance(made.history, bool) or made.history < 1:
        raise PlanError(f"{made}: history is a number of steps, from 1 up.")
    if made.scaler is not None and not isinstance(made.scaler, LossScale):
        raise PlanError(f"{made}: scaler is a {type(made.scaler).__name__}; give a LossScale, or nothing.")


def _dtype(given: torch.dtype | str | None, name: str, argument: str) -> Any:
    known = None if given is None else _floating(given)
    if given is not None and known is None:
        raise PlanError(
            f'precision("{name}", {argument}={given!r}): give a dtype of floating point, such as "float32".'
        )
    return known


def _floating(given: Any) -> str | None:
    """Return the name of a dtype of floating point; None for anything else."""
    try:
        name = name_of(given)
    except InputError:
        return None
    return name if "float" in name else None


def _refuse_others(plan: Plan, made: Precision) -> None:
    """Refuse a model of float64, and one of another low dtype than autocast's, which torch computes with on no device
    alike."""
    autocast = made._step()["autocast"]
    refused = {
        "float64": "in float64 leave precision out",
        "bfloat16": 'for a model of bfloat16 give "bf16"',
        "float16": 'for a model of float16 give "fp16"',
    }
    for dtype, otherwise in refused.items():
        if dtype != "float64" and (autocast is None or name_of(autocast) == dtype):
            continue
        names = [row.name for row in plan.rows if row.kind == "parameter" and name_of(row.dtype) == dtype]
        if names:
            raise PlanError(
                f"{made}: {names[0]} is {dtype} (and {len(names) - 1} more); precision is "
                f"about models of float32. Build the model in float32, or call model.float() first; {otherwise}."
            )


def _changes(row: Row) -> bool:
    return row.kind == "parameter" and name_of(row.dtype) == "float32"


def _with_dtype(layout: Layout, dtype: torch.dtype, row: Row, made: Precision) -> Layout:
    if layout.dtype not in (None, dtype):
        raise PlanError(
            f'{made}: "{row.name}" has the layout "{layout}" already, and would become {dtype}. Choose one precision; '
            "`keep` names what stays float32."
        )
    return dataclasses.replace(layout, dtype=dtype)


def _set(step: Step, wanted: dict[str, Any], made: Precision) -> Step:
    """Return the step with these settings; those that are unset stay as they are."""
    changed = {name: value for name, value in wanted.items() if value}
    for name, value in changed.items():
        before = getattr(step, name)
        if before and before != value:
            raise PlanError(f"{made}: the step has {name}={before} already, and would get {value}. Choose one.")
    return step.replace(**changed)
