"""Training steps on eight devices beside the same step written by hand for one. Failures are plain assertions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

import shardlib as sl
import shardlib.jax as sj
from shardlib.testing import models
from tests.jax.refusals import raised

__all__ = ["CHECKS", "refused"]

CHECKS: dict[str, Callable[[], None]] = {}


def _check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__.removeprefix("_").replace("_", " ")] = function
    return function


def _same(
    step: sj.TrainStep, params: Any, batches: Any, mean_loss: Callable[..., Any], optimizer: Any, start: Any = None
) -> sj.TrainState:
    """The step gives losses, parameters and optimizer state of one device, in planned shardings; returns its state.

    Args:
        step: the step to check.
        params: its parameters.
        batches: a batch for each step.
        mean_loss: `mean_loss(params, batch)` of the whole batch, for one device.
        optimizer: clips too, if the step does.
        start: parameters for one device, where they differ.
    """
    state = step.init(params)
    planned = jax.tree.map(lambda shape: shape.sharding, step.abstract(params))
    own = jax.tree.map(np.asarray, params if start is None else start)
    opt_state = optimizer.init(own)
    with jax.default_device(jax.devices()[0]):
        for batch in batches:
            state, metrics = step(state, batch)
            loss, grads = jax.value_and_grad(mean_loss)(own, batch)
            updates, opt_state = optimizer.update(grads, opt_state, own)
            own = optax.apply_updates(own, updates)
            _close(metrics["loss"], loss)
    jax.tree.map(_close, jax.tree.leaves((state.params, state.opt_state)), jax.tree.leaves((own, opt_state)))
    assert jax.tree.map(lambda array: array.sharding, state) == planned
    (program,) = step._jitted.values()
    assert program._cache_size() == 1, "the second step is compiled anew"
    return state


def _close(got: Any, wanted: Any) -> None:
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape
    # Rounding of 1.1e-16, over sums of a hundred terms; a mistake is of order one.
    assert np.allclose(got, wanted, rtol=1e-12, atol=1e-12), np.abs(got - wanted).max()


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def _ids(count: int = 2) -> list[jax.Array]:
    return [jax.random.randint(jax.random.key(seed), (8, 4), 0, 16) for seed in range(count)]


# --- a GPT of plain JAX, of flax, of torch ----------------------------------------------------------------------------


def _params() -> dict[str, Any]:
    shapes = {"qkv": (8, 3, 4, 2), "proj": (4, 2, 8), "up": (8, 16), "down": (16, 8)}
    block = {name: {"kernel": _normal(at, *shape) / 3} for at, (name, shape) in enumerate(shapes.items())}
    return {"embed": {"table": _normal(9, 16, 8)}, "position": _normal(10, 4, 8), "blocks": [block]}


_RULES = sl.Rules(
    {
        "qkv.kernel": "in qkv heads@tp head",
        "proj.kernel": "heads@tp head out",
        "up.kernel": "in out@tp",
        "down.kernel": "in@tp out",
        "embed.table": "vocab@tp embed",
    },
    unmatched="replicate",
)


def _logits(params: Any, ids: Any) -> Any:
    x = params["embed"]["table"][ids] + params["position"]
    for block in params["blocks"]:
        q, k, v = jnp.moveaxis(jnp.einsum("bte,eqhd->bqhtd", x, block["qkv"]["kernel"]), 1, 0)
        causal = jnp.tril(jnp.ones((4, 4), bool))
        scores = jnp.where(causal, q @ k.swapaxes(-1, -2), -jnp.inf)
        x = x + jnp.einsum("bhtd,hde->bte", jax.nn.softmax(scores) @ v, block["proj"]["kernel"])
        x = x + jnp.tanh(x @ block["up"]["kernel"]) @ block["down"]["kernel"]
    return x @ params["embed"]["table"].T


# Keys' biases have no gradient but rounding, which Adam would divide by itself.
_SGD = optax.sgd(0.1, momentum=0.9)


def _losses(logits: Any, ids: Any) -> Any:
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])


def _gpt_loss(params: Any, ids: Any) -> Any:
    return _losses(_logits(params, ids), ids).mean()


@_check
def _a_gpt_of_plain_jax() -> None:
    """With microbatches, clipping, a loss scale and recomputation."""
    adamw = optax.adamw(1e-2)
    step = sj.train_step(
        _gpt_loss,
        adamw,
        _RULES,
        sj.make_mesh("dp=2,tp=4"),
        transforms=[sl.zero(2)],
        accumulate=2,
        clip=0.3,
        loss_scale=1024.0,
        remat=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    )
    # A state of the chain is the clipping's, which is empty, and adamw's.
    state = _same(step, _params(), _ids(), _gpt_loss, optax.chain(optax.clip_by_global_norm(0.3), adamw))
    mu = state.opt_state[0].mu
    assert mu["blocks"][0]["up"]["kernel"].sharding.spec == jax.P("dp", "tp")
    assert state.params["blocks"][0]["up"]["kernel"].sharding.spec == jax.P(None, "tp")
    assert int(state.step) == 2 and float(state.scale["scale"]) == 1024


@_check
def _a_gpt_of_flax() -> None:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            options: Any = {"param_dtype": jnp.float64, "rngs": rngs}
            self.qkv = nnx.LinearGeneral(8, (3, 4, 2), **options)
            self.proj = nnx.LinearGeneral((4, 2), 8, axis=(-2, -1), **options)
            self.up, self.down = nnx.Linear(8, 16, **options), nnx.Linear(16, 8, **options)

    class GPT(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(16, 8, param_dtype=jnp.float64, rngs=rngs)
            self.blocks = nnx.List([Block(rngs)])

        def __call__(self, ids: Any) -> Any:
            x = self.embed(ids)
            for block in self.blocks:
                q, k, v = jnp.moveaxis(block.qkv(x), 2, 0)
                scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), jnp.einsum("bqhd,bkhd->bhqk", q, k), -jnp.inf)
                x = x + block.proj(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v))
                x = x + block.down(jnp.tanh(block.up(x)))
            return self.embed.attend(x)

    split: Any = nnx.split(GPT(nnx.Rngs(0)), nnx.Param, ...)
    graph, params, rest = split

    def loss_fn(params: Any, ids: Any) -> Any:
        model: Any = nnx.merge(graph, params, rest)
        return _losses(model(ids), ids).mean()

    layouts = {"embed": "vocab@tp embed", "down": "in@tp out", "up": "in out@tp", "proj": "heads@tp head embed"}
    rules = {f"{part}.{key}": layout for part, layout in layouts.items() for key in ("kernel", "embedding")}
    rules = sl.Rules(rules, optional=tuple(rules), unmatched="replicate")
    step = sj.train_step(loss_fn, _SGD, rules, sj.make_mesh("dp=2,tp=4"), transforms=[sl.zero(3)])
    state = _same(step, params, _ids(), loss_fn, _SGD)
    kernel = state.params["blocks"][0]["up"]["kernel"].get_value()
    assert kernel.sharding.spec == jax.P("dp", "tp")
    assert isinstance(state.params, nnx.State) and isinstance(state.opt_state[0].trace, nnx.State)


@_check
def _a_gpt_of_torch_with_as_many_tokens_as_its_mask_says() -> None:
    """Microbatches have different numbers of tokens: the loss is the mean over all."""
    model = models.Transformer(vocab=16, heads=4, head=4, layers=1, fused=True).double()
    rules = models.rules_for(model)
    fn, params = sj.compile_model(model, sj.make_mesh("dp=2,tp=4"), rules, transforms=[sl.zero(1)])
    one, start = sj.compile_model(
        model, sj.make_mesh("dp=1", devices=jax.devices()[:1]), sl.Rules({}, unmatched="replicate")
    )
    weights = jnp.arange(1.0, 25.0).reshape(8, 3) % 5 > 1

    def summed(model: Any, params: Any, batch: Any) -> Any:
        ids, weight = batch
        return (_losses(model(params, ids), ids) * weight).sum(), weight.sum()

    def mean(params: Any, batch: Any) -> Any:
        total, count = summed(one, params, batch)
        return total / count

    step = sj.train_step(functools.partial(summed, fn), _SGD, fn, has_count=True, accumulate=4)
    batches = [(ids, weights) for ids in _ids()]
    state = step.init(params)
    planned = jax.tree.map(lambda shape: shape.sharding, step.abstract(params))
    opt_state, programs = _SGD.init(start), jax.jit(jax.value_and_grad(mean))
    for batch in batches:
        state, metrics = step(state, batch)
        loss, grads = programs(start, batch)
        updates, opt_state = _SGD.update(grads, opt_state, start)
        start = optax.apply_updates(start, updates)
        _close(metrics["loss"], loss)
        assert int(metrics["count"]) == int(weights.sum())
    got, wanted = fn.to_torch(state.params), one.to_torch(start)
    for name, tensor in got.items():
        _close(tensor, wanted[name])
    assert jax.tree.map(lambda array: array.sharding, state) == planned


# --- what a step may do ---------------------------------------------------------------------------------------------


def _square(params: Any, batch: Any) -> Any:
    return jnp.square(batch["x"] @ params["kernel"] - batch["y"]).mean()


_KERNEL: dict[str, Any] = {"kernel": "in out@tp"}


def _batch() -> dict[str, Any]:
    return {"x": _normal(1, 8, 4), "y": _normal(2, 8, 4)}


@_check
def _a_step_is_scanned_and_lowered_as_any_function() -> None:
    step = sj.train_step(_square, optax.sgd(0.1), _KERNEL, sj.make_mesh("dp=2,tp=4"))
    params = {"kernel": _normal(0, 4, 4)}
    batches = [_batch(), jax.tree.map(lambda leaf: leaf + 1, _batch())]
    first, scanned = step.init(params), step.init(params)
    state = first
    program = step.lower(state, batches[0]).compile()
    losses = []
    for batch in batches:
        state, metrics = program(state, batch)
        losses.append(metrics["loss"])
    assert first.params["kernel"].is_deleted() and not params["kernel"].is_deleted()
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    scanned, metrics = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))(scanned, stacked)
    _close(metrics["loss"], jnp.stack(losses))
    _close(scanned.params["kernel"], state.params["kernel"])
    told = raised(lambda: step(first, batches[0]))
    assert "a state that an earlier call has used up" in told and "donate=False" in told, told


@_check
def _aux_is_stacked_and_each_microbatch_has_its_keys() -> None:
    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        return _square(params, batch), {"key": jax.random.key_data(rng["drop"]), "x": batch["x"], "none": None}

    mesh = sj.make_mesh("dp=2,tp=4")
    step = sj.train_step(loss_fn, optax.sgd(0.1), _KERNEL, mesh, has_aux=True, accumulate=4)
    batch = {**_batch(), "factor": 2.0}
    _, metrics = step(step.init({"kernel": _normal(0, 4, 4)}), batch, rng={"drop": jax.random.key(0)})
    assert len({*map(tuple, np.asarray(metrics["aux"]["key"]).tolist())}) == 4
    _close(metrics["aux"]["x"][1], batch["x"][1::4])
    step = sj.train_step(lambda p, b: (_square(p, b), None), optax.sgd(0.1), _KERNEL, mesh, has_aux=True)
    assert jax.eval_shape(step, step.init({"kernel": _normal(0, 4, 4)}), _batch())[1]["aux"] is None


@_check
def _parameters_may_be_tensors_of_torch() -> None:
    tensors = {"kernel": torch.ones(4, 4, dtype=torch.float64), "bias": torch.zeros(4, dtype=torch.float64)}
    step = sj.train_step(_square, optax.sgd(0.1), {"kernel": "in out@tp", "bias": "out@tp"}, sj.make_mesh("dp=2,tp=4"))
    state, _ = step(step.init(tensors), _batch())
    arrays = jax.tree.map(jnp.asarray, {name: tensor.numpy() for name, tensor in tensors.items()})
    wanted, _ = step(step.init(arrays), _batch())
    jax.tree.map(_close, state.params, wanted.params)
    assert (
        state.params["kernel"].sharding.spec
        == step.abstract(tensors).params["kernel"].sharding.spec
        == jax.P(None, "tp")
    )


@_check
def _an_optimizer_that_reads_the_loss_is_given_it() -> None:
    optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    step = sj.train_step(_square, optimizer, _KERNEL, sj.make_mesh("dp=2,tp=4"))
    state, metrics = step(step.init({"kernel": _normal(0, 4, 4)}), _batch())
    _close(state.opt_state[1].best_value, metrics["loss"])


@_check
def _buffers_are_those_of_the_whole_batch() -> None:
    model = models.ConvNet().double()
    fn, params = sj.compile_model(model, sj.make_mesh("dp=2,tp=4"), models.rules_for(model))

    def loss_fn(params: Any, buffers: Any, x: Any) -> Any:
        y, buffers = fn.apply(params, buffers, x)
        return jnp.square(y).mean(), (buffers, y.shape[0])

    step = sj.train_step(loss_fn, optax.sgd(0.1), fn, has_buffers=True, has_aux=True)
    x = torch.randn(8, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state, metrics = step(step.init(params, fn.buffers), x.numpy())
    loss = model(x).square().mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    _close(metrics["loss"], loss.detach().numpy())
    wanted = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in fn.to_torch({**state.params, **state.buffers}).items():
        _close(value, wanted[name].detach())
    assert metrics["aux"] == 8


@_check
def _buffers_follow_the_rules_that_match_them() -> None:
    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        mean = buffers["mean"]["kernel"] / 2 + params["kernel"] / 2
        return _square(params, batch), {**buffers, "mean": {"kernel": mean}, "seen": buffers["seen"] + 1}

    def typed(params: Any, buffers: Any, batch: Any) -> Any:
        assert _spec(buffers["mean"]["kernel"]) == jax.P(None, "tp") and _spec(buffers["cache"]) == jax.P("dp", None)
        return loss_fn(params, buffers, jax.sharding.reshard(batch, jax.P("dp")))

    rules: dict[str, Any] = {**_KERNEL, "cache": "rows@dp out", "norm": "channel@tp"}
    params, mean = {"kernel": _normal(0, 4, 4)}, _normal(1, 4, 4)
    norm = {"mean": jnp.zeros(4), "var": jnp.ones(4)}  # of flax, whose scale and bias are parameters
    buffers = {"mean": {"kernel": mean}, "cache": torch.ones(4, 2), "norm": norm, "seen": jnp.zeros((), int)}
    updated = params["kernel"] - 0.1 * jax.grad(_square)(params, _batch())["kernel"]
    for given in (params["kernel"], params["kernel"], updated, updated):  # two microbatches in each step
        mean = mean / 2 + given / 2
    for loss, mesh in ((loss_fn, sj.make_mesh("dp=2,tp=4")), (typed, _explicit())):
        options: dict[str, Any] = {"transforms": [sl.zero(1)], "has_buffers": True, "accumulate": 2}
        step = sj.train_step(loss, optax.sgd(0.1), rules, mesh, **options)
        state, planned = step.init(params, buffers), step.abstract(params, buffers)
        for _ in range(2):
            state, _ = step(state, _batch())
        assert jax.tree.map(lambda array: array.sharding, state) == jax.tree.map(lambda shape: shape.sharding, planned)
        specs = (state.buffers["mean"]["kernel"].sharding.spec, state.buffers["cache"].sharding.spec)
        assert specs == (jax.P(None, "tp"), jax.P("dp", None)), specs
        assert state.buffers["norm"]["var"].sharding.spec == jax.P("tp")
        assert int(state.buffers["seen"]) == 4
        _close(state.buffers["mean"]["kernel"], mean)
    step = sj.train_step(loss_fn, optax.sgd(0.1), {**rules, "cash": None}, mesh, has_buffers=True)
    assert 'Rule "cash": "replicate" matches nothing' in raised(lambda: step.init(params, buffers))


@_check
def _what_is_given_keeps_its_memory() -> None:
    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        return _square(params, batch), {"n": buffers["n"] + 1}

    for mesh in (sj.make_mesh("dp=2,tp=4"), sj.make_mesh("dp=1,tp=1", devices=jax.devices()[:1])):
        step = sj.train_step(loss_fn, optax.sgd(0.1), _KERNEL, mesh, has_buffers=True)
        params, buffers = {"kernel": _normal(0, 4, 4)}, {"n": jnp.zeros(64)}
        state, _ = step(step.init(params, buffers), _batch())
        assert not params["kernel"].is_deleted() and not buffers["n"].is_deleted()
        assert float(buffers["n"].sum()) == 0 and float(state.buffers["n"].sum()) == 64


@_check
def _a_state_may_come_from_a_file_or_from_within_a_program() -> None:
    mesh = sj.make_mesh("dp=2,tp=4")
    step = sj.train_step(_square, optax.adam(0.1), _KERNEL, mesh, transforms=[sl.zero(1)])
    params = {"kernel": _normal(0, 4, 4)}
    wanted, _ = step(step.init(params), _batch())
    planned = jax.tree.map(lambda shape: shape.sharding, step.abstract(params))
    read = jax.device_get(step.init(params))
    before = jax.tree.map(np.copy, read)
    for state in (read, jax.tree.map(jnp.asarray, read), jax.jit(step.init)(params)):
        found, _ = step(state, _batch())
        jax.tree.map(_close, found, wanted)
        assert jax.tree.map(lambda array: array.sharding, found) == planned
    jax.tree.map(_close, read, before)
    assert jax.tree.map(lambda array: array.sharding, jax.jit(step.init)(params)) == planned
    assert jax.eval_shape(step.init, params).params["kernel"].shape == (4, 4)


@_check
def _an_optimizer_without_extra_arguments_and_a_count_of_rows() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.square(batch["x"] @ params["kernel"] - batch["y"]).mean(-1).sum(), batch["x"].shape[0]

    optimizer = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))
    step = sj.train_step(loss_fn, optimizer, _KERNEL, sj.make_mesh("dp=2,tp=4"), has_count=True, accumulate=2)
    _same(step, {"kernel": _normal(0, 4, 4)}, [_batch()] * 2, _square, optimizer)


@_check
def _a_step_whose_gradients_overflow_is_skipped() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        assert params["kernel"].dtype == jnp.float16
        return (batch["x"] @ params["kernel"]).astype(jnp.float32).mean()

    mesh, transforms = sj.make_mesh("dp=2,tp=4"), [sl.zero(1), _scaled_fp16()]
    step = sj.train_step(loss_fn, optax.adam(0.5), _KERNEL, mesh, transforms=transforms)
    _skips(step, {"kernel": jnp.ones((4, 4), jnp.float32)})


@_check
def _a_compiled_model_has_the_loss_scale_of_its_plan() -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    mesh, transforms = sj.make_mesh("dp=2,tp=4"), [sl.zero(1), _scaled_fp16()]
    fn, params = sj.compile_model(model, mesh, {"weight": "out@tp in"}, transforms=transforms)
    loss = fn.around(lambda model, x: model(x).float().mean())
    assert fn(params, jnp.ones((8, 4), jnp.float16)).dtype == jnp.float16
    _skips(sj.train_step(lambda params, batch: loss(params, batch["x"]), optax.adam(0.5), fn), params)


def _scaled_fp16() -> Any:
    return sl.precision("fp16_naive", scaler=sl.transforms.LossScale(2.0**17, growth_interval=2))


def _skips(step: Any, params: Any) -> None:
    """Five steps of a mean of products with ones; the gradient of each weight is 2.5 / 4."""
    state = step.init(params)
    seen = []
    for _ in range(5):
        state, metrics = step(state, {"x": jnp.full((8, 4), 2.5, jnp.float16)})
        (weight,), (moment,) = state.params.values(), state.opt_state[0].mu.values()
        seen.append((bool(metrics["skipped"]), float(metrics["scale"]), int(state.step), float(weight.max())))
        assert weight.dtype == moment.dtype == jnp.float32
    # The gradient times the scale is in float16, which ends at 65504.
    skipped, scales, steps, values = zip(*seen, strict=True)
    assert skipped == (True, False, False, True, False), seen
    assert scales == (2.0**17, 2.0**16, 2.0**16, 2.0**17, 2.0**16), seen
    assert steps == (0, 1, 2, 2, 3), seen
    assert np.allclose(values, (1, 0.5, 0, 0, -0.5), atol=1e-3), seen


@_check
def _added_axes_go_to_a_dim_that_they_divide() -> None:
    rules = sl.Rules({}, unmatched="replicate")
    step = sj.train_step(
        lambda p, x: x.sum(), optax.sgd(0.1, 0.9), rules, sj.make_mesh("dp=8"), transforms=[sl.zero(1)]
    )
    shapes = {"table": (257, 16), "odd": (3, 5), "tiny": (), "even": (16, 3)}
    found = step.abstract({name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()})
    specs = {name: str(array.sharding.spec) for name, array in found.opt_state[0].trace.items()}
    assert specs == {"table": "P(None, 'dp')", "odd": "P(None, None)", "tiny": "P()", "even": "P('dp', None)"}, specs


@_check
def _means_of_adafactor_have_the_layout_of_the_dims_that_they_keep() -> None:
    """Rules of a tree and a compiled model agree, also where both dims have one size."""
    mesh, adafactor = sj.make_mesh("dp=2,tp=4"), optax.adafactor(0.1, min_dim_size_to_factor=4)
    for rows, columns in ((8, 16), (16, 8), (8, 8)):
        model, rules = nn.Linear(columns, rows, bias=False), {"weight": "out@tp in"}
        fn, params = sj.compile_model(model, mesh, rules, transforms=[sl.zero(1)])
        by_rules = sj.train_step(lambda p, x: x, adafactor, rules, mesh, transforms=[sl.zero(1)])
        for step in (by_rules, sj.train_step(lambda p, x: x, adafactor, fn)):
            state = step.abstract(params).opt_state[0]
            assert step.abstract(params).params["weight"].sharding.spec == jax.P("tp", None)
            both = {"row": state.v_row["weight"], "col": state.v_col["weight"]}
            # v_row keeps the smaller dim, the first of two; zero(1) adds dp to the first.
            smaller, larger = ("row", "col") if rows <= columns else ("col", "row")
            assert both[smaller].sharding.spec == jax.P(("tp", "dp")), both
            assert both[larger].sharding.spec == jax.P(None), both
            assert both[smaller].shape == (rows,) and both[larger].shape == (columns,)


# --- axes of type Explicit --------------------------------------------------------------------------------------------


def _explicit() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)


_MLP = {"up": {"kernel": "in out@tp"}, "down": {"kernel": "in@tp out"}}
_MLP_RULES: dict[str, Any] = {f"{name}.kernel": layout["kernel"] for name, layout in _MLP.items()}


def _mlp() -> dict[str, Any]:
    return {"up": {"kernel": _normal(3, 4, 16)}, "down": {"kernel": _normal(4, 16, 4)}}


def _mlp_loss(params: Any, batch: Any, hidden: Any = None, out: Any = None) -> Any:
    """In plain JAX, or with the types of hidden values and outputs."""
    x = jnp.tanh(jnp.dot(batch["x"], params["up"]["kernel"], out_sharding=hidden))
    return jnp.square(jnp.dot(x, params["down"]["kernel"], out_sharding=out) - batch["y"]).mean()


def _spec(array: Any) -> jax.P:
    return jax.typeof(array).sharding.spec


@_check
def _a_loss_of_explicit_types_on_a_mesh_of_such_axes() -> None:
    def typed(params: Any, batch: Any) -> Any:
        specs = [_spec(array) for array in (params["up"]["kernel"], params["down"]["kernel"], batch["x"])]
        assert specs == [jax.P(None, "tp"), jax.P("tp", None), jax.P("dp", None)], specs
        return _mlp_loss(params, batch, jax.P("dp", "tp"), jax.P("dp"))

    adamw, clipped = optax.adamw(1e-2), optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2))
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    for transform in (sl.zero(1), sl.zero(3)):
        for others in ({"accumulate": 2, "remat": policy}, {"loss_scale": 8.0}):
            step = sj.train_step(
                typed,
                adamw,
                _MLP_RULES,
                _explicit(),
                transforms=[transform],
                clip=0.3,
                **others,  # type: ignore[arg-type]
            )
            state = _same(step, _mlp(), [_batch(), _batch()], _mlp_loss, clipped)
            assert state.opt_state[0].mu["up"]["kernel"].sharding.spec == jax.P("dp", "tp")


@_check
def _a_batch_keeps_its_explicit_types_and_aux_is_replicated() -> None:
    def typed(params: Any, buffers: Any, batch: Any, rng: Any) -> Any:
        assert _spec(batch["x"]) == jax.P(None, "dp") and _spec(batch["y"]) == jax.P("dp", None)
        x = jax.sharding.reshard(batch["x"], jax.P("dp"))
        loss = _mlp_loss(params, {**batch, "x": x}, jax.P("dp", "tp"), jax.P("dp"))
        return loss, ({"seen": buffers["seen"] + 1.0}, {"x": x, "drawn": jax.random.normal(rng, ())})

    mesh = _explicit()
    step = sj.train_step(typed, optax.sgd(0.1), _MLP_RULES, mesh, has_buffers=True, has_aux=True)
    batch = {**_batch(), "factor": 2.0}
    given = {**batch, "x": jax.device_put(batch["x"], jax.NamedSharding(mesh, jax.P(None, "dp")))}
    with jax.set_mesh(mesh):
        state = step.init(_mlp(), {"seen": jnp.zeros(())})
        state, metrics = step(state, given, rng=jax.random.key(0))
        stacked = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], given)
        one = functools.partial(step, rng=jax.random.key(0))
        state, _ = jax.jit(lambda state, batches: jax.lax.scan(one, state, batches))(state, stacked)
    _close(metrics["loss"], _mlp_loss(_mlp(), batch))
    _close(metrics["aux"]["x"], batch["x"])
    _close(metrics["aux"]["drawn"], jax.random.normal(jax.random.key(0), ()))
    assert float(state.buffers["seen"]) == 2 and state.params["up"]["kernel"].sharding.spec == jax.P(None, "tp")
    assert metrics["aux"]["x"].sharding.is_fully_replicated


# --- refusals -------------------------------------------------------------------------------------------------------


def refused() -> dict[str, str]:
    """What is raised for each wrong thing."""
    mesh, sgd, params = sj.make_mesh("dp=2,tp=4"), optax.sgd(0.1), {"kernel": jnp.ones((4, 4))}
    fn, own = sj.compile_model(nn.Linear(4, 4), mesh, {"*": None})

    def made(loss_fn: Any = _square, optimizer: Any = sgd, **options: Any) -> Any:
        return sj.train_step(loss_fn, optimizer, _KERNEL, mesh, **options)

    def called(loss_fn: Any, batch: Any = None, **options: Any) -> Any:
        step = made(loss_fn, **options)
        return step(step.init(params), _batch() if batch is None else batch)

    def with_key(params: Any, batch: Any, rng: Any) -> Any:
        return _square(params, batch) + jax.random.normal(rng)

    def keyed(loss_fn: Any, rng: Any) -> Any:
        step = made(loss_fn)
        return step(step.init(params), _batch(), rng=rng)

    model = sj.train_step(_square, sgd, fn)
    apart = jax.device_put(jnp.ones((8, 4)), jax.devices()[3])
    turned = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("dp",))
    calls: dict[str, Callable[[], Any]] = {
        "optimizer": lambda: made(optimizer="adam"),
        "loss_fn": lambda: made(loss_fn=3),
        "remat": lambda: made(remat="dots"),
        "accumulate": lambda: made(accumulate=0),
        "clip": lambda: made(clip=-1.0),
        "scale": lambda: made(loss_scale="dynamic"),
        "flag": lambda: made(has_aux="no"),
        "mesh": lambda: sj.train_step(_square, sgd, _KERNEL),
        "two meshes": lambda: sj.train_step(_square, sgd, fn, mesh),
        "setting": lambda: called(_square, transforms=[sl.accumulate(2)]),
        "integers": lambda: made().init({"kernel": jnp.ones((4, 4), int)}),
        "missing": lambda: model.init({"weight": own["weight"]}),
        "strange": lambda: model.init({**own, "wieght": own["weight"]}),
        "shape": lambda: model.init({**own, "weight": jnp.ones(3)}),
        "tree": lambda: model.init([own["weight"]]),
        "state": lambda: made()(params, _batch()),
        "vector": lambda: called(lambda p, b: b["x"]),
        "pair": lambda: called(lambda p, b: (b["x"].sum(), b["y"].sum())),
        "no pair": lambda: called(_square, has_count=True),
        "integer loss": lambda: called(lambda p, b: jnp.int32(1)),
        "rows": lambda: called(_square, {"x": jnp.ones((6, 4)), "y": jnp.ones((6, 4))}, accumulate=4),
        "key": lambda: called(_square, {**_batch(), "key": jax.random.key(0)}, accumulate=2),
        "tensors": lambda: called(_square, {**_batch(), "x": torch.ones(8, 4)}),
        "text": lambda: called(_square, {**_batch(), "source": "a file"}),
        "texts": lambda: called(_square, np.array(["a", "b"])),
        "another device": lambda: called(_square, {**_batch(), "x": apart}),
        "another order": lambda: called(_square, jax.device_put(apart, jax.NamedSharding(turned, jax.P("dp")))),
        "deleted": lambda: called(_square, _deleted()),
        "shapes of a batch": lambda: called(_square, jax.eval_shape(_batch)),
        "lowered text": lambda: (lambda step: step.lower(step.init(params), "a file"))(made()),
        "seed": lambda: keyed(with_key, 3),
        "keys": lambda: keyed(with_key, {"drop": jax.random.split(jax.random.key(0))}),
        "key elsewhere": lambda: keyed(with_key, jax.device_put(jax.random.key(0), jax.devices()[3])),
        "no key": lambda: called(with_key),
        "key for none": lambda: keyed(_square, jax.random.key(0)),
        "aux": lambda: called(lambda p, b: (_square(p, b), {"name": "mse"}), has_aux=True, accumulate=2),
        "state of sgd": lambda: made(optimizer=optax.adamw(0.1))(made().init(params), _batch()),
        "state without a scale": lambda: made(loss_scale=8.0)(made().init(params), _batch()),
        "state of other shapes": lambda: _with_moments_of(made(optimizer=optax.adam(0.1)), params, jnp.ones((4, 8))),
        "tensors of a model": lambda: model.init({**own, "weight": torch.ones(4, 4)}),
        "buffers": lambda: made(has_buffers=True).init(params),
        "changed buffers": lambda: _with_buffers(made),
        "shapes": lambda: made().init(jax.eval_shape(lambda: params)),
        "line search": lambda: (lambda step: step(step.init(params), _batch()))(made(optimizer=optax.lbfgs())),
    }
    return {name: raised(call) for name, call in calls.items()}


def _deleted() -> Any:
    batch = jnp.ones(8)
    batch.delete()
    return batch


def _with_moments_of(step: Any, params: Any, other: Any) -> None:
    step(step.init(params)._replace(opt_state=step.init({"kernel": other}).opt_state), _batch())


def _with_buffers(made: Callable[..., Any]) -> None:
    step = made(lambda p, buffers, b: (_square(p, b), {"n": buffers["n"] + 0.5}), has_buffers=True)
    step(step.init({"kernel": jnp.ones((4, 4))}, {"n": jnp.zeros((), jnp.int32)}), _batch())
