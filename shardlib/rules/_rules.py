"""`Rules`: what rules do with a model, a file or another library's rules."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardlib._mesh_shape import AxisKind, MeshLike, MeshShape
from shardlib.errors import RuleError
from shardlib.rules import _report, logical, maxtext, specs, toml
from shardlib.rules._modes import changes_of, check_keys
from shardlib.rules._resolution import Resolution
from shardlib.rules._resolve import Resolver
from shardlib.rules._rule_set import RuleSet
from shardlib.rules.stages import StagesLike
from shardlib.rules.tensor_modes import registered_tensor_modes, tensor_mode
from shardlib.rules.trees import Tree

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Rules"]


class Rules(RuleSet):
    """Layouts for the tensors of a model on a mesh, by patterns of names.

    Args:
        rules: pattern to layout. A pattern names a module, a parameter, a buffer, or (ending in `.input` or `.output`)
            an activation (a module's input or output); see `shardlib.rules.patterns`. A layout is text ("vocab@tp
            embed"; one name alone means the output features of a module, and weight and bias both follow), a role
            ("colwise", "rowwise", "replicate"), a torch placement (dim of the module's weight, on the default axis),
            `{axis: placement}`, one placement per mesh axis, a `Layout`, or None to replicate.
        activations: rules that can only mean a module's input or output.
        axes: dim name to the mesh axis (or axes, outermost first; "tp?" where it divides) that shards it wherever it is
            named without "@". An axis named here may be missing from a mesh; the dim is then not sharded.
        sizes: sizes of the factors of fused dims: numbers, or attribute paths ("config.n_head") looked up on the module
            and then on the modules around it.
        unmatched: the treatment of a parameter that no rule matches: "error" or "replicate".
        optional: keys of rules that may match nothing.
        override: keys of rules that take precedence over earlier ones.
        axis: the mesh axis of roles and bare placements.
        stages: the modules on each stage of a pipeline axis: names, with bars between stages, as in
            "embed, blocks.0-3 | blocks.4-7, norm, head", or `Balanced(...)`; see `shardlib.rules.stages`. They are
            not used on a mesh without such an axis.
        modes: name to the changes that `mode(name)` applies: `rules`, which override those that are there,
            `activations`, `axes`, `sizes` and `optional`, each as above.
        description: the purpose of the rules, in one line.
        models: qualified names of the model classes that the rules are for, as in "transformers.GPT2LMHeadModel".
        notes: key to a comment, kept in the file form; not part of the value.

    Raises:
        RuleError: a key, a value or an option cannot be read.

    >>> rules = Rules({"0": "colwise", "2": "rowwise"})
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    >>> for tensor in rules.resolve(model, "tp=4").tensors.values():
    ...     print(f"{tensor.name:9} {str(tensor.layout):12} {tensor.note}")
    0.weight  out@tp in    column-parallel (out dim)
    0.bias    out@tp       column-parallel (out dim)
    2.weight  out in@tp    row-parallel (in dim)
    2.bias    out          replicated; added once after the reduction
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_keys(self.modes)
        for name in self.modes:
            try:
                self.mode(name)
            except RuleError as fault:
                raise RuleError(f'Mode "{name}": {fault}') from None

    @classmethod
    def of(cls, rules: Rules | Mapping[str, Any]) -> Rules:
        """Return `rules` as `Rules`; a plain mapping is wrapped."""
        return rules if isinstance(rules, Rules) else cls(rules)

    @classmethod
    def from_toml(cls, source: str | Path) -> Rules:
        """Read rules from the text of a layout file or from a path (a `Path`, or text that ends in ".toml").

        Raises:
            RuleError: the file is not TOML (with its line), or says something that rules do not know.

        >>> Rules.from_toml('[params]\\n"mlp.up" = "colwise"').rules
        {'mlp.up': Role(name='colwise')}
        """
        where, arguments = toml.read(source)
        try:
            return cls(**arguments)
        except RuleError as fault:
            raise RuleError(f"{where}: {fault}") from None

    def to_toml(self) -> str:
        """Return the text of a layout file; `Rules.from_toml(rules.to_toml()) == rules`."""
        return toml.write(self)

    @classmethod
    def from_tp_plan(cls, model: nn.Module, *, axis: str = "tp") -> Rules:
        """Convert the `tp_plan` that a Hugging Face model carries; see `shardlib.rules.foreign`."""
        from shardlib.rules import foreign  # it imports torch

        return cls(**foreign.read_tp_plan(model, axis))

    @classmethod
    def from_parallelize_plan(cls, plan: Mapping[str, Any], *, axis: str = "tp") -> Rules:
        """Convert a plan for torch's `parallelize_module`; see `shardlib.rules.foreign`."""
        from shardlib.rules import foreign  # it imports torch

        return cls(**foreign.read_parallelize_plan(plan, axis))

    @classmethod
    def from_logical_axes(cls, names: Any, rules: Iterable[logical.LogicalRule]) -> Rules:
        """Convert logical axes of flax, t5x and MaxText, as `flax.linen.logical_to_mesh_axes` reads them.

        The pairs stand in order of precedence: each gives its mesh axes to the dim of that name, unless the dim has
        axes already, or a pair with None, or another dim of the tensor has one of them. Names without a pair are not
        split. Names of dims become those of the layouts, paths in the tree those of tensors: `layers.0.kernel`.

        Args:
            names: a tree of dicts and lists whose leaves name the dims of a parameter: a tuple with a
                name, or None, for each; a `PartitionSpec` of names, as `nn.get_partition_spec` makes them; a box of
                flax (`nn.LogicallyPartitioned`), with or without a value. An array without a box is not sharded.
            rules: pairs of a logical name and a mesh axis, several of them, or None.

        Raises:
            RuleError: a leaf without names, or with one name twice; a malformed pair.

        >>> names = {"dense": {"kernel": ("embed", "mlp"), "bias": ("mlp",)}}
        >>> Rules.from_logical_axes(names, [("mlp", "tp"), ("embed", ("tp", "fsdp")), ("embed", "fsdp")])
        Rules({"^dense.kernel": "embed@fsdp mlp@tp", "^dense.bias": "mlp@tp"})
        """
        return cls(**logical.read_logical_axes(names, rules))

    def to_logical_axes(self, model: nn.Module, mesh: MeshLike) -> logical.LogicalAxes:
        """Return the layouts of a model's parameters and buffers as logical axes; the inverse of `from_logical_axes`.

        A logical name is the dim's name, where that has the same mesh axes in all tensors. Activations are not
        included: flax models constrain activations inside (`nn.with_logical_constraint`).

        Raises:
            RuleError: as `resolve`; a sharded factor of a fused dim.

        >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> axes = Rules({"0": "colwise", "2": "rowwise"}).to_logical_axes(model, "tp=4")
        >>> axes.names["0"], axes.names["2"]
        ({'weight': ('out', 'in'), 'bias': ('out',)}, {'weight': (None, 'in_tp'), 'bias': (None,)})
        >>> axes.rules
        [('out', 'tp'), ('in', None), ('in_tp', 'tp')]
        """
        return logical.write_logical_axes(self.resolve(model, mesh))

    @classmethod
    def from_maxtext(
        cls,
        config: str | Path | Mapping[str, Any] | Sequence[Any],
        names: Any,
        mesh: MeshLike,
        *,
        kinds: Mapping[str, AxisKind] | None = None,
    ) -> Rules:
        """Convert the `logical_axis_rules` of a configuration of MaxText, for the parameters that `names` lists.

        They are read as by `from_logical_axes`. Axes that the mesh does not have are left out afterwards, as MaxText
        leaves out axes of size one.

        Args:
            config: the path of a YAML file, whose `base_config` is read too, or its content; or several, which are
                merged as MaxText merges base.yml with a model's file: a later file replaces the pairs of its names, or
                all of them with `override_logical_axis_rules`.
            names: a tree of logical names, as for `from_logical_axes`.
            mesh: the mesh, with all or some of the configuration's `mesh_axes`.
            kinds: the kinds of mesh axes that are not registered. Those of MaxText's files are known.

        Raises:
            RuleError: as `from_logical_axes`; a pair gives a parameter an axis that is not in `mesh_axes`, or the mesh
                has such an axis; a configuration without rules.

        >>> config = {"mesh_axes": ["fsdp", "tensor"], "logical_axis_rules": [["embed", ["fsdp"]], ["mlp", "tensor"]]}
        >>> Rules.from_maxtext(config, {"wi": ("embed", "mlp")}, "fsdp=4")
        Rules({"^wi": "embed@fsdp mlp"})
        """
        return cls(maxtext.read_maxtext(config, names, mesh, kinds))

    @classmethod
    def from_keras_layout_map(
        cls,
        layout_map: Any,
        *,
        kinds: Mapping[str, AxisKind] | None = None,
        unmatched: Literal["error", "replicate"] = "error",
    ) -> Rules:
        """Convert a `keras.distribution.LayoutMap`, such as KerasHub's `Backbone.get_layout_map(device_mesh)`.

        Names are paths of variables with dots for slashes; give a tree `{variable.path: variable.value}`. A path that
        is a key has its layout. Otherwise keys are regular expressions, which match as they do in the version of Keras
        that made the map: the whole path, or in former versions a part of it. Keras refuses two keys that match one
        path; rules do if their layouts differ.

        Args:
            layout_map: the layout map. It may have no mesh.
            kinds: the kinds of mesh axes that are not known, as in `{"rows": "data"}`; "batch" is.
            unmatched: the treatment of variables that no key matches, which Keras replicates.

        Raises:
            RuleError: an axis of no known kind, or twice in one layout; a key that is no regular expression.

        >>> import keras  # doctest: +SKIP
        >>> layout_map = keras.distribution.LayoutMap(None)  # doctest: +SKIP
        >>> layout_map[".*dense.*kernel"] = (None, "model")  # doctest: +SKIP
        >>> Rules.from_keras_layout_map(layout_map, unmatched="replicate")  # doctest: +SKIP
        Rules({"tensor re:.*dense.*kernel": "_ _@model ..."}, unmatched='replicate')
        """
        return cls(specs.read_keras_layout_map(layout_map, kinds), unmatched=unmatched)

    def to_keras_layout_map(self, variables: Any, device_mesh: Any) -> Any:
        """Return a `keras.distribution.LayoutMap` with a key for each variable.

        Args:
            variables: the variables of a Keras model, or a mapping from their paths to arrays.
            device_mesh: a `keras.distribution.DeviceMesh`.

        Raises:
            RuleError: as `resolve`; two axes in one dim, which Keras cannot write.
            InputError: a dim that its axes do not divide.

        >>> layout_map = Rules({"up": "colwise"}).to_keras_layout_map(model.variables, mesh)  # doctest: +SKIP
        >>> keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="dp")  # doctest: +SKIP
        """
        tree = specs.structs_of_keras(variables)
        return specs.write_keras_layout_map(self.resolve(tree, specs.mesh_of_keras(device_mesh)), tree, device_mesh)

    @classmethod
    def from_partition_specs(
        cls,
        given: Any,
        *,
        kinds: Mapping[str, AxisKind] | None = None,
        unmatched: Literal["error", "replicate"] = "error",
    ) -> Rules:
        """Convert `PartitionSpec`s by name: a mapping from patterns, or a tree of the parameters' structure.

        Args:
            given: a mapping from names or patterns of rules to specs, with dots or slashes; or a tree of specs, as
                `nnx.get_partition_spec` and `nn.get_partition_spec` make them. A spec is a `PartitionSpec`, the one of
                a `NamedSharding`, a tuple, or None to replicate. Dims beyond its end are not split.
            kinds: the kinds of mesh axes that are not registered, as in `{"x": "data", "y": "model"}`.
            unmatched: the treatment of parameters that have no spec.

        Raises:
            RuleError: a leaf that is no spec, or leaves a dim to the compiler; an axis of no known kind, or twice in
                one spec.

        >>> Rules.from_partition_specs({"layers.*.wq.weight": ("fsdp", "tp"), "norm.weight": None})
        Rules({"layers.*.wq.weight": "_@fsdp _@tp ...", "norm.weight": "..."})
        """
        return cls(specs.read_partition_specs(given, kinds), unmatched=unmatched)

    def to_partition_specs(self, tree: Any, mesh: MeshLike) -> Any:
        """Return a tree of `PartitionSpec`s for a tree of arrays; the inverse of `from_partition_specs`.

        No device is needed. `shardlib.jax.shardings` gives `NamedSharding`s, also for gradients and optimizer state.

        Raises:
            RuleError: as `resolve`.
            InputError: a dim that its axes do not divide.
            LayoutError: a sharded factor of a fused dim, which no spec can say.

        >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((4, 8), "float32")}}  # doctest: +SKIP
        >>> Rules({"up": "colwise"}).to_partition_specs(tree, "tp=2")  # doctest: +SKIP
        {'up': {'kernel': P(None, 'tp')}}
        """
        read = Tree.of(tree)
        return specs.write_partition_specs(read, self.resolve(read.root, mesh))

    def with_stages(self, stages: StagesLike) -> Rules:
        """Return the same rules with other stages, as for those of a layout file.

        >>> Rules({"head": None}).with_stages("embed | head").stages
        'embed | head'
        """
        return replace(self, stages=stages)

    def mode(self, *names: str) -> Rules:
        """Return the rules with these modes applied: modes of the rules, or registered tensor modes such as "2d".

        Raises:
            RuleError: there is no such mode; a tensor mode that brings transforms, which rules cannot hold.

        >>> rules = Rules({"up": "colwise"}, modes={"split": {"activations": {"up.output": "... ff@tp"}}})
        >>> rules.mode("split")
        Rules({"up": "colwise"}, activations={"up.output": "... ff@tp"})
        """
        if not names:
            return self
        if any(name not in self.modes and name in registered_tensor_modes() for name in names):
            return functools.reduce(Rules._in_one_mode, names, self)
        changes = changes_of(self, names)
        given = {option: changes.pop(option) for option in ("axes", "sizes")}
        made = replace(self, **changes, axes={}, sizes={}, modes={})
        for option, by_name in given.items():  # rules that the mode replaced may have named others
            stated = {name for mode in names for name in self.modes[mode].get(option, ())}
            given[option] = {name: each for name, each in by_name.items() if name in stated or name in made.dim_names}
        return replace(made, **given)

    def _in_one_mode(self, name: str) -> Rules:
        if name in self.modes or name not in registered_tensor_modes():
            return self.mode(name)
        mode = tensor_mode(name)
        if mode.transforms:
            raise RuleError(
                f'Tensor mode "{name}" brings the transforms {mode.transforms}, which rules cannot hold. Take both '
                f"from shardlib.rules.tensor_mode({name!r}): its rules(...) and its transforms."
            )
        return mode.rules(self)

    def resolve(self, model: nn.Module | Any, mesh: MeshLike) -> Resolution:
        """Resolve a layout for every parameter and buffer of a model, and for the activations that need one.

        Pure: no process group and no device; the model may be on `meta`, or a tree of arrays of JAX.

        Raises:
            RuleError: a rule matches nothing, two rules disagree, a parameter has no rule, an axis is unknown or used
                twice, a layout does not fit its tensor, tied parameters get two layouts.
        """
        return Resolver(self, model, MeshShape.of(mesh)).resolution()

    def explain(self, name: str, model: nn.Module | None = None, mesh: MeshLike | None = None) -> str:
        """List the rules that match a name; with a model the layout that they give, and with a mesh the local shape.

        >>> print(Rules({"attn.qkv": "colwise"}).explain("blocks.0.attn.qkv.weight"))
        "blocks.0.attn.qkv.weight"
          rule "attn.qkv": "colwise" names its module "blocks.0.attn.qkv"
        """
        return _report.explain(self, name, model, None if mesh is None else MeshShape.of(mesh))

    def coverage(self, model: nn.Module, mesh: MeshLike | None = None) -> _report.Coverage:
        """Count the tensors and bytes that each rule covers; prints as a table. Unmatched rules and parameters are
        listed, not refused."""
        return _report.coverage(self, model, None if mesh is None else MeshShape.of(mesh))
