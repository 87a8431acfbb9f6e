"""The case to prove: a model, its batches, its sharding and its training."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib._mesh_shape import MeshShape
from shardlib.engine._torch import pytree
from shardlib.engine.apply import shard_model
from shardlib.errors import InputError, InputTypeError, check_flags, nearest

__all__ = ["Case", "adamw", "as_call", "default_loss", "rows_of"]

# The sharded runs of a proof: True at sizes of buckets by which a small model takes the paths of a large one, False at
# those of the plan.
SCALES = (True, False)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """The arguments of `equivalent`, checked; it travels to the ranks. `scales` are the sharded runs: see `SCALES`."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    mesh: MeshShape
    rules: Any = None
    transforms: tuple[Callable[..., Any], ...] = ()
    shard: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    split: Callable[[Any, int, int], Any] | None = None
    steps: int = 2
    accumulate: int = 1
    no_sync: bool = False
    clip: float | Callable[[nn.Module], torch.Tensor] | None = None
    dtype: torch.dtype = torch.float64
    rng: Literal["exact", "fast"] = "exact"
    seed: int = 0
    before_step: Callable[[nn.Module, int], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    engine: Literal["torch", "jax"] = "torch"
    scales: tuple[bool, ...] = field(default_factory=lambda: SCALES)

    def __post_init__(self) -> None:
        for what in ("model", "batch"):
            if not callable(getattr(self, what)) or isinstance(getattr(self, what), nn.Module):
                raise InputError(
                    f"equivalent() was given {what}={_shown(getattr(self, what))}; give a function that makes one, "
                    "such "
                    + ("as `lambda: MyModel()`." if what == "model" else "as `lambda step: torch.randn(8, 16)`.")
                )
        self._check_functions()
        for what, least in (("steps", 0), ("accumulate", 1), ("seed", 0)):
            value = getattr(self, what)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"equivalent() was given {what}={value!r}; give an integer from {least} up.")
        number = isinstance(self.clip, int | float) and self.clip > 0
        if self.clip is not None and not callable(self.clip) and not number:
            raise InputError(
                f"equivalent() was given clip={self.clip!r}; give a gradient norm above zero, a function (model) "
                "-> norm that clips, or None."
            )
        if self.dtype not in DTYPES:
            raise InputError(
                f"equivalent() was given dtype={self.dtype!r}; give one of {', '.join(map(str, DTYPES))}. "
                "torch.float64 tells rounding and mistakes apart best."
            )
        if self.rng not in ("exact", "fast"):
            raise InputError(f'equivalent() was given rng={self.rng!r}; give "exact" or "fast".')
        check_flags("equivalent", InputError, no_sync=self.no_sync)
        self._check_options()
        self._check_how_it_is_sharded()
        self._check_engine()

    def _check_options(self) -> None:
        known = [name for name in inspect.signature(shard_model).parameters if name not in ("model", "mesh", "rules")]
        for name in self.options:
            if name not in known:
                close = nearest(name, [*known, *(each.name for each in dataclasses.fields(self))])
                raise InputTypeError(f"equivalent() was given {name}=, which neither it nor shard_model takes.{close}")

    def _check_functions(self) -> None:
        """Check that functions are callable with their arguments."""
        for what, takes in _TAKES.items():
            value = getattr(self, what)
            if value is None:
                continue
            form = f"a function ({', '.join(takes)})"
            if not callable(value):
                raise InputError(f"equivalent() was given {what}={_shown(value)}; give {form}, or leave it out.")
            if not _accepts(value, len(takes)):
                raise InputError(
                    f"equivalent() was given {what}={_shown(value)}, which does not take its arguments; give {form}."
                )

    def _check_how_it_is_sharded(self) -> None:
        if self.shard is None:
            return
        given = [name for name in ("rules", "transforms", "no_sync") if getattr(self, name)]
        given += [f"{name}=" for name in self.options]
        if given:
            raise InputError(
                f"equivalent() was given both shard= and {', '.join(given)}. shard= is a function (model, mesh) "
                "-> model that shards by its own means; rules, transforms, no_sync and options belong to shard_model."
            )

    def _check_engine(self) -> None:
        if self.engine not in ("torch", "jax"):
            raise InputError(f'equivalent() was given engine={self.engine!r}; give "torch" or "jax".')
        if self.engine == "torch":
            return
        given = [f"{name}=" for name in ("shard", "split", "no_sync", "before_step") if getattr(self, name)]
        given += ["a function as clip="] if callable(self.clip) else []
        given += [f"{name}=" for name in self.options]
        if given:
            raise InputError(
                f'equivalent(engine="jax") was given {", ".join(given)}, which the torch engine alone has: the JAX '
                "engine is one compiled program of global arrays. Leave it out."
            )

    def train(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return a new optimizer.

        Raises:
            InputError: not an optimizer, or one that runs the model itself.
        """
        made = (self.optimizer or adamw)(params)
        if not isinstance(made, torch.optim.Optimizer):
            raise InputError(
                f"optimizer= returned a {type(made).__name__}; it has to return a torch.optim.Optimizer of the "
                "parameters that it is given."
            )
        if isinstance(made, torch.optim.LBFGS):
            raise InputError(
                "optimizer= returned LBFGS, which runs the model several times a step through a closure. One "
                "backward pass is compared after another: give another optimizer."
            )
        return made


_TAKES = {
    "model": (),
    "batch": ("step",),
    "shard": ("model", "mesh"),
    "loss": ("model", "batch"),
    "optimizer": ("params",),
    "split": ("batch", "index", "count"),
    "before_step": ("model", "step"),
}


def _accepts(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function takes this number of positional arguments; True without a signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _shown(value: Any) -> str:
    bulky = isinstance(value, nn.Module | torch.Tensor | torch.optim.Optimizer)
    return f"a {type(value).__name__}" if bulky else repr(value)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that is used where none is given: it has state of every kind.

    Where a gradient is zero in exact arithmetic (the bias of a key), Adam divides its rounding by itself plus eps. With
    torch's default of 1e-8 that moves a parameter by more than the limit of float64; this eps keeps it below.
    """
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-5)


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as arguments: a mapping by keyword, a tuple by position, (tuple, mapping) both ways."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], Mapping):
        return batch[0], dict(batch[1])
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss in the model's output, or a mean over rows in which each feature has its own weight."""
    args, kwargs = as_call(batch)
    output = model(*args, **kwargs)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    leaves = [
        leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    if not leaves:
        raise InputError(
            f"The model's output ({type(output).__name__}) has neither a loss nor a floating-point tensor. Give "
            "loss=: a function (model, batch) -> scalar tensor, a mean over the rows of the batch."
        )
    return torch.stack([_spread(leaf) for leaf in leaves]).sum()


def _spread(output: torch.Tensor) -> torch.Tensor:
    """Return a mean over rows of a function that differs between features, with slopes of both signs."""
    if not output.ndim:
        return output
    weight = torch.linspace(0.5, 1.5, max(output[0].numel(), 1), dtype=output.dtype, device=output.device)
    weight = weight[: output[0].numel()].view(output.shape[1:])
    return (output.square() * weight + output.sin()).mean()


def rows_of(batch: Any, index: int, count: int) -> Any:
    """Return the rows of a global batch for one of `count` data ranks, of every tensor with rows in dim 0.

    A tensor has rows if its dim 0 is as long as that of the first tensor; others (a mask shared by all) go to all.

    Raises:
        InputError: rows that do not divide, so that a mean of means would not be the mean.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if count == 1 or not tensors:
        return batch
    rows = len(tensors[0])
    if rows % count:
        raise InputError(
            f"The batch has {rows} rows, which {count} data ranks cannot share evenly: the mean over ranks of their "
            f"mean losses would not be the mean over rows. Give a multiple of {count} rows."
        )

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(count)[index] if tensor.ndim and len(tensor) == rows else tensor

    return pytree.tree_map_only(torch.Tensor, part, batch)
