"""Construction of the plan from model, mesh and rules. The model may be on `meta`; no process group is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlib import layouts
from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib._plan.experts import check_experts, expert_notes
from shardlib._plan.laid_out import find_blocks, rows_of
from shardlib._plan.memory import Blocks
from shardlib._plan.units import find_repeated, find_units
from shardlib._plan.value import Plan
from shardlib.errors import PlanError
from shardlib.rules import Rules, Stage
from shardlib.rules._tree_node import TreeNode
from shardlib.rules.stages import Weigh, read_stages, resolve_stages

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "RulesLike",
    "Transform",
    "as_rules",
    "check_model",
    "listed_transforms",
    "make_plan",
    "say_absent_axes",
    "transformed",
]

RulesLike = Rules | Mapping[str, Any] | str | Path
Transform = Callable[[Plan], Plan]


def make_plan(
    model: Any,
    mesh: MeshLike,
    rules: RulesLike | None = None,
    *,
    transforms: Transform | Sequence[Transform] = (),
    weigh: Weigh | None = None,
) -> Plan:
    """Plan the layout of every tensor of a model on a mesh, in each phase of a training step.

    Model axes and expert axes of a rule split a parameter in all four phases. A data axis of a rule splits the stored,
    grad and state phases, not the compute phase.

    Args:
        model: a module; it is not changed, and may be on `meta`.
        mesh: a `DeviceMesh`, or a shape such as "dp=8,tp=4".
        rules: a `Rules`, a mapping of patterns to layouts, or the name or path of a layout file; by default what
            `layouts.for_model` finds.
        transforms: a function from plan to plan, or several, applied in order.
        weigh: measures the cost of modules, for stages that are balanced by it.

    Raises:
        RuleError, LayoutError: the rules are not unambiguous for this model and mesh.
        MeshError, PlanError: the mesh has an axis of unknown size; a transform did not return a plan.

    >>> import torch
    >>> p = make_plan(torch.nn.Linear(4, 8), "dp=2,tp=2", {"weight": "out@tp in", "bias": "out@tp"})
    >>> p["weight"].local_shape(p.mesh), p.memory().parameters
    ((4, 4), 80)
    """
    check_model(model)
    shape = _known_sizes(MeshShape.of(mesh))
    rule_set = layouts.for_model(model) if rules is None else as_rules(rules)
    resolution = rule_set.resolve(model, shape)
    blocks, units = find_blocks(model), find_units(model)
    stages = _find_stages(rule_set, model, shape, weigh)
    rows = rows_of(resolution, shape, units)
    if not isinstance(model, TreeNode):  # of a tree of JAX, experts are a dim like any other
        check_experts(model, rows, resolution.borders.values(), shape)
    made = Plan(
        mesh=shape,
        rows=rows,
        borders=tuple(resolution.borders.values()),
        rules=rule_set,
        notes=(*(() if stages else _notes(shape, blocks)), *expert_notes(rows, shape)),
        blocks=blocks,
        units=units,
        repeated=find_repeated(model),
        stages=stages,
    )
    lacking = say_absent_axes(rule_set, shape)
    idle = [
        f'Axis "{axis}" ({shape[axis]} ranks) shards nothing: no rule of this model names it.{lacking}'
        for axis in made.idle_axes
    ]
    return transformed(made.replace(notes=(*made.notes, *idle)), transforms)


def check_model(model: Any) -> None:
    """Check that a model is one.

    Raises:
        PlanError: it is something else, such as a class, or has lazy parameters.
    """
    if isinstance(model, type) or not hasattr(model, "named_modules"):
        of_jax = " shardlib.jax.plan takes trees of arrays." if isinstance(model, Mapping | list) else ""
        raise PlanError(
            f"A model was given as {type(model).__name__}; give a torch.nn.Module, on any device or meta.{of_jax}"
        )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "cls_to_become"):  # of nn.LazyLinear and the like
            raise PlanError(f'Parameter "{name}" has no shape yet. Run the model once, then make the plan.')


def transformed(made: Plan, transforms: Transform | Sequence[Transform]) -> Plan:
    """Apply a transform, or several in order.

    Raises:
        PlanError: these are no functions, or one does not return a plan.
    """
    for transform in listed_transforms(transforms):
        made = made | transform
    return made


def listed_transforms(transforms: Transform | Sequence[Transform]) -> list[Transform]:
    """Return a transform, or several, as a list.

    Raises:
        PlanError: these are no functions.
    """
    each = (transforms,) if callable(transforms) else transforms
    if isinstance(each, str) or not isinstance(each, Iterable):
        raise PlanError(
            f"transforms={transforms!r} was given; give functions plan -> plan, such as shardlib.zero(2). "
            "shardlib.transforms.parse reads a text."
        )
    return [*each]


def as_rules(rules: RulesLike) -> Rules:
    """Return a rule set from any of the forms in which one may be given."""
    if isinstance(rules, Rules | Mapping):
        return Rules.of(rules)
    if isinstance(rules, str | Path):
        return layouts.load(rules)
    raise PlanError(
        f"Rules were given as {type(rules).__name__}; give shardlib.Rules, a mapping from patterns to layouts, or the "
        "name or path of a layout file."
    )


def say_absent_axes(rules: Rules | None, mesh: MeshShape) -> str:
    """Return a sentence about the axes that rules name and a mesh lacks; an empty string if there are none."""
    absent = [f'"{axis}"' for axis in (() if rules is None else rules.axis_names) if axis not in mesh]
    return f" The rules name {', '.join(absent)}, which the mesh lacks: use one name in both." if absent else ""


def _find_stages(rules: Rules, model: nn.Module, mesh: MeshShape, weigh: Weigh | None) -> tuple[Stage, ...]:
    """Return the stages that the rules name, if the mesh has a pipeline axis."""
    if len(mesh.pipeline_axes) > 1:
        axes = " and ".join(f'"{axis}"' for axis in mesh.pipeline_axes)
        raise PlanError(f'Mesh "{mesh}" has the pipeline axes {axes}; a model has one at most. Leave one out.')
    ranks = mesh.only(mesh.pipeline_axes).world_size if mesh.pipeline_axes else 1
    named = read_stages(rules.stages)
    return resolve_stages(named, model, ranks, weigh) if named is not None and ranks > 1 else ()


def _known_sizes(shape: MeshShape) -> MeshShape:
    if -1 in shape.sizes:
        raise PlanError(
            f'Mesh "{shape}" leaves a size open. A plan needs every size: give a number, or '
            f'MeshShape("{shape}").resolve(number_of_processes).'
        )
    return shape


def _notes(mesh: MeshShape, blocks: Blocks | None) -> tuple[str, ...]:
    if not mesh.pipeline_axes:
        return ()
    axes = ", ".join(f'"{axis}"' for axis in mesh.pipeline_axes)
    if blocks is None:
        return (f"The model has no repeated blocks: memory counts all of it on each stage of {axes}.",)
    return (
        f'Memory counts the {blocks.count} blocks of "{blocks.prefix}" divided evenly over {axes}, modules before them '
        "on the first stage and modules after them on the last; the figures are those of the largest stage.",
    )
