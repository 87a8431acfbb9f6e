"""A function of JAX as a module of torch: the opposite direction of `compile_model`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
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
        self._function = function
        self._flat: dict[str, _Flat] = {}

    def forward(self, *inputs: Any) -> Any:
        """Call the function with these parameters, on tensors."""
        # By attribute: where a unit is gathered (fsdp, zero(3)), a plain tensor stands in the parameter's place.
        params = [operator.attrgetter(name)(self) for name in self._names]
        leaves, inputs_structure = pytree.tree_flatten(inputs)
        # Where a model axis splits activations, every rank computes the same, on whole tensors.
        split = next((each.device_mesh for each in (*leaves, *params) if isinstance(each, DTensor)), None)
        flat = self._of_leaves(len(params), inputs_structure)
        structure, *results = _Called.apply(flat, *map(_whole, (*params, *leaves)))
        if split is not None:
            results = [_replicated(each, split) for each in results]
        return jax.tree.unflatten(structure, results)

    def _of_leaves(self, count: int, structure: Any) -> _Flat:
        """Return the function of a list of arrays: the parameters, then the leaves of the inputs."""
        if str(structure) not in self._flat:

            def function(leaves: list[Any]) -> Any:
                params = jax.tree_util.tree_unflatten(self._structure, leaves[:count])
                return self._function(params, *pytree.tree_unflatten(leaves[count:], structure))

            self._flat[str(structure)] = _Flat(function)
        return self._flat[str(structure)]


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


class _Flat:
    """A function of a list of arrays, jitted; its gradients are such a function too, and so have gradients."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self.function, self.run = function, jax.jit(function)
        self._pullbacks: dict[tuple[int, ...], _Flat] = {}

    def pullback(self, moved: tuple[int, ...], count: int) -> _Flat:
        """Return the gradients of the leaves at `moved` as a function of all `count` leaves and the results' gradients.

        A gradient of torch is the conjugate of JAX's.
        """
        if moved not in self._pullbacks:

            def pulled(leaves: list[Any]) -> Any:
                own, grads = leaves[:count], leaves[count:]

                def results(values: list[Any]) -> list[Any]:
                    changed = dict(zip(moved, values, strict=True))
                    outputs = self.function([changed.get(i, leaf) for i, leaf in enumerate(own)])
                    return [jnp.asarray(each) for each in jax.tree.leaves(outputs) if _is_inexact(each)]

                _, pull = jax.vjp(results, [own[i] for i in moved])
                return [grad.conj() for grad in pull([grad.conj() for grad in grads])[0]]

            self._pullbacks[moved] = _Flat(pulled)
        return self._pullbacks[moved]


class _Called(torch.autograd.Function):
    """A function of JAX on tensors, and its `jax.vjp` on the way back."""

    @staticmethod
    def forward(ctx: Any, flat: _Flat, *leaves: Any) -> Any:
        arrays = [to_jax(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        outputs, structure = jax.tree.flatten(flat.run(arrays))
        results = [to_torch(array) for array in outputs]
        ctx.flat, ctx.leaves = flat, [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        ctx.tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.save_for_backward(*(leaves[i] for i in ctx.tensors))  # so that torch sees writes and second derivatives
        ctx.set_materialize_grads(True)
        ctx.mark_non_differentiable(*(each for each in results if not _has_gradient(each)))
        ctx.real = [_has_gradient(each) for each in results]
        return (structure, *results)

    @staticmethod
    def backward(ctx: Any, _: Any, *grads: Any) -> Any:
        leaves = list(ctx.leaves)
        for i, tensor in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            leaves[i] = tensor
        moved = tuple(i for i in ctx.tensors if _has_gradient(leaves[i]))
        given = [grad.contiguous() for grad, real in zip(grads, ctx.real, strict=True) if real]
        found = _Called.apply(ctx.flat.pullback(moved, len(leaves)), *leaves, *given)[1:]
        by_leaf = dict(zip(moved, found, strict=True))
        return (None, *(by_leaf.get(i) for i in range(len(leaves))))


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_inexact(array: Any) -> bool:
    return bool(jnp.issubdtype(jnp.asarray(array).dtype, jnp.inexact))
