"""A training run that moves between torch and a tree of JAX: names, orders of dims, and Adam's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib.checkpoint._manifest import Saved
from shardlib.checkpoint._opened import Names, Opened, renaming
from shardlib.checkpoint._permuted import Reading, Transpose, permutations, permuted
from shardlib.errors import CheckpointError, InputError, nearest
from shardlib.jax._exchange import to_torch
from shardlib.jax._step import TrainState
from shardlib.layout._boxes import full_box
from shardlib.rules.trees import named_leaves

__all__ = ["copy_to_torch", "renamed", "steps"]

# What torch's Adam and AdamW keep of a parameter, and the field of optax's state that has the same numbers.
_FIELDS = {"exp_avg": "mu", "exp_avg_sq": "nu"}
_ALONE = "Load the parameters alone, sj.load(path, step.abstract(params).params), and begin with step.init(params)."
_Order = tuple[int, ...] | None


def renamed(
    source: Opened, wanted: Sequence[str], names: Names, transpose: Transpose | None, *, trained: bool
) -> Opened:
    """Return a checkpoint of `shardlib.save` with the names and dims of a tree.

    Args:
        source: the checkpoint.
        wanted: the names of the tree's leaves.
        names: the tree's names for parameters.
        transpose: orders of dims, by patterns of names in the checkpoint.
        trained: whether the tree is the state of a training step, with the optimizer's.

    Raises:
        CheckpointError: two tensors get one name; an optimizer whose state optax does not have.
    """
    model = source.manifest.tensors["model"]
    groups = {group[0]: group for group in source.manifest.tied}
    several = {name: groups.get(name, (name,)) for name in model}  # a tensor that is tied has many names, and is one
    shapes = {each: model[name].shape for name, group in several.items() for each in group}
    orders = permutations(transpose or {}, shapes, source.folder)
    dims = {name: orders[each] for name, group in several.items() for each in group if each in orders}
    called = _called(several, wanted, renaming(names), "params." if trained else "")
    entries = [(called[name], saved, name, dims.get(name)) for name, saved in model.items()]
    if trained:
        entries += _moments(source, wanted, called, dims)
    found: dict[str, Saved] = {}
    for name, saved, key, order in entries:
        if name in found:
            raise CheckpointError(f'names= calls two tensors of "{source.folder}" "{name}", one of them "{key}".')
        if name is not None:
            found[name] = replace(saved, key=key) if order is None else permuted(saved, key, order)
    manifest = replace(source.manifest, tensors={**source.manifest.tensors, "model": found}, tied=())
    return replace(source, manifest=manifest, dims={key: order for *_, key, order in entries if order is not None})


def _called(
    several: Mapping[str, Sequence[str]],
    wanted: Sequence[str],
    rename: Callable[[str], str | None] | None,
    prefix: str,
) -> dict[str, str | None]:
    """Return the tree's name for each tensor of the model; a tied one may have there that of any of its names."""

    def one(name: str) -> str | None:
        new = name if rename is None else rename(name)
        if new is not None and not isinstance(new, str):
            raise CheckpointError(f'names= calls "{name}" {new!r}; give a name, or None to leave the tensor out.')
        return None if new is None else prefix + new

    found: dict[str, str | None] = {}
    for name, group in several.items():
        new = [each for each in map(one, group) if each is not None]
        found[name] = next((each for each in new if each in wanted), new[0] if new else None)
    return found


def _moments(
    source: Opened, wanted: Sequence[str], called: Mapping[str, str | None], dims: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str | None, Saved, str, _Order]]:
    """Iterate over what the optimizer keeps of each parameter, under the name of the leaf of optax's state."""
    if not source.manifest.tensors["optimizer"]:
        raise CheckpointError(f'"{source.folder}" holds no state of an optimizer. {_ALONE}')
    for key, saved in source.manifest.tensors["optimizer"].items():
        parameter, _, field = key.removeprefix("state.").rpartition(".")
        if field == "step" or called[parameter] is None:
            continue
        if field not in _FIELDS:
            raise CheckpointError(
                f'The optimizer of "{source.folder}" keeps "{field}" of "{parameter}", and optax has no state that is '
                f"known to have the same numbers; known are those of Adam and AdamW, {', '.join(_FIELDS)}. {_ALONE}"
            )
        end = f".{_FIELDS[field]}.{str(called[parameter]).removeprefix('params.')}"
        yield _moment(wanted, end) or f"opt_state{end}", saved, key, dims.get(parameter)


def steps(source: Opened, readers: Reading) -> int:
    """Return the number of steps that the optimizer has made.

    Raises:
        CheckpointError: parameters have made different numbers of steps; optax counts once for all of them.
    """
    counts = {
        key.removeprefix("state.").removesuffix(".step"): int(source.read(readers, key, saved, full_box(saved.shape)))
        for key, saved in source.manifest.tensors["optimizer"].items()
        if key.endswith(".step")
    }
    if len({*counts.values()}) != 1:
        raise CheckpointError(
            f'The parameters of "{source.folder}" have made different numbers of steps, {counts}; optax counts the '
            f"steps of all parameters together. {_ALONE}"
        )
    return next(iter(counts.values()))


# --- back -----------------------------------------------------------------------------------------------------------


def copy_to_torch(
    state: TrainState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    names: Names = None,
    transpose: Transpose | None = None,
) -> None:
    """Copy the state of a training step into a module of torch and its Adam, in place: the inverse of `load`.

    Nothing is changed unless all fits. The model is a plain one; `shardlib.save` it with its optimizer, and
    `shardlib.load` both into a sharded model.

    Args:
        state: the state, whose arrays are on devices of this process.
        model: receives the parameters, and buffers that the state has.
        optimizer: `torch.optim.Adam` or `AdamW` over the model's parameters, which receives the moments and the number
            of steps. Its options are not changed.
        names: as for `load`: the tree's names for tensors of the model, without "params."; None keeps a tensor as it
            is.
        transpose: as for `load`: orders of dims by patterns of names in the model, that make the tree's.

    Raises:
        InputError: tensors that the state does not have, or of other shapes; another optimizer; a sharded model.

    >>> import optax
    >>> from shardlib.jax import make_mesh, train_step
    >>> def loss_fn(params, x):
    ...     return (x @ params["kernel"] + params["bias"]).sum()
    >>> step = train_step(loss_fn, optax.adamw(1e-3), {"*": None}, make_mesh("dp=1"))
    >>> state = step.init({"kernel": torch.ones(3, 2), "bias": torch.zeros(2)})
    >>> state, _ = step(state, torch.ones(4, 3).numpy())
    >>> model = nn.Linear(3, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> copy_to_torch(state, model, optimizer, names={"weight": "kernel"}, transpose={"weight": (1, 0)})
    >>> optimizer.state[model.weight]["step"], optimizer.state[model.weight]["exp_avg"].shape
    (tensor(1.), torch.Size([2, 3]))
    """
    tensors = model.state_dict(keep_vars=True)
    if sharded := [name for name, tensor in tensors.items() if isinstance(tensor, DTensor)]:
        raise InputError(
            f'copy_to_torch was given a sharded model ("{sharded[0]}" is a DTensor). Give a plain one; shardlib.save '
            "it, and shardlib.load it into the sharded model."
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        raise InputError(
            f"copy_to_torch was given {type(optimizer).__name__}; give torch.optim.Adam or AdamW, or None."
        )
    rename = renaming(names) or str
    dims = permutations(transpose or {}, {name: tuple(t.shape) for name, t in tensors.items()}, Path("the model"))
    leaves = dict(named_leaves(state, lambda _: False))
    found: dict[torch.Tensor, torch.Tensor] = {}
    moments: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    wrong: list[str] = []
    for name, tensor in tensors.items():
        if (new := rename(name)) is None:
            continue

        def taken(leaf: str | None, called: str, name: str = name, like: torch.Tensor = tensor) -> torch.Tensor:
            if leaf is None:
                wrong.append(f'"{name}" is "{called}" there, which the state does not have.{nearest(called, leaves)}')
                return like
            array, order = leaves[leaf], dims.get(name, tuple(range(like.ndim)))
            if tuple(array.shape) != tuple(like.shape[dim] for dim in order):
                wrong.append(f'"{name}" has shape {tuple(like.shape)}, and "{leaf}" {tuple(array.shape)}')
                return like
            return to_torch(array, copy=True).permute([order.index(dim) for dim in range(like.ndim)])

        place = next((each for each in (f"params.{new}", f"buffers.{new}") if each in leaves), None)
        found[tensor] = taken(place, f"params.{new}")
        if optimizer is not None and tensor.requires_grad:
            kept = {key: f".{field}.{new}" for key, field in _FIELDS.items()}
            moments[tensor] = {key: taken(_moment(leaves, end), f"opt_state{end}") for key, end in kept.items()}
    if wrong:
        listed = "".join(f"\n  {line}" for line in wrong)
        raise InputError(f"copy_to_torch: the state does not fit the model:{listed}\nnames= and transpose= say how.")
    for tensor, values in found.items():
        tensor.data.copy_(values)
    for tensor, kept_of in moments.items():
        like = {key: torch.empty_like(tensor.data).copy_(values) for key, values in kept_of.items()}
        assert optimizer is not None
        optimizer.state[tensor] = {"step": torch.tensor(float(state.step)), **like}


def _moment(leaves: Mapping[str, Any] | Sequence[str], end: str) -> str | None:
    return next((name for name in leaves if name.startswith("opt_state.") and name.endswith(end)), None)
