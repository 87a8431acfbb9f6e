"""A function of JAX as a module of torch: the opposite direction of `compile_model`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardlib.engine._torch import pytree
from shardlib.errors import InputError
from shardlib.jax._exchange import to_jax, to_torch
from shardlib.rules.trees import name_of_path

__all__ = ["JaxModule"]


class JaxModule(nn.Module):
    """A function `f(params, *inputs)` of JAX, such as a flax module's `apply`, as a module that torch trains.

    Parameters are torch's, so that its optimizers step on them; forward and backward run in JAX, jitted, and hand
    tensors over without a copy where alignment allows. A gradient that JAX does not define (of whole numbers) is None.
    Inside of a sharded model, each rank calls the function with whole tensors: what a model axis splits is gathered.

    Args:
        function: pure; its outputs are an array, or a nested structure of them.
        params: a nested mapping of arrays, or of tensors. Names are the paths, joined by ".".

    Raises:
        InputError: a parameter that is not an array, or a path that torch cannot use as a name.

    >>> import jax.numpy as jnp
    >>> module = JaxModule(lambda p, x: jnp.tanh(x @ p["kernel"]), {"kernel": jnp.ones((3, 2))})
    >>> module(torch.ones(4, 3)).sum().backward()
    >>> [(name, tuple(p.grad.shape)) for name, p in module.named_parameters()]
    [('kernel', (3, 2))]
    """

    def __init__(self, function: Callable[..., Any], params: Mapping[str, Any]) -> None:
        super().__init__()
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(params)
        self._names = [name_of_path(path) for path, _ in leaves]
        for name, (_, leaf) in zip(self._names, leaves, strict=True):
            _register(self, name, leaf)
        self._forward = jax.jit(function)

        def pulled(arrays: Any, inputs: Any, cotangents: Any) -> Any:
            return jax.vjp(lambda p, x: function(p, *x), arrays, inputs)[1](cotangents)

        self._backward = jax.jit(pulled)

    def forward(self, *inputs: Any) -> Any:
        """Call the function with these parameters, on tensors."""
        # By attribute: where a unit is gathered (fsdp, zero(3)), a plain tensor stands in the parameter's place.
        params = [operator.attrgetter(name)(self) for name in self._names]
        leaves, inputs_structure = pytree.tree_flatten(inputs)
        # Where a model axis splits activations, every rank computes the same, on whole tensors.
        split = next((each.device_mesh for each in (*leaves, *params) if isinstance(each, DTensor)), None)
        structure, *results = _Called.apply(self, inputs_structure, len(params), *map(_whole, (*params, *leaves)))
        if split is not None:
            results = [_replicated(each, split) for each in results]
        return pytree.tree_unflatten(results, structure)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _replicated(value: Any, mesh: DeviceMesh) -> Any:
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _register(module: nn.Module, name: str, leaf: Any) -> None:
    """Register a parameter inside nested modules, one for each part of the path."""
    tensor = leaf if isinstance(leaf, torch.Tensor) else None
    if tensor is None and not isinstance(leaf, jax.Array | np.ndarray):
        raise InputError(f'JaxModule: "{name}" is a {type(leaf).__name__}; parameters are arrays or tensors.')
    # A copy: torch's optimizers write where JAX believes that nothing changes.
    tensor = to_torch(jax.numpy.asarray(leaf), copy=True) if tensor is None else tensor.detach().clone()
    *parents, last = name.split(".")
    for parent in parents:
        if not hasattr(module, parent):
            module.add_module(parent, nn.Module())
        module = module.get_submodule(parent)
    if not last or hasattr(module, last):
        raise InputError(f'JaxModule: a parameter cannot be called "{name}" in a torch module; rename it.')
    module.register_parameter(last, nn.Parameter(tensor, requires_grad=_has_gradient(tensor)))


class _Called(torch.autograd.Function):
    """`f(params, *inputs)`, and its `jax.vjp` on the way back."""

    @staticmethod
    def forward(ctx: Any, module: JaxModule, structure: Any, count: int, *tensors: Any) -> Any:
        # Torch keeps the tensors, so that it notices writes to them, and gathers or recomputes them in backward.
        ctx.save_for_backward(*(t if isinstance(t, torch.Tensor) else None for t in tensors))
        ctx.others = [None if isinstance(t, torch.Tensor) else t for t in tensors]
        ctx.module, ctx.count, ctx.inputs = module, count, structure
        params, inputs = _arguments(ctx, tensors)
        outputs, outputs_structure = pytree.tree_flatten(module._forward(params, *inputs))
        ctx.outputs = outputs_structure
        ctx.set_materialize_grads(True)
        results = [to_torch(array) for array in outputs]
        ctx.mark_non_differentiable(*(r for r in results if not _has_gradient(r)))
        return (outputs_structure, *results)

    @staticmethod
    def backward(ctx: Any, _: Any, *grads: Any) -> Any:
        cotangents = pytree.tree_unflatten([_cotangent(grad) for grad in grads], ctx.outputs)
        tensors = [o if t is None else t for t, o in zip(ctx.saved_tensors, ctx.others, strict=True)]
        by_params, by_inputs = ctx.module._backward(*_arguments(ctx, tensors), cotangents)
        leaves = [*jax.tree_util.tree_leaves(by_params), *pytree.tree_leaves(by_inputs)]
        return (None, None, None, *(_gradient(leaf) for leaf in leaves))


def _arguments(ctx: Any, tensors: Sequence[Any]) -> tuple[Any, Any]:
    """Return parameters and inputs of the function as JAX has them."""
    arrays = [to_jax(t) if isinstance(t, torch.Tensor) else t for t in tensors]
    params = jax.tree_util.tree_unflatten(ctx.module._structure, arrays[: ctx.count])
    return params, pytree.tree_unflatten(arrays[ctx.count :], ctx.inputs)


# A complex gradient of torch is the conjugate of JAX's.


def _cotangent(grad: torch.Tensor) -> Any:
    return to_jax(grad.conj()) if _has_gradient(grad) else np.zeros(tuple(grad.shape), jax.dtypes.float0)


def _gradient(leaf: Any) -> torch.Tensor | None:
    return None if getattr(leaf, "dtype", None) == jax.dtypes.float0 else to_torch(leaf).conj()


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
