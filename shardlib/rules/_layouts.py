"""Conversion of a rule's value to the layout of one tensor: axes by dim name, sizes, roles, placements, module dims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardlib._mesh_shape import MeshShape
from shardlib.errors import LayoutError, RuleError
from shardlib.layout import Dim, Factor, Layout
from shardlib.layout._fit import settle
from shardlib.rules._match import Entry
from shardlib.rules._model import ModelIndex, called, summary
from shardlib.rules._placed import border_of_placements, by_axis, placed_dims, unsplit
from shardlib.rules._sizes import SizeFinder
from shardlib.rules._tree_node import TreeNode
from shardlib.rules._values import Cut, Role, Text
from shardlib.rules.dims import ModuleDims, dims_of

__all__ = ["AxisUse", "LayoutMaker", "axis_use"]

Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class AxisUse:
    """The axes that a dim name is split over; `optional` is the "?" of the text form."""

    axes: tuple[str, ...]
    optional: bool = False


def axis_use(given: str | Iterable[str] | None) -> AxisUse:
    """Parse the axes of a dim name.

    >>> axis_use("tp?"), axis_use(["fsdp", "tp"])
    (AxisUse(axes=('tp',), optional=True), AxisUse(axes=('fsdp', 'tp'), optional=False))
    >>> axis_use(["tp", "sp?"])
    AxisUse(axes=('tp', 'sp'), optional=True)
    """
    named = (given,) if isinstance(given, str) else tuple(given or ())
    if not all(isinstance(axis, str) for axis in named):
        return AxisUse(named)
    optional = bool(named) and named[-1].endswith("?")
    return AxisUse((*named[:-1], *(axis.removesuffix("?") for axis in named[-1:])), optional)


@dataclass(frozen=True)
class LayoutMaker:
    """Makes layouts for the tensors of one model on one mesh.

    Attributes:
        axes: dim name to the axes it stands for.
        sizes: finds the sizes of factors.
        default_axis: the axis of roles and of bare placements.
    """

    index: ModelIndex
    mesh: MeshShape
    axes: Mapping[str, AxisUse]
    sizes: SizeFinder
    default_axis: str
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def for_tensor(self, entry: Entry, name: str) -> Layout:
        """Return the layout that a rule which names this very tensor gives it."""
        module_name, module, attribute = self.index.owner(name)
        shape = tuple(self.index.leaf[name].tensor.shape)
        registered = dims_of(module)
        sizes = self._sizes(entry, registered, module_name)
        key = (entry.key, "tensor", attribute, shape, _key(registered), *sizes.items())
        return self._once(key, lambda: self._tensor_layout(entry, name, shape, registered, attribute, sizes))

    def for_module(self, entry: Entry, module_name: str) -> dict[str, Layout]:
        """Return the layouts that a rule which names this module gives its own tensors, by attribute.

        Raises:
            RuleError: the dims of the module's tensors are not known, or the value does not fit them.
        """
        shapes = {attr: tuple(self.index.leaf[full].tensor.shape) for attr, full in self.index.own[module_name].items()}
        if entry.value == Role("replicate"):
            return {attribute: Layout.replicate(len(shape)) for attribute, shape in shapes.items()}
        registered = dims_of(self.index.modules[module_name])
        if registered is None:
            raise self._unknown_module(entry, module_name, shapes)
        sizes = self._sizes(entry, registered, module_name)
        key = (entry.key, "module", *shapes.items(), _key(registered), *sizes.items())
        return self._once(key, lambda: self._module_layouts(entry, module_name, shapes, registered, sizes))

    def for_border(self, entry: Entry, module_name: str) -> Layout:
        """Return the layout of an activation, whose shape is not known yet: factors may stay open, and "?" needs a
        size."""
        match entry.value:
            case Text(_, layout):
                sizes = self._sizes(entry, None, module_name)
                return self._settled(entry, self._on_mesh(_with_sizes(self._with_axes(entry, layout), sizes)))
            case Role("replicate"):
                return Layout.parse("...")
            case Role(name):
                raise RuleError(
                    f'Rule {entry}: "{name}" is a role of a module, but this key names an activation. Give the '
                    'activation a layout as text, as in "batch seq embed@tp", or placements.'
                )
            case _:
                return self._on_mesh(border_of_placements(entry, self._placements(entry)))

    # Values, one after another.

    def _tensor_layout(
        self,
        entry: Entry,
        name: str,
        shape: tuple[int, ...],
        registered: ModuleDims | None,
        attribute: str,
        sizes: Mapping[str, int],
    ) -> Layout:
        match entry.value:
            case Role("replicate"):
                return Layout.replicate(len(shape))
            case Role():
                named = registered.dims(attribute, len(shape)) if registered else None
                if registered is None or named is None:
                    raise self._unknown_tensor(entry, name, shape)
                dims = _split(named, self._role(entry, name, registered))
            case Text(_, layout):
                return self._fit(entry, name, shape, self._with_axes(entry, layout), sizes)
            case _:
                dims = placed_dims(entry, name, shape, ("_",) * len(shape), self._placements(entry))
        return self._fit(entry, name, shape, Layout(dims), sizes)

    def _module_layouts(
        self,
        entry: Entry,
        module_name: str,
        shapes: Mapping[str, tuple[int, ...]],
        registered: ModuleDims,
        sizes: Mapping[str, int],
    ) -> dict[str, Layout]:
        named = {attr: registered.dims(attr, len(shape)) for attr, shape in shapes.items()}
        known = {attr: dims for attr, dims in named.items() if dims is not None}
        if not known:
            raise self._unknown_module(entry, module_name, shapes)
        spread = self._spread(entry, module_name, registered, known)
        return {
            attr: self._fit(entry, self.index.own[module_name][attr], shapes[attr], Layout(spread(attr)), sizes)
            for attr in known
        }

    def _spread(
        self, entry: Entry, module_name: str, registered: ModuleDims, known: Mapping[str, tuple[str, ...]]
    ) -> Callable[[str], Dims]:
        """Return a function from a tensor's attribute to the dims that a rule about the module gives it."""
        primary = next(attr for attr in registered.tensors if attr in known)
        match entry.value:
            case Role():
                target = self._role(entry, module_name, registered)
                return lambda attr: _split(known[attr], target)
            case Text(_, layout):
                layout = self._with_axes(entry, layout)
                if (lone := _lone_factor(layout)) and lone.name in registered.names:
                    return lambda attr: _split(known[attr], lone)
                dims = _dims_of_text(entry, module_name, layout, registered, known[primary])
            case _:
                full = self.index.own[module_name][primary]
                shape = tuple(self.index.leaf[full].tensor.shape)
                dims = placed_dims(entry, full, shape, known[primary], self._placements(entry))
        # Dims without a name ("_") mean the same only in a tensor whose dims are all the same.
        by_name = {name: dim for name, dim in zip(known[primary], dims, strict=True) if name != "_"}
        return lambda attr: (
            dims if known[attr] == known[primary] else tuple(by_name.get(n) or unsplit(n) for n in known[attr])
        )

    def _role(self, entry: Entry, name: str, registered: ModuleDims) -> Factor:
        """Return the factor that a role splits."""
        if entry.value == Role("colwise"):
            found, what = [registered.output] if registered.output else [], "output features"
        else:
            found, what = list(registered.contracted), "dim that is summed over"
        if len(found) == 1:
            return Factor(found[0], (self.default_axis,))
        which = f"several are: {_listed(found)}" if found else "none of them is"
        raise RuleError(
            f'Rule {entry} shards the {what} of "{name}", whose dims are {_spelled(registered)}; {which}. Name a dim '
            f'in a text, as in "dim@{self.default_axis}", or use "replicate".'
        )

    # Axes, sizes, fitting.

    def _with_axes(self, entry: Entry, layout: Layout) -> Layout:
        dims = tuple(
            Dim(tuple(map(self._factor_with_axes, dim.factors))) if isinstance(dim, Dim) else dim for dim in layout.dims
        )
        if dims == layout.dims:
            return layout
        try:
            return replace(layout, dims=dims)
        except LayoutError as fault:
            raise RuleError(f"Rule {entry}, with the axes that the rule set gives its dims: {fault}") from None

    def _factor_with_axes(self, factor: Factor) -> Factor:
        use = self.axes.get(factor.name)
        if factor.axes or use is None or not use.axes:
            return factor
        return replace(factor, axes=use.axes, optional=use.optional)

    def _sizes(self, entry: Entry, registered: ModuleDims | None, module_name: str) -> dict[str, int]:
        names = _factor_names(entry.value.layout) if isinstance(entry.value, Text) else ()
        return self.sizes.find(entry, names, module_name, registered.sizes if registered else {})

    def _placements(self, entry: Entry) -> list[tuple[str, Cut | None]]:
        return by_axis(entry, self.mesh, self.default_axis)

    def _on_mesh(self, layout: Layout) -> Layout:
        return layout.with_axes_dropped(axis for axis in layout.axes if axis not in self.mesh)

    def _settled(self, entry: Entry, layout: Layout) -> Layout:
        for factor in (factor for dim in layout.dims if isinstance(dim, Dim) for factor in dim.factors):
            if factor.optional and factor.size is None:
                raise RuleError(
                    f'Rule {entry}: whether "{factor.name}" is sharded cannot be decided for an activation, whose '
                    f'shape is not known yet. Give the size, as in sizes={{"{factor.name}": 8}}, or leave the "?" out.'
                )
        return replace(layout, dims=tuple(settle(dim, self.mesh) for dim in layout.dims))

    def _fit(self, entry: Entry, name: str, shape: tuple[int, ...], layout: Layout, sizes: Mapping[str, int]) -> Layout:
        """Make a layout concrete for one tensor."""
        try:
            return self._on_mesh(_with_sizes(layout, sizes)).resolve(shape, self.mesh)
        except LayoutError as fault:
            raise RuleError(f'Rule {entry}, for "{name}": {fault}') from None

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _unknown_module(self, entry: Entry, name: str, shapes: Mapping[str, tuple[int, ...]]) -> RuleError:
        module = self.index.modules[name]
        register = (
            "with their dims in a text"
            if isinstance(module, TreeNode)
            else f"or tell once with shardlib.rules.register_dims({called(module)}, {_example(shapes)})"
        )
        return RuleError(
            f'Rule {entry} names module "{name}" ({called(module)}), and what the dims of its tensors mean is not '
            f"known: {summary(shapes)}. Name the parameters in the rule instead, {register}."
        )

    def _unknown_tensor(self, entry: Entry, name: str, shape: tuple[int, ...]) -> RuleError:
        return RuleError(
            f'Rule {entry} gives a role to "{name}", global shape {shape}, whose dims are not known. Name its dims in '
            'a text, as in "out@tp in", or give a placement such as Shard(0).'
        )


def _split(named: tuple[str, ...], target: Factor) -> Dims:
    """Return the registered dims with the target factor split."""
    dims = Layout.parse(" ".join(named)).dims
    return tuple(
        Dim(tuple(target if factor.name == target.name else factor for factor in dim.factors))
        for dim in dims
        if isinstance(dim, Dim)
    )


def _dims_of_text(
    entry: Entry, module_name: str, layout: Layout, registered: ModuleDims, primary: tuple[str, ...]
) -> Dims:
    """Return the dims of the primary tensor that a text about its module gives: all of them, or the output features
    only."""
    if len(layout.dims) == 1 and layout.ndim == 1 and len(primary) > 1:
        output = next((at for at, name in enumerate(primary) if registered.output in _words(name)), None)
        if output is not None:
            return tuple(_only(layout) if at == output else unsplit(name) for at, name in enumerate(primary))
    if layout.ndim is not None and layout.ndim != len(primary):
        every = f'all {len(primary)} dims of its weight, "{" ".join(primary)}"'
        either = f'its output features ("{registered.output}") or {every}' if registered.output else every
        raise RuleError(
            f'Rule {entry}: it names {layout.ndim} dim{"s" * (layout.ndim > 1)}, but for module "{module_name}" a text '
            f"names {either}. Write that, or name a parameter."
        )
    dims = tuple(dim for dim in layout.with_ndim(len(primary)).dims if isinstance(dim, Dim))
    _refuse_swapped(entry, module_name, tuple(dim.name for dim in dims), primary)
    return dims


def _refuse_swapped(entry: Entry, module_name: str, given: tuple[str, ...], primary: tuple[str, ...]) -> None:
    if given != primary and sorted(given) == sorted(primary):
        raise RuleError(
            f'Rule {entry}: it names the dims "{" ".join(given)}", but the weight of module "{module_name}" is stored '
            f'as "{" ".join(primary)}". Write them in that order.'
        )


def _with_sizes(layout: Layout, sizes: Mapping[str, int]) -> Layout:
    return replace(layout, dims=tuple(_sized(dim, sizes) for dim in layout.dims))


def _sized(dim: Any, sizes: Mapping[str, int]) -> Any:
    if not isinstance(dim, Dim):
        return dim
    return Dim(tuple(replace(f, size=sizes[f.name]) if f.size is None and f.name in sizes else f for f in dim.factors))


def _lone_factor(layout: Layout) -> Factor | None:
    if len(layout.dims) == 1 and isinstance(layout.dims[0], Dim) and not layout.dims[0].fused:
        return layout.dims[0].factors[0]
    return None


def _only(layout: Layout) -> Dim:
    dim = layout.dims[0]
    assert isinstance(dim, Dim)
    return dim


def _words(name: str) -> list[str]:
    return name.strip("()").split()


def _factor_names(layout: Layout) -> tuple[str, ...]:
    return tuple(factor.name for dim in layout.dims if isinstance(dim, Dim) for factor in dim.factors)


def _key(registered: ModuleDims | None) -> tuple[Any, ...]:
    return () if registered is None else (registered.output, registered.contracted, *registered.tensors.items())


def _spelled(registered: ModuleDims) -> str:
    return ", ".join(f'{name} "{dims}"' for name, dims in registered.tensors.items())


def _listed(names: Iterable[str]) -> str:
    return " and ".join(f'"{name}"' for name in names) or "no dim"


def _example(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f'{name}="{" ".join(["..."] * len(shape))}"' for name, shape in shapes.items())
