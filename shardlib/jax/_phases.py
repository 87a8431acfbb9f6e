"""The shardings of a tree of parameters in each phase of a training step: by rules, or by a compiled model's plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from shardlib._dtypes import name_of
from shardlib._mesh_shape import MeshShape
from shardlib._plan import LossScale, Phase, Plan, RulesLike, Transform, as_rules
from shardlib.errors import InputError, PlanError, nearest
from shardlib.jax import rules
from shardlib.jax._context import constrained
from shardlib.rules import Rules

if TYPE_CHECKING:
    from shardlib.jax._compile import Compiled

__all__ = ["OfModel", "OfRules", "Phases", "copied"]


class Phases(Protocol):
    """The layouts of a tree's leaves in each phase."""

    @property
    def mesh(self) -> Mesh:
        """The JAX mesh."""

    def shardings(self, params: Any, phase: Phase) -> Any:
        """Return the tree of shardings in a phase, for a tree of arrays or of their shapes."""

    def of_state(self, opt_state: Any, params: Any) -> Any:
        """Return the tree of shardings of an optimizer's state, for arrays or shapes."""

    def of_buffers(self, buffers: Any, params: Any) -> Any:
        """Return the tree of shardings of buffers, for arrays or shapes."""

    def placed_buffers(self, buffers: Any, params: Any) -> Any:
        """Return the buffers as `placed` returns parameters."""

    def placed(self, params: Any) -> Any:
        """Return the tree as arrays with their stored shardings, which share no memory with what was given."""

    def values(self, params: Any) -> Any:
        """Return the tree that the loss is given: gathered as the plan says, in the compute dtype."""

    def scaler(self, params: Any) -> LossScale | None:
        """Return the scale of the loss that the plan asks for."""


@dataclass(frozen=True)
class OfModel:
    """The layouts of a compiled model, which gathers its parameters by itself."""

    fn: Compiled

    @property
    def mesh(self) -> Mesh:
        return self.fn.mesh

    def shardings(self, params: Any, phase: Phase) -> Any:
        self._check(params)
        return self.fn.shardings(params, phase)

    def of_state(self, opt_state: Any, params: Any) -> Any:
        return self.fn.shardings(opt_state, "state")

    def of_buffers(self, buffers: Any, params: Any) -> Any:
        return self.fn.shardings(buffers)

    def placed_buffers(self, buffers: Any, params: Any) -> Any:
        return copied(buffers, self.fn.shardings(buffers))

    def placed(self, params: Any) -> Any:
        return copied(params, self.shardings(params, "stored"))

    def values(self, params: Any) -> Any:
        return params

    def scaler(self, params: Any) -> LossScale | None:
        return self.fn.plan.step.scaler

    def _check(self, params: Any) -> None:
        trained = {row.name for row in self.fn.plan.rows if row.requires_grad}
        given = {*params} if isinstance(params, dict) else None
        if given is None:
            raise InputError(
                f"The step of a compiled model was given parameters as {type(params).__name__}; give the dict from "
                "names to arrays that compile_model returned."
            )
        if tensors := [name for name, array in params.items() if hasattr(array, "untyped_storage")]:
            raise InputError(
                f'"{tensors[0]}" was given as a tensor of torch; give the arrays that compile_model returned. '
                "fn.from_torch converts tensors by name."
            )
        if missing := sorted(trained - given):
            raise InputError(f"{len(missing)} arrays are missing, {', '.join(missing[:3])} among them.")
        if strange := sorted(given - trained):
            raise InputError(
                f'"{strange[0]}" was given, and is not a trained parameter of the model.{nearest(strange[0], trained)} '
                "Buffers and frozen parameters are fn.buffers."
            )
        self.fn.check_shapes(params)


class OfRules:
    """The layouts of a tree of arrays by rules on its paths, with transforms such as `zero(1)`.

    With `has_buffers` a rule may match parameters, buffers, or both.
    """

    def __init__(
        self,
        rules: RulesLike,
        mesh: Mesh,
        transforms: Transform | Sequence[Transform] = (),
        *,
        has_buffers: bool = False,
    ) -> None:
        self.rules, self.mesh, self.transforms, self.has_buffers = rules, mesh, transforms, has_buffers
        self._plans: dict[Any, Plan] = {}

    def shardings(self, params: Any, phase: Phase) -> Any:
        return rules.shardings(params, self.mesh, self._plan(params), phase=phase)

    def of_state(self, opt_state: Any, params: Any) -> Any:
        return rules.shardings(opt_state, self.mesh, self._plan(params), phase="state")

    def of_buffers(self, buffers: Any, params: Any) -> Any:
        return rules.shardings(buffers, self.mesh, self._plan_of_buffers(buffers, params))

    def placed_buffers(self, buffers: Any, params: Any) -> Any:
        made = self._plan_of_buffers(buffers, params)
        return copied(rules.shard_params(buffers, self.mesh, made), rules.shardings(buffers, self.mesh, made))

    def placed(self, params: Any) -> Any:
        return copied(rules.shard_params(params, self.mesh, self._plan(params)), self.shardings(params, "stored"))

    def values(self, params: Any) -> Any:
        return rules.cast(params, self.mesh, self._plan(params))

    def scaler(self, params: Any) -> LossScale | None:
        return self._plan(params).step.scaler

    def _plan(self, params: Any) -> Plan:
        def made() -> Plan:
            lenient = _all_optional(as_rules(self.rules)) if self.has_buffers else self.rules
            found = rules.plan(params, self.mesh, lenient, transforms=self.transforms)
            _refuse_narrower(found)
            return found

        return self._once((), params, made)

    def _plan_of_buffers(self, buffers: Any, params: Any) -> Plan:
        """Return the plan of buffers, which no transform changes. A rule has to match one of them or a parameter."""

        def made() -> Plan:
            given = as_rules(self.rules)
            covered = given.coverage(buffers, MeshShape.of(self.mesh)).rows
            used = [row.rule for row in covered if row.rule is not None and row.tensors + row.agreeing]
            strict = dataclasses.replace(given, optional=(*given.optional, *used))
            rules.plan(params, self.mesh, strict, transforms=self.transforms)
            return rules.plan(buffers, self.mesh, dataclasses.replace(_all_optional(given), unmatched="replicate"))

        return self._once("buffers", (buffers, params), made)

    def _once(self, kind: Any, tree: Any, make: Callable[[], Plan]) -> Plan:
        """Return the plan for a tree of these shapes, which is made once."""
        leaves, structure = jax.tree.flatten(tree)
        key = kind, structure, tuple((tuple(jnp.shape(leaf)), str(getattr(leaf, "dtype", ""))) for leaf in leaves)
        if key not in self._plans:
            self._plans[key] = make()
        return self._plans[key]


def _all_optional(given: Rules) -> Rules:
    """Return rules each of which may match nothing."""
    return dataclasses.replace(given, optional=tuple(given.rules))


def _refuse_narrower(plan: Plan) -> None:
    """Refuse a plan that stores parameters in fewer bits without a master copy: a tree keeps its dtypes."""
    for row in plan.rows:
        if row.requires_grad and not row.has_master and (kept := row.stored.dtype) not in (None, row.dtype):
            low = name_of(kept)
            raise PlanError(
                f'The plan stores "{row.name}" as {low} without a master copy, by {", ".join(plan.transforms)}; a tree '
                f"keeps the dtypes that it has. Leave the transform out, and give a tree in {low}: "
                f"jax.tree.map(lambda a: a.astype(jnp.{low}), params)."
            )


def copied(tree: Any, shardings: Any) -> Any:
    """Put a tree of arrays there, in memory of its own, which may be donated."""

    def copy(leaf: Any, sharding: NamedSharding) -> Any:
        if isinstance(leaf, jax.core.Tracer):
            return constrained(leaf, sharding)
        # Twice: the first call may alias the shard of a device that has the array already, whatever it is told.
        return jax.device_put(jax.device_put(leaf, sharding), sharding, may_alias=False)

    return jax.tree.map(copy, tree, shardings)
