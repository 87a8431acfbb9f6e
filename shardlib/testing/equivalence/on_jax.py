"""The run of a case on the JAX engine, beside the single device's on torch. Imported where JAX has its devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

import shardlib.jax as sj
from shardlib._plan import Plan
from shardlib.engine._torch import pytree
from shardlib.errors import InputError
from shardlib.jax._bits import to_numpy, to_tensor
from shardlib.testing.equivalence.case import Case, default_loss
from shardlib.testing.equivalence.optax_of import stepper_of
from shardlib.testing.equivalence.trace import Trace, Where, tracing
from shardlib.testing.equivalence.train import Run, cast, named_tensors

__all__ = ["JaxRun"]


class JaxRun:
    """A model that the JAX engine trains; to be compared as a sharded `Run` is.

    Its values are those of arrays, whole: `model` is a module of torch that is given them after each step.
    """

    sharded = True

    def __init__(self, case: Case, model: nn.Module, beside: Run) -> None:
        self.case, self.model, self.beside = case, model, beside
        optimizer = case.train(model.parameters())
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        mesh = sj.make_mesh(case.mesh, devices=jax.devices()[: case.mesh.world_size])
        self.fn, self.params = sj.compile_model(model, mesh, case.rules, transforms=case.transforms)
        self.buffers = self.fn.buffers
        params = named_tensors(model)[0]
        self.steppers = {
            name: stepper_of(optimizer, groups[id(params[name])]) for name in self.params if id(params[name]) in groups
        }
        self.states = self._begun()
        self.stepped: set[str] = set()
        self._next: Any = None
        self.grads: dict[str, Any] = {}
        self.output: Any = None
        self.trace: Trace | None = None
        self._programs: dict[Any, Any] = {}
        self._watched = _Watched()
        self._update = jax.jit(self._updated, static_argnums=0)
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
        self._show()

    @property
    def plan(self) -> Plan:
        return self.fn.plan

    def _show(self) -> None:
        """Copy the arrays' values into the module."""
        params, buffers = named_tensors(self.model)
        tensors = {**buffers, **params}
        for name, value in self.fn.to_torch({**self.buffers, **self.params}).items():
            tensors[name].data = value

    def tensors(self) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
        """Return parameters and buffers by name, with the arrays' values."""
        return named_tensors(self.model)

    def begin(self, step: int) -> None:
        self.grads = {}

    def forward_backward(self, step: int, micro: int) -> torch.Tensor:
        """Run one backward pass, accumulated; return the loss, divided by the number of passes."""
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), self.case.dtype)
        batch = cast(self.case.batch(step * self.case.accumulate + micro), dtype)
        leaves, structure = pytree.tree_flatten(batch)
        tensors = [to_numpy(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        program = self._program(batch, leaves, structure)
        if self.trace is None:
            (loss, (output, _, self.buffers)), (grads, _) = program(self.params, [], self.buffers, tensors)
        else:
            (loss, (output, values, self.buffers)), (grads, probed) = program(
                self.params, self._watched.zeros(), self.buffers, tensors
            )
            self._watched.into(self.trace, values, probed)
        self.grads = self._add(self.grads, grads) if self.grads else grads
        self.output = pytree.tree_map_only(jax.Array, _tensor, output)
        return _tensor(loss)

    def _program(self, batch: Any, leaves: list[Any], structure: Any) -> Any:
        """Return a compiled forward and backward for batches of one structure, and a separate one for tracing."""
        key = (str(structure), repr([None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]))
        if self.trace is None and key in self._programs:
            return self._programs[key]
        if self.trace is not None:
            self._watched = _Watched()
            self.fn.around(self._forward).prepare((batch, None))  # which says what there is to be watched
        fn = self.fn.around(self._forward)
        if fn.prepare((batch, self._watched.tensors())).random:
            raise InputError(
                "The model draws random numbers in its forward, and on JAX these are JAX's own: no run of torch draws "
                "the same. Prove it with dropout at zero, or in evaluation mode: model=lambda: make().eval()."
            )

        def loss_of(params: Any, probes: Any, buffers: Any, arrays: list[Any]) -> Any:
            given = iter(arrays)
            own = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            batch = pytree.tree_unflatten(own, structure)
            (loss, output, values), buffers = fn.apply(params, buffers, batch, probes)
            return loss, (output, values, buffers)

        shardings = (None, (self.fn.shardings(self.params, "grad"), None))
        program = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True), out_shardings=shardings)
        if self.trace is None:
            self._programs[key] = program
        return program

    def _forward(self, model: nn.Module, batch: Any, probes: list[torch.Tensor] | None) -> Any:
        """Run the model, in torch; return loss, output, and module inputs and outputs if they are traced."""
        outputs: list[Any] = []
        handle = model.register_forward_hook(lambda _model, _args, output: outputs.append(output))
        watching = nullcontext() if self.trace is None else self._watched.tracing(model, probes)
        try:
            with watching:
                loss = (self.case.loss or default_loss)(model, batch) / self.case.accumulate
            return loss, outputs[-1], list(self._watched.trace.values.values())
        finally:
            handle.remove()

    @contextmanager
    def tracing(self) -> Iterator[Trace]:
        """Trace the values and gradients that enter and leave every module, of the code inside the block."""
        self.trace = Trace()
        try:
            yield self.trace
        finally:
            self.trace, self._watched = None, _Watched()

    def _reached(self) -> frozenset[str]:
        """Return the parameters that the loss depends on: where torch has no gradient, JAX's is zero."""
        theirs = self.beside.gradients()
        return frozenset(n for n, g in self.grads.items() if theirs.get(n) is not None or np.asarray(g).any())

    def clip(self) -> torch.Tensor | None:
        """Compute the norm of all gradients, and clip them to the case's norm if it has one.

        The same program makes the step, which `step` takes.
        """
        names = self._reached()
        if not names:
            return None
        grads = {name: self.grads[name] for name in names}
        norm, *self._next = self._update(names, self.params, grads, self.states)
        return _tensor(norm)

    def step(self) -> None:
        if self._next is not None:
            self.params, self.states = self._next
            self.stepped |= self._reached() & self.steppers.keys()
            self._next = None
            self._show()

    def _begun(self) -> Any:
        """Initialize the state of Adam and momentum with zeros."""

        def begin(params: Any) -> Any:
            return {name: stepper.transformation.init(params[name]) for name, stepper in self.steppers.items()}

        shapes = jax.eval_shape(begin, self.params)
        shardings = self.fn.shardings(shapes, "state")
        return jax.tree.map(lambda s, sharding: jax.device_put(np.zeros(s.shape, s.dtype), sharding), shapes, shardings)

    def _updated(self, names: frozenset[str], params: Any, grads: Any, states: Any) -> tuple[Any, Any, Any]:
        norm = jnp.linalg.norm(jnp.stack([jnp.linalg.norm(g.ravel()) for g in grads.values()]))
        # As torch.nn.utils.clip_grad_norm_.
        factor = 1 if self.case.clip is None else jnp.minimum(self.case.clip / (norm + 1e-6), 1)  # type: ignore[operator]
        new_params, new_states = dict(params), dict(states)
        for name in sorted(names & self.steppers.keys()):
            grad, made = (grads[name] * factor).astype(grads[name].dtype), self.steppers[name].transformation
            update, new_states[name] = made.update(grad, states[name], params[name])
            new_params[name] = params[name] + update.astype(params[name].dtype)
        planned_arrays = (self.fn.shardings(new_params), self.fn.shardings(new_states, "state"))
        return norm, *jax.lax.with_sharding_constraint((new_params, new_states), planned_arrays)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return dict(self.fn.to_torch({name: self.grads[name] for name in self._reached()}))

    def state(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's tensors, by "parameter: key", with torch's names."""
        found = {}
        for name in self.stepped:
            state = self.states[name]
            for key, own in self.steppers[name].state.items():
                value = optax.tree_utils.tree_get(state, own)
                is_count = own == "count"
                tensor = _tensor(value).to(_of_count()) if is_count else self.fn.to_torch({name: value})[name]
                found[f"{name}: {key}"] = tensor
        return found

    def off_plan(self) -> dict[str, str]:
        """Return arrays whose sharding differs from the plan's rows."""
        planned_arrays = [
            ("", self.params, "stored"),
            ("", self.buffers, "stored"),
            ("gradient of ", self.grads, "grad"),
        ]
        found = {}
        for what, arrays, phase in planned_arrays:
            planned = self.fn.shardings(arrays, phase)  # type: ignore[arg-type]
            for name, array in arrays.items():
                if not array.sharding.is_equivalent_to(planned[name], array.ndim):
                    found[f"{what}{name}"] = f"has sharding {array.sharding}, where the plan has {planned[name].spec}"
        return found

    def unlike_replicas(self) -> dict[str, str]:
        """Return arrays whose equal elements have different bits on devices."""
        found = {}
        for name, array in {**self.buffers, **self.params}.items():
            first: dict[str, Any] = {}
            for shard in array.addressable_shards:
                other = first.setdefault(str(shard.index), shard)
                if np.asarray(other.data).tobytes() != np.asarray(shard.data).tobytes():
                    pair = f"{other.device.id} and {shard.device.id}"
                    found[name] = f"devices {pair} hold the same elements with different bits, after the last step"
        return found


class _Watched:
    """The inputs and outputs of modules in one forward.

    A zero is added to each value there: what the loss's gradient with respect to it is, is the value's gradient.
    """

    def __init__(self) -> None:
        self.trace = Trace()

    def tracing(self, model: nn.Module, probes: list[torch.Tensor] | None) -> AbstractContextManager[Trace]:
        self.trace = Trace()
        return tracing(model, into=self.trace, probes=probes)

    def _probed(self) -> list[Where]:
        return [where for where, value in self.trace.values.items() if value.is_floating_point()]

    def tensors(self) -> list[torch.Tensor]:
        found = [self.trace.values[where] for where in self._probed()]
        return [torch.zeros(tuple(value.shape), dtype=value.dtype) for value in found]

    def zeros(self) -> list[np.ndarray]:
        return [to_numpy(tensor) for tensor in self.tensors()]

    def into(self, trace: Trace, values: list[Any], gradients: list[Any]) -> None:
        """Add arrays to a trace; calls of a module are numbered after those of earlier passes."""
        before = Counter(call.module for call in trace.begun)

        def at(where: Where) -> Where:
            return replace(where, call=where.call + before[where.module])

        trace.values.update(zip(map(at, self.trace.values), map(_tensor, values), strict=True))
        trace.gradients.update(zip(map(at, self._probed()), map(_tensor, gradients), strict=True))
        trace.begun += self.trace.begun


def _tensor(array: Any) -> torch.Tensor:
    return to_tensor(np.asarray(array)).clone()


def _of_count() -> torch.dtype:
    """Return the dtype of the step count in torch's optimizers."""
    return torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
