"""Every family that has a layout file, and some convolutions, trained on a mesh of JAX and on one device of torch.

Runs on the devices.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import gpt
import jax
import numpy as np
import optax
import torch
from torch import nn

import shardlib as sl
import shardlib.jax as sj
from shardlib._mesh import MeshShape
from tests.families import transformer_models
from tests.families.mixtral import Case as Mixtral
from tests.families.resnet import Case as ResNet
from tests.families.resnet import Inverted
from tests.families.t5 import Case as T5

__all__ = ["CONVOLUTIONS", "FAMILIES", "Case", "collectives", "compared", "megatron", "rounded"]

# One layer where compiling two takes twice as long. Of tp=8 are the heads; keys and values have fewer.
_HEADS = {"num_attention_heads": 8, "num_hidden_layers": 1}
_LLAMA = {**_HEADS, "num_key_value_heads": 4}


def _gpt(layers: int = 2, vocab: int = 67) -> nn.Module:
    config = gpt.GPTConfig(vocab_size=vocab, context=16, n_layer=layers, n_head=8, d_model=32)
    model = gpt.GPT(config)
    return _moved(model)


def _moved(model: nn.Module) -> nn.Module:
    """Move weights away from where they start, so far that nothing is lost in the noise."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def _convnext() -> nn.Module:
    config = transformer_models.transformers.ConvNextConfig(
        hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32, num_labels=5
    )
    return _moved(transformer_models.transformers.ConvNextForImageClassification(config))


def _ids(step: int) -> Any:
    return (transformer_models.text(step)[1]["input_ids"],), {}


def _small(batch: Any, size: int = 32) -> Any:
    (images,), kwargs = batch
    return (images[..., :size, :size],), kwargs


_build, _text = transformer_models.build, transformer_models.text
# Model, and what makes the batch of a step.
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "example_gpt": (_gpt, _ids),
    "gpt2": (lambda: _build("GPT2LMHeadModel", n_head=8, n_layer=1), lambda step: _text(step, use_cache=False)),
    "llama": (lambda: _build("LlamaForCausalLM", "sdpa", **_LLAMA), lambda step: _text(step, use_cache=False)),
    "bert": (
        lambda: _build("BertForMaskedLM", "sdpa", **_HEADS),
        lambda step: _text(step, labels="tokens", padding="right"),
    ),
    "vit": (
        lambda: _build("ViTForImageClassification", "sdpa", **_HEADS),
        lambda step: transformer_models.images(step, labels="class"),
    ),
    "t5": (
        lambda: T5("", settings={"num_heads": 8, "num_layers": 1}).make_model(),
        lambda step: T5("", padding=True).make_batch(step),
    ),
    "mixtral": (
        lambda: Mixtral("", settings=_LLAMA).make_model(),
        lambda step: Mixtral("", balanced=True).make_batch(step),
    ),
    "resnet": (lambda: ResNet("").make_model(), lambda step: _small(ResNet("").make_batch(step))),
}
# Depthwise and grouped kernels. Their rules are proposed.
CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "convnext": (_convnext, lambda step: _small(ResNet("").make_batch(step))),
    "inverted": (Inverted, lambda step: _small(ResNet("").make_batch(step), 8)),
}
_ALL = FAMILIES | CONVOLUTIONS


@dataclass(frozen=True)
class Case:
    family: str
    mesh: str
    dtype: str = "float64"
    transform: str = ""
    steps: int = 3

    def __str__(self) -> str:
        return " ".join(filter(None, (self.family, self.mesh, self.dtype, self.transform)))


def _loss(output: Any) -> Any:
    """For tensors and arrays alike: the model's own, or one that every logit has a part in."""
    if isinstance(output, dict) and output.get("loss") is not None:
        return output["loss"]
    values = output["logits"] if isinstance(output, dict) else output
    return (values**2).mean() + values.mean()


@contextmanager
def _float64_throughout() -> Iterator[None]:
    """Models of transformers go down to float32 where they are careful (norms, angles, losses); here to float64."""
    names = {"float32": torch.float64, "float": torch.float64}
    sj.to_jax(torch.zeros(()))  # the table of dtypes is made of torch's own
    with mock.patch.multiple(torch, **names), mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def compared(case: Case) -> dict[str, float]:
    """How far apart the two engines are: loss and gradients of the first step, parameters and buffers after the last.

    A gradient's distance is to the largest entry of its tensor, or a thousandth of the model's largest where that is
    more: some gradients are zero in exact arithmetic.
    """
    if case.dtype == "float64":
        with _float64_throughout():
            return _compared(case)
    return _compared(case)


def rounded(case: Case) -> dict[str, dict[str, float]]:
    """How far the loss and gradients of both engines are in float32 from those of torch in float64."""
    build, batch_of = FAMILIES[case.family]
    torch.manual_seed(0)
    model, args_of = build(), batch_of(0)
    with _float64_throughout():
        (loss,), exact = _train_torch(copy.deepcopy(model).double(), [_of_dtype(args_of, torch.float64)])
    fn, params = sj.compile_model(model, sj.make_mesh(case.mesh))
    (own,), grads, _ = _train_jax(fn, params, [args_of])
    (plain,), theirs = _train_torch(model, [args_of])
    top = max(float(g.abs().max()) for g in exact.values()) / 1000
    engines = {"jax": (own, fn.to_torch(grads)), "torch": (plain, theirs)}
    return {
        engine: {
            "loss": abs(value - loss) / abs(loss),
            "gradient": max(_apart(found[n].double(), g, top) for n, g in exact.items()),
        }
        for engine, (value, found) in engines.items()
    }


def _compared(case: Case) -> dict[str, float]:
    build, batch_of = _ALL[case.family]
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    model = build().to(dtype)
    batches = [_of_dtype(batch_of(step), dtype) for step in range(case.steps)]
    transforms = [eval(case.transform, {"zero": sl.zero, "fsdp": sl.fsdp})] if case.transform else []
    mesh = sj.make_mesh(case.mesh, devices=jax.devices()[: MeshShape.of(case.mesh).world_size])
    fn, params = sj.compile_model(model, mesh, transforms=transforms)
    losses, grads, trained = _train_jax(fn, params, batches)
    wanted, wanted_grads = _train_torch(model, batches)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    top = max(float(g.abs().max()) for g in wanted_grads.values())
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)),
        "gradient": max(_apart(fn.to_torch(grads)[n], g, top / 1000) for n, g in wanted_grads.items()),
        "trained": max(_apart(t, tensors[n], 1e-3) for n, t in fn.to_torch(trained).items()),
    }


def _of_dtype(batch: Any, dtype: torch.dtype) -> Any:
    args, kwargs = batch

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def _apart(got: torch.Tensor, wanted: torch.Tensor, least: float) -> float:
    wanted = wanted.detach()
    if not wanted.numel():
        return 0.0
    return float((got - wanted).abs().max()) / max(float(wanted.abs().max()), least)


_ADAMW = {"b1": 0.9, "b2": 0.999, "eps": 1e-5, "weight_decay": 0.01}  # as torch's, but for eps: see the families' tests
_RATE = 1e-4


def _train_jax(fn: sj.Compiled, params: Any, batches: Any) -> Any:
    optimizer = optax.adamw(_RATE, **_ADAMW)
    shardings = fn.shardings(jax.eval_shape(optimizer.init, params), "state")
    state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
    static = {name: v for name, v in batches[0][1].items() if not isinstance(v, torch.Tensor)}

    def loss_of(params: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
        output, buffers = fn.apply(params, buffers, *args, **kwargs, **static)
        return _loss(output), buffers

    def step(params: Any, buffers: Any, state: Any, args: Any, kwargs: Any) -> Any:
        (loss, buffers), grads = jax.value_and_grad(loss_of, has_aux=True)(params, buffers, args, kwargs)
        updates, state = optimizer.update(grads, state, params)
        return loss, grads, optax.apply_updates(params, updates), buffers, state

    stored = fn.shardings(params)
    step = jax.jit(step, out_shardings=(None, fn.shardings(params, "grad"), stored, None, shardings))
    buffers, losses, first = fn.buffers, [], None
    for args, kwargs in batches:
        arrays = {name: np.asarray(v) for name, v in kwargs.items() if isinstance(v, torch.Tensor)}
        loss, grads, params, buffers, state = step(params, buffers, state, tuple(map(np.asarray, args)), arrays)
        first = grads if first is None else first
        losses.append(float(loss))
    assert {n: a.sharding for n, a in params.items()} == stored
    return losses, first, {**params, **buffers}


def _train_torch(model: nn.Module, batches: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), _RATE, (0.9, 0.999), 1e-5, 0.01)
    losses, first = [], None
    for args, kwargs in batches:
        optimizer.zero_grad()
        loss = _loss(model(*args, **kwargs))
        loss.backward()
        if first is None:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(float(loss))
    return losses, first


# --- what XLA makes of it -------------------------------------------------------------------------------------------

_COLLECTIVE = re.compile(r" (all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)(?:-start)?\(")


def collectives(compiled: Any) -> Counter[str]:
    """How many of each kind a compiled program holds."""
    return Counter(_COLLECTIVE.findall(compiled.as_text()))


_BLOCKS: dict[str, Callable[[int], nn.Module]] = {
    "example_gpt": lambda layers: _gpt(layers, 64),
    "gpt2": lambda layers: _build("GPT2LMHeadModel", "sdpa", n_head=8, n_layer=layers, vocab_size=64),
    "llama": lambda layers: _build(
        "LlamaForCausalLM", "sdpa", **{**_LLAMA, "num_hidden_layers": layers}, vocab_size=64, intermediate_size=64
    ),
}


def megatron(family: str, mesh: str) -> dict[str, dict[str, int]]:
    """The collectives that one more block adds, to a forward and to a training step."""
    counted = {}
    for layers in (1, 2):
        torch.manual_seed(0)
        model = _BLOCKS[family](layers)
        fn, params = sj.compile_model(model, sj.make_mesh(mesh))
        static = {} if family == "example_gpt" else {"use_cache": False}

        def loss_of(params: Any, ids: Any, fn: Any = fn, static: Any = static) -> Any:
            return _loss(fn(params, ids, **static))

        ids = np.zeros((4, 10), np.int32)
        programs = {"forward": jax.jit(loss_of), "step": jax.jit(jax.value_and_grad(loss_of))}
        counted[layers] = {name: collectives(f.lower(params, ids).compile()) for name, f in programs.items()}
    return {name: dict(counted[2][name] - counted[1][name]) for name in ("forward", "step")}
