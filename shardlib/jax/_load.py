"""Checkpoints straight into arrays: each device's piece is read from the files, and nothing else of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import torch
from jax.sharding import SingleDeviceSharding

from shardlib._progress import Progress
from shardlib.checkpoint._manifest import Saved
from shardlib.checkpoint._opened import Names, Opened, found, opened
from shardlib.checkpoint._paths import given
from shardlib.checkpoint._permuted import Reading, Transpose
from shardlib.checkpoint._save import wait_for_saving
from shardlib.errors import CheckpointError, InputError, nearest
from shardlib.jax._bits import to_numpy
from shardlib.jax._compile import Compiled
from shardlib.jax._dtypes import torch_dtype
from shardlib.jax._narrow import fitting, refuse_narrowed
from shardlib.jax._step import TrainState
from shardlib.jax._storage import Storage, by_pieces
from shardlib.jax._trained import renamed, steps
from shardlib.layout._boxes import Box
from shardlib.rules.trees import name_of_path, named_leaves

__all__ = ["load"]

Slices = tuple[slice, ...]


def load(
    path: str | os.PathLike[str],
    into: Any,
    *,
    names: Names = None,
    transpose: Transpose | None = None,
    cast: bool = False,
) -> Any:
    """Load the tensors of a checkpoint as sharded arrays; each device's shard is read separately.

    Reads safetensors files (one, or several with the index that Hugging Face writes), what orbax writes, and what
    `shardlib.save` wrote, optimizers left out. All names, shapes and dtypes are compared before anything is read. Every
    process calls it with the same arguments.

    Args:
        path: a checkpoint: a file, a folder, or a step of an orbax `CheckpointManager`.
        into: the function of `compile_model`; the model may have been on `meta`. Or a tree of arrays or
            `jax.ShapeDtypeStruct`s with shardings, as `shard_params` of `jax.eval_shape` gives it; its paths are names,
            "params.layers.0.kernel". Or `step.abstract(params)` of a training step: from what `shardlib.save` wrote
            with an optimizer, its state is read too, for optax's Adam or momentum, and the number of steps.
        names: what a tensor of the checkpoint is called here, where the two differ: a function of its name, or a
            mapping from it (others keep theirs); None leaves a tensor out. Where an optimizer's state is read, these
            are names of parameters, without "params.", and what the optimizer keeps of them follows.
        transpose: orders of dims by patterns of names in the checkpoint, as in rules, where they are others there:
            `{"kernel": (1, 0)}`; the numbers are those of `Tensor.permute`.
        cast: convert dtypes that differ; else they are an error.

    Returns:
        For a compiled model its parameters, a dict as `compile_model` returned second; what is not trained is put into
        its `buffers`. For a tree the same tree of arrays.

    Raises:
        CheckpointError: it is damaged, or does not fit: all names that either side lacks, shapes, dtypes.
        InputError: `into` is neither; JAX cannot hold a value.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> from shardlib.jax import make_mesh, shard_params
    >>> tree = {"dense": {"kernel": jax.ShapeDtypeStruct((4, 8), "float32")}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"dense.weight": torch.ones(8, 4)}, folder + "/model.safetensors")
    ...     shapes = shard_params(tree, make_mesh("tp=1"), {"kernel": "in out@tp"})
    ...     tree = load(folder, shapes, names={"dense.weight": "dense.kernel"}, transpose={"dense.weight": (1, 0)})
    >>> tree["dense"]["kernel"].shape, tree["dense"]["kernel"].sharding.spec
    ((4, 8), P(None, 'tp'))
    """
    wait_for_saving()
    targets, model, back = _compiled(into) if isinstance(into, Compiled) else _tree(into)
    folder, text = found(given(path, "load"))
    with ExitStack() as keep:
        trained = False
        if text is None:
            source = opened(keep, Path(str(folder)), text, model, names, transpose)
        else:
            source = opened(keep, Path(str(folder)), text, model, None, None)
            trained = isinstance(into, TrainState)
            source = renamed(source, list(targets), names, transpose, trained=trained)
        readers = keep.enter_context(source.readers())
        counters = {name: target for name, target in targets.items() if trained and _counts(name)}
        chosen = _chosen(source, {name: target for name, target in targets.items() if name not in counters}, cast)

        def read() -> dict[str, Any]:
            used = [saved for several in chosen.values() for _, saved in several]
            used += source.manifest.tensors["optimizer"].values() if trained else ()
            numbers = sorted({piece.file for saved in used for piece in saved.pieces})
            source.check_all([source.manifest.files[n] for n in numbers], checksums=jax.process_index() == 0)
            made = steps(source, readers) if trained else 0
            arrays = {name: target.make(lambda _: torch.tensor(made)) for name, target in counters.items()}
            with Progress(f'loading "{source.folder.name}"', unit="tensors", total=len(chosen)) as progress:
                for name, several in chosen.items():
                    arrays[name] = _read(source, readers, targets[name], several)
                    progress.advance()
            return arrays

        return back(source.reading(read))


def _counts(name: str) -> bool:
    """Return whether a leaf of a training step's state counts updates."""
    return name == "step" or (name.startswith("opt_state.") and name.endswith(".count"))


class _Target:
    """An array to be made: what the tensor is called, also otherwise, and how an array is made from its slices."""

    def __init__(
        self, names: Sequence[str], shape: Sequence[int], dtype: torch.dtype, make: Callable[[Any], Any]
    ) -> None:
        self.names, self.shape, self.dtype, self.make = tuple(names), tuple(shape), dtype, make


def _compiled(into: Compiled) -> tuple[dict[str, _Target], Any, Callable[[Any], Any]]:
    model = into.model
    saved = set(model.state_dict(keep_vars=True))
    rows = [row for row in into.plan.rows if saved & set(row.tied)]
    kept = {row.name for row in rows}
    empty = [n for n, array in into.buffers.items() if n not in kept and isinstance(array, jax.ShapeDtypeStruct)]
    if empty:
        raise InputError(
            f"The model was on the meta device, and {', '.join(empty)} are in no checkpoint: set fn.buffers[name] to "
            "arrays first, or compile a model whose buffers have values."
        )

    def back(arrays: dict[str, Any]) -> dict[str, Any]:
        into.buffers.update({row.name: arrays.pop(row.name) for row in rows if not row.requires_grad})
        return arrays

    return {row.name: _of_storage(into._storage(row.name), row.tied) for row in rows}, model, back


def _of_storage(stored: Storage, names: Sequence[str]) -> _Target:
    return _Target(names, stored.global_shape, stored.dtype, stored.read)


def _tree(into: Any) -> tuple[dict[str, _Target], Any, Callable[[Any], Any]]:
    leaves, structure = jax.tree_util.tree_flatten_with_path(into)
    paths = [name_of_path(path) for path, _ in leaves]
    # Of flax's variables, whose paths end in "value": rules leave it out, and orbax keeps it.
    short = [name for name, _ in named_leaves(into, lambda _: False)]
    both = zip(short, paths, leaves, strict=True)
    targets = {name: _of_leaf((name, path), leaf) for name, path, (_, leaf) in both}
    if len(targets) != len(leaves):
        raise InputError("Two paths of the tree make the same name; rename keys that hold dots.")

    def back(arrays: Mapping[str, Any]) -> Any:
        return jax.tree_util.tree_unflatten(structure, [arrays[name] for name in targets])

    return targets, None, back


def _of_leaf(names: tuple[str, str], leaf: Any) -> _Target:
    name = names[0]
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        raise InputError(
            f'load was given a tree with {type(leaf).__name__} at "{name}"; give what compile_model returned first, or '
            "a tree of arrays or jax.ShapeDtypeStructs, as shardlib.jax.shard_params(jax.eval_shape(...), mesh, rules) "
            "makes it."
        )
    sharding = leaf.sharding or SingleDeviceSharding(jax.local_devices()[0])
    shape, dtype = tuple(leaf.shape), torch_dtype(leaf.dtype)
    refuse_narrowed(dtype, f'"{name}"')

    def make(read: Callable[[Slices], torch.Tensor]) -> Any:
        return by_pieces(shape, sharding, lambda index: fitting(to_numpy(read(index).to(dtype)), f'"{name}"'))

    return _Target(names, shape, dtype, make)


def _chosen(source: Opened, targets: Mapping[str, _Target], cast: bool) -> dict[str, list[tuple[str, Saved]]]:
    """Choose the saved tensors to read for each array, or raise with everything that does not fit."""
    saved = source.manifest.tensors["model"]
    chosen = {name: [(each, saved[each]) for each in source.names_of(target.names)] for name, target in targets.items()}
    used = {each for several in chosen.values() for each, _ in several}
    missing = [name for name, several in chosen.items() if not several]
    unexpected = [name for name in saved if name not in used]
    wrong = []
    if missing:
        wrong.append(f"not in the checkpoint: {', '.join(missing)}.{nearest(missing[0], unexpected)}")
    if unexpected:
        wrong.append(f"only in the checkpoint: {', '.join(unexpected)}.{nearest(unexpected[0], missing)}")
    for name, several in chosen.items():
        target = targets[name]
        for _, one in several:
            if one.shape != target.shape:
                wrong.append(f'"{name}" has shape {one.shape} in the checkpoint, and {target.shape} here')
            elif one.dtype != target.dtype and not cast:
                wrong.append(f'"{name}" is {one.dtype} in the checkpoint, and {target.dtype} here; cast=True converts')
    if wrong:
        listed = "".join(f"\n  {line}" for line in wrong)
        raise CheckpointError(
            f'The checkpoint "{source.folder}" does not fit:{listed}\nnames= says what tensors are called here (None '
            "leaves one out), transpose= how dims stand there."
        )
    return chosen


def _read(source: Opened, readers: Reading, target: _Target, several: Sequence[tuple[str, Saved]]) -> Any:
    """Read one array; saved tensors that are tied here must be equal."""

    def part(slices: Slices) -> torch.Tensor:
        box = Box(tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices))
        values, *others = [source.read(readers, name, saved, box) for name, saved in several]
        if any(not torch.equal(values, other) for other in others):
            raise CheckpointError(
                f"{', '.join(name for name, _ in several)} are one tensor here, and different ones in the checkpoint "
                f'"{source.folder}". Untie them in the model, or load another checkpoint.'
            )
        return values

    return target.make(part)
