"""One training script for both engines: a model, an optimizer and a loss as functions of parameters.

    apply, params = functional(model, "dp=2,tp=2", rules, engine="jax")
    step = train_step(apply, adamw(1e-3), loss)
    state = step.init(params)
    for batch in batches:
        state, metrics = step(state, batch)

The loss is a torch function `loss(model, *batch)` on either engine: JAX runs its graph, together with the model's.
The batch is the global one on either engine: each data rank of torch takes its own rows. JAX is imported where
`engine="jax"` is asked for, and not before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shardlib import engine as torch_engine
from shardlib._mesh import mesh as torch_mesh
from shardlib._mesh_shape import MeshShape
from shardlib._plan import Plan, RulesLike, Transform
from shardlib.engine._torch import pytree
from shardlib.errors import InputError, PlanError

__all__ = ["AdamW", "Apply", "State", "Step", "adamw", "functional", "train_step"]

Loss = Callable[..., torch.Tensor]


class Apply(Protocol):
    """`apply(params, *args, **kwargs)`: the model's outputs for parameters by name."""

    @property
    def plan(self) -> Plan: ...

    def __call__(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> Any: ...


class State(NamedTuple):
    """The state that a step changes: pass on the state that the step returned, not the old one.

    Attributes:
        params: tensors or arrays by name.
        buffers: tensors that are not trained; empty on torch, whose model has its own.
        optimizer: the optimizer's own state.
        step: steps that were taken.
    """

    params: Any
    buffers: Any
    optimizer: Any
    step: int


class Step(Protocol):
    """`state, metrics = step(state, *batch)`, from the state that `init(params)` gives."""

    def init(self, params: Any) -> State: ...

    def __call__(self, state: State, *batch: Any, rng: Any = None) -> tuple[State, dict[str, Any]]: ...


@dataclass(frozen=True)
class AdamW:
    """The optimizer that `adamw` returns, for either engine."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if not _is_number(value := getattr(self, name)):
                raise InputError(f"adamw({name}={value!r}) was given; give a number that is not negative.{_ALONE}")
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2 or not all(map(_is_beta, self.betas)):
            raise InputError(f"adamw(betas={self.betas!r}) was given; give two numbers below 1, such as (0.9, 0.999).")

    def of_torch(self, params: Any) -> torch.optim.Optimizer:
        """Return `torch.optim.AdamW` for some parameters."""
        return torch.optim.AdamW(params, self.lr, self.betas, self.eps, self.weight_decay)

    def of_optax(self) -> Any:
        """Return `optax.adamw`, which needs optax."""
        import optax

        return optax.adamw(self.lr, *self.betas, eps=self.eps, weight_decay=self.weight_decay)


_ALONE = (
    " A schedule is of one engine: give train_step optax.adamw(schedule), or a function from parameters to a torch "
    "optimizer."
)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= value < math.inf  # type: ignore[operator]


def _is_beta(value: Any) -> bool:
    return _is_number(value) and value < 1


def adamw(
    lr: float, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01
) -> AdamW:
    """Return AdamW for either engine, with torch's defaults.

    Raises:
        InputError: an option is not a number, is negative, or a beta is not below 1.

    >>> adamw(1e-3).weight_decay
    0.01
    """
    return AdamW(lr, betas, eps, weight_decay)


def functional(
    model: nn.Module,
    mesh: Any,
    rules: RulesLike | None = None,
    *,
    transforms: Transform | Sequence[Transform] = (),
    engine: str = "torch",
) -> tuple[Apply, dict[str, Any]]:
    """Return `(apply, params)` of a single-device module, sharded by rules, on either engine.

    Args:
        model: a module. On torch it is sharded in place, on JAX it is copied.
        mesh: "dp=2,tp=2", or a mesh of the engine.
        rules: as of `shard_model`.
        transforms: a function from plan to plan, or several, applied in order.
        engine: "torch" or "jax".

    Returns:
        A function of parameters and the model's arguments, and the parameters that are trained by name: DTensors and
        tensors of the model itself, or `jax.Array`s. On torch each data rank gives its own rows, and parameters are
        those returned here; on JAX anything of their shapes will do.

    Raises:
        PlanError: another engine; also the errors of `shard_model` and `shardlib.jax.compile_model`.

    >>> apply, params = functional(nn.Linear(4, 2), "dp=1", {"**": None})
    >>> apply(params, torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """
    if engine == "torch":
        made = mesh if isinstance(mesh, torch.distributed.device_mesh.DeviceMesh) else torch_mesh(mesh)
        sharded = torch_engine.shard_model(model, made, rules, transforms=transforms)
        return _OnTorch(sharded), {n: p for n, p in sharded.named_parameters() if p.requires_grad}
    if engine == "jax":
        from shardlib import jax as jax_engine

        placed = jax_engine.make_mesh(mesh) if isinstance(mesh, str | Mapping | MeshShape) else mesh
        return jax_engine.compile_model(model, placed, rules, transforms=transforms)
    raise PlanError(f'functional(engine={engine!r}): give "torch" or "jax".')


def train_step(apply: Apply, optimizer: AdamW | Any, loss: Loss) -> Step:
    """Return a training step as a function `state, metrics = step(state, *batch)`.

    On torch parameters, buffers and optimizer state are updated where they are, so that the old state is gone; on JAX
    its memory is handed on to the new one. Either way use what is returned.

    Args:
        apply: the function of `functional`.
        optimizer: the optimizer of `adamw`; or, for one engine, a function from parameters to a torch optimizer, or a
            transformation of optax.
        loss: `loss(model, *batch)`, in torch, a mean over the rows that it is given; the same on either engine.

    Returns:
        The step. `metrics["loss"]` is the mean over the global batch, before the update.

    Raises:
        InputError: a function that `functional` did not return; an optimizer of the other engine; a batch whose rows
            the data ranks do not divide.

    >>> apply, params = functional(nn.Linear(4, 3), "dp=1", {"**": None})
    >>> step = train_step(apply, adamw(1e-2), lambda model, x, y: nn.functional.cross_entropy(model(x), y))
    >>> state = step.init(params)
    >>> state, metrics = step(state, torch.ones(2, 4), torch.tensor([0, 2]))
    >>> state.step, float(metrics["loss"]) > 0
    (1, True)
    """
    if not callable(loss):
        raise InputError(f"train_step was given the loss {loss!r}; give a function loss(model, *batch) of torch.")
    if not isinstance(apply, _OnTorch) and not hasattr(apply, "around"):
        raise InputError(
            f"train_step was given {type(apply).__name__}; give the function that functional(model, mesh, rules) "
            "returned first."
        )
    if isinstance(apply, _OnTorch):
        return _TorchStep(apply.model, optimizer, loss)
    return _JaxStep(apply, optimizer, loss)


def _check_state(state: Any) -> None:
    if not isinstance(state, State):
        raise InputError(
            f"The step was called with a state that is a {type(state).__name__}; begin with step.init(params)."
        )


# --- torch ----------------------------------------------------------------------------------------------------------


class _OnTorch:
    """The sharded model as a function of its own parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.plan: Plan = torch_engine.get_plan(model)
        self._own = dict(model.named_parameters())

    def __call__(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if strange := [name for name, tensor in params.items() if tensor is not self._own.get(name)]:
            raise InputError(
                f'apply was given a "{strange[0]}" that is not the model\'s own tensor. On torch a model is sharded '
                "with its tensors: hand on the params of functional(), which steps update in place, or copy values "
                "into them with shardlib.load or tensor.copy_()."
            )
        return self.model(*args, **kwargs)


class _TorchStep:
    def __init__(self, model: nn.Module, optimizer: Any, loss: Loss) -> None:
        self.model, self.loss = model, loss
        self.mesh = torch_engine.get_plan(model).mesh
        make = optimizer.of_torch if isinstance(optimizer, AdamW) else optimizer
        if not callable(make):
            raise InputError(
                f"train_step was given the optimizer {optimizer!r} for torch; give shardlib.functional.adamw(lr), or a "
                "function from parameters to a torch.optim.Optimizer."
            )
        self.wrapper = torch_engine.OptimizerWrapper(make(model.parameters()), model)

    def init(self, params: Any) -> State:
        return State(params, {}, self.wrapper, 0)

    def __call__(self, state: State, *batch: Any, rng: Any = None) -> tuple[State, dict[str, Any]]:
        _check_state(state)
        self.wrapper.zero_grad()
        loss = self.loss(self.model, *pytree.tree_map_only(torch.Tensor, self._own_rows, batch))
        self.wrapper.backward(loss)
        self.wrapper.step()
        return state._replace(step=state.step + 1), {"loss": self._over_ranks(loss.detach())}

    def _own_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim:
            return tensor
        index, ranks = self.mesh.data_place(self.mesh.coordinate(dist.get_rank()))
        if tensor.shape[0] % ranks:
            raise InputError(
                f'A batch of {tensor.shape[0]} rows was given to {ranks} data ranks of mesh "{self.mesh}"; give a '
                "number of rows that they divide."
            )
        return tensor.chunk(ranks)[index]

    def _over_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the mean over all ranks: data ranks have equally many rows, model ranks the same loss."""
        if self.mesh.data_ranks > 1:
            dist.all_reduce(loss)
            loss = loss / dist.get_world_size()
        return loss


# --- JAX ------------------------------------------------------------------------------------------------------------


class _JaxStep:
    """`shardlib.jax.train_step`, with a batch of several tensors and a loss in torch."""

    def __init__(self, apply: Any, optimizer: Any, loss: Loss) -> None:
        from shardlib import jax as jax_engine

        made = optimizer.of_optax() if isinstance(optimizer, AdamW) else optimizer
        if not (hasattr(made, "init") and hasattr(made, "update")):
            raise InputError(
                f"train_step was given the optimizer {optimizer!r} for JAX; give shardlib.functional.adamw(lr), or a "
                "transformation of optax."
            )
        if apply.plan.step.scaler is not None:
            raise PlanError(
                "The plan scales the loss, and the state of this step has no scale on JAX. Use "
                "shardlib.jax.train_step(loss_fn, optimizer, apply), whose state has one."
            )
        around = apply.around(loss)

        def loss_of(params: Any, buffers: Any, batch: Any, rng: Any = None) -> Any:
            return around.apply(params, buffers, *batch, rng=rng)

        self.buffers, self.whole = apply.buffers, jax_engine.TrainState
        self.step = jax_engine.train_step(loss_of, made, apply, has_buffers=True)

    def init(self, params: Any) -> State:
        made = self.step.init(params, self.buffers)
        return State(made.params, made.buffers, made.opt_state, 0)

    def __call__(self, state: State, *batch: Any, rng: Any = None) -> tuple[State, dict[str, Any]]:
        _check_state(state)
        batch = pytree.tree_map_only(torch.Tensor, lambda t: t.numpy(), batch)
        given = self.whole(np.int32(state.step), state.params, state.optimizer, state.buffers)
        made, metrics = self.step(given, batch, rng=rng)
        return State(made.params, made.buffers, made.opt_state, state.step + 1), metrics
