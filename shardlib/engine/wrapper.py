"""An optimizer for a sharded model that says what a plain one cannot: by name, with counts, scaled, agreed on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch, optimizer
from shardlib.engine.held import held_of, local_of
from shardlib.engine.lost import naming_lost_ranks
from shardlib.engine.norms import clip_among, clip_grad_value_
from shardlib.engine.scaler import LossScaler
from shardlib.engine.sharded import Sharded, record_of
from shardlib.errors import CheckpointError, InputError, ShardingError

__all__ = ["OptimizerWrapper"]


class OptimizerWrapper(torch.optim.Optimizer):
    """Any `torch.optim` optimizer, or one with its interface, on a sharded model.

    The optimizer inside steps on plain local tensors of the parts that the plan's state layouts give, with the fused or
    foreach form that it would take. Param groups are its own: what is written to them later counts. It is an
    `Optimizer` itself, so that `torch.optim.lr_scheduler` takes it.

    Over a plain optimizer, which works too, it adds the dynamic loss scale of `precision("fp16")`, losses with counts,
    steps of several backward passes (`accumulate(n)`), and a state dict by parameter names.

    Args:
        inner: built from `model.parameters()` after `shard_model`; or a class or function that takes them.
        model: what `shard_model` returned.
        **options: for `inner`, where that is a class or function.

    Attributes:
        step_was_skipped: whether the last `step()` changed nothing: a gradient was not finite, or further backward
            passes belong to the step.

    Raises:
        ShardingError: the model is not sharded, or the optimizer's parameters are not its.

    >>> import shardlib as sl
    >>> model = sl.shard_model(nn.Linear(4, 2), "dp=1", {"**": None})
    >>> opt = OptimizerWrapper(torch.optim.AdamW, model, lr=1e-3)
    >>> opt.backward(model(torch.ones(3, 4)).sum())
    >>> opt.clip_grad_norm_(1.0) > 0
    tensor(True)
    >>> opt.step()
    >>> sorted(opt.state_dict()["state"]), opt.state_dict()["param_groups"][0]["params"]
    (['bias', 'weight'], ['weight', 'bias'])
    """

    def __init__(self, inner: Any, model: nn.Module, **options: Any) -> None:
        self._record: Sharded = record_of(model)
        _torch.make_hooks(self)
        if not isinstance(inner, torch.optim.Optimizer):
            if not callable(inner):
                raise ShardingError(
                    f"OptimizerWrapper was given {inner!r}; give an optimizer built from model.parameters(), or a "
                    "class such as torch.optim.AdamW with its options."
                )
            inner = inner(model.parameters(), **options)
        elif options:
            raise ShardingError(
                f"OptimizerWrapper was given an optimizer and the options {', '.join(options)}; give options with a "
                "class, as in OptimizerWrapper(torch.optim.AdamW, model, lr=1e-3)."
            )
        self.inner: torch.optim.Optimizer = inner
        self.model = model
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._refuse_strangers()
        step = self._record.plan.step
        self.scaler = LossScaler(step.scaler) if step.scaler is not None else None
        self.fp8_history = self._record.fp8_history
        self.step_was_skipped = False
        self._count: torch.Tensor | None = None
        self._counted: bool | None = None  # whether this step's losses came with counts
        self._divided_by: float | None = None
        self._settled = False  # gradients are those of the mean loss, unscaled

    def _refuse_strangers(self) -> None:
        strangers = [p for group in self.inner.param_groups for p in group["params"] if id(p) not in self._names]
        if strangers:
            raise ShardingError(
                f"{len(strangers)} of the optimizer's parameters are not the model's (the first has shape "
                f"{tuple(strangers[0].shape)}). Build it from model.parameters() after shard_model, and give each "
                "model an optimizer of its own."
            )

    # --- what an optimizer has ----------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.inner.param_groups = value

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.inner.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)
        self._refuse_strangers()

    def unwrap(self) -> torch.optim.Optimizer:
        """The optimizer inside."""
        return self.inner

    def __repr__(self) -> str:
        return f"OptimizerWrapper({self.inner!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step. Between the backward passes of one step it does nothing."""
        if self._is_between_passes():
            return
        self._forget()
        for param in self._params():
            if set_to_none or isinstance(param.grad, DTensor):
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def _forget(self) -> None:
        self._count, self._counted, self._divided_by, self._settled = None, None, None, False

    def _params(self) -> Iterator[torch.Tensor]:
        for group in self.inner.param_groups:
            yield from group["params"]

    def _is_between_passes(self) -> bool:
        return self._record.reducer.is_between_passes()

    # --- a step -------------------------------------------------------------------------------------------------------

    @naming_lost_ranks("backward")
    def backward(self, loss: Any, *, weight: Any = None) -> None:
        """Run backward: of a mean loss, of a sum with its count, or of a mean with its weight.

        With counts, a step's gradient is that of all sums over all counts, on all data ranks and in all passes since
        `zero_grad`: what one device gets from all examples together, also where ranks have unequal numbers of tokens.
        Until `clip_grad_norm_` or `step`, gradients are those of the sums.

        Args:
            loss: a scalar: the mean loss over this rank's examples; or a pair (sum of losses, number of examples).
            weight: how many examples (tokens) the mean is over.

        Raises:
            InputError: no scalar, a count that is none, or counts with some passes of a step only.
        """
        total, count = _sum_and_count(loss, weight)
        if self._counted is not None and self._counted is not (count is not None):
            raise InputError(
                "Some losses of this step came with a count and some without. Give all of them as (sum, count) or with "
                "weight=, or none."
            )
        self._settled, self._counted = False, count is not None
        if count is not None:
            self._count = count if self._count is None else self._count + count
        if self.scaler is not None:
            # What flows through the model in float16 is then as large as on one device with the whole batch.
            total = self.scaler.scaled(total) * (self._record.reducer.scale / self._divisor(count))
        total.backward()

    def backward_by_another(self) -> float:
        """Let somebody else run the backward passes of this step, of losses that are means; returns their factor."""
        if self._counted:
            raise InputError(
                "Some losses of this step came with a count, and a pipeline's have theirs divided already."
            )
        self._settled, self._counted = False, False
        return 1.0 if self.scaler is None else self.scaler.scale * self._record.reducer.scale

    def _divisor(self, count: torch.Tensor | None) -> float:
        """What sums are divided by before they are scaled: a number about as large as a step's count, on all ranks."""
        if count is None:
            return 1.0
        if self._divided_by is None:
            largest = count.clone()
            if (group := self._record.reducer.data_group()) is not None:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            self._divided_by = max(1.0, largest.item())
        return self._divided_by

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add to this rank's gradients; see `shardlib.no_sync`."""
        with self._record.reducer.no_sync():
            yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters, unless further passes belong to the step or a gradient is not finite.

        Args:
            closure: runs forward and backward (with `self.backward`) and returns the loss, which `step` returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_was_skipped = self._is_between_passes()
        if self.step_was_skipped:
            return loss
        self._step()
        return loss

    @naming_lost_ranks("step")
    def _step(self) -> None:
        self._settle()
        if self.scaler is not None:
            self.step_was_skipped = self.scaler.overflowed
            self.scaler.update()
        if not self.step_was_skipped:
            self._call_step_hooks("step_pre")
            with optimizer.stepping_through_wrapper():
                self.inner.step()
            self._call_step_hooks("step_post")
        self._forget()

    def _call_step_hooks(self, when: str) -> None:
        """Hooks of steps that are taken. Gradients are those of the mean loss, as after `clip_grad_norm_`."""
        for hook in _torch.hooks_of(self, when):
            if hook(self, (self,), {}) is not None and when == "step_pre":
                raise InputError(
                    f"The hook {hook!r} gave new arguments for a step. An OptimizerWrapper calls its hooks after the "
                    "closure, when no argument is left; let the hook return None."
                )

    def follow(self, scheduler: Any) -> Any:
        """Let a learning rate scheduler take only the steps that this optimizer takes; returns it.

        A step that was skipped since a gradient was not finite, or since further passes belong to it, is none.
        """
        kind = type(scheduler)

        def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            if not self.step_was_skipped:
                kind.step(scheduler, *args, **kwargs)

        # A class of its own, under the same name: an attribute would be part of the scheduler's state dict.
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        scheduler.__class__ = type(kind.__name__, (kind,), {**names, "step": step})
        return scheduler

    @naming_lost_ranks("step")
    def _settle(self) -> None:
        """Once a step: gradients of sums become those of means, scaled ones unscaled; ranks agree on what is finite."""
        if self._settled:
            return
        self._settled = True
        factor = 1.0
        if self._count is not None:
            group = self._record.reducer.data_group()
            total = self._count.to(torch.float64)
            if group is not None:
                dist.all_reduce(total, group=group)
            if total.item() == 0:
                raise InputError("The counts of this step add up to zero on all ranks: there is nothing to learn from.")
            factor /= total.item() * self._record.reducer.scale
        if self.scaler is not None:
            factor *= (self._divided_by or 1.0) / (self.scaler.scale * self._record.reducer.scale)
        grads = [local_of(p.grad) for p in self._params() if p.grad is not None]
        if factor != 1.0:
            _torch.multiply_all(grads, factor)
        if self.scaler is not None:
            self.scaler.look_at(grads, self._record.reducer.group_of_all(), self._record.reducer.executor.device)

    # --- clipping -----------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale gradients so that their norm, over all elements of all parameters, is at most `max_norm`.

        Returns the norm before. Of gradients that are not finite under a loss scale nothing is clipped: the step will
        be skipped.
        """
        self._settle()
        overflow = self.scaler is not None and self.scaler.overflowed
        return clip_among(
            self.model.parameters() if self._record.pipeline is not None else (),
            list(self._params()),
            math.inf if overflow else max_norm,
            norm_type,
            error_if_nonfinite and not overflow,
        )

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of every gradient to [-clip_value, clip_value]."""
        self._settle()
        clip_grad_value_(self._params(), clip_value)

    # --- state dicts --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State by parameter names: DTensors of global shape where it is split, and each group's names and options.

        Tensors are the optimizer's own, not copies. The loss scale is under "scaler", what delayed scales of float8 are
        chosen by under "fp8_history".
        """
        for hook in _torch.hooks_of(self, "state_dict_pre"):
            hook(self)
        state = {self._names[id(p)]: dict(self.inner.state[p]) for p in self._params() if self.inner.state.get(p)}
        groups = [
            {**group, "params": [self._names[id(p)] for p in group["params"]]} for group in self.inner.param_groups
        ]
        made: dict[str, Any] = {"state": state, "param_groups": groups}
        if self.scaler is not None:
            made["scaler"] = self.scaler.state_dict()
        if self.fp8_history is not None:
            made["fp8_history"] = self.fp8_history.state_dict()
        for hook in _torch.hooks_of(self, "state_dict_post"):
            made = made if (other := hook(self, made)) is None else other
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Take what `state_dict` gave, of this mesh or with plain tensors of global shape, as one device has them.

        A state dict with numbers in the place of names is `torch.optim`'s own, and is taken in its order.

        Raises:
            CheckpointError: names or groups that are not this optimizer's.
        """
        given = dict(state_dict)
        for hook in _torch.hooks_of(self, "load_state_dict_pre"):
            given = given if (other := hook(self, given)) is None else dict(other)
        scaler, history = given.pop("scaler", None), given.pop("fp8_history", None)
        groups, state = given.get("param_groups"), given.get("state")
        if not isinstance(groups, list) or not isinstance(state, Mapping):
            raise CheckpointError('An optimizer\'s state dict has "state" and "param_groups"; this one does not.')
        here = self.inner.param_groups
        if len(groups) != len(here):
            raise CheckpointError(f"The state dict has {len(groups)} param groups, the optimizer {len(here)}.")
        named = all(isinstance(name, str) for group in groups for name in group["params"])
        by_id: dict[int, Any] = {}
        for index, (theirs, ours) in enumerate(zip(groups, here, strict=True)):
            names = [self._names[id(p)] for p in ours["params"]]
            if named and sorted(theirs["params"]) != sorted(names):
                unlike = sorted({*theirs["params"]} ^ {*names})
                raise CheckpointError(
                    f"Group {index} of the state dict has other parameters than the optimizer's. In one of them only: "
                    f"{', '.join(unlike[:5])}{', ...' if len(unlike) > 5 else ''}."
                )
            if not named and len(theirs["params"]) != len(names):
                raise CheckpointError(
                    f"Group {index} of the state dict has {len(theirs['params'])} parameters, the optimizer's "
                    f"{len(names)}."
                )
            keys = dict(zip(names, names if named else theirs["params"], strict=True))
            by_id |= {id(p): state.get(keys[self._names[id(p)]]) for p in ours["params"]}
        for theirs, ours in zip(groups, here, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})
        for param in self._params():
            known = by_id[id(param)]
            if known is None:
                self.inner.state.pop(param, None)
            else:
                self.inner.state[param] = {key: _taken(param, key, value) for key, value in known.items()}
        if scaler is not None and self.scaler is not None:
            self.scaler.load_state_dict(scaler)
        if history is not None and self.fp8_history is not None:
            self.fp8_history.load_state_dict(history)
        for hook in _torch.hooks_of(self, "load_state_dict_post"):
            hook(self)


def _sum_and_count(loss: Any, weight: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    pair = isinstance(loss, tuple | list)
    if pair and (len(loss) != 2 or weight is not None):
        raise InputError(
            f"backward() was given {len(loss)} values{' and weight=' if weight is not None else ''}; give a mean loss, "
            "a pair (sum, count), or a mean loss and weight=."
        )
    total = loss[0] if pair else loss
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        shape = tuple(total.shape) if isinstance(total, torch.Tensor) else type(total).__name__
        raise InputError(f"backward() was given a loss of {shape}; give a scalar tensor.")
    given = loss[1] if pair else weight
    if given is None:
        return total, None
    count = torch.as_tensor(given, dtype=torch.float64).detach()
    if count.numel() != 1 or not torch.isfinite(count) or count < 0:
        raise InputError(f"backward() was given the count {given!r}; give a number of examples or tokens, from 0 up.")
    count = count.reshape(()).to(total.device)
    return (total if pair else total * count.to(total.dtype)), count


def _taken(param: torch.Tensor, key: str, value: Any) -> Any:
    """A loaded entry: this rank's part of a plain tensor of global shape; others as they are."""
    held = held_of(param)
    plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.ndim > 0
    if not plain or held is None or value.shape != param.shape:
        return value
    if held.cut is None and held.compute_spec is None:
        return value.to(held.state_device, copy=True)
    return held.wrap(held.take(value).to(held.state_device))
