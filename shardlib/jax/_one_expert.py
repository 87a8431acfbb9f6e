"""The computation of one expert on one token, as a program without routing, from a module that loops over experts.

A module of experts asks which tokens chose an expert. With one expert and one token the answer is known, so its forward
runs there with real numbers of experts, and the ops on the token, its weight and the expert's parameters are recorded.
All else that it computes is constant. The record is proved: with two experts and several tokens, the module has to
return the sum of what the record returns, with the same gradients.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardlib.engine import _torch
from shardlib.engine._torch import Op, TorchDispatchMode, pytree
from shardlib.engine.feature.experts import holding

__all__ = ["NotSeparableError", "OneExpert", "one_expert_of"]


class NotSeparableError(Exception):
    """A module of experts does not compute each choice of each token by itself; its text completes "since ..."."""


@dataclass(frozen=True)
class OneExpert:
    """The computation of one expert on one token.

    Attributes:
        program: takes the token (1, embed), its weight (1, 1), and each parameter with one expert (1, ...); returns
            (1, embed).
        example: tensors that it takes.
        dtype: of the result.
    """

    program: torch.fx.GraphModule
    example: tuple[torch.Tensor, ...]
    dtype: torch.dtype

    @property
    def form(self) -> tuple[Any, ...]:
        """A value that is equal for programs that compute the same."""
        constants = ((name, str(value.dtype), value.tolist()) for name, value in self.program.named_buffers())
        return self.program.code, repr(list(constants)), tuple((x.shape, x.dtype) for x in self.example), self.dtype


def one_expert_of(module: nn.Module, experts: int, tokens: torch.Tensor, weights: torch.Tensor) -> OneExpert:
    """Return what one of a module's experts computes of one token. Values of `tokens` and `weights` are not read.

    Raises:
        NotSeparableError: the forward depends on values of tokens, draws random numbers, raises, or does not return the
            sum of what each chosen expert makes of each token.
    """
    if any(True for _ in module.buffers()):
        raise NotSeparableError("it has buffers, which belong to no expert")
    with _torch.no_modes(), torch.enable_grad():
        params, _ = _torch.own_tensors(module)
        draw = torch.Generator().manual_seed(0)
        two = {
            name: _random((min(2, experts), *param.shape[1:]), param.dtype, draw)
            for name, param in params.items()
            if param is not None
        }
        rows = _random((3, tokens.shape[1]), tokens.dtype, draw), _random((3, 2), weights.dtype, draw).sigmoid()
        try:
            found = _recorded(module, experts, (rows[0][:1], rows[1][:1, :1], *(p[:1].clone() for p in two.values())))
            for numbers in ([[0, 1], [1, 0], [0, 1]], [[1], [1], [1]]) if experts > 1 else ([[0], [0], [0]],):
                _prove(found, module, experts, rows, torch.tensor(numbers), two)
        except NotSeparableError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}".rstrip(": ")
            raise NotSeparableError(f"it raises {said!r} for a few tokens that choose one or two experts") from error
    return found


def _random(shape: Sequence[int], dtype: torch.dtype, draw: torch.Generator) -> torch.Tensor:
    """Return numbers that a product of matrices keeps at the size of one."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    drawn = torch.rand(tuple(shape), generator=draw, device="cpu", dtype=exact).sub_(0.5)
    return drawn.mul_(math.sqrt(12 / (shape[-1] if len(shape) > 2 else 1))).to(dtype)


# --- recording ------------------------------------------------------------------------------------------------------


def _recorded(module: nn.Module, experts: int, example: tuple[torch.Tensor, ...]) -> OneExpert:
    recorder = _Recorder(example)
    numbers = torch.zeros((1, 1), dtype=torch.int64, device="cpu")

    token, weight, *params = example
    names = [name for name, param in _torch.own_tensors(module)[0].items() if param is not None]
    own = dict(zip(names, params, strict=True))
    with torch.no_grad(), recorder, _Unreadable(recorder), holding(module, own, experts, 1):
        result = module.forward(token, numbers, weight)
    program = recorder.returning(result, token.shape)
    return OneExpert(program, example, result.dtype)


class _Recorder(TorchDispatchMode):
    """Records the ops on some tensors, and on what is computed from them; ops on nothing else just run.

    A value of a recorded tensor cannot be read.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.graph, self.root = torch.fx.Graph(), nn.Module()
        self._nodes: dict[int, torch.fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # so that no other tensor gets the id of one of them
        for at, tensor in enumerate(inputs):
            self._keep(tensor, self.graph.placeholder(f"x{at}"))

    def __torch_dispatch__(self, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise NotSeparableError(f"it draws random numbers ({op})")
        if not any(map(self.has, pytree.tree_leaves((args, kwargs)))):
            return op(*args, **kwargs)
        args = self._refuse_values(op, args)
        taken = self._product(*args, **kwargs) if _is_grouped(op) else self._without_rows(op, args, kwargs)
        # Before the op runs, which may write to a constant.
        operands = pytree.tree_map_only(torch.Tensor, self._node, taken[1:])
        node = self.graph.call_function(_out_of_place(taken[0]), *operands)
        result = op(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._keep(result, node)
        for at, each in enumerate(result if isinstance(result, list | tuple) else ()):
            if isinstance(each, torch.Tensor):
                self._keep(each, self.graph.call_function(operator.getitem, (node, at)))
        return result

    def has(self, value: Any) -> bool:
        """Return whether a value is a recorded tensor."""
        return id(value) in self._nodes

    def _refuse_values(self, op: Op, args: Any) -> Any:
        """Refuse an op that reads values; return its arguments, where a constant mask is an index."""
        if op.overloadpacket in _INDEXED:
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            if not any(map(self.has, masks)):
                return args[0], [index for each in args[1] for index in _as_index(each)], *args[2:]
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.intersection(op.tags) and (
            op.overloadpacket not in _INDEXED or masks
        ):
            raise NotSeparableError(f"what it does depends on values of tokens, weights or parameters ({op})")
        return args

    def _product(self, row: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor, *more: Any) -> Any:
        """Return the one product that a grouped one is, of a row and an expert's matrix."""
        if matrices.shape[0] != 1 or offs.tolist() != [len(row)] or any(each is not None for each in more):
            raise NotSeparableError("a grouped product has more than the groups of its experts")
        matrix = self.graph.call_function(torch.ops.aten.select.int, (self._node(matrices), 0, 0))
        return torch.ops.aten.mm.default, (row, matrix), {}

    def _without_rows(self, op: Op, args: Any, kwargs: dict[str, Any]) -> tuple[Op, Any, dict[str, Any]]:
        """Return an op without the index of the one token or expert that there is: a lookup is a reshape, and to add to
        a row is to add."""
        if op.overloadpacket in (torch.ops.aten.index, torch.ops.aten._unsafe_index):
            sizes = [size for size, index in zip(args[0].shape, args[1], strict=False) if index is not None]
            result = op(*args)
            if all(size == 1 for size in sizes) and result.numel() == args[0].numel():
                return torch.ops.aten.reshape.default, (args[0], list(result.shape)), {}
        if op.overloadpacket in _ADDED and not kwargs:
            total, dim, _, added = args
            if total.shape == added.shape and total.shape[dim] == 1:
                return _ADDED[op.overloadpacket], (total, added), {}
        return op, args, kwargs

    def _keep(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def _node(self, tensor: torch.Tensor) -> torch.fx.Node:
        """Return the node of a tensor. A constant may be written to later: each use has its present value."""
        if self.has(tensor):
            return self._nodes[id(tensor)]
        name = f"constant_{len(list(self.root.buffers()))}"
        self.root.register_buffer(name, tensor.clone())
        return self.graph.get_attr(name)

    def returning(self, result: Any, shape: Sequence[int]) -> torch.fx.GraphModule:
        """Return the program that computes a result."""
        node = self._nodes.get(id(result))
        if node is None or result.shape != shape:
            shown = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise NotSeparableError(f"for a token of shape {tuple(shape)} it returns {shown}")
        self.graph.output(node)
        return torch.fx.GraphModule(self.root, self.graph)


_INDEXED = (
    torch.ops.aten.index,
    torch.ops.aten.index_put,
    torch.ops.aten.index_put_,
    torch.ops.aten._unsafe_index,
)


def _as_index(index: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
    return index.nonzero(as_tuple=True) if is_mask else (index,)  # type: ignore[union-attr]


def _is_grouped(op: Op) -> bool:
    return str(op) in ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


def _out_of_place(op: Op) -> Op:
    """Return the op that computes what an op in place writes.

    torch.export takes the gradient from what is written to a detached tensor, which a new tensor is for a dispatch mode
    (2.13.0). If another view of what is written is read later, the proof fails.
    """
    name, _, overload = op.__name__.partition(".")
    if not name.endswith("_"):
        return op
    found = getattr(getattr(torch.ops.aten, name[:-1], None), overload, None)
    if found is None:
        raise NotSeparableError(f"it writes by {op}, which has no form that returns a new tensor")
    return found  # type: ignore[no-any-return]


_ADDED = {
    torch.ops.aten.index_add: torch.ops.aten.add.Tensor,
    torch.ops.aten.index_add_: torch.ops.aten.add_.Tensor,
}


class _Unreadable(TorchFunctionMode):
    """Lets nothing read values of recorded tensors past the recorder."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING and self._recorder.has(args[0]):
            raise NotSeparableError(
                f"what it does depends on values of tokens, weights or parameters ({func.__name__})"
            )
        return func(*args, **(kwargs or {}))


_READING = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__)


# --- the proof ------------------------------------------------------------------------------------------------------


def _prove(
    found: OneExpert,
    module: nn.Module,
    experts: int,
    rows: tuple[torch.Tensor, torch.Tensor],
    numbers: torch.Tensor,
    params: dict[str, torch.Tensor],
) -> None:
    """Compare result and gradients of the module with sums of the record's, for some choices of experts."""
    own = len(next(iter(params.values())))
    tokens, weights = rows[0], rows[1][:, : numbers.shape[1]]

    def by_module(tokens: torch.Tensor, weights: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        with holding(module, dict(zip(params, given, strict=True)), experts, own):
            return module.forward(tokens, numbers, weights)  # type: ignore[no-any-return]

    def by_expert(tokens: torch.Tensor, weights: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        def one(row: int, choice: int) -> torch.Tensor:
            expert = int(numbers[row, choice])
            weight = weights[row : row + 1, choice : choice + 1]
            return found.program(tokens[row : row + 1], weight, *(p[expert : expert + 1] for p in given))  # type: ignore[no-any-return]

        each = [[one(row, choice) for choice in range(numbers.shape[1])] for row in range(len(tokens))]
        return torch.cat([sum(own[1:], own[0]) for own in each])

    wanted, made = (_with_gradients(run, (tokens, weights, *params.values())) for run in (by_module, by_expert))
    if not all(each.isfinite().all() for each in wanted):
        raise NotSeparableError("it gives infinite numbers, or none, for random ones of the size of one")
    for name, ours, theirs in zip(("result", *("gradient",) * (2 + len(params))), made, wanted, strict=True):
        if not _agree(ours, theirs):
            raise NotSeparableError(
                f"its {name} is not the sum of what each chosen expert makes of each token by itself"
            )


def _with_gradients(run: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    result = run(*leaves)
    if not result.requires_grad:
        return [result, *map(torch.zeros_like, leaves)]
    grads = torch.autograd.grad(result.sin().sum(), leaves, allow_unused=True)
    return [result, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]


def _agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether numbers agree to half of their digits: rounding is in the last ones, a mistake in the first."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    largest = max(float(theirs.detach().abs().max()), torch.finfo(theirs.dtype).tiny)
    return float((ours - theirs).detach().abs().max()) <= math.sqrt(torch.finfo(ours.dtype).eps) * largest
