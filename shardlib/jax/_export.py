"""Export of a module to a functional graph: `torch.export`, without in-place ops and views.

What an export forgets is marked on its nodes before: which of them run without gradients. Errors are explained.
"""

from __future__ import annotations

import dataclasses
import operator
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind

from shardlib.engine._torch import Op, decomposition_of
from shardlib.errors import InputError, PlanError, ShardlibError, nearest
from shardlib.jax._narrow import refuse_narrowed
from shardlib.jax._one_expert import OneExpert
from shardlib.jax._opaque import Found, Routing, opaque
from shardlib.jax._table import find_lowering, known_ops

__all__ = ["NO_SYMBOL", "Around", "Graph", "Source", "export", "module_path", "of_sizes", "without_gradient"]

_MARK = "shardlib_no_grad"


@dataclass(frozen=True)
class Source:
    """The source of a graph input: "tensor", of the model, by its name; "constant"; "argument"."""

    kind: str
    name: str
    value: Any = None


@dataclass(frozen=True)
class Graph:
    """An exported module.

    Attributes:
        nodes: in the order of execution, without inputs and outputs.
        sources: for each input node where its value comes from.
        results: the nodes, or constants, that the model returns, flat.
        changed: the buffers that it changes, each with the node of its new value.
        structure: the tree structure of `results`.
        programs: what one expert computes of one token, by the numbers that ops of experts have.
    """

    nodes: tuple[torch.fx.Node, ...]
    sources: Mapping[torch.fx.Node, Source]
    results: tuple[Any, ...]
    changed: Mapping[str, torch.fx.Node]
    structure: Any
    programs: tuple[Graph, ...] = ()

    @property
    def random(self) -> bool:
        """Whether it draws random numbers."""
        return any(_draws(node) for node in self.nodes)


def _draws(node: torch.fx.Node) -> bool:
    """Return whether a node draws random numbers: attention and recurrent layers only do with a positive probability
    of dropout."""
    found = find_lowering(node.target) if hasattr(node.target, "namespace") else None
    if found is None or not found.random:
        return False
    name = node.target.__name__  # type: ignore[union-attr]
    if name.startswith("scaled_dot_product"):
        return float(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)) > 0  # type: ignore[arg-type]
    if name.startswith(("lstm", "gru", "rnn_")):
        dropout, train = node.args[5:7]
        return bool(train) and float(dropout) > 0  # type: ignore[arg-type]
    return True


Symbolic = Sequence[tuple[torch.Tensor, Mapping[int, str]]]
NO_SYMBOL = (
    "Export a program for each number of rows: jax.export.export(jax.jit(fn))(fn.abstract(), "
    "jax.ShapeDtypeStruct((8, ...), dtype))."
)


def export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], routing: Routing, symbolic: Symbolic = ()
) -> Graph:
    """Export the graph of a module for arguments of these shapes. Its modules of experts become one op each.

    Args:
        model: the module.
        args: examples of its arguments.
        kwargs: examples of its keyword arguments.
        routing: how modules of experts are recognised, and route.
        symbolic: tensors among the examples, each with its dims that may have any size, and their names.

    Raises:
        InputError: its forward depends on values of tensors; the message points at the line.
        PlanError: it cannot be exported for another reason, or has ops that no lowering is registered for; all of
            them are listed.
    """
    with opaque(model, routing, named) as found:
        graph = _graph_of(model, args, kwargs, symbolic, found)
    return dataclasses.replace(graph, programs=tuple(_of_one(*each) for each in found.programs))


def _graph_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], symbolic: Symbolic, found: Found
) -> Graph:
    try:
        program = _exported(model, args, kwargs, symbolic)
    except ShardlibError:
        raise
    except Exception as error:
        raise _explained(error, model, symbolic, found) from error
    graph = _read(program)
    _refuse_varying_shapes(graph, found)
    _refuse_unknown(graph)
    _refuse_narrow_nodes(graph)
    return graph


def _of_one(name: str, one: OneExpert) -> Graph:
    """Export what one expert computes. Its constants are part of the graph."""
    try:
        graph = _graph_of(one.program, one.example, {}, (), Found())
    except ShardlibError as error:
        raise type(error)(f'One expert of "{name}" cannot be compiled. {error}') from error
    own = {key: Source("constant", key, value) for key, value in one.program.named_buffers()}
    return dataclasses.replace(graph, sources={node: own.get(s.name, s) for node, s in graph.sources.items()})


def _exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], symbolic: Symbolic
) -> torch.export.ExportedProgram:
    with warnings.catch_warnings():
        # torch.export's own use of its trees (2.13); no model can do anything about it.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
        dynamic = _dynamic(model, args, kwargs, symbolic)
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic, strict=False)
        for node in program.graph.nodes:
            _mark(node)
        return _decomposed(program.run_decompositions({}))


def _dynamic(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], symbolic: Symbolic) -> Any:
    """Return torch's `dynamic_shapes`: dims of one name have one size."""
    if not symbolic:
        return None
    found = torch.export.ShapesCollection()
    dims = {name: torch.export.Dim(name) for _, names in symbolic for name in names.values()}
    for tensor, names in symbolic:
        found[tensor] = {dim: dims[name] for dim, name in names.items()}
    return found.dynamic_shapes(model, args, kwargs)


def _decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Decompose ops without a lowering, and those that they come apart into, for as long as torch can.

    Ops with a lowering stay whole: they keep torch's gradients, and dims that a mesh shards.
    """
    table: dict[Any, Callable[..., Any]] = {}
    whole: set[Any] = set()
    while found := {op: how for op in _missing(program) - table.keys() - whole if (how := decomposition_of(op))}:
        done = _applied(program, table | found)
        if done is None:
            whole |= {op for op, how in found.items() if _applied(program, table | {op: how}) is None}
            found = {op: how for op, how in found.items() if op not in whole}
            done = _applied(program, table | found)
        if done is None:  # each can be decomposed, and not all of them
            return program
        table |= found
        program = done
    return program


def _applied(program: torch.export.ExportedProgram, table: Mapping[Any, Any]) -> torch.export.ExportedProgram | None:
    """Return the program with ops decomposed, or None if torch cannot, makes ops with effects of them, or takes apart
    ops with a lowering beside them."""
    try:
        done = program.run_decompositions(dict(table))
    except Exception:
        return None
    has_effects = any(spec.kind is InputKind.TOKEN for spec in done.graph_signature.input_specs)
    return None if has_effects or _whole(program) - _whole(done) else done


def _whole(program: torch.export.ExportedProgram) -> Counter[Any]:
    """Count the ops with a lowering."""
    nodes = (node for node in program.graph.nodes if node.op == "call_function")
    return Counter(node.target for node in nodes if isinstance(node.target, Op) and _lowering_name(node) is None)


def _missing(program: torch.export.ExportedProgram) -> set[Any]:
    nodes = (node for node in program.graph.nodes if node.op == "call_function")
    return {node.target for node in nodes if isinstance(node.target, Op) and _lowering_name(node) is not None}


class Around(nn.Module):
    """A function of a module and of further arguments, as a module: both are exported together.

    The names of the module's tensors and parts stay its own: `named` takes this module's out of them.
    """

    def __init__(self, function: Callable[..., Any], model: nn.Module) -> None:
        super().__init__()
        self.function, self.around = function, model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.around, *args, **kwargs)


_AROUND = f"{Around.__module__}.{Around.__qualname__}"  # as torch.export notes the class


def named(name: str) -> str:
    """Return a name as in the model, whether or not the model was exported inside of a function."""
    return "" if name == "around" else name.removeprefix("around.")


def _mark(node: torch.fx.Node) -> None:
    """Mark a node; every node that derives from it inherits the mark."""
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled":
        node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: not node.args[0]}


def without_gradient(node: torch.fx.Node) -> bool:
    """Return whether the model computes a node under `torch.no_grad()`."""
    return bool(node.meta.get("custom", {}).get(_MARK))


def module_path(node: torch.fx.Node) -> tuple[str, ...]:
    """Return the names of the modules that a node runs in, outermost first; empty for a function around the model."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return tuple(named(name) for name, kind in stack if kind != _AROUND)


def _read(program: torch.export.ExportedProgram) -> Graph:
    inputs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
    sources: dict[torch.fx.Node, Source] = {}
    nodes, output = [], None
    for node in program.graph.nodes:
        if node.op == "placeholder":
            sources[node] = _source(inputs[node.name], program)
        elif node.op == "call_function":
            nodes.append(node)
        elif node.op == "output":
            output = node
        else:
            raise PlanError(
                f'The exported graph has a node of kind "{node.op}" ({node.name}), which no lowering knows.'
            )
    assert output is not None
    changed, results = {}, []
    for spec, value in zip(program.graph_signature.output_specs, output.args[0], strict=True):  # type: ignore[arg-type]
        if spec.kind is OutputKind.BUFFER_MUTATION:
            changed[named(str(spec.target))] = value
        elif spec.kind is OutputKind.USER_OUTPUT:
            results.append(value)
        else:
            raise PlanError(
                f"The model changes its {spec.kind.name.lower().replace('_', ' ')} {spec.target} in place. JAX arrays "
                "do not change: return the new value, or keep it in a buffer."
            )
    return Graph(tuple(nodes), sources, tuple(results), changed, program.call_spec.out_spec)


def _source(spec: Any, program: torch.export.ExportedProgram) -> Source:
    if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
        return Source("tensor", named(str(spec.target)))
    if spec.kind is InputKind.CONSTANT_TENSOR:
        return Source("constant", str(spec.target), program.constants[spec.target])
    if spec.kind is InputKind.USER_INPUT:
        return Source("argument", spec.arg.name)
    raise PlanError(f"The exported graph has an input of kind {spec.kind.name}, which the JAX engine does not know.")


# --- refusals -------------------------------------------------------------------------------------------------------


def _refuse_unknown(graph: Graph) -> None:
    """Refuse ops without a lowering, all at once, each with the modules that need it."""
    missing: dict[str, dict[str, None]] = {}
    for node in graph.nodes:
        if node.target is not operator.getitem and _lowering_name(node) is not None:
            missing.setdefault(str(_lowering_name(node)), {})[(module_path(node) or ("",))[-1] or "(root)"] = None
    if not missing:
        return
    lines = [
        f"  {op}, needed by {', '.join(list(where)[:4])}{f' and {len(where) - 4} more' if len(where) > 4 else ''}"
        f"{nearest(op, known_ops())}"
        for op, where in sorted(missing.items())
    ]
    raise PlanError(
        f"{len(missing)} {'ops have' if len(missing) > 1 else 'op has'} no lowering to JAX:\n"
        + "\n".join(lines)
        + "\nRegister each with @shardlib.jax.lowering(op), a function on jax arrays with the op's own arguments, or "
        "write the module with other ops."
    )


def _lowering_name(node: torch.fx.Node) -> str | None:
    """Return the name of an op without a lowering, or None for one that has a lowering."""
    target: Any = node.target
    if of_sizes(node):
        return None
    if not hasattr(target, "namespace") or not hasattr(target, "overloadpacket"):
        return str(getattr(target, "__name__", target))
    name = f"{target.namespace}::{target.__name__}"
    return None if name == "aten::_assert_tensor_metadata.default" or find_lowering(target) else name


def of_sizes(node: torch.fx.Node) -> bool:
    """Return whether a node computes with sizes of arguments, or checks them, and not with arrays."""
    checks = ("_assert_scalar", "sym_constrain_range")
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool) or getattr(
        node.target, "__name__", ""
    ).startswith(checks)


def _refuse_varying_shapes(graph: Graph, found: Found) -> None:
    """Refuse results whose shape depends on values, as of `x[mask]` and `nonzero`, and numbers read from tensors."""
    for node in graph.nodes:
        value = node.meta.get("val")
        where = (module_path(node) or ("",))[-1] or "(root)"
        if isinstance(value, torch.Tensor) and any(_depends(size) for size in value.shape):
            raise InputError(
                f'In "{where}" the shape of what {node.target} gives depends on values of tensors{_line_in(node)}. A '
                f"compiled program has fixed shapes. Use torch.where(mask, x, other) in place of x[mask].{found.hint}"
            )
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and _depends(value):
            raise InputError(
                f'In "{where}" {node.target} makes a Python number of a tensor{_line_in(node)}. A compiled program is '
                "the same for all values. Compute with the tensor itself, or pass the number as an argument."
                f"{found.hint}"
            )


def _depends(size: Any) -> bool:
    """Return whether a number depends on values: torch calls such ones u0 or zuf0, and sizes of arguments s0."""
    return not isinstance(size, int) and re.search(r"\b(u|zuf)\d", str(size)) is not None


def _line_in(node: torch.fx.Node) -> str:
    code = (node.meta.get("stack_trace") or "").strip().splitlines()
    return f", at {code[-2].strip()}: `{code[-1].strip()}`" if len(code) > 1 else ""


def _refuse_narrow_nodes(graph: Graph) -> None:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            where = (module_path(node) or ("",))[-1] or "(root)"
            what = f'What "{where}" computes with {node.target}'
            refuse_narrowed(value.dtype, what, convert="the model with .float()")


_DEPENDS = ("data-dependent", "DataDependent", "data dependent", "Could not guard", "unbacked")


def _explained(error: Exception, model: nn.Module, symbolic: Symbolic, found: Found) -> Exception:
    where = _line_of(error)
    text = f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    # Of a size that is a symbol, torch says below the first line what the model asks of it.
    first = next((line[2:] for line in lines[1:] if line.startswith("- ") and symbolic), lines[0])
    if any(word in text for word in _DEPENDS):
        return InputError(
            f"{type(model).__name__} cannot be compiled: its forward depends on values of tensors{where}. A compiled "
            "program is the same for all values. Use torch.where in place of if, a mask in place of an index of "
            f"varying length, or pass the number as an argument. (torch.export: {first}){found.hint}"
        )
    hint = " Pass use_cache=False." if "Cache" in text else ""
    hint += f" Its graph may be another one for other sizes. {NO_SYMBOL}" if symbolic else ""
    return PlanError(f"{type(model).__name__} cannot be exported{where}: {first.rstrip('.')}.{hint}")


_NOT_THEIRS = ("/torch/", "/shardlib/jax/", "/contextlib.py", "/inspect.py", "<")


def _line_of(error: BaseException | None) -> str:
    """Return the innermost line of the traceback that is neither torch's nor ours."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if not any(part in frame.filename for part in _NOT_THEIRS):
                return f", at {frame.filename}:{frame.lineno}, in {frame.name}: `{frame.line}`"
        error = error.__cause__ or error.__context__
    return ""
