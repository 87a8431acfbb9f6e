"""Transforms of JAX around the function of a compiled model. Failures are plain assertions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from jax.sharding import AxisType
from torch import nn

import shardlib as sl
import shardlib.jax as sj
from shardlib.testing import models
from tests.jax.refusals import raised

__all__ = ["CHECKS", "FAMILIES", "exported_family", "refused"]

CHECKS: dict[str, Callable[[], None]] = {}


def _check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__.removeprefix("_").replace("_", " ")] = function
    return function


@functools.cache
def _model() -> tuple[Any, Any, Any, Any]:
    """An MLP with a fused weight, at zero(2), so that gradients have shardings of their own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 8)).double()
    rules = {"0.weight": "(3 heads@tp) in", "2": "rowwise"}
    fn, params = sj.compile_model(model, sj.make_mesh("dp=2,tp=4"), rules, transforms=[sl.zero(2)])
    x = jax.random.normal(jax.random.key(0), (8, 8))
    return fn, params, jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size).reshape(leaf.shape)), params), x


def _plain(params: Any, x: Any) -> Any:
    """The same model by hand."""
    up = params["0.weight"].reshape(12, 8)
    return jnp.tanh(x @ up.T) @ params["2.weight"].T + params["2.bias"]


def _loss(fn: Any, params: Any, x: Any) -> Any:
    return jnp.square(fn(params, x)).mean()


def _same(transform: Callable[[Callable[..., Any]], Any], **options: Any) -> None:
    """What a transform makes of the compiled function and of the one by hand has the same values."""
    got, wanted = transform(_model()[0]), transform(_plain)
    assert str(jax.tree.structure(got)) == str(jax.tree.structure(wanted))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        # Rounding of 1.1e-16, over sums of a hundred terms; a mistake is of order one.
        assert np.allclose(one, other, rtol=1e-12, atol=1e-12), np.abs(np.asarray(one) - np.asarray(other)).max()


@_check
def _without_jit_with_it_and_its_shapes() -> None:
    _, params, _, x = _model()
    _same(lambda fn: fn(params, x))
    _same(lambda fn: jax.jit(fn)(params, x))
    _same(lambda fn: jax.eval_shape(fn, params, x).shape)


@_check
def _gradients_in_reverse() -> None:
    fn, params, _, x = _model()
    _same(lambda fn: jax.jit(jax.value_and_grad(functools.partial(_loss, fn)))(params, x))
    grads = jax.jit(jax.grad(functools.partial(_loss, fn)))(params, x)
    laid_out = jax.tree.map(
        lambda grad, planned: grad.sharding.is_equivalent_to(planned, grad.ndim), grads, fn.shardings(grads, "grad")
    )
    assert all(laid_out.values()) and "dp" in str(grads["0.weight"].sharding.spec)
    _same(lambda fn: jax.grad(functools.partial(_loss, fn), argnums=1)(params, x))
    _same(lambda fn: jax.vjp(fn, params, x)[1](jnp.cos(x)))
    _same(lambda fn: jax.jacrev(lambda b: fn({**params, "2.bias": b}, x).sum(0))(params["2.bias"]))


@_check
def _gradients_forward() -> None:
    _, params, tangent, x = _model()
    _same(lambda fn: jax.jit(lambda p, t: jax.jvp(lambda p: fn(p, x), (p,), (t,)))(params, tangent))
    _same(lambda fn: jax.linearize(lambda p: fn(p, x), params)[1](tangent))
    _same(lambda fn: jax.jacfwd(lambda b: fn({**params, "2.bias": b}, x).sum(0))(params["2.bias"]))


@_check
def _second_derivatives() -> None:
    _, params, tangent, x = _model()

    def product(fn: Any) -> Any:
        grad = jax.grad(lambda p: _loss(fn, p, x))
        return jax.jit(lambda p, t: jax.jvp(grad, (p,), (t,))[1])(params, tangent)

    _same(product)
    _same(lambda fn: jax.hessian(lambda b: _loss(fn, {**params, "2.bias": b}, x))(params["2.bias"]))


@_check
def _vmap_over_batches_and_over_parameters() -> None:
    _, params, _, x = _model()
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 2]), params)
    _same(lambda fn: jax.jit(jax.vmap(fn, (None, 0)))(params, jnp.stack([x, x + 1])))
    _same(lambda fn: jax.vmap(jax.grad(functools.partial(_loss, fn)), (0, None))(several, x))
    _same(lambda fn: jax.vmap(lambda row: jax.grad(lambda p: _loss(fn, p, row[None]))(params))(x))


@_check
def _checkpoints_and_custom_derivatives() -> None:
    _, params, _, x = _model()

    def recomputed(fn: Any, policy: Any) -> Any:
        return jax.jit(jax.grad(functools.partial(_loss, jax.checkpoint(fn, policy=policy))))(params, x)

    for policy in (None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.nothing_saveable):
        _same(functools.partial(recomputed, policy=policy))

    def twice(fn: Any) -> Any:
        called = jax.custom_vjp(fn)
        called.defvjp(lambda p, x: jax.vjp(fn, p, x), lambda back, g: back(2 * g))
        return jax.grad(functools.partial(_loss, called))(params, x)

    _same(twice)


@_check
def _scan_over_steps_and_donated_state() -> None:
    _, params, _, x = _model()
    optimizer = optax.sgd(0.1, momentum=0.9)

    def steps(fn: Any) -> Any:
        def one(carry: Any, x: Any) -> Any:
            loss, grads = jax.value_and_grad(functools.partial(_loss, fn))(carry[0], x)
            updates, state = optimizer.update(grads, carry[1])
            return (optax.apply_updates(carry[0], updates), state), loss

        begun = jax.tree.map(jnp.copy, (params, optimizer.init(params)))
        return jax.jit(lambda c, xs: jax.lax.scan(one, c, xs), donate_argnums=0)(begun, jnp.stack([x, x + 1]))

    _same(steps)


@_check
def _ahead_of_time_and_exported() -> None:
    fn, params, _, x = _model()
    shapes = {name: shape for name, shape in fn.abstract().items() if name in params}
    _same(lambda each: jax.jit(each).lower(shapes, x).compile()(params, x))
    exported = jax.export.export(jax.jit(fn), platforms=["cpu", "tpu", "cuda"])(shapes, x)
    _same(lambda each: jax.jit(jax.grad(functools.partial(_loss, exported.call if each is fn else each)))(params, x))


class _Pictures(nn.Module):
    """Plain and grouped convolutions, a norm, pooling, and a size that is computed of another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.grouped = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        y = nn.functional.max_pool2d(self.grouped(y) + y, 2)
        pairs = y.reshape(y.shape[0] * 2, -1).reshape(y.shape[0], 8, -1)
        return self.head(pairs[:].mean(2))


@_check
def _exported_for_any_number_of_rows() -> None:
    torch.manual_seed(0)
    transformer = models.Transformer(vocab=11, heads=4, head=4, layers=2).double()
    pictures = sl.Rules({"head": "colwise"}, unmatched="replicate")
    ids, images = jnp.arange(48).reshape(8, 6) % 11, jax.random.normal(jax.random.key(0), (8, 4, 8, 8))
    for model, rules, x, scan in (
        (transformer, models.rules_for(transformer), ids, False),
        (transformer, models.rules_for(transformer), ids, True),
        (_Pictures().double().eval(), pictures, images, False),
    ):
        fn, params = sj.compile_model(model, sj.make_mesh("dp=2,tp=4"), rules, scan=scan)
        step = jax.jit(jax.value_and_grad(lambda p, x, fn=fn: jnp.square(fn(p, x)).mean()))
        shapes = {name: shape for name, shape in fn.abstract().items() if name in params}
        (rows,) = jax.export.symbolic_shape("rows")
        exported = jax.export.export(step)(shapes, jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype))
        for count in (8, 3):
            loss, grads = jax.jit(exported.call)(params, x[:count])
            _beside_torch(model, sj.to_torch(x[:count]), float(loss), fn.to_torch(grads))


def _beside_torch(model: nn.Module, x: torch.Tensor, loss: float, grads: dict[str, torch.Tensor]) -> None:
    model.zero_grad()
    wanted = model(x).square().mean()
    wanted.backward()
    assert abs(loss - float(wanted)) <= 1e-12 * abs(float(wanted))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-12, atol=1e-12)


def _bert() -> nn.Module:
    options: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=32, num_hidden_layers=1, max_position_embeddings=16, **options)
    return transformers.BertForSequenceClassification(config)


def _t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32, decoder_start_token_id=0, **sizes)
    )


FAMILIES: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[int, ...]]]] = {
    "BERT": (_bert, {"input_ids": (6,), "labels": ()}),
    "T5": (_t5, {"input_ids": (6,), "labels": (4,)}),
}


def exported_family(name: str) -> float:
    """How far loss and gradients of an exported program are from torch's, for several numbers of rows."""
    torch.manual_seed(0)
    build, shapes = FAMILIES[name]
    model = build().double().eval()
    fn, params = sj.compile_model(model, sj.make_mesh("dp=2,tp=4"))
    step = jax.jit(jax.value_and_grad(lambda p, batch: fn(p, **batch, **options)["loss"]))
    options = {"use_cache": False} if name == "T5" else {}
    (rows,) = jax.export.symbolic_shape("rows", constraints=["mod(rows, 2) == 0"])
    symbolic = {key: jax.ShapeDtypeStruct((rows, *shape), np.int64) for key, shape in shapes.items()}
    exported = jax.export.export(step)({key: each for key, each in fn.abstract().items() if key in params}, symbolic)
    far = 0.0
    for count in (2, 6):
        batch = {key: torch.randint(2, (count, *shape)) for key, shape in shapes.items()}
        loss, grads = jax.jit(exported.call)(params, {key: tensor.numpy() for key, tensor in batch.items()})
        model.zero_grad()
        wanted = model(**batch, **options).loss
        wanted.backward()
        apart = [abs(float(loss) - float(wanted))]
        for key, grad in fn.to_torch(grads).items():
            theirs = model.get_parameter(key).grad
            apart.append(float((grad if theirs is None else grad - theirs).abs().max()))
        far = max(far, *apart)
    return far


class _Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 5 else x


@_check
def _under_a_mesh_of_either_type() -> None:
    fn, params, _, x = _model()
    with jax.set_mesh(fn.mesh):
        _same(lambda each: jax.jit(jax.grad(functools.partial(_loss, each)))(params, x))
    wanted = _plain(params, x)
    with jax.set_mesh(jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)):
        got = jax.jit(jax.sharding.auto_axes(fn, out_sharding=jax.P("dp")))(params, x)
        assert got.sharding.spec == jax.P("dp", None)
        assert np.allclose(got, wanted, rtol=1e-12, atol=1e-12)


@_check
def _inside_and_outside_of_shard_map() -> None:
    """Inside, over all axes or one, it is the model of the local rows."""
    fn, params, _, x = _model()
    rows, whole = jax.P("dp"), jax.P()
    for manual in ({"dp"}, {"dp", "tp"}):

        def mean(params: Any, x: Any) -> Any:
            return jax.lax.pmean(_loss(fn, params, x), "dp")

        mapped = jax.shard_map(mean, mesh=fn.mesh, in_specs=(whole, rows), out_specs=whole, axis_names=manual)
        losses = {fn: jax.jit(mapped), _plain: functools.partial(_loss, _plain)}
        _same(lambda each, losses=losses: jax.value_and_grad(losses[each])(params, x))  # type: ignore[misc]
    after = jax.shard_map(lambda y: y * 2, mesh=fn.mesh, in_specs=rows, out_specs=rows)
    _same(lambda each: jax.jit(lambda p: after(each(p, x)))(params))


@_check
def _inside_pmap() -> None:
    _, params, _, x = _model()
    whole = jax.tree.map(np.asarray, params)
    _same(lambda fn: jax.pmap(fn, in_axes=(None, 0))(whole, np.asarray(x)[:, None]))


def refused() -> dict[str, str]:
    """What is raised where a transform cannot be served."""
    fn, params, _, x = _model()
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("2*rows, 8"), x.dtype)
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 8"), x.dtype)
    branches, _ = sj.compile_model(_Branches(), fn.mesh, {})
    shapes = {name: shape for name, shape in fn.abstract().items() if name in params}
    step = sj.train_step(functools.partial(_loss, fn), optax.sgd(0.1), fn)
    state = step.init(params)
    explicit = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)

    def under(call: Callable[[], Any]) -> Any:
        with jax.set_mesh(explicit):
            return call()

    mapped = jax.shard_map(step, mesh=fn.mesh, in_specs=(jax.P(), jax.P("dp")), out_specs=jax.P(), check_vma=False)
    return {
        "symbolic": raised(lambda: jax.export.export(jax.jit(fn))(shapes, symbolic)),
        "branch on rows": raised(lambda: jax.export.export(jax.jit(branches))({}, rows)),
        "explicit": raised(lambda: under(lambda: jax.jit(fn)(params, x))),
        "explicit step": raised(lambda: under(lambda: step(state, x))),
        "mapped step": raised(lambda: mapped(state, x)),
    }
