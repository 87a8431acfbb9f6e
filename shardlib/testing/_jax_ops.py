"""Ops of PyTorch's database on one device of JAX beside torch. Runs in the process that is kept for JAX."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from shardlib.engine._torch import pytree
from shardlib.errors import ShardlibError
from shardlib.jax import make_mesh
from shardlib.jax._bits import to_numpy, to_tensor
from shardlib.jax._compile import compile_model
from shardlib.testing.ops import Finding, Sample, Verdict, _difference, _direction, _plain, _tolerance, samples_of

__all__ = ["check"]


@dataclass(frozen=True)
class _Case:
    """A sample with what torch makes of it: outputs, and gradients, which are zero where torch has none."""

    sample: Sample
    outputs: list[Any]
    grads: list[torch.Tensor]

    @property
    def trained(self) -> list[int]:
        return [i for i, tensor in enumerate(self.sample.tensors) if tensor.requires_grad]


class _Calls(nn.Module):
    """The functions of samples, each of its own tensors, as one module: exporting it once saves time."""

    def __init__(self, cases: Sequence[_Case]) -> None:
        super().__init__()
        self.samples = [case.sample for case in cases]

    def forward(self, tensors: list[list[torch.Tensor]]) -> Any:
        """Call each on copies: some ops of the database write to their operand."""
        copies = [[tensor.clone() for tensor in own] for own in tensors]
        return [pytree.tree_leaves(s.run(own)) for s, own in zip(self.samples, copies, strict=True)]


# Zeta functions, which torch (2.13) computes in float64 with the digits of float32.
_COARSE = ("polygamma|", "special.polygamma|", "special.zeta|", "digamma|")


# Ops whose vectors may have another sign or phase.
_FREE = ("linalg.eig", "linalg.svd", "svd", "linalg.qr", "qr|", "pca_lowrank", "svd_lowrank")


def check(names: Sequence[str], count: int, dtype: torch.dtype | None) -> list[Verdict]:
    """Check some samples of each op; runs in a process where JAX has 64-bit numbers."""
    warnings.simplefilter("ignore")
    cases = [
        (name, case) for name in names for sample in _samples(name, count, dtype) if (case := _case(sample)) is not None
    ]
    found = _findings([case for _, case in cases])
    jax.clear_caches()
    return [Verdict(name, tuple(f for (own, _), f in zip(cases, found, strict=True) if own == name)) for name in names]


def _samples(name: str, count: int, dtype: torch.dtype | None) -> list[Sample]:
    dtype = dtype or (torch.float32 if name.startswith(_COARSE) else None)
    return samples_of(name, count=count, dtype=dtype, unique=name.startswith(_FREE))


def _findings(cases: Sequence[_Case]) -> list[Finding]:
    """Check cases in one program; in halves if one of them is refused, or draws numbers, to find out which."""
    if not cases:
        return []
    found = _compared(cases)
    if len(cases) == 1 or (len(found) == len(cases) and all(f.kind in ("right", "wrong") for f in found)):
        return found
    half = len(cases) // 2
    return [*_findings(cases[:half]), *_findings(cases[half:])]


def _case(sample: Sample) -> _Case | None:
    """Return None for a sample that torch refuses, and for results of another layout."""
    tensors = sample.tensors
    try:
        outcome = sample.outcome()
    except Exception:
        return None
    at = len(outcome) - 2 * len(tensors)
    trained = [(g, t) for g, t in zip(outcome[at:], tensors, strict=False) if t.requires_grad]
    grads = [torch.zeros_like(t) if g is None else g for g, t in trained]
    plain = all(_plain(x) for x in (*outcome[:at], *grads) if isinstance(x, torch.Tensor))
    return _Case(sample, outcome[:at], grads) if plain else None


def _compared(cases: Sequence[_Case]) -> list[Finding]:
    try:
        results, random = _on_jax(cases)
    except ShardlibError as error:
        return [Finding("refused", (), str(error))]
    except Exception as error:
        return [Finding("crashed", (), f"{type(error).__name__}: {error}")]
    return [_finding(case, found, random) for case, found in zip(cases, results, strict=True)]


def _finding(case: _Case, found: list[Any], random: bool) -> Finding:
    wanted = [*case.outputs, *case.grads]
    if random:  # the bits are JAX's
        found, wanted = ([_kind(x) for x in values] for values in (found, wanted))
    if (wrong := _difference(found, wanted, _tolerance(case.sample.tensors, wanted))) is not None:
        return Finding("wrong", (), wrong)
    return Finding("random" if random else "right", ())


def _kind(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _on_jax(cases: Sequence[_Case]) -> tuple[list[list[Any]], bool]:
    """Return outputs and gradients of each case, and whether numbers were drawn."""
    tensors = [[tensor.detach() for tensor in case.sample.tensors] for case in cases]
    fn, _ = compile_model(_Calls(cases), make_mesh("dp=1", devices=jax.devices()[:1]), {})
    random = fn.prepare((tensors,)).random
    arrays = [[jnp.asarray(to_numpy(tensor)) for tensor in own] for own in tensors]
    numbers: list[Any] = []  # results that are no arrays

    def results(values: list[list[Any]]) -> list[Any]:
        given = [list(own) for own in arrays]
        for case, own, new in zip(cases, given, values, strict=True):
            for i, value in zip(case.trained, new, strict=True):
                own[i] = value
        flat = pytree.tree_leaves(fn({}, given, rng=jax.random.key(0)))
        numbers[:] = [None if isinstance(x, jax.Array) else x for x in flat]
        return [x for x in flat if isinstance(x, jax.Array)]

    def both(values: list[list[Any]]) -> tuple[list[Any], list[list[Any]]]:
        outputs, pull = jax.vjp(results, values)
        wanted = [direction for case in cases for direction in _directions(case.outputs)]
        wanted = [direction for direction, x in zip(wanted, numbers, strict=True) if x is None]
        return outputs, pull([_cotangent(y, d) for y, d in zip(outputs, wanted, strict=True)])[0]

    outputs, grads = jax.jit(both)([[own[i] for i in case.trained] for case, own in zip(cases, arrays, strict=True)])
    given = iter(outputs)
    left = iter([to_tensor(next(given)) if x is None else x for x in numbers])
    return [
        [*(next(left) for _ in case.outputs), *(to_tensor(jnp.conj(grad)) for grad in own)]
        for case, own in zip(cases, grads, strict=True)
    ], random


def _directions(outputs: list[Any]) -> list[Any]:
    """Return the cotangent of each output, that of `Sample.outcome`. Outputs without a gradient have one too."""
    roots = [i for i, x in enumerate(outputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    order = [*roots, *(i for i in range(len(outputs)) if i not in roots)]
    return [_direction(x, order.index(i), None) if _is_inexact(x) else None for i, x in enumerate(outputs)]


def _is_inexact(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _cotangent(output: Any, direction: torch.Tensor | None) -> Any:
    """Return a cotangent of JAX, which conjugates where torch does not."""
    if direction is None or tuple(direction.shape) != output.shape:
        return np.zeros(output.shape, jax.dtypes.float0)
    return jnp.conj(jnp.asarray(to_numpy(direction)).astype(output.dtype))
