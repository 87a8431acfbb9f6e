"""Rules on trees of arrays: plans and shardings for parameters of flax, haiku, equinox or Keras, or plain dicts.

Names are those of paths: "layers.0.kernel". Neither torch nor a device is needed for a plan; a sharding needs a mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib._dtypes import name_of
from shardlib._mesh_shape import MeshShape
from shardlib._plan import Phase, Plan, Row, RulesLike, Transform, make_plan
from shardlib.errors import InputError, MeshError, PlanError
from shardlib.jax._context import redistributed
from shardlib.jax._mesh import named_sharding
from shardlib.jax._narrow import fitting, refuse_narrowed
from shardlib.jax._statistics import reduced_dim, without_dim
from shardlib.layout import Layout
from shardlib.rules.specs import check_even
from shardlib.rules.trees import Tree

__all__ = ["PHASES", "cast", "plan", "refuse_settings", "shard_params", "shardings"]

# How the torch engine sends what XLA sends by itself, and the scale of the loss, which train_step carries out.
_SERVED = ("bucket_mb", "unbucketed_mb", "scaler")
PHASES: tuple[Phase, ...] = get_args(Phase)


def plan(tree: Any, mesh: Any, rules: RulesLike, *, transforms: Transform | Sequence[Transform] = ()) -> Plan:
    """Plan the layout of every array of a tree on a mesh: what `shardlib.plan` is for a module of torch.

    Args:
        tree: any tree of arrays, or of `jax.ShapeDtypeStruct`s as `jax.eval_shape` makes them: a `flax.nnx.State`,
            dicts of linen or haiku, a module of equinox, plain dicts and lists. Variables of flax that are no
            parameters, and integers, are buffers: no rule has to match them.
        mesh: a JAX mesh, or a shape such as "dp=8,tp=4".
        rules: a `Rules`, a mapping of patterns to layouts, or the path of a layout file.
        transforms: a function from plan to plan, or several: `zero`, `fsdp`, `hsdp`, `precision`. Where the axes that
            they add divide no dim of an array, it is not split over these axes.

    Raises:
        RuleError, LayoutError: the rules do not say one clear thing about these arrays, or name an activation: a tree
            has none.
        InputError: a leaf is no array, or two paths make one name.
        PlanError: a transform is of the torch engine only.

    >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((4, 8), "float32")}}
    >>> p = plan(tree, "dp=2,tp=2", {"up": "colwise"})
    >>> str(p["up.kernel"].stored), p.memory().parameters
    ('in out@tp', 64)
    """
    if rules is None:
        raise PlanError(
            "A tree of arrays was given with rules=None, and rules are guessed for modules of torch only. Give "
            'shardlib.Rules, a mapping such as {"up": "colwise"}, or Rules({}, unmatched="replicate").'
        )
    made = make_plan(Tree.of(tree).root, MeshShape.of(mesh), rules, transforms=transforms)
    refuse_settings(made)
    return made.map_rows(lambda row: _evenly(row, made.mesh))


def shardings(
    tree: Any,
    mesh: Mesh,
    rules: RulesLike | Plan,
    *,
    transforms: Transform | Sequence[Transform] = (),
    phase: Phase = "stored",
) -> Any:
    """Return a tree of `NamedSharding`s for a tree of arrays.

    With a plan, the tree may be of the parameters, of their gradients, or of an optimizer's state: an array whose path
    ends in a parameter's name, and that has its shape, has the layout of that parameter. An array of an optimizer's
    state that lacks one dim of its parameter, as Adafactor's means of rows and columns do, has the layout of the other
    dims. Everything else is replicated.

    Args:
        tree: arrays, or `jax.ShapeDtypeStruct`s.
        mesh: a JAX mesh.
        rules: rules for the tree, or a plan that was made of the parameters.
        transforms: as for `plan`, where rules are given.
        phase: "stored" for parameters, "grad" for gradients, "state" for an optimizer's state, "compute" for parameters
            as a model computes with them.

    Raises:
        RuleError, LayoutError: as `plan`; a fused dim that is split inside has no sharding.
        InputError: a dim that its axes do not divide; a plan of another mesh.

    >>> from shardlib.jax import make_mesh
    >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((4, 8), "float32")}}
    >>> shardings(tree, make_mesh("dp=1,tp=1"), {"up": "colwise"})["up"]["kernel"].spec
    P(None, 'tp')
    """
    if phase not in PHASES:
        raise InputError(f"shardings(phase={phase!r}) was given; give one of {', '.join(PHASES)}.")
    if isinstance(rules, Plan) and transforms:
        raise InputError(
            "shardings was given a plan, and transforms beside it, which would change nothing. Apply them to the plan: "
            "plan(tree, mesh, rules, transforms=...)."
        )
    made = rules if isinstance(rules, Plan) else plan(tree, mesh, rules, transforms=transforms)
    _check_mesh(made, mesh)
    replicated, rows = NamedSharding(mesh, PartitionSpec()), {row.name: row for row in made.rows}

    def of_other(name: str | None, leaf: Any) -> NamedSharding:
        if phase == "state" and name is not None and (found := _reduced(name, tuple(leaf.shape), rows)):
            row, dim = found
            return NamedSharding(mesh, without_dim(_sharding(row, made.mesh, mesh, phase).spec, dim))
        return replicated

    return _mapped(tree, made, lambda _, row: _sharding(row, made.mesh, mesh, phase), of_other)


def cast(tree: Any, mesh: Mesh, rules: Plan) -> Any:
    """Return the parameters as a model computes with them: in the dtype and with the layout of the compute phase.

    Call it inside of `jax.jit`, on what a loss function gets: with `precision("bf16")` it rounds the master copy, and
    with `fsdp()` or `zero(3)` it all-gathers the weights. Gradients come back in the dtype of the tree, and in the
    layout that the plan has for them: with `fsdp()` and `zero(3)` in that of the tree.

    Raises:
        InputError: rules in place of a plan; a plan of another tree or mesh.

    >>> import shardlib as sl
    >>> from shardlib.jax import make_mesh
    >>> mesh, tree = make_mesh("dp=1"), {"w": jax.numpy.ones((4, 8))}
    >>> half = plan(tree, mesh, {"w": None}, transforms=sl.precision("bf16"))
    >>> cast(tree, mesh, half)["w"].dtype.name
    'bfloat16'
    """
    if not isinstance(rules, Plan):
        raise InputError(
            f"cast was given {type(rules).__name__}; give a plan, as shardlib.jax.plan(tree, mesh, rules, "
            "transforms=...) makes it."
        )
    _check_mesh(rules, mesh)
    _check_names(tree, rules)

    def computed(leaf: Any, row: Row) -> Any:
        dtype = leaf.dtype if row.compute.dtype is None else name_of(row.compute.dtype)
        there = _sharding(row, rules.mesh, mesh, "compute")
        back = _sharding(row, rules.mesh, mesh, "grad") if row.grad is not None else there
        return redistributed(leaf.astype(dtype), there, back)

    return _mapped(tree, rules, computed, lambda _, leaf: leaf)


def shard_params(params: Any, mesh: Mesh, rules: RulesLike | Plan) -> Any:
    """Shard a tree of arrays or tensors over a JAX mesh, by rules on the names of its paths.

    Args:
        params: any tree of arrays, numpy arrays or tensors, such as flax's parameters; or of `jax.ShapeDtypeStruct`s,
            as `jax.eval_shape` makes them, which get shardings: `load` reads a checkpoint into them.
        mesh: a JAX mesh.
        rules: as for a model, with text layouts: `Rules({"kernel": "in out@tp"}, unmatched="replicate")`; or a plan.

    Returns:
        The same tree of `jax.Array`s, of the same shapes; without values where there were none.

    Raises:
        RuleError, LayoutError: the rules do not say one clear thing about these names; a factor of a fused dim is
            sharded, which no array of this shape can be.
        InputError: a dim that its axes do not divide; a leaf that is not an array, or that JAX would narrow; a plan of
            another tree or mesh.

    >>> from shardlib.jax import make_mesh
    >>> tree = {"dense": {"kernel": jax.numpy.ones((4, 8)), "bias": jax.numpy.ones(8)}}
    >>> laid = shard_params(tree, make_mesh("tp=1"), {"kernel": "in out@tp", "bias": "out@tp"})
    >>> laid["dense"]["kernel"].sharding.spec
    P(None, 'tp')
    """
    if isinstance(rules, Plan):
        _check_names(params, rules)
    read, wanted = Tree.of(params), jax.tree.leaves(shardings(params, mesh, rules))
    return read.map([_placed(*each) for each in zip(read.names, read.leaves, wanted, strict=True)])


def refuse_settings(plan: Plan, *, served: Sequence[str] = ()) -> None:
    """Refuse settings of a plan that only the torch engine has, but for those that the caller carries out."""
    if plan.mesh.pipeline_axes:
        raise PlanError(
            f'Mesh "{plan.mesh}" has a pipeline axis; the JAX engine runs all modules on all devices. Leave it out.'
        )
    for row in plan.rows:
        for phase, layout in row.layouts.items():
            if layout.memory != "device":
                raise PlanError(
                    f'"{row.name}" is in host memory in phase {phase}; the JAX engine keeps everything on its devices. '
                    "Leave offload() out."
                )
        if row.has_master and row.grad is not None and name_of(row.grad.dtype or row.dtype) != "float32":
            raise PlanError(
                f'The plan has gradients of "{row.name}" in {name_of(row.grad.dtype)}, by '
                f"{', '.join(plan.transforms)}; on JAX they have the dtype of the master copy. Leave grads= out."
            )
    asked = {name: value for name, value in plan.step.settings().items() if name not in (*_SERVED, *served)}
    if asked == {"overlap": True}:
        raise PlanError(
            f"The plan asks for overlap=True, by {', '.join(plan.transforms)}; XLA overlaps communication by itself. "
            "Leave overlap= out."
        )
    if asked:
        named = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        raise PlanError(
            f"The plan asks for {named}, by {', '.join(plan.transforms)}; the JAX engine takes no such setting from a "
            "plan. Leave the transform out: shardlib.jax.train_step has accumulate= and remat=, and "
            "optax.MultiSteps and jax.checkpoint are JAX's own."
        )


def _check_mesh(made: Plan, mesh: Mesh) -> None:
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise MeshError(
            f"A mesh was given as {type(mesh).__name__}, and a sharding needs devices; give a jax.sharding.Mesh, as "
            'shardlib.jax.make_mesh("dp=2,tp=4") makes it.'
        )
    if made.mesh != (shape := MeshShape.of(mesh)):
        raise InputError(
            f'The plan was made for mesh "{made.mesh}", and the mesh is "{shape}". Make the plan for this mesh: '
            "shardlib.jax.plan(tree, mesh, rules)."
        )


def _check_names(tree: Any, made: Plan) -> None:
    """Refuse parameters that a plan does not have: they would be replicated, or computed with, as they are."""
    read, rows = Tree.of(tree), {row.name: row for row in made.rows}
    for name, leaf in zip(read.names, read.leaves, strict=True):
        kind = "" if name is None else name_of(leaf.dtype)
        if name is not None and ("float" in kind or "complex" in kind) and not _row_of(name, tuple(leaf.shape), rows):
            raise InputError(
                f'The plan has no "{name}" of shape {tuple(leaf.shape)}: it was made of another tree, with '
                f"{', '.join(list(rows)[:3])}. Make it of this one: shardlib.jax.plan(tree, mesh, rules)."
            )


def _mapped(
    tree: Any, made: Plan, change: Callable[[Any, Row], Any], otherwise: Callable[[str | None, Any], Any]
) -> Any:
    """Return a tree of what `change` gives for each array of a parameter, and `otherwise` for other arrays by name."""
    read, rows = Tree.of(tree), {row.name: row for row in made.rows}
    found = []
    for name, leaf in zip(read.names, read.leaves, strict=True):
        row = None if name is None else _row_of(name, tuple(leaf.shape), rows)
        found.append(otherwise(name, leaf) if row is None else change(leaf, row))
    return read.map(found)


def _row_of(name: str, shape: tuple[int, ...], rows: Mapping[str, Row]) -> Row | None:
    """Return the row of the parameter whose name a path is, or ends in; the longest of several."""
    while name:
        if (row := rows.get(name)) is not None and row.global_shape == shape:
            return row
        name = name.partition(".")[2]
    return None


def _reduced(name: str, shape: tuple[int, ...], rows: Mapping[str, Row]) -> tuple[Row, int] | None:
    """Return the row of the parameter of which an array is a statistic, and the dim that the array lacks."""
    prefix, end = "", name
    while end:
        row = rows.get(end)
        if row is not None and (dim := reduced_dim(row.global_shape, shape, prefix)) is not None:
            return row, dim
        first, _, end = end.partition(".")
        prefix += f"{first}."
    return None


def _sharding(row: Row, shape: MeshShape, mesh: Mesh, phase: Phase) -> NamedSharding:
    layout = row.layouts.get(phase, row.stored).resolve(row.global_shape, shape)
    check_even(row.name, row.global_shape, layout, shape)
    return named_sharding(layout, mesh)


def _evenly(row: Row, mesh: MeshShape) -> Row:
    """Return the row with the axes that a transform added on a dim that they divide, or left out if there is none.

    An array of a tree keeps its shape, so no padding can make the shards of such a dim even.
    """
    changed = {}
    for phase, layout in row.layouts.items():
        if layout.uneven_dims(row.global_shape, mesh):
            added = [axis for axis in mesh.names if axis in layout.axes - row.compute.axes]
            even = next(_even_choices(row.compute, row.global_shape, mesh, added), row.compute)
            changed[phase] = dataclasses.replace(even, dtype=layout.dtype)
    return row.replace(**changed) if changed else row


def _even_choices(layout: Layout, shape: tuple[int, ...], mesh: MeshShape, added: Sequence[str]) -> Iterator[Layout]:
    for dim in range(len(shape)):
        choice = layout.with_axes(dim, (*layout.axes_of(dim), *added))
        if not choice.uneven_dims(shape, mesh):
            yield choice


def _placed(name: str | None, leaf: Any, sharding: NamedSharding) -> Any:
    if name is not None:
        refuse_narrowed(leaf.dtype, f'"{name}"')
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if hasattr(leaf, "untyped_storage"):  # a tensor of torch
        from shardlib.jax._bits import to_numpy

        leaf = to_numpy(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        leaf = fitting(leaf, f'"{name}"')
    return jax.device_put(leaf, sharding)
