"""Experts on JAX: modules that route in their own ways, and what is checked of them. Runs on the devices."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from torch import nn

import shardlib as sl
import shardlib.jax as sj
from shardlib.jax._experts import _by_blocks
from tests.engine.mixture import CHOICES, EMBED, EXPERTS, Batched, Experts, Mixture, Model, limit_capacity
from tests.jax.refusals import raised

__all__ = ["CHECKS", "MODULES", "RULES", "SPLIT", "as_torch", "batch", "refused"]

RULES = sl.Rules({"experts.up": "expert@ep ff embed", "experts.down": "expert@ep embed ff"}, unmatched="replicate")
SPLIT = sl.Rules(
    {
        "experts.up": "expert@ep ff@tp embed",
        "experts.down": "expert@ep embed ff@tp",
        "experts.output": "replicate",
    },
    axes={"expert": "ep"},
    unmatched="replicate",
)
BOUND = 1e-12  # rounding of 1.1e-16, over sums of some hundred terms; a mistake is of order one


def batch(step: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 3, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _compiled(model: nn.Module, mesh: str, rules: Any = None, **options: Any) -> tuple[sj.Compiled, Any]:
    devices = jax.devices()[: sl.MeshShape(mesh).world_size]
    return sj.compile_model(model, sj.make_mesh(mesh, devices=devices), rules or {"**": None}, **options)


def _loss(fn: sj.Compiled, x: torch.Tensor) -> Callable[[Any], Any]:
    return lambda params: jnp.square(fn(params, x.numpy())).mean()


def _apart(model: nn.Module, x: torch.Tensor, *on: Any, **options: Any) -> float:
    """How far gradients on JAX are from torch's."""
    fn, params = _compiled(model, *on, **options)
    return _unlike(fn.to_torch(jax.jit(jax.grad(_loss(fn, x)))(params)), model, x)


def _unlike(grads: Any, model: nn.Module, x: torch.Tensor, parts: int = 1) -> float:
    """How far gradients are from those of a model: of the mean over parts of the batch, each of which it runs alone."""
    assert all(grad.isfinite().all() for grad in grads.values())
    model.zero_grad()
    for rows in x.chunk(parts):
        (model(rows).square().mean() / parts).backward()
    theirs = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return max(float((grads[n] - g).abs().max()) for n, g in theirs.items())


def _model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Model(**options).double()


# --- modules --------------------------------------------------------------------------------------------------------


class _Masked(Experts):
    """Skips experts without tokens, and indexes by a mask."""

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            chosen = numbers == expert
            if not chosen.any():
                continue
            hit, weight = chosen.any(-1), (weights * chosen).sum(-1)
            made = (tokens[hit] @ self.up[expert].t()).tanh() @ self.down[expert].t()
            result[hit] += made * weight[hit, None]
        return result


class _Sorted(Experts):
    """Sorts tokens by expert, and reads how many each has as numbers of Python."""

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = numbers.flatten().argsort()
        rows = order // numbers.shape[1]
        counts = torch.bincount(numbers.flatten(), minlength=self.num_experts).tolist()
        pieces = [
            (piece @ self.up[expert].t()).tanh() @ self.down[expert].t()
            for expert, piece in enumerate(tokens[rows].split(counts))
            if len(piece)
        ]
        return torch.zeros_like(tokens).index_add(0, rows, torch.cat(pieces) * weights.flatten()[order, None])


class _Unweighted(Experts):
    """Learns nothing about its weights."""

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, numbers, weights.detach())


def _of_transformers(name: str) -> Callable[[], nn.Module]:
    """The experts of a model, as a loop over those that got tokens."""

    def build() -> nn.Module:
        model_type = {"GptOss": "gpt_oss", "Qwen3Moe": "qwen3_moe", "DeepseekV3": "deepseek_v3"}.get(name, name.lower())
        config = getattr(transformers, f"{name}Config")(
            hidden_size=EMBED,
            intermediate_size=8,
            moe_intermediate_size=8,
            num_local_experts=EXPERTS,
            num_experts=EXPERTS,
            n_routed_experts=EXPERTS,
        )
        config._experts_implementation = "eager"
        modeling = getattr(getattr(transformers.models, model_type), f"modeling_{model_type}")
        module = getattr(modeling, f"{name}Experts")(config)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5)
        return module

    return build


_FAMILIES = "Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3", "Olmoe"
MODULES: dict[str, Callable[[], nn.Module]] = {
    "loop": Experts,
    "products of batches": Batched,
    "masks": _Masked,
    "sorted": _Sorted,
    "unweighted": _Unweighted,
    **{name: _of_transformers(name) for name in _FAMILIES},
}


def as_torch(name: str, implementation: str = "") -> None:
    """A module of experts has torch's gradients, on one device, also in another of transformers' implementations."""
    torch.manual_seed(0)
    model = Mixture()
    model.experts = MODULES[name]()
    model, own = model.double(), copy.deepcopy(model).double()
    if implementation:
        own.experts.config._experts_implementation = implementation
    x = torch.randn(7, EMBED, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    fn, params = _compiled(own, "dp=1", example=x)
    (graph,) = fn._graphs.values()
    assert "shardlib.experts.default" in {str(node.target) for node in graph.nodes}
    assert not {"aten.index.Tensor", "aten.index_add.default"} & {str(n.target) for n in graph.programs[0].nodes}
    assert _unlike(fn.to_torch(jax.jit(jax.grad(_loss(fn, x)))(params)), model, x) < BOUND


# --- what is refused ------------------------------------------------------------------------------------------------


class _Dropping(Experts):
    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(tokens, numbers, weights), 0.5)


class _Branching(Experts):
    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens if tokens.sum() > 0 else -tokens, numbers, weights)


class _Mixing(Experts):
    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens - tokens.mean(0), numbers, weights)


class _Buffered(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(EMBED))

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, numbers, weights) * self.scale


class _Pairs(Experts):
    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        first, second = numbers.unbind(1)
        return super().forward(tokens, torch.stack([first, second], 1), weights)


class _Listed(nn.Module):
    """Experts that are modules of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.experts = nn.ModuleList(nn.Linear(EMBED, EMBED) for _ in range(EXPERTS))

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, choice = (numbers == number).nonzero(as_tuple=True)
            result = result.index_add(0, row, expert(tokens[row]) * weights[row, choice, None])
        return result


_REFUSED = {
    "dropping": _Dropping,
    "branching": _Branching,
    "mixing": _Mixing,
    "buffered": _Buffered,
    "pairs": _Pairs,
    "listed": _Listed,
}


def refused(case: str, capacity: float = 0.0, rows: int = 8) -> str:
    model = Mixture()
    model.experts = _REFUSED[case]() if case else Experts()
    options = {"transforms": sl.expert_capacity(capacity)} if capacity else {}
    mesh, rules = ("ep=2", RULES) if capacity else ("dp=1", None)

    def call() -> None:
        fn, params = _compiled(model, mesh, rules, **options)
        fn(params, np.ones((rows, EMBED), np.float32))

    return raised(call)


# --- checks ---------------------------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[], None]] = {}


def _check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__.removeprefix("_").replace("_", " ")] = function
    return function


@_check
def _a_capacity_drops_the_choices_that_the_torch_engine_drops() -> None:
    for mesh, factor, dropped in (("dp=2,ep=2", 0.75, True), ("ep=2", 100.0, False)):
        model = _model()
        limited = copy.deepcopy(model)
        for layer in limited.layers:
            limit_capacity(layer[1].experts, factor)
        fn, params = _compiled(model, mesh, RULES, transforms=sl.expert_capacity(factor))
        parts, grads = fn.plan.mesh.data_ranks, fn.to_torch(jax.jit(jax.grad(_loss(fn, batch(0))))(params))
        assert _unlike(grads, limited, batch(0), parts) < BOUND
        assert (_unlike(grads, model, batch(0), parts) > 1e-3) is dropped


@_check
def _rows_that_ranks_do_not_divide_are_computed_too() -> None:
    model = _model()
    for rows in (1, 6):
        assert _apart(model, batch(0, rows), "dp=2,ep=2", RULES) < BOUND


@_check
def _in_bfloat16_gradients_are_the_exact_ones_but_for_rounding() -> None:
    """Fewer than eight roundings of 2**-8 lie between a gradient and the exact one; a mistake is of order one."""
    x = torch.randn(8, EMBED, generator=torch.Generator().manual_seed(1)).bfloat16()
    for name, mesh, rules in (("Mixtral", "dp=1", None), ("loop", "ep=4", RULES)):
        torch.manual_seed(0)
        model = Mixture()
        model.experts = MODULES[name]()
        fn, params = _compiled(model.bfloat16(), mesh, rules)
        loss = jax.jit(jax.grad(lambda p, fn=fn: jnp.square(fn(p, x).astype(jnp.float32)).mean()))
        grads = fn.to_torch(loss(params))
        exact = model.double()
        exact(x.double()).square().mean().backward()
        for key, parameter in exact.named_parameters():
            assert grads[key].dtype == torch.bfloat16 and parameter.grad is not None
            unlike = float((grads[key].double() - parameter.grad).abs().max() / parameter.grad.abs().max())
            assert 0 < unlike < 8 * 2**-8, (key, unlike)


@_check
def _a_module_is_recorded_once_for_all_graphs() -> None:
    runs = []

    class Counted(Experts):
        def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            runs.append(len(tokens))
            return super().forward(tokens, numbers, weights)

    model = Mixture()
    model.experts = Counted()
    fn, _ = _compiled(model, "dp=1", example=torch.ones(2, EMBED))
    seen = len(runs)
    fn.prepare(torch.ones(3, EMBED))
    fn.around(lambda model, x: model(x).sum()).prepare(torch.ones(2, EMBED))
    assert len(fn._graphs) == 2 and len(runs) == seen > 0


class _Picky(nn.Module):
    """Expert 0 takes positive tokens, expert 1 negative ones; what each makes of the others is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 2
        self.sign, self.up = nn.Parameter(torch.tensor([[-8.0], [8.0]])), nn.Parameter(torch.ones(2, 1))

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, choice = (numbers == expert).nonzero(as_tuple=True)
            made = (tokens[row] * self.sign[expert]).exp().exp() * self.up[expert]
            result = result.index_add(0, row, made * weights[row, choice, None])
        return result


class _ToPicky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.scale = _Picky(), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x * self.scale, (x[:, :1] < 0).long(), torch.ones_like(x[:, :1]) * self.scale)


@_check
def _no_expert_sees_a_token_that_did_not_choose_it() -> None:
    """Not even as padding: zero times the gradient of something infinite is not zero."""
    model = _ToPicky().double()
    rules = sl.Rules({"experts.*": "expert@ep one"}, unmatched="replicate")
    for negative in (0, 5):  # five: rank 0 has no positive token
        sign = torch.tensor([[-1.0]] * negative + [[1.0]] * (8 - negative), dtype=torch.float64)
        x = sign * torch.linspace(0.9, 1.3, 8, dtype=torch.float64)[:, None]
        assert model.experts(x, (sign > 0).long(), torch.ones_like(x)).isinf().all(), "or the test could not tell"
        assert _apart(model, x, "dp=1") < BOUND
        assert _apart(model, x, "ep=2", rules) < BOUND
        assert _apart(model, x, "ep=2", rules, transforms=sl.expert_capacity(100.0)) < BOUND


@_check
def _blocks_are_enough_for_all_choices() -> None:
    """Of every way to choose, in turn all of them: an expert's number, one beyond the last, or one before the first."""
    scales = jnp.array([1.0, 10.0, 100.0])
    tokens, weights = jnp.arange(1.0, 4), jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    def one(params: Any, token: Any, weight: Any) -> Any:
        return params[0] * token * weight

    @jax.jit
    @jax.vmap
    def both(numbers: Any) -> Any:
        ours = _by_blocks(one, [scales], tokens[:, None], numbers, weights)[:, 0]
        chosen = jnp.where((numbers >= 0) & (numbers < 3), scales[numbers], 0)
        return ours, (chosen * weights).sum(1) * tokens

    every = np.array(list(itertools.product(range(-1, 4), repeat=6))).reshape(-1, 3, 2)
    ours, wanted = both(every)
    assert np.array_equal(ours, wanted)


@_check
def _nothing_as_large_as_each_block_s_parameters_is_kept_for_backward() -> None:
    model = Mixture().double()
    fn, params = _compiled(model, "dp=1")
    x = torch.ones(4, EMBED, dtype=torch.float64)
    _, backward = jax.vjp(_loss(fn, x), params)
    largest = max(leaf.size for leaf in jax.tree.leaves(backward))
    assert largest == max(leaf.size for leaf in params.values()), "experts themselves are the largest"


@_check
def _alike_experts_are_scanned() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Mixture() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functools.reduce(lambda x, block: block(x), self.blocks, x)

    model, x = Blocks().double(), torch.ones(4, EMBED, dtype=torch.float64)
    fn, params = _compiled(model, "dp=2,ep=2", RULES, scan=True)
    program = jax.jit(fn).lower(params, x.numpy())
    assert program.as_text().count("stablehlo.while") == 1
    assert np.allclose(program.compile()(params, x.numpy()), model(x).detach(), rtol=BOUND, atol=BOUND)


@_check
def _transforms_of_jax_go_through() -> None:
    model, x = _model(), batch(0)
    wanted = model(x).detach().numpy()
    fn, params = _compiled(model, "dp=2,ep=2", RULES)
    assert np.allclose(fn(params, x.numpy()), wanted, rtol=BOUND, atol=BOUND)
    each = jax.jit(jax.vmap(lambda x: fn(params, x)))(np.stack([x.numpy(), x.numpy()[::-1]]))
    assert np.allclose(each, np.stack([wanted, wanted[::-1]]), rtol=BOUND, atol=BOUND)
    spec = jax.P("dp")
    local = jax.shard_map(fn, mesh=fn.mesh, in_specs=(jax.P(), spec), out_specs=spec, axis_names={"dp"})
    assert np.allclose(jax.jit(local)(params, x.numpy()), wanted, rtol=BOUND, atol=BOUND)
    tangent = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size).reshape(leaf.shape)), params)
    _, slope = jax.jit(lambda p: jax.jvp(_loss(fn, x), (p,), (tangent,)))(params)
    grads = jax.jit(jax.grad(_loss(fn, x)))(params)
    assert abs(slope - sum(jax.tree.leaves(jax.tree.map(jnp.vdot, grads, tangent)))) < BOUND


@_check
def _layouts_of_one_expert_are_typed() -> None:
    report = sj.check_layouts(_model(), "dp=2,ep=5,tp=2", SPLIT, example=batch(0, 20))
    # Tokens, numbers and weights are gathered, and results summed over ep and over tp, in each of two layers.
    assert report, str(report)
    assert report.moved == {"gather": 6, "sum": 4}, report.moved
    twice = sl.Rules(
        {"experts.up": "expert@ep ff@tp embed", "experts.down": "expert@ep embed@tp ff"}, unmatched="replicate"
    )
    report = sj.check_layouts(_model(), "dp=2,ep=5,tp=2", twice, example=batch(0, 20))
    assert "the contracted dim is sharded over tp in one operand only" in str(report)
    assert {finding.module for finding in report.findings} >= {"layers.0.1.experts", "layers.1.1.experts"}


assert CHOICES == 2
