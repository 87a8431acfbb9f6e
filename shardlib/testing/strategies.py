"""Hypothesis strategies: meshes, layouts, rules, models, and whole cases that `assert_equivalent` takes.

The ten-line test of a model of your own, on every mesh of at most four ranks, under any rules at all:

    from hypothesis import given, settings
    from shardlib.testing import strategies
    from shardlib.testing.equivalence import assert_equivalent

    @given(strategies.cases(my_model, my_batch))
    @settings(max_examples=100, deadline=None)
    def test_any_layout(case):
        assert_equivalent(**case)

What is drawn need not be sensible: a bias split apart from its weight's rows, a norm whose features are split, two axes
on one dim, more ranks than a dim has indices. The numbers have to be those of one device all the same. Left out is what
shardlib refuses; and, in rules, fused dims of activations, and roles that split a factor of a fused dim.

Everything shrinks towards one axis of two ranks, nothing split, the smallest model, nothing frozen: what is left in a
minimal example is needed for its failure.

Needs hypothesis (the extra `testing`); `import shardlib.testing` alone does not import it.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import nn

from shardlib._mesh import MeshLike, MeshShape
from shardlib._plan import Plan
from shardlib.engine._torch import pytree
from shardlib.errors import InputError, MeshError
from shardlib.layout import Dim, Factor, Layout
from shardlib.rules import Rules
from shardlib.rules.dims import ModuleDims, dims_of
from shardlib.rules.patterns import compile_pattern
from shardlib.testing.equivalence.case import as_call
from shardlib.testing.models import MLP, ConvNet, Tokens, Transformer, batch_for

__all__ = [
    "Case",
    "ModelFactory",
    "batches",
    "cases",
    "convnets",
    "layouts",
    "mesh_shapes",
    "mlps",
    "register_transforms",
    "rule_sets",
    "shapes",
    "transformers",
    "transforms",
]

_often, _seldom = st.sampled_from([False, True, True, True]), st.sampled_from([False, False, True])


# --- meshes ---------------------------------------------------------------------------------------------------------


def mesh_shapes(
    max_world: int = 4,
    *,
    model_axes: Sequence[str] = ("tp",),
    data_axes: Sequence[str] = ("dp",),
    rows: int | None = None,
) -> st.SearchStrategy[MeshShape]:
    """Meshes of at least two ranks, of some of these axes in any order; now and then an axis has size one.

    Shrinks towards one axis of two ranks, a model axis if there is one.

    Args:
        max_world: most ranks.
        model_axes: axes that split the work on an example.
        data_axes: axes that carry different examples.
        rows: of the global batch, which the number of data ranks then divides.

    Raises:
        InputError: there is no such mesh, or an axis is not of that kind.

    >>> from hypothesis import find
    >>> find(mesh_shapes(), lambda mesh: True)
    MeshShape("tp=2")
    >>> find(mesh_shapes(8), lambda mesh: len(mesh) == 2 and mesh.world_size > 4)
    MeshShape("tp=2,dp=3")
    """
    for name, size in (("max_world", max_world), ("rows", 2 if rows is None else rows)):
        _check_size("mesh_shapes", name, size)
    model, data = _axes("model", model_axes), _axes("data", data_axes)
    axes = (*model, *data)
    fits = model or rows is None or any(rows % size == 0 for size in range(2, max_world + 1))
    if max_world < 2 or not axes or len(set(axes)) < len(axes) or not fits:
        raise InputError(
            f"mesh_shapes({max_world}, model_axes={model}, data_axes={data}, rows={rows}): there is no such mesh. Give "
            "at least one axis, each once, at least two ranks, and rows that some number of data ranks divides."
        )
    return _mesh_shapes(max_world, model, data, rows)


@st.composite
def _mesh_shapes(
    draw: st.DrawFn, max_world: int, model: tuple[str, ...], data: tuple[str, ...], rows: int | None
) -> MeshShape:
    # As many draws whatever is drawn, the last axes first: each axis shrinks away by itself, and the first ones stay.
    every = (*model, *data)
    there = {axis: draw(st.booleans()) for axis in reversed(every)}
    which = [draw(st.integers(0, 11)) for _ in every]
    order = draw(st.permutations(every))
    axes = [axis for axis in every if there[axis]] or [every[0]]
    sizes: dict[str, int] = {}
    for at, axis in enumerate(axes):
        most = max_world // math.prod(sizes.values()) // 2 ** (len(axes) - at - 1)
        allowed = [size for size in range(2, most + 1) if axis in model or _shared(rows, data, sizes, size)]
        sizes[axis] = allowed[which[at] * len(allowed) // 11] if allowed and which[at] < 11 else 1
    if math.prod(sizes.values()) == 1:
        axis = next((a for a in axes if a in model or _shared(rows, data, sizes, 2)), every[0])
        least = (n for n in range(2, max_world + 1) if axis in model or _shared(rows, data, sizes, n))
        sizes = {**sizes, axis: next(least)}
    return MeshShape({axis: sizes[axis] for axis in order if axis in sizes})


def _shared(rows: int | None, data: Sequence[str], sizes: Mapping[str, int], size: int) -> bool:
    """Whether as many more data ranks still share the rows evenly."""
    return rows is None or rows % (size * math.prod(sizes[axis] for axis in data if axis in sizes)) == 0


def _axes(kind: Literal["model", "data"], names: Sequence[str]) -> tuple[str, ...]:
    given = f"{kind}_axes={names!r}"
    if isinstance(names, str):
        raise InputError(f'mesh_shapes({given}): give a sequence of names, as in {kind}_axes=("{names}",).')
    for name in names:
        try:
            known = MeshShape({name: 1}).kind(name)
        except MeshError as fault:
            raise InputError(f"mesh_shapes({given}): {fault}") from None
        if known != kind:
            raise InputError(f'mesh_shapes({given}): "{name}" is a {known} axis; give it as {known}_axes.')
    return tuple(names)


def _data_ranks(shape: MeshShape) -> int:
    return math.prod(shape[axis] for axis in shape.data_axes)


# --- tensors and layouts --------------------------------------------------------------------------------------------


def shapes(
    mesh: MeshLike, *, min_dims: int = 1, max_dims: int = 3, uneven: bool = True
) -> st.SearchStrategy[tuple[int, ...]]:
    """Global shapes of tensors for a mesh: sizes from 0 to 14, and multiples of what its axes cut a dim into.

    Shrinks towards one dim of size zero (of size one, where nothing may be uneven).

    >>> from hypothesis import find
    >>> find(shapes("dp=2,tp=2"), lambda shape: len(shape) == 2)
    (0, 0)
    """
    shape = MeshShape.of(mesh)
    for name, size in (("min_dims", min_dims), ("max_dims", max_dims)):
        _check_size("shapes", name, size)
    return _shapes(shape, min_dims, max_dims, uneven)


@st.composite
def _shapes(draw: st.DrawFn, mesh: MeshShape, min_dims: int, max_dims: int, uneven: bool) -> tuple[int, ...]:
    def size() -> int:
        kind = draw(st.sampled_from(["small", "multiple", "multiple"] if uneven else ["multiple"]))
        if kind == "small":
            return draw(st.integers(0, 14))
        pieces = math.prod(each if draw(_often) else 1 for each in mesh.sizes)
        return pieces * draw(st.integers(1, 3)) * draw(st.integers(1, 3))

    return tuple(size() for _ in range(draw(st.integers(min_dims, max_dims))))


def layouts(
    shape: Sequence[int],
    mesh: MeshLike,
    *,
    axes: Sequence[str] | None = None,
    dims: Sequence[str] | None = None,
    uneven: bool = True,
    fused: bool = True,
    partial: bool = False,
) -> st.SearchStrategy[Layout]:
    """Layouts of a tensor of this global shape: any axes on any dims, in any order.

    Shrinks towards nothing split, then towards one axis on an early dim that is not fused.

    Args:
        shape: global sizes of the tensor's dims.
        mesh: the mesh, or its text.
        axes: the axes that may split; all of the mesh by default.
        dims: names of the dims, "d0", "d1", ... by default. Factors of a fused dim are numbered after it.
        uneven: whether axes may split a dim that they do not divide.
        fused: whether dims may be products of two or three factors, any of them split.
        partial: whether the tensor may be a sum still to be taken over axes that split nothing.

    Raises:
        InputError: a size that is negative, an axis that the mesh does not have, more or fewer names than dims.

    >>> from hypothesis import find
    >>> find(layouts((4, 6), "dp=2,tp=2"), lambda layout: True)
    Layout("d0 d1")
    >>> find(layouts((4, 6), "dp=2,tp=2"), lambda layout: "tp" in layout.axes)
    Layout("d0@tp d1")
    """
    mesh_shape, sizes = MeshShape.of(mesh), tuple(shape)
    wrong = [size for size in sizes if isinstance(size, bool) or not isinstance(size, int) or size < 0]
    if wrong:
        raise InputError(f"layouts({sizes}): {wrong[0]!r} is no size of a dim; give whole numbers from 0 up.")
    for axis in axes or ():
        if axis not in mesh_shape:
            raise InputError(f'layouts(axes={tuple(axes or ())}): mesh "{mesh_shape}" has no axis "{axis}".')
    if dims is not None and len(dims) != len(sizes):
        raise InputError(f"layouts({sizes}, dims={tuple(dims)}): give one name for each of the {len(sizes)} dims.")
    names = tuple(dims) if dims is not None else tuple(f"d{at}" for at in range(len(sizes)))
    within = mesh_shape.names if axes is None else tuple(axes)
    most = len(within) if fused else -1
    return _layouts(sizes, mesh_shape, within, names, uneven=uneven, fused=most, fuse_whole=fused, partial=partial)


def _layout(
    draw: st.DrawFn,
    shape: tuple[int, ...],
    mesh: MeshShape,
    axes: tuple[str, ...],
    names: tuple[str, ...],
    *,
    uneven: bool = True,
    fused: int = -1,
    fuse_whole: bool = False,
    partial: bool = False,
    shared: int = 0,
) -> Layout:
    """What is drawn for one tensor.

    `fused` is how many axes may split a fused dim, -1 for no such dim; `fuse_whole` says whether none may, too. With
    `shared` axes of one dim stand in the mesh's order unless they divide what each of so many data ranks has of it.
    """
    held: list[list[str]] = [[] for _ in shape]
    last = 0
    for axis in axes:
        # Two axes on one dim are rare where each takes any: one number more says "where the last one is".
        at = draw(st.integers(0, len(shape) + 1))
        last = at if at <= len(shape) else last
        if last:
            held[last - 1].append(axis)
    dims = []
    for at, (name, size, mine) in enumerate(zip(names, shape, held, strict=True)):
        order = list(draw(st.permutations(mine))) if len(mine) > 1 else mine
        if shared and size % (shared * math.prod(mesh[axis] for axis in mine)):
            order = mine
        kept = order if uneven else _dividing(order, size, mesh)
        most = fused if kept or fuse_whole else -1
        stem = f"d{at}f" if name == "_" else name
        dims.append(_dim(draw, name, stem, size, tuple(kept), mesh, most))
    split = {axis for dim in dims for axis in dim.axes}
    sums = [(axis, "sum") for axis in axes if partial and axis not in split and draw(st.booleans())]
    return Layout(tuple(dims), tuple(sums))


_layouts = st.composite(_layout)


def _dividing(axes: Iterable[str], size: int, mesh: MeshShape) -> list[str]:
    """The axes that divide what is left of a dim after those before them."""
    kept = []
    for axis in axes:
        if size % mesh[axis] == 0:
            kept.append(axis)
            size //= mesh[axis]
    return kept


def _dim(draw: st.DrawFn, name: str, stem: str, size: int, axes: tuple[str, ...], mesh: MeshShape, fused: int) -> Dim:
    """A dim that these axes split: plain, or the product of factors that they divide."""
    pieces = math.prod(mesh[axis] for axis in axes)
    # Drawn where it decides nothing, too: an axis that goes away takes no draws with it, and so can go away.
    wanted = fused >= 0 and draw(_often if fused > 1 else st.booleans())
    if not wanted or len(axes) > fused or not size or size % pieces:
        return Dim((Factor(name, axes),))
    count = draw(st.integers(2, 3))
    at = {axis: draw(st.integers(0, count - 1)) for axis in mesh.names}
    held = [[axis for axis in axes if at[axis] == factor] for factor in range(count)]
    left, factors = size // pieces, []
    for factor, mine in enumerate(held):
        more = draw(_among(_divisors(left))) if factor < count - 1 else left
        left //= more
        factors.append(Factor(f"{stem}{factor}", tuple(mine), more * math.prod(mesh[a] for a in mine)))
    return Dim(tuple(factors))


@lru_cache(maxsize=1024)
def _divisors(size: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, size + 1) if size % d == 0)


@lru_cache(maxsize=1024)
def _among(choices: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """`sampled_from`, made once: making it costs more than drawing from it."""
    return st.sampled_from(choices)


# --- what can be said about a model ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tensor:
    """A parameter or buffer that a rule can name, or several of one shape in repeated blocks."""

    key: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]


@dataclass(frozen=True)
class _Unit:
    """A module's own tensors, or those of all blocks' modules of that name.

    Attributes:
        key: names the modules; "" where no rule about them as modules says one clear thing.
        tensors: the first is the module's primary tensor.
        roles: names of roles that the module knows.
    """

    key: str
    tensors: tuple[_Tensor, ...]
    roles: tuple[str, ...]


@dataclass(frozen=True)
class _Borders:
    """Module borders that a layout can be given to: key of a rule to the global shape of the activation."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.shapes)


@dataclass(frozen=True)
class _Facts:
    """What rules can be written about, once by patterns over repeated blocks (True), once by each name (False)."""

    units: Mapping[bool, tuple[_Unit, ...]]
    borders: Mapping[bool, _Borders]
    parameters: tuple[str, ...] = ()


def _facts_of(model: nn.Module, batch: Any) -> _Facts:
    seen = {} if batch is None else _activations(model, batch)
    return _Facts(
        {by_pattern: tuple(_units(model, by_pattern)) for by_pattern in (True, False)},
        {by_pattern: _Borders(dict(_borders(model, seen, by_pattern))) for by_pattern in (True, False)},
        tuple(name for name, _ in model.named_parameters()),
    )


@lru_cache(maxsize=256)
def _facts(model: Callable[[], nn.Module], batch: Callable[[int], Any]) -> _Facts:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _facts_of(model(), batch(0))


def _units(model: nn.Module, by_pattern: bool) -> Iterator[_Unit]:
    modules = dict(model.named_modules())
    tensors = dict([*model.named_parameters(), *model.named_buffers()])  # each once, under its first name
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {id(t): [n for n, other in every if other is t] for t in tensors.values()}
    known = [name for name, _ in every] + [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for group in _groups(modules, by_pattern):
        if by_pattern and len(group) > 1 and not _alike(group, modules, tensors, names, known):
            yield from (u for name in group for u in _unit([name], modules, tensors, names))
        else:
            yield from _unit(group, modules, tensors, names)


def _groups(modules: Iterable[str], by_pattern: bool) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in modules:
        groups.setdefault(_by_pattern(name) if by_pattern else name, []).append(name)
    return list(groups.values())


def _by_pattern(name: str) -> str:
    """A name for the modules like it in all blocks; blocks are what the first number counts."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name, count=1)


def _own(name: str, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A module's tensors that no module before it has: attribute to tensor."""
    prefix = f"{name}." if name else ""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {attr: t for attr, t in own if f"{prefix}{attr}" in tensors}


def _alike(
    group: Sequence[str],
    modules: Mapping[str, nn.Module],
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[int, Sequence[str]],
    known: Sequence[str],
) -> bool:
    """Whether a pattern can stand for modules: they hold tensors of the same shapes, tied to nothing, and it finds no
    other module or tensor."""
    own = [_own(name, modules[name], tensors) for name in group]
    shapes = {tuple((attr, tuple(t.shape)) for attr, t in each.items()) for each in own}
    if len(shapes) > 1 or any(len(names[id(t)]) > 1 for each in own for t in each.values()):
        return False
    found = {name for name in known if compile_pattern(f"^{_by_pattern(group[0])}").matches(name)}
    found |= {
        name
        for attr in own[0]
        for name in known
        if compile_pattern(f"^{_by_pattern(f'{group[0]}.{attr}')}").matches(name)
    }
    return found == set(group) | {f"{name}.{attr}" for name in group for attr in own[0]}


def _unit(
    group: Sequence[str],
    modules: Mapping[str, nn.Module],
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[int, Sequence[str]],
) -> Iterator[_Unit]:
    module = modules[group[0]]
    own = _own(group[0], module, tensors)
    if not own:
        return
    key = "^" + (_by_pattern(group[0]) if len(group) > 1 else group[0])
    registered = dims_of(module)
    prefix = f"{key}." if group[0] else "^"
    named = {attr: registered and registered.dims(attr, t.ndim) for attr, t in own.items()}

    def dims(attr: str, tensor: torch.Tensor) -> tuple[str, ...]:
        return tuple(name if name.isidentifier() else "_" for name in named[attr] or ("_",) * tensor.ndim)

    found = [_Tensor(f"{prefix}{attr}", tuple(t.shape), dims(attr, t)) for attr, t in own.items()]
    every = {*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))}
    tied = every != set(own) or any(len(names[id(t)]) > 1 for t in own.values())
    as_module = registered is not None and bool(group[0]) and not tied
    if registered is None or not as_module or not any(named.values()):
        yield _Unit("", tuple(found), ())
        return
    primary = next(attr for attr in registered.tensors if named.get(attr))
    found.sort(key=lambda tensor: not tensor.key.endswith(f".{primary}"))
    yield _Unit(key, tuple(found), _roles(registered, named[primary] or ()))


def _roles(registered: ModuleDims, primary: Sequence[str]) -> tuple[str, ...]:
    """Roles that split a plain dim; one that splits a factor of a fused dim is refused where it does not divide."""
    plain = registered.output in primary, len(registered.contracted) == 1 and registered.contracted[0] in primary
    return ("colwise",) * plain[0] + ("rowwise",) * plain[1]


def _activations(model: nn.Module, batch: Any) -> dict[tuple[str, str], set[tuple[int, ...]]]:
    """The shapes of the first floating-point tensor that crosses each border of each module, over all calls."""
    seen: dict[tuple[str, str], set[tuple[int, ...]]] = {}

    def note(name: str, side: str, tree: Any) -> None:
        floats = [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if floats:
            seen.setdefault((name, side), set()).add(tuple(floats[0].shape))

    def watch(name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, args, kwargs: note(name, "input", (args, kwargs)), with_kwargs=True)
        module.register_forward_hook(lambda _, args, output: note(name, "output", output))

    for name, module in model.named_modules():
        watch(name, module)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))

    def fitted(x: torch.Tensor) -> torch.Tensor:
        return x.to(device=like.device, dtype=like.dtype if x.is_floating_point() else None)

    args, kwargs = pytree.tree_map_only(torch.Tensor, fitted, as_call(batch))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model(*args, **kwargs)
    return seen


def _borders(
    model: nn.Module, seen: Mapping[tuple[str, str], set[tuple[int, ...]]], by_pattern: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Borders whose activation has one number of dims, at least one."""
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for group, side in itertools.product(
        _groups((n for n, _ in model.named_modules()), by_pattern), ("input", "output")
    ):
        found = set().union(*(seen.get((name, side), set()) for name in group))
        if len({len(shape) for shape in found}) != 1 or not all(seen.get((name, side)) for name in group):
            continue
        pattern = f"^{_by_pattern(group[0])}" if len(group) > 1 else f"^{group[0]}"
        if len(group) > 1 and [n for n in modules if compile_pattern(pattern).matches(n)] != list(group):
            continue
        shape = tuple(math.gcd(*sizes) for sizes in zip(*found, strict=True))  # what divides it divides each of them
        if shape:
            yield f"{pattern}.{side}" if group[0] else f"^{side}", shape


# --- rules ----------------------------------------------------------------------------------------------------------


def rule_sets(model: nn.Module, mesh: MeshLike, batch: Any = None) -> st.SearchStrategy[Rules]:
    """Rules for a model on a mesh: any valid assignment of its model axes to dims, sensible or not.

    For each module a role, a text about its dims, or a layout for each parameter and buffer by itself; for module
    borders a layout of the activation. Repeated blocks have rules by patterns, or each its own. Left out is what
    shardlib refuses: two layouts for tied parameters, a fused dim split by two axes (until torch gathers it right), an
    uneven dim whose axes stand in another order than the mesh's.

    Shrinks towards no rule at all, every tensor whole.

    Args:
        model: any module; looked at, not changed.
        mesh: the mesh, or its text.
        batch: an example of what the model is called with. With it the model is run once, to see which activations
            cross which borders; without it borders get no rules.

    Raises:
        InputError: the model is no module.

    >>> from hypothesis import find
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    >>> find(rule_sets(model, "tp=2"), lambda rules: True)
    Rules({}, unmatched='replicate')
    >>> find(rule_sets(model, "tp=2"), lambda rules: rules.resolve(model, "tp=2").tensors["2.bias"].layout.axes)
    Rules({"^2": "colwise"}, unmatched='replicate')
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"rule_sets() was given a {type(model).__name__}; give a torch.nn.Module.")
    return _rule_sets(_facts_of(copy.deepcopy(model), batch), MeshShape.of(mesh))


@st.composite
def _rule_sets(draw: st.DrawFn, facts: _Facts, mesh: MeshShape) -> Rules:
    axes = mesh.model_axes
    # Drawn where it decides nothing, too: hypothesis takes what needs fewer draws for simpler, and a mesh without model
    # axes is no simpler than one with nothing split.
    if not (draw(_often) and axes):
        return Rules({}, unmatched="replicate")
    by_pattern = not draw(st.booleans())
    rules: dict[str, str] = {}
    for unit in facts.units[by_pattern]:
        rules |= _unit_rules(draw, unit, mesh)
    borders = facts.borders[by_pattern]
    activations = {}
    if draw(st.booleans()) if borders.keys else False:
        for key in draw(st.lists(_among(borders.keys), min_size=1, max_size=2, unique=True)):
            shape = borders.shapes[key]
            activations[key] = _layout(draw, shape, mesh, axes, ("_",) * len(shape), shared=_data_ranks(mesh)).text
    # Roles speak of one axis.
    axis = draw(_among(axes)) if set(rules.values()) & {"colwise", "rowwise"} else axes[0]
    return Rules(rules, activations=activations, unmatched="replicate", axis=axis)


def _unit_rules(draw: st.DrawFn, unit: _Unit, mesh: MeshShape) -> dict[str, str]:
    kind = draw(_among(("whole", *["module"] * bool(unit.key), *unit.roles, "tensors")))
    if kind == "whole":
        return {}
    if kind in unit.roles:
        return {unit.key: kind}
    tensors = unit.tensors if kind == "tensors" else unit.tensors[:1]
    drawn = {t.key: _layout(draw, t.shape, mesh, mesh.model_axes, t.dims, fused=1, shared=1) for t in tensors}
    if kind == "module":
        drawn = {unit.key: drawn[tensors[0].key]}
    return {key: layout.text for key, layout in drawn.items() if layout.axes}


# --- transforms -----------------------------------------------------------------------------------------------------

Transform = Callable[[Plan], Plan]


def identity(plan: Plan) -> Plan:
    """The transform that leaves a plan as it is."""
    return plan


# One strategy for each kind of transform. What `shardlib.transforms` gains is registered here, or with
# `register_transforms` from a package of one's own, and is then part of every case.
_TRANSFORMS: list[st.SearchStrategy[Transform]] = [st.just(identity)]


def register_transforms(strategy: st.SearchStrategy[Transform]) -> None:
    """Let `transforms`, and with it `cases`, draw from one more strategy of functions from plan to plan.

    The functions travel to other processes: they must be importable there, or be values that can be pickled.

    Raises:
        InputError: it is no strategy.

    >>> register_transforms(3)
    Traceback (most recent call last):
    shardlib.errors.InputError: register_transforms(3): give a hypothesis strategy of functions from plan to plan.
    """
    if not isinstance(strategy, st.SearchStrategy):
        raise InputError(
            f"register_transforms({strategy!r}): give a hypothesis strategy of functions from plan to plan."
        )
    if strategy not in _TRANSFORMS:
        _TRANSFORMS.append(strategy)


def transforms(max_size: int = 2) -> st.SearchStrategy[tuple[Transform, ...]]:
    """Transforms to apply one after another. Shrinks towards none.

    >>> from hypothesis import find
    >>> find(transforms(), lambda drawn: True)
    ()
    """
    # Asked for at each draw, so that what is registered later counts too.
    return st.deferred(lambda: st.lists(st.one_of(_TRANSFORMS), max_size=max_size).map(tuple))


# --- models ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class ModelFactory:
    """Makes a model; a value that can be pickled, so that ranks make the same one.

    Attributes:
        cls: the class, or any function that returns a module.
        arguments: its keyword arguments, as pairs.
        frozen: names of parameters that are not trained.
        thaw: whether they are from the second step on; for that give `before_step` to `equivalent`.

    >>> factory = ModelFactory(nn.Linear, (("in_features", 2), ("out_features", 3)), frozen=("bias",))
    >>> factory
    ModelFactory(Linear(in_features=2, out_features=3), frozen=('bias',))
    >>> factory().bias.requires_grad
    False
    """

    cls: Callable[..., nn.Module]
    arguments: tuple[tuple[str, Any], ...] = ()
    frozen: tuple[str, ...] = ()
    thaw: bool = False

    def __call__(self) -> nn.Module:
        model = self.cls(**dict(self.arguments))
        self.before_step(model, 0)
        return model

    def before_step(self, model: nn.Module, step: int) -> None:
        """Freeze what is frozen in this step, and thaw what is no more."""
        parameters = dict(model.named_parameters())
        for name in self.frozen:
            parameters[name].requires_grad_(self.thaw and step > 0)

    def __repr__(self) -> str:
        named = getattr(self.cls, "__qualname__", repr(self.cls))
        shown = [f"{named}({', '.join(f'{name}={value!r}' for name, value in self.arguments)})"]
        shown += [f"frozen={self.frozen!r}"] if self.frozen else []
        shown += ["thaw=True"] if self.thaw else []
        return f"ModelFactory({', '.join(shown)})"


# Sizes of one head and numbers of heads, the narrowest first. At least four features: a LayerNorm of two gives +1 and
# -1 whatever it is given, and its gradient is rounding alone.
_HEADS = ((2, 2), (1, 4), (3, 2), (2, 3), (4, 2), (2, 4), (3, 3), (4, 3))


def transformers(*, dropout: bool = False, min_layers: int = 1, max_layers: int = 2) -> st.SearchStrategy[ModelFactory]:
    """Transformers of `shardlib.testing.models`: fused q, k and v or apart, grouped queries, tied embeddings, uneven
    vocabularies, LayerNorm or RMSNorm, learned or rotary positions, with and without biases, frozen parameters.

    Shrinks towards one layer of two heads of two features, five tokens.

    >>> from hypothesis import find
    >>> find(transformers(), lambda factory: True)
    ModelFactory(Transformer(vocab=5, heads=2, head=2))
    """
    return _transformers(dropout, min_layers, max_layers)


@st.composite
def _transformers(draw: st.DrawFn, dropout: bool, min_layers: int, max_layers: int) -> ModelFactory:
    heads, head = draw(st.sampled_from(_HEADS))
    arguments = {"vocab": draw(st.integers(5, 9)), "heads": heads, "head": head}
    layers = draw(st.integers(min_layers, max_layers))
    fewer = [None, *(n for n in range(heads - 1, 0, -1) if heads % n == 0)]
    choices: dict[str, st.SearchStrategy[Any]] = {
        "kv_heads": st.integers(0, 2).map(lambda at: fewer[at % len(fewer)]),
        "fused": st.sampled_from([True, False]),
        "tied": st.booleans(),
        "dropout": _dropout(dropout),
        "norm": st.sampled_from(["layer", "rms"]),
        "position": st.sampled_from(["learned", "rotary"]).map(lambda p: "learned" if head % 2 else p),
        "bias": st.sampled_from([True, False]),
    }
    simplest = {"layers": 1, "kv_heads": None, "fused": True, "tied": False, "dropout": 0.0, "norm": "layer"}
    simplest |= {"position": "learned", "bias": True}
    return _factory(draw, Transformer, arguments, {"layers": layers}, choices, simplest)


def mlps(*, dropout: bool = False) -> st.SearchStrategy[ModelFactory]:
    """MLPs of `shardlib.testing.models`, of any widths from one to nine: a layer or its weight used twice, buffers that
    change, an unused layer, frozen parameters.

    Shrinks towards widths of one.

    >>> from hypothesis import find
    >>> find(mlps(), lambda factory: True)
    ModelFactory(MLP(ins=1, width=1, outs=1))
    """
    return _mlps(dropout)


@st.composite
def _mlps(draw: st.DrawFn, dropout: bool) -> ModelFactory:
    arguments = {name: draw(st.integers(1, 9)) for name in ("ins", "width", "outs")}
    choices: dict[str, st.SearchStrategy[Any]] = {
        "bias": st.sampled_from([True, False]),
        "shared": st.sampled_from(["", "weight", "module"]),
        "dropout": _dropout(dropout),
        "buffers": st.booleans(),
        "unused": st.booleans(),
    }
    simplest = {"bias": True, "shared": "", "dropout": 0.0, "buffers": False, "unused": False}
    return _factory(draw, MLP, arguments, {}, choices, simplest)


def convnets(*, dropout: bool = False) -> st.SearchStrategy[ModelFactory]:
    """Convolutional nets of `shardlib.testing.models`, of one to seven channels, with BatchNorm or GroupNorm.

    Shrinks towards one channel and windows of one pixel.

    >>> from hypothesis import find
    >>> find(convnets(), lambda factory: True)
    ModelFactory(ConvNet(channels=1, outs=1, kernel=1))
    """
    return _convnets(dropout)


@st.composite
def _convnets(draw: st.DrawFn, dropout: bool) -> ModelFactory:
    arguments = {
        "channels": draw(st.integers(1, 7)),
        "outs": draw(st.integers(1, 5)),
        "kernel": draw(st.sampled_from([1, 3])),
    }
    choices: dict[str, st.SearchStrategy[Any]] = {
        "norm": st.sampled_from(["batch", "group"]),
        "dropout": _dropout(dropout),
    }
    return _factory(draw, ConvNet, arguments, {}, choices, {"norm": "batch", "dropout": 0.0})


def _dropout(wanted: bool) -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 0.3]) if wanted else st.just(0.0)


def _factory(
    draw: st.DrawFn,
    cls: Callable[..., nn.Module],
    arguments: Mapping[str, Any],
    drawn: Mapping[str, Any],
    choices: Mapping[str, st.SearchStrategy[Any]],
    simplest: Mapping[str, Any],
) -> ModelFactory:
    """A factory whose arguments are drawn, those that are the simplest left out; some of its parameters are frozen.

    Three in four models have choices at all. So the simplest one takes few draws, which is what hypothesis shrinks to.
    """
    if draw(_often):
        drawn = {**drawn, **{name: draw(strategy) for name, strategy in choices.items()}}
    more = {name: value for name, value in drawn.items() if value != simplest[name]}
    factory = ModelFactory(cls, (*arguments.items(), *more.items()))
    if not draw(_seldom):
        return factory
    names = _parameters(factory)
    frozen = draw(st.lists(_among(names), min_size=1, max_size=2, unique=True))
    return ModelFactory(cls, factory.arguments, tuple(frozen), draw(st.booleans()))


@lru_cache(maxsize=256)
def _parameters(factory: Callable[[], nn.Module]) -> tuple[str, ...]:
    with torch.random.fork_rng(devices=[]):
        return tuple(name for name, _ in factory().named_parameters())


def batches(model: nn.Module, mesh: MeshLike | None = None) -> st.SearchStrategy[Callable[[int], Any]]:
    """Batches for a model of `shardlib.testing.models`: functions of the step that can be pickled.

    The number of rows is a multiple of the mesh's data ranks. Shrinks towards two rows (of two data ranks, one each),
    of one token.

    Raises:
        InputError: another model.

    >>> from hypothesis import find
    >>> find(batches(MLP(ins=3)), lambda batch: True)
    Numbers(shape=(2, 3))
    """
    ranks = 1 if mesh is None else _data_ranks(MeshShape.of(mesh))
    return _batches(batch_for(model), getattr(model, "context", 1), ranks)


@lru_cache(maxsize=256)
def _batch_sizes(factory: Callable[[], nn.Module]) -> tuple[Any, int]:
    with torch.random.fork_rng(devices=[]):
        model = factory()
    return batch_for(model), getattr(model, "context", 1)


@st.composite
def _batches(draw: st.DrawFn, made: Any, context: int, ranks: int) -> Callable[[int], Any]:
    rows = ranks * draw(st.integers(2 if ranks == 1 else 1, 6 if ranks == 1 else 3))
    if isinstance(made, Tokens):
        return Tokens(rows, draw(st.integers(1, context)), made.vocab)
    return type(made)((rows, *made.shape[1:]))


# --- whole cases ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """The arguments of `equivalent` and `assert_equivalent`: `assert_equivalent(**case)`.

    A value that can be pickled if its model and batch can. `arguments` gives the same as a dict.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    mesh: MeshShape
    rules: Rules = field(default_factory=lambda: Rules({}, unmatched="replicate"))
    transforms: tuple[Transform, ...] = ()
    accumulate: int = 1
    no_sync: bool = False
    clip: float | None = None
    rng: Literal["exact", "fast"] = "exact"

    def arguments(self) -> dict[str, Any]:
        """What `equivalent` is called with."""
        names = ("model", "batch", "mesh", "rules", "transforms", "accumulate", "no_sync", "clip", "rng")
        found = {name: getattr(self, name) for name in names}
        thaws = getattr(self.model, "thaw", False)
        return {**found, "before_step": self.model.before_step} if thaws else found  # type: ignore[attr-defined]

    def keys(self) -> Iterable[str]:
        """With `case[key]` what `**case` needs."""
        return self.arguments().keys()

    def __getitem__(self, name: str) -> Any:
        return self.arguments()[name]


def cases(
    model: Callable[[], nn.Module] | st.SearchStrategy[Callable[[], nn.Module]] | None = None,
    batch: Callable[[int], Any] | None = None,
    *,
    meshes: st.SearchStrategy[MeshShape] | None = None,
    max_world: int = 4,
) -> st.SearchStrategy[Case]:
    """Everything that `assert_equivalent` needs: `assert_equivalent(**case)`.

    Mesh, rules, transforms, accumulated backward passes (with and without `no_sync`), clipping; and model and batch
    where they are not given.

    Shrinks towards one axis of two ranks, the smallest model, no rule, one backward pass.

    Args:
        model: a function that makes your model, or a strategy of such functions; by default `transformers`, `mlps` and
            `convnets`.
        batch: a function from the step to a batch, as `equivalent` takes it; needed with a model of your own. Meshes
            are drawn so that their data ranks share its rows.
        meshes: a strategy of meshes; by default `mesh_shapes` of two model axes and a data axis.
        max_world: most ranks, where `meshes` is not given.

    Raises:
        InputError: a model that cannot be called, or one of your own without a batch.

    >>> from hypothesis import find
    >>> case = find(cases(), lambda case: case.mesh.data_axes)
    >>> case.mesh, case.model, case.rules
    (MeshShape("dp=2"), ModelFactory(MLP(ins=1, width=1, outs=1)), Rules({}, unmatched='replicate'))
    """
    if model is not None and not isinstance(model, st.SearchStrategy) and not callable(model):
        raise InputError(f"cases() was given model={model!r}; give a function that makes one, or a strategy of such.")
    if isinstance(model, nn.Module):
        raise InputError(
            f"cases() was given a {type(model).__name__}; give a function that makes one, as in `lambda: MyModel()`: "
            "each rank makes its own."
        )
    if model is not None and not isinstance(model, st.SearchStrategy) and batch is None:
        raise InputError(
            "cases() was given a model without a batch; give a function from the step to a batch, as in "
            "`lambda step: torch.randn(8, 16)`."
        )
    if meshes is None:
        rows = None if batch is None else _rows(batch)
        meshes = mesh_shapes(max_world, model_axes=("tp", "sp"), rows=rows)
    return _cases(model, batch, meshes)


def _rows(batch: Callable[[int], Any]) -> int:
    leaves = [leaf for leaf in pytree.tree_leaves(batch(0)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    return len(leaves[0]) if leaves else 1


@st.composite
def _cases(draw: st.DrawFn, model: Any, batch: Callable[[int], Any] | None, meshes: Any) -> Case:
    mesh = draw(meshes)
    if model is None:
        model = st.one_of(mlps(dropout=True), convnets(dropout=True), transformers(dropout=True))
    factory = draw(model) if isinstance(model, st.SearchStrategy) else model
    made = batch or draw(_batches(*_batch_sizes(factory), _data_ranks(mesh)))
    rules = draw(_rule_sets(_facts(factory, made), mesh))
    accumulate = draw(st.integers(1, 2))
    rng = draw(_among(("exact", "fast")))
    return Case(
        factory,
        made,
        mesh,
        rules,
        draw(transforms()),
        accumulate,
        no_sync=accumulate > 1 and draw(st.booleans()),
        clip=draw(st.sampled_from([None, 0.5])),
        # With rng="fast" each data rank draws a dropout of its own, which is that of no single device.
        rng=rng if _data_ranks(mesh) == 1 else "exact",
    )


def _check_size(function: str, name: str, size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InputError(f"{function}({name}={size!r}): give a whole number from 1 up.")
