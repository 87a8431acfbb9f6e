"""Compilation of a module, a mesh and rules to a pure JAX function and its sharded parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib import _plan
from shardlib._plan import Phase, Plan, RulesLike, Transform
from shardlib.engine._torch import copied_with, pytree
from shardlib.errors import InputError, PlanError, check_flags, nearest
from shardlib.jax import _experts, _lowerings
from shardlib.jax._bits import to_numpy
from shardlib.jax._borders import Constraints
from shardlib.jax._context import refuse_explicit
from shardlib.jax._dtypes import as_dtype, torch_dtype, x64
from shardlib.jax._export import NO_SYMBOL, Around, Graph, Source, export
from shardlib.jax._given import check_keys, refuse_elsewhere
from shardlib.jax._interpreter import run
from shardlib.jax._mesh import shape_of
from shardlib.jax._narrow import fitting, refuse_narrowed
from shardlib.jax._opaque import Routing
from shardlib.jax._scan import Run, find_runs
from shardlib.jax._statistics import reduced_dim, without_dim
from shardlib.jax._storage import Storage, storage_of
from shardlib.jax.rules import PHASES, refuse_settings
from shardlib.rules.trees import name_of_path

__all__ = ["Compiled", "as_call", "compile_model", "structure_of"]

_UNDER_AUTO = (
    "Call it under axes of type Auto: "
    'jax.sharding.auto_axes(fn, out_sharding=jax.P("dp"))(params, x), with the sharding that the result has.'
)
assert _lowerings and _experts  # importing them filled the table
Arrays = dict[str, Any]


def compile_model(
    model: nn.Module,
    mesh: Mesh,
    rules: RulesLike | None = None,
    *,
    transforms: Transform | Sequence[Transform] = (),
    example: Any = None,
    matmul_precision: str | None = "highest",
    scan: bool = False,
) -> tuple[Compiled, Arrays]:
    """Convert a plain module to a pure JAX function, and its parameters to sharded arrays.

    `fn(params, *inputs)` returns the global outputs of global inputs, equal to the module's on one device. It can be
    jitted and differentiated. The module's present mode (`train()` or `eval()`) is kept.

    Args:
        model: a single-device module; it is copied, with its values.
        mesh: a JAX mesh, as from `make_mesh`.
        rules: a `Rules`, a mapping of patterns to layouts, or the name or path of a layout file; by default what
            `layouts.for_model` finds.
        transforms: a function from plan to plan, or several; `zero(1)`, `zero(2)`, `zero(3)`, `fsdp()`, `hsdp()` and
            `precision("bf16")` are shardings and dtypes here. A master copy is the array itself, in float32, which is
            rounded where the model uses it. The scale of the loss of `precision("fp16_naive")` is for `train_step`; the
            function alone does not scale.
        example: a global batch: a tuple of arguments, a mapping of keyword arguments, or one tensor. With it the graph
            is exported now, with its errors; without it, at the first call. Each other shape gets its own graph at its
            first call.
        matmul_precision: precision of products on accelerators, see `jax.default_matmul_precision`; None leaves it to
            JAX.
        scan: run repeated blocks that are alike as one body, by `jax.lax.scan` over their stacked parameters. The time
            of XLA's compilation then hardly grows with depth. Parameters keep their names and arrays; they are stacked
            at each call, which copies them.

    Returns:
        The function (see `Compiled`), and a dict from names to arrays of the trained parameters. An array has the shape
        of the tensor, except for fused dims of which one factor is sharded, whose factors become dims, and uneven ones,
        which are padded with zeros: `fn.to_torch(params)` has the model's own shapes.

    Raises:
        PlanError: the plan needs a feature of the torch engine only (a pipeline, offload, recomputation, ...); an op
            has no lowering; the model cannot be exported.
        InputError: its forward depends on values of tensors; it is of float64 and jax_enable_x64 is off; `scan`
            finds no two consecutive blocks alike.
        MeshError, RuleError, LayoutError: mesh and rules do not fit the model.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> from shardlib.jax import make_mesh
    >>> fn, params = compile_model(model, make_mesh("dp=1,tp=1"), {"0": "colwise", "2": "rowwise"})
    >>> jax.jit(fn)(params, jnp.ones((2, 4))).shape, params["0.weight"].sharding.spec
    ((2, 4), P('tp', None))
    """
    check_flags("compile_model", InputError, scan=scan)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"compile_model was given {type(model).__name__}; give a module of torch. For a tree of arrays there are "
            "shardlib.jax.shard_params and train_step."
        )
    shape = shape_of(mesh)
    if any(isinstance(tensor, DTensor) for tensor in (*model.parameters(), *model.buffers())):
        raise PlanError("The model is sharded already; compile the single-device model, before shard_model.")
    plan = _plan.make_plan(model, shape, rules, transforms=transforms)
    refuse_settings(plan, served=("capacity_factor",))
    stored = {row.name: storage_of(row, mesh, shape) for row in plan.rows}
    compiled = Compiled(
        structure_of(model, plan), plan, mesh, stored, _values_of(model, stored, plan), matmul_precision, scan
    )
    params = {row.name: compiled._first.pop(row.name) for row in plan.rows if row.requires_grad}
    compiled.buffers.update(compiled._first)
    if example is not None:
        compiled.prepare(example)
    return compiled, params


def structure_of(model: nn.Module, plan: Plan) -> nn.Module:
    """Copy the modules with tensors in their compute dtypes, without values."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    dtypes = {id(tensor): plan[name].compute.dtype for name, tensor in tensors.items()}
    return copied_with(model, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=dtypes.get(id(t)) or t.dtype))


def _values_of(model: nn.Module, stored: Mapping[str, Storage], plan: Plan) -> Arrays:
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {row.name: stored[row.name].to_array(tensors[row.name]) for row in plan.rows}


class Compiled:
    """The result of `compile_model`: a pure function, with the model's plan and tensors.

    Attributes:
        plan: the plan that it carries out.
        mesh: a JAX mesh.
        buffers: arrays that are not trained: buffers, and parameters that are frozen. A dict to pass on, or to keep.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        stored: Mapping[str, Storage],
        first: Arrays,
        matmul_precision: str | None,
        scan: bool = False,
    ) -> None:
        self.plan: Plan = plan
        self.mesh = mesh
        self.buffers: Arrays = {}
        self._model, self._stored, self._first = model, stored, first
        self._precision, self._scan = matmul_precision, scan
        self._graphs: dict[Any, Graph] = {}

    def __call__(self, params: Arrays, *args: Any, rng: Any = None, **kwargs: Any) -> Any:
        """Return the model's outputs, with the buffers' initial values.

        Args:
            params: arrays by name, as `compile_model` returned them, or updated ones.
            *args: arguments of the model's forward, with global batches; arrays replace tensors, other values are
                unchanged.
            rng: a key of JAX, for a model that draws (dropout in training mode).
            **kwargs: keyword arguments, likewise.

        Returns:
            The module's result, with arrays instead of tensors; a mapping (as of a Hugging Face model) as a dict.

        Raises:
            InputError: the model changes buffers, so that they must be passed (`apply`); it draws, and there is no
                key; arrays are missing, or of another shape.
        """
        results, changed = self._run(params, self.buffers, args, kwargs, rng)
        if changed:
            raise InputError(
                f"The model changes its buffers ({', '.join(list(changed)[:3])}{', ...' if len(changed) > 3 else ''}), "
                "and fn(params, ...) would lose the new values. Call outputs, buffers = fn.apply(params, fn.buffers, "
                "...), or compile the model in evaluation mode."
            )
        return results

    def apply(self, params: Arrays, buffers: Arrays, *args: Any, rng: Any = None, **kwargs: Any) -> tuple[Any, Arrays]:
        """Return `(outputs, buffers)` for a model that changes its buffers, as BatchNorm does; see `__call__`.

        >>> from shardlib.jax import make_mesh
        >>> fn, params = compile_model(nn.BatchNorm1d(3), make_mesh("dp=1"), {"**": None})
        >>> _, buffers = fn.apply(params, fn.buffers, jnp.ones((2, 3)))
        >>> int(buffers["num_batches_tracked"])
        1
        """
        results, changed = self._run(params, buffers, args, kwargs, rng)
        return results, {**buffers, **changed}

    def around(self, function: Callable[..., Any]) -> Compiled:
        """Compile `function(model, *args, **kwargs)`, written in torch, together with the model: for instance a loss.

        The result is called as this is, with the function's arguments; parameters and buffers are the same ones.

        >>> from shardlib.jax import make_mesh
        >>> fn, params = compile_model(nn.Linear(4, 3), make_mesh("dp=1"), {"**": None})
        >>> loss = fn.around(lambda model, x, y: nn.functional.cross_entropy(model(x), y))
        >>> bool(loss(params, jnp.ones((2, 4)), jnp.array([0, 2])) > 0)
        True
        """
        model = Around(function, self._model)
        made = Compiled(model, self.plan, self.mesh, self._stored, {}, self._precision, self._scan)
        made.buffers = self.buffers
        return made

    def prepare(self, example: Any) -> Graph:
        """Export the graph for a batch of these shapes now, and raise its errors."""
        return self._graph(*_flat_arguments(*as_call(example)))

    def shardings(self, tree: Any, phase: Phase = "stored") -> Any:
        """Return a tree of `NamedSharding`s for a tree of arrays with the parameters' names, such as optax's state.

        An array with a parameter's name and shape has the plan's sharding for the phase: "state" for an optimizer's
        state, "grad" for gradients, "stored" for parameters. An array of an optimizer's state that lacks one dim of its
        parameter, as Adafactor's means of rows and columns do, has the layout of the other dims. Everything else is
        replicated.

        >>> from shardlib.jax import make_mesh
        >>> fn, params = compile_model(nn.Linear(4, 8), make_mesh("dp=1,tp=1"), {"*": "out@tp ..."})
        >>> fn.shardings({"mu": params, "count": jnp.zeros(())}, "state")["mu"]["weight"].spec
        P('tp', None)
        """
        if phase not in PHASES:
            raise InputError(f"shardings(phase={phase!r}) was given; give one of {', '.join(PHASES)}.")
        replicated = NamedSharding(self.mesh, PartitionSpec())

        def find(path: Any, leaf: Any) -> NamedSharding:
            names = [str(getattr(key, "key", "")) for key in path]
            stored = next((self._stored[name] for name in reversed(names) if name in self._stored), None)
            if stored is None or phase not in stored.specs:
                return replicated
            if (shape := tuple(np.shape(leaf))) == stored.array_shape:
                return stored.sharding(phase)
            dim = reduced_dim(stored.array_shape, shape, name_of_path(path)) if phase == "state" else None
            return replicated if dim is None else NamedSharding(self.mesh, without_dim(stored.specs[phase], dim))

        return jax.tree_util.tree_map_with_path(find, tree)

    def to_torch(self, arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Convert arrays by name (parameters, gradients, buffers) to unsharded tensors with the model's shapes; copies.

        Arrays over several processes are gathered: every process has to call this, and gets the whole tensors.
        """
        return {name: self._storage(name).to_torch(array) for name, array in arrays.items()}

    def from_torch(self, tensors: Mapping[str, torch.Tensor]) -> Arrays:
        """Convert tensors by name, with the model's shapes, to arrays with the plan's layouts; copies. The inverse of
        `to_torch`.

        Tied parameters may have any of their names.
        """
        rows = {self.plan[name].name: tensor for name, tensor in tensors.items()}
        return {name: self._storage(name).to_array(tensor) for name, tensor in rows.items()}

    @property
    def model(self) -> nn.Module:
        """The modules that were compiled, whose tensors have shapes and dtypes and no values."""
        return self._model.around if isinstance(self._model, Around) else self._model

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shape, dtype and sharding of every array by name, as restoring a checkpoint needs them."""
        return {name: stored.abstract() for name, stored in self._stored.items()}

    def _storage(self, name: str) -> Storage:
        if name not in self._stored:
            raise InputError(f'The model has no tensor "{name}".{nearest(name, self._stored)}')
        return self._stored[name]

    def _run(
        self, params: Arrays, buffers: Arrays, args: tuple[Any, ...], kwargs: dict[str, Any], rng: Any
    ) -> tuple[Any, Arrays]:
        refuse_explicit("A compiled model", _UNDER_AUTO)
        arrays = self._checked(params, buffers)
        leaves, structure = _flat_arguments(args, kwargs)
        self._check_given(arrays, leaves, rng)
        graph = self._graph(leaves, structure)
        if graph.random and rng is None:
            raise InputError(
                "The model draws random numbers (dropout, in training mode); pass rng=jax.random.key(seed), another "
                "one each step, or compile the model in evaluation mode."
            )
        given = [_as_array(leaf) for leaf in leaves if _is_array(leaf)]
        rows = next((leaf.shape[0] for leaf in given if leaf.ndim), 0)
        constraints = Constraints(graph, self.plan.borders, self.mesh, self.plan.mesh, rows)
        batch = iter([constraints.on_batch(leaf) for leaf in given])
        runs = self._runs(graph, constraints) if self._scan else []
        stacked = _stacked_alone(runs)

        def stored(node: torch.fx.Node) -> tuple[Any, Storage | None]:
            source = graph.sources[node]
            if source.kind == "constant":
                return _constant(source), None
            name = self.plan[source.name].name
            return arrays[name], self._stored[name]

        values: Arrays = {}
        inputs: dict[torch.fx.Node, Any] = {}
        for node, source in graph.sources.items():
            if node in stacked:
                continue
            if source.kind == "tensor":
                name = self.plan[source.name].name
                if name not in values:
                    values[name] = self._stored[name].value(arrays[name])
                inputs[node] = values[name]
            elif source.kind == "constant":
                inputs[node] = _constant(source)
            elif isinstance(node.meta.get("val"), torch.Tensor):
                inputs[node] = next(batch).astype(as_dtype(node.meta["val"].dtype))
            else:
                inputs[node] = node.meta.get("val")
        with jax.default_matmul_precision(self._precision):
            results, changed = run(graph, inputs, constraints, rng, runs, stored)
        kept = {self.plan[name].name: value for name, value in changed.items()}
        outputs = _plain(pytree.tree_unflatten(results, graph.structure))
        return outputs, {name: self._stored[name].kept(value) for name, value in kept.items()}

    def _runs(self, graph: Graph, constraints: Constraints) -> list[Run]:
        def form(node: torch.fx.Node) -> Any:
            source = graph.sources[node]
            if source.kind == "constant":
                return str(source.value.dtype), tuple(source.value.shape)
            return dataclasses.replace(self._stored[self.plan[source.name].name], name="")

        runs = find_runs(graph, self.plan.repeated, constraints, form)
        if not runs:
            blocks = ", ".join(self.plan.repeated[:4]) or "none"
            raise InputError(
                f"compile_model(scan=True) found no two consecutive blocks that compute alike; the repeated blocks are "
                f"{blocks}. Blocks are alike whose ops, shapes and layouts are the same, which have their tensors to "
                "themselves, and each of which reads the results of the one before. Leave scan out."
            )
        return runs

    def _checked(self, params: Arrays, buffers: Arrays) -> Arrays:
        for given in (params, buffers):
            if not isinstance(given, Mapping) or any(isinstance(array, torch.Tensor) for array in given.values()):
                raise InputError(
                    f"A compiled model was given {type(given).__name__} as its parameters or buffers; give the dict of "
                    "arrays that compile_model returned, or fn.buffers. fn.from_torch converts tensors."
                )
        arrays = {**buffers, **params}
        if missing := [name for name in self._stored if name not in arrays]:
            raise InputError(
                f"{len(missing)} arrays are missing, {', '.join(missing[:3])} among them: give all that compile_model "
                "returned, and fn.buffers."
            )
        if unknown := [name for name in arrays if name not in self._stored]:
            raise InputError(f'The model has no tensor "{unknown[0]}".{nearest(unknown[0], self._stored)}')
        self.check_shapes(arrays)
        return arrays

    def _check_given(self, arrays: Arrays, leaves: Sequence[Any], rng: Any) -> None:
        """Refuse shapes without values, arrays on other devices, and what is no key."""
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in (*arrays.values(), *leaves)):
            raise InputError(
                "A compiled model was called with shapes, and computes with values. Give arrays, or call "
                "jax.eval_shape(fn, params, x) or jax.jit(fn).lower(params, x)."
            )
        for leaf in leaves:
            refuse_elsewhere(leaf, self.mesh, "An argument")
        for name, array in arrays.items():
            refuse_elsewhere(array, self.mesh, f'"{name}"')
        if rng is not None:
            check_keys(rng)
            refuse_elsewhere(rng, self.mesh, "rng")

    def check_shapes(self, arrays: Mapping[str, Any]) -> None:
        """Refuse arrays by name that have other shapes than those of `compile_model`."""
        for name, array in arrays.items():
            if tuple(array.shape) != (wanted := self._storage(name).array_shape):
                raise InputError(
                    f'"{name}" was given as an array of shape {tuple(array.shape)}; it is {wanted}. '
                    "fn.from_torch({name: tensor}) makes arrays of the right shape from the model's tensors."
                )

    def _graph(self, leaves: list[Any], structure: Any) -> Graph:
        key = (tuple(_key_of(leaf) for leaf in leaves), str(structure))
        if key not in self._graphs:
            examples = [_example(leaf) for leaf in leaves]
            symbolic = [(example, _symbols(leaf)) for example, leaf in zip(examples, leaves, strict=True)]
            args, kwargs = pytree.tree_unflatten(examples, structure)
            self._graphs[key] = export(
                self._model, args, kwargs, Routing.of(self.plan), [pair for pair in symbolic if pair[1]]
            )
        return self._graphs[key]


def as_call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as positional and keyword arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if not isinstance(example, tuple):
        return (example,), {}
    both = len(example) == 2 and isinstance(example[0], tuple) and isinstance(example[1], Mapping)
    return (example[0], dict(example[1])) if both else (example, {})


def _stacked_alone(runs: Sequence[Run]) -> set[torch.fx.Node]:
    """Return the tensors that nothing but the scanned blocks reads."""
    scanned = {node for each in runs for nodes in each.blocks for node in nodes}
    tensors = {node for each in runs for own in each.stacked.values() for node in own}
    return {node for node in tensors if scanned.issuperset(node.users)}


def _flat_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    return pytree.tree_flatten((args, kwargs))


def _is_array(leaf: Any) -> bool:
    arrays = torch.Tensor | np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct
    return isinstance(leaf, arrays) or hasattr(leaf, "aval")


def _as_array(leaf: Any) -> Any:
    values = to_numpy(leaf) if isinstance(leaf, torch.Tensor) else leaf
    return jnp.asarray(fitting(values, "An argument") if isinstance(values, np.ndarray | np.generic) else values)


def _constant(source: Source) -> Any:
    return jnp.asarray(fitting(to_numpy(source.value), f'The constant "{source.name}"'))


def _key_of(leaf: Any) -> Any:
    """Return the cache key of a leaf: arrays by shape and dtype, anything else by value."""
    if not _is_array(leaf):
        return type(leaf).__name__, repr(leaf)
    return tuple(n if isinstance(n, int) else str(n) for n in leaf.shape), _dtype_of(leaf)


def _dtype_of(leaf: Any) -> torch.dtype:
    """Return torch's dtype for a leaf: indices have 64 bits there, and 32 in JAX by default."""
    dtype = leaf.dtype if isinstance(leaf, torch.Tensor) else torch_dtype(leaf.dtype)
    if not x64() and dtype == torch.int32:
        return torch.int64
    refuse_narrowed(dtype, "An argument", convert="the model with .float()")
    return dtype


_SIZE = 12  # of a symbolic dim, where torch traces the model; any that no other dim is likely to have


def _example(leaf: Any) -> Any:
    if not _is_array(leaf):
        return leaf
    return torch.zeros([n if isinstance(n, int) else _SIZE for n in leaf.shape], dtype=_dtype_of(leaf))


def _symbols(leaf: Any) -> dict[int, str]:
    """Return the names of an array's symbolic dims, by dim."""
    if not _is_array(leaf):
        return {}
    found = {dim: str(n) for dim, n in enumerate(leaf.shape) if not isinstance(n, int)}
    if strange := [name for name in found.values() if not name.isidentifier()]:
        raise InputError(
            f'The model was given an array of symbolic shape {tuple(leaf.shape)}; its dim "{strange[0]}" is an '
            f"expression, and torch.export takes symbols. {NO_SYMBOL}"
        )
    return found


def _plain(tree: Any) -> Any:
    """Convert containers to JAX's: a mapping of any kind becomes a dict."""
    if isinstance(tree, Mapping):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(_plain, tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map(_plain, tree))
    return tree
