"""`OptimizerWrapper`: an optimizer for a sharded model, with loss scaling, counts and state by parameter name."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch
from shardlib.engine.data import optimizer
from shardlib.engine.data.norms import clip_among, clip_grad_value_
from shardlib.engine.data.params import local_of
from shardlib.engine.data.scaler import LossScaler
from shardlib.engine.ranks.lost import naming_lost_ranks
from shardlib.engine.sharded import Sharded, Stateful, param_state_of, record_of
from shardlib.errors import CheckpointError, InputError, ShardingError

__all__ = ["OptimizerWrapper"]


def _of_inner(name: str) -> property:
    """Return a property that is an attribute of the inner optimizer."""
    return property(lambda self: getattr(self.inner, name), lambda self, value: setattr(self.inner, name, value))


class OptimizerWrapper(torch.optim.Optimizer):
    """Wrap a `torch.optim` optimizer, or one with the same interface, for a sharded model.

    The inner optimizer steps on plain local tensors, the shards that the plan's state layouts give, with the fused or
    foreach implementation that it would choose. `param_groups` are those of the inner optimizer, so that later changes
    to them take effect. The wrapper is an `Optimizer` itself, so that `torch.optim.lr_scheduler` accepts it.

    A plain optimizer also works on a sharded model. The wrapper adds the dynamic loss scale of `precision("fp16")`,
    losses with counts, steps of several backward passes (`accumulate(n)`), and a state dict by parameter names.

    Args:
        inner: an optimizer that was built from `model.parameters()` after `shard_model`, or a class or function that
            takes them.
        model: the result of `shard_model`.
        **options: arguments for `inner`, if that is a class or function.

    Attributes:
        step_was_skipped: whether the last `step()` changed nothing: a gradient was not finite, or further backward
            passes belong to the step.
        stateful: what is saved beside the state, by name: the loss scale, and what features of the plan keep.

    Raises:
        ShardingError: the model is not sharded, or the optimizer has parameters of another model.

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
        record_of(model)  # raises where it is not sharded
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
        self._refuse_foreign_params(self._params())
        step = self._record.plan.step
        self.scaler = LossScaler(step.scaler) if step.scaler is not None else None
        self.step_was_skipped = False
        self._reset_step()

    def _refuse_foreign_params(self, params: Iterable[torch.Tensor]) -> None:
        known = self._names
        foreign = [p for p in params if id(p) not in known]
        if foreign:
            raise ShardingError(
                f"{len(foreign)} of the optimizer's parameters do not belong to the model (the first has shape "
                f"{tuple(foreign[0].shape)}). Build it from model.parameters() after shard_model, and give each "
                "model an optimizer of its own."
            )

    # `reshard` gives the model another record and other parameters.

    @property
    def _record(self) -> Sharded:
        return record_of(self.model)

    @property
    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.model.named_parameters()}

    @property
    def stateful(self) -> dict[str, Stateful]:
        """Objects that are saved beside the state, by name: the loss scale, and what features of the plan keep."""
        scaled: dict[str, Stateful] = {} if self.scaler is None else {"scaler": self.scaler}
        return {**scaled, **self._record.stateful}

    # --- the interface of an optimizer --------------------------------------------------------------------------------

    param_groups: list[dict[str, Any]] = _of_inner("param_groups")  # type: ignore[assignment]
    state: defaultdict[torch.Tensor, Any] = _of_inner("state")  # type: ignore[assignment]
    defaults: dict[str, Any] = _of_inner("defaults")  # type: ignore[assignment]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)
        try:
            self._refuse_foreign_params(self.inner.param_groups[-1]["params"])
        except ShardingError:
            self.inner.param_groups.pop()
            raise

    def unwrap(self) -> torch.optim.Optimizer:
        """Return the inner optimizer."""
        return self.inner

    def __repr__(self) -> str:
        return f"OptimizerWrapper({self.inner!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step. Do nothing between the backward passes of one step."""
        if self._is_between_passes():
            return
        self._reset_step()
        for param in self._params():
            if set_to_none or isinstance(param.grad, DTensor):
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def _reset_step(self) -> None:
        self._count: torch.Tensor | None = None
        self._counted: bool | None = None  # whether the losses of this step have counts
        self._divided_by: float | None = None
        self._gradients_are_final = False  # whether gradients are those of the mean loss, unscaled

    def _params(self) -> Iterator[torch.Tensor]:
        for group in self.inner.param_groups:
            yield from group["params"]

    def _is_between_passes(self) -> bool:
        return self._record.reducer.is_between_passes()

    # --- a step -------------------------------------------------------------------------------------------------------

    @naming_lost_ranks("backward")
    def backward(self, loss: Any, *, weight: Any = None) -> None:
        """Run backward from a mean loss, from a sum with its count, or from a mean with its weight.

        With counts, the gradient of a step is that of the sum of all losses divided by the sum of all counts, over all
        data ranks and all passes since `zero_grad`. This is the gradient that one device computes from all examples
        together, also if ranks have different numbers of tokens. Until `clip_grad_norm_` or `step`, `p.grad` is the
        gradient of the sums.

        Args:
            loss: a scalar, the mean loss over this rank's examples; or a pair (sum of losses, number of examples).
            weight: the number of examples (tokens) that the mean is over.

        Raises:
            InputError: the loss is not a scalar, a count is invalid, or only some passes of a step have counts.
        """
        total, count = _sum_and_count(loss, weight)
        if self._counted is not None and self._counted is not (count is not None):
            raise InputError(
                "Some losses of this step came with a count and some without. Give all of them as (sum, count) or with "
                "weight=, or none."
            )
        before = self._count, self._counted
        self._gradients_are_final, self._counted = False, count is not None
        if count is not None:
            self._count = count if self._count is None else self._count + count
        if self.scaler is not None:
            # Float16 gradients inside of the model then have the magnitude that they have on a single device.
            total = self.scaler.scaled(total) * (self._record.reducer.scale / self._divisor(count))
        try:
            total.backward()
        except BaseException:
            self._count, self._counted = before  # of a pass that has raised, which is not a part of the step
            raise

    def backward_by_another(self) -> float:
        """Let a pipeline run the backward passes of this step, of mean losses; return the factor for these losses."""
        if self._counted:
            raise InputError(
                "Some losses of this step came with a count, and a pipeline's have theirs divided already."
            )
        self._gradients_are_final, self._counted = False, False
        return 1.0 if self.scaler is None else self.scaler.scale * self._record.reducer.scale

    def _divisor(self, count: torch.Tensor | None) -> float:
        """Return the divisor of sums before scaling: about the count of the step, the same on all ranks."""
        if count is None:
            return 1.0
        if self._divided_by is None:
            largest = count.clone()
            if (group := self._record.reducer.data_group()) is not None:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            self._divided_by = max(1.0, largest.item())
        return self._divided_by

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate this rank's gradients; see `shardlib.no_sync`."""
        return self._record.reducer.no_sync()

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
        self._finish_gradients()
        if self.scaler is not None:
            self.step_was_skipped = self.scaler.overflowed
            self.scaler.update()
        if not self.step_was_skipped:
            self._call_step_hooks("step_pre")
            with optimizer.stepping_through_wrapper():
                self.inner.step()
            self._call_step_hooks("step_post")
        self._reset_step()

    def _call_step_hooks(self, when: str) -> None:
        """Call the hooks of a step that is taken. As after `clip_grad_norm_`, gradients are those of the mean loss."""
        for hook in _torch.hooks_of(self, when):
            if hook(self, (self,), {}) is not None and when == "step_pre":
                raise InputError(
                    f"The hook {hook!r} gave new arguments for a step. An OptimizerWrapper calls its hooks after the "
                    "closure, when no argument is left; let the hook return None."
                )

    def follow(self, scheduler: Any) -> Any:
        """Let a learning rate scheduler count only the steps that this optimizer takes; return the scheduler.

        A step that was skipped, because a gradient was not finite or further passes belong to it, does not count.
        """
        kind = type(scheduler)

        def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            if not self.step_was_skipped:
                kind.step(scheduler, *args, **kwargs)

        # A subclass of the same name: an attribute would become part of the scheduler's state dict.
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        scheduler.__class__ = type(kind.__name__, (kind,), {**names, "step": step})
        return scheduler

    @naming_lost_ranks("step")
    def _finish_gradients(self) -> None:
        """Divide gradients of sums by counts, unscale them, and agree on whether they are finite, once a step."""
        if self._gradients_are_final:
            return
        self._gradients_are_final = True
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

        Returns the norm before clipping. Between the backward passes of one step it does nothing, as `step` and
        `zero_grad` do, and returns nan: gradients are partial sums then. Under a loss scale, gradients that are not
        finite are not clipped: the step will be skipped.
        """
        if self._is_between_passes():
            return torch.full((), math.nan, device=self._record.reducer.executor.device)
        self._finish_gradients()
        overflow = self.scaler is not None and self.scaler.overflowed
        return clip_among(
            self.model.parameters() if self._record.pipeline is not None else (),
            list(self._params()),
            math.inf if overflow else max_norm,
            norm_type,
            error_if_nonfinite and not overflow,
        )

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of every gradient to [-clip_value, clip_value]; between the passes of a step, nothing."""
        if self._is_between_passes():
            return
        self._finish_gradients()
        clip_grad_value_(self._params(), clip_value)

    # --- state dicts --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter names, with the names and options of each param group.

        Sharded state is a DTensor of global shape. Tensors are the optimizer's own, not copies. Beside "state" and
        "param_groups" stands what `stateful` names: the loss scale is under "scaler".
        """
        for hook in _torch.hooks_of(self, "state_dict_pre"):
            hook(self)
        known = self._names
        state = {known[id(p)]: dict(self.inner.state[p]) for p in self._params() if self.inner.state.get(p)}
        groups = [{**group, "params": [known[id(p)] for p in group["params"]]} for group in self.inner.param_groups]
        made: dict[str, Any] = {"state": state, "param_groups": groups}
        made |= {name: kept.state_dict() for name, kept in self.stateful.items()}
        for hook in _torch.hooks_of(self, "state_dict_post"):
            made = made if (other := hook(self, made)) is None else other
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a result of `state_dict`: from this mesh, or with plain tensors of global shape, as on one device.

        A state dict with indices instead of names is in the format of `torch.optim`, and is loaded in the optimizer's
        order.

        Raises:
            CheckpointError: the names, groups or shapes are not those of this optimizer. Nothing has been loaded.
        """
        if not isinstance(state_dict, Mapping):
            raise CheckpointError(
                f"load_state_dict was given {type(state_dict).__name__}; give what state_dict() returns."
            )
        given = dict(state_dict)
        for hook in _torch.hooks_of(self, "load_state_dict_pre"):
            given = given if (other := hook(self, given)) is None else dict(other)
        groups, state = given.get("param_groups"), given.get("state")
        if not isinstance(groups, list) or not isinstance(state, Mapping):
            raise CheckpointError('An optimizer\'s state dict has "state" and "param_groups"; this one does not.')
        param_groups = self.inner.param_groups
        if len(groups) != len(param_groups):
            raise CheckpointError(f"The state dict has {len(groups)} param groups, the optimizer {len(param_groups)}.")
        named, known_names = all(isinstance(name, str) for group in groups for name in group["params"]), self._names
        loaded: dict[torch.Tensor, Any] = {}
        for index, (theirs, ours) in enumerate(zip(groups, param_groups, strict=True)):
            names = [known_names[id(p)] for p in ours["params"]]
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
            keys = names if named else theirs["params"]
            loaded |= {param: state.get(key) for param, key in zip(ours["params"], keys, strict=True)}
        keys = {name for group in groups for name in group["params"]}
        if unknown := [name for name in state if name not in keys]:
            raise CheckpointError(
                f"The state dict has state of {unknown[0]!r}, and none of its param groups has that. Give the state "
                "and the groups of one optimizer."
            )
        if optimizer.steps_shards(self.inner):
            for param, known in loaded.items():
                self._refuse_other_shapes(param, known or {})
        for theirs, ours in zip(groups, param_groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})
        for param, known in loaded.items():
            if known is None:
                self.inner.state.pop(param, None)
            else:
                self.inner.state[param] = {key: _as_local_state(param, value) for key, value in known.items()}
        for name in self.stateful.keys() & given.keys():
            self.stateful[name].load_state_dict(given[name])
        for hook in _torch.hooks_of(self, "load_state_dict_post"):
            hook(self)

    def _refuse_other_shapes(self, param: torch.Tensor, state: Mapping[str, Any]) -> None:
        param_state = param_state_of(param)
        for key, value in state.items():
            if isinstance(value, DTensor) and not (param_state is not None and param_state.holds(value)):
                raise CheckpointError(
                    f'"{key}" of "{self._names[id(param)]}" is a DTensor of other shards in the state dict: '
                    f"{value.placements} on {value.device_mesh}. Give full tensors, value.full_tensor(); or use "
                    "shardlib.save and shardlib.load, which lay state out anew. Nothing has been loaded."
                )
            if isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != param.shape:
                raise CheckpointError(
                    f'"{key}" of "{self._names[id(param)]}" has global shape {tuple(value.shape)} in the state dict, '
                    f"and the parameter {tuple(param.shape)}. Give the state of an optimizer of this model; nothing "
                    "has been loaded."
                )


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
    if given is None and not pair:
        return total, None
    count = as_count(given, "backward() was given").to(total.device)
    return (total if pair else total * count.to(total.dtype)), count


def as_count(given: Any, told: str) -> torch.Tensor:
    """Return a count as a scalar of float64.

    Raises:
        InputError: it is no number from 0 up; `told` begins the message.

    >>> as_count(3, "backward() was given")
    tensor(3., dtype=torch.float64)
    """
    try:
        count = torch.as_tensor(given, dtype=torch.float64).detach().reshape(())
        is_valid = not _torch.has_values(count) or bool(torch.isfinite(count) and count >= 0)
    except (TypeError, ValueError, RuntimeError):
        is_valid = False
    if not is_valid:
        raise InputError(f"{told} the count {given!r}; give a number of examples or tokens, from 0 up.")
    return count


def _as_local_state(param: torch.Tensor, value: Any) -> Any:
    """Return a loaded entry: this rank's shard of a plain tensor of global shape; other entries unchanged."""
    param_state = param_state_of(param)
    plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.ndim > 0
    if not plain or param_state is None or value.shape != param.shape:
        return value
    if param_state.shard_spec is None and param_state.compute_spec is None:
        return value.to(param_state.state_device, copy=True)
    return param_state.wrap(param_state.take(value).to(param_state.state_device))
