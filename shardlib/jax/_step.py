"""A training step of JAX: microbatches, clipping and a loss scale around an optax optimizer, on sharded state."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib._dtypes import name_of
from shardlib._mesh_shape import MeshShape
from shardlib._plan import LossScale, RulesLike, Transform
from shardlib.errors import InputError, check_flags
from shardlib.jax._context import constrained, is_explicit, refuse_explicit
from shardlib.jax._given import check_keys, fitting_batch, is_array, is_placed, refuse_elsewhere
from shardlib.jax._mesh import shape_of
from shardlib.jax._phases import OfModel, OfRules, Phases, copied
from shardlib.rules.trees import name_of_path

if TYPE_CHECKING:
    from shardlib.jax._compile import Compiled

__all__ = ["TrainState", "TrainStep", "train_step"]


class TrainState(NamedTuple):
    """The state of a training step: a tree of arrays, for orbax to save as it is.

    Attributes:
        step: the number of updates; steps that a loss scale skipped are not counted.
        params: the tree of parameters.
        opt_state: the optimizer's own state.
        buffers: arrays that the loss changes and no optimizer updates, or None.
        scale: the state of the loss scale, or None.
    """

    step: Any
    params: Any
    opt_state: Any
    buffers: Any = None
    scale: Any = None


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: Any,
    rules: Compiled | RulesLike,
    mesh: Mesh | None = None,
    *,
    transforms: Transform | Sequence[Transform] = (),
    has_aux: bool = False,
    has_count: bool = False,
    has_buffers: bool = False,
    accumulate: int = 1,
    clip: float | None = None,
    loss_scale: float | LossScale | None = None,
    remat: Callable[..., Any] | None = None,
    donate: bool = True,
) -> TrainStep:
    """Return a jitted training step `state, metrics = step(state, batch)`, whose state is sharded and donated.

    `step.init(params)` makes the first state. The step equals the same step on one device with the whole batch.

    Args:
        loss_fn: `loss_fn(params, batch)` returns the mean loss over the rows of the batch, a scalar. With a key,
            `step(state, batch, rng=key)`, it is called with `rng=`.
        optimizer: a transformation of optax.
        rules: rules on the paths of a tree of parameters, as of `shard_params`; or the function that `compile_model`
            returned, whose plan lays the parameters out.
        mesh: a JAX mesh, for rules; a compiled model has its own. Where its axes are of type Explicit, as those of
            `jax.make_mesh`, `loss_fn` gets arrays of such types: parameters as they are computed with, and the batch
            as it is given, or with its rows over the data axes. What it returns as aux is replicated.
        transforms: a function from plan to plan, or several, for rules: `zero(1)`, `zero(2)`, `zero(3)`, `fsdp()`,
            `hsdp()`, and `precision("bf16")`, whose master copy is the state's array. Where the axes that they add
            divide no dim of an array, it is not split over these axes.
        has_aux: `loss_fn` returns `(loss, aux)`, as for `jax.grad`. With microbatches, each array in `metrics["aux"]`
            has a first dim for them.
        has_count: in place of the mean, `loss_fn` returns `(sum, count)`, such as the number of tokens that are not
            masked. The step divides by the count of the whole batch, or by 1 if that is 0; no gradient flows through
            the count.
        has_buffers: `loss_fn(params, buffers, batch)` returns `(loss, buffers)`, or `(loss, (buffers, aux))`, as
            BatchNorm needs it; `step.init(params, buffers)` takes the first ones. Rules that match their names lay them
            out, and the others are replicated. Transforms do not change them.
        accumulate: the number of microbatches, which run one after the other. Microbatch i of n has the rows i, i + n,
            i + 2n and so on, which are on the device that has the batch's rows already.
        clip: the largest norm of all gradients together, as of `optax.clip_by_global_norm`; `math.inf` only reports
            the norm.
        loss_scale: a number, or a `shardlib.transforms.LossScale`, which adapts. A step whose gradients are not finite
            is skipped. `precision("fp16_naive")` has one.
        remat: a policy of `jax.checkpoint_policies`, by which the forward's values are kept or recomputed in backward.
        donate: False keeps the memory of the state that is given.

    Returns:
        The step. `metrics` is a dict: "loss", before the update; "aux" with `has_aux`, "count" with `has_count`,
        "grad_norm" before clipping with `clip`, "scale" and "skipped" with a loss scale.

    Raises:
        InputError: an argument of another kind; later, a loss that is no scalar, a batch that cannot be divided.
        PlanError: a transform that asks for what only the torch engine does.

    >>> import optax, shardlib.jax as sj
    >>> def loss_fn(params, batch):
    ...     return jnp.square(batch["x"] @ params["kernel"] - batch["y"]).mean()
    >>> step = train_step(loss_fn, optax.adam(1e-2), {"kernel": "in out@tp"}, sj.make_mesh("dp=1,tp=1"), clip=1.0)
    >>> state = step.init({"kernel": jnp.ones((4, 2))})
    >>> state, metrics = step(state, {"x": jnp.ones((8, 4)), "y": jnp.zeros((8, 2))})
    >>> int(state.step), float(metrics["loss"]), state.opt_state[0].mu["kernel"].sharding.spec
    (1, 16.0, P(None, 'tp'))
    """
    check_flags("train_step", InputError, has_aux=has_aux, has_count=has_count, has_buffers=has_buffers, donate=donate)
    for what, given, wanted in (("loss_fn", loss_fn, "loss_fn(params, batch)"), ("remat", remat, _POLICY)):
        if not callable(given) and (what == "loss_fn" or given is not None):
            raise InputError(f"train_step({what}={given!r}) was given; give {wanted}.")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InputError(f"train_step was given the optimizer {optimizer!r}; give one of optax, as optax.adamw(1e-3).")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise InputError(f"train_step(accumulate={accumulate!r}) was given; give a number of microbatches from 1 on.")
    if clip is not None and not _positive(clip):
        raise InputError(f"train_step(clip={clip!r}) was given; give a positive norm, or None.")
    phases = _phases_of(rules, mesh, transforms, has_buffers)
    takes = _Takes(has_aux, has_count, has_buffers)
    return TrainStep(loss_fn, optimizer, phases, takes, accumulate, clip, _scale_of(loss_scale), remat, donate)


_POLICY = "a policy such as jax.checkpoint_policies.dots_with_no_batch_dims_saveable"


def _positive(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and number > 0


def _phases_of(rules: Any, mesh: Mesh | None, transforms: Any, has_buffers: bool) -> Phases:
    if _is_compiled(rules):
        if mesh is not None or transforms:
            raise InputError(
                "train_step was given a compiled model, and a mesh or transforms beside it. The model has its own: "
                "give them to compile_model."
            )
        return OfModel(rules)
    if mesh is None:
        raise InputError('train_step was given rules and no mesh; give one, as shardlib.jax.make_mesh("dp=2,tp=4").')
    if not is_explicit(mesh):
        shape_of(mesh)
    return OfRules(rules, mesh, transforms, has_buffers=has_buffers)


def _is_compiled(rules: Any) -> bool:
    """Tell whether a model was compiled, which needs torch; rules do not."""
    module = sys.modules.get("shardlib.jax._compile")
    return module is not None and isinstance(rules, module.Compiled)


def _scale_of(given: Any) -> LossScale | None:
    if given is None or isinstance(given, LossScale):
        return given
    if not _positive(given) or math.isinf(given):
        raise InputError(
            f"train_step(loss_scale={given!r}) was given; give a positive number, a shardlib.transforms.LossScale, or "
            "None."
        )
    return LossScale(float(given), 1.0, 1.0, min_scale=float(given), max_scale=float(given))


@dataclass(frozen=True)
class _Takes:
    """The form of the loss function."""

    aux: bool
    count: bool
    buffers: bool


class _Found(NamedTuple):
    """The results of the loss function: a mean with a count of None, or a sum with its count."""

    loss: Any
    count: Any
    buffers: Any
    aux: Any


class TrainStep:
    """The training step that `train_step` returns: `state, metrics = step(state, batch)`."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: Any,
        phases: Phases,
        takes: _Takes,
        accumulate: int,
        clip: float | None,
        scale: LossScale | None,
        remat: Callable[..., Any] | None,
        donate: bool,
    ) -> None:
        self._loss_fn, self._optimizer, self._phases, self._takes = loss_fn, optimizer, phases, takes
        self._accumulate, self._clip, self._scale, self._remat = accumulate, clip, scale, remat
        self._donated = (0,) if donate else ()
        self._jitted: dict[Any, Any] = {}
        self._shape, self._explicit = MeshShape.of(phases.mesh), is_explicit(phases.mesh)

    def init(self, params: Any, buffers: Any = None) -> TrainState:
        """Return the first state, sharded: copies of the parameters and buffers, and the optimizer's state.

        Args:
            params: a tree of arrays or tensors, whole or sharded; for a compiled model the dict that `compile_model`
                returned.
            buffers: a tree of arrays, for `has_buffers`.
        """
        self._check_context()
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((params, buffers))):
            raise InputError("step.init was given shapes, and copies values. Give arrays, or call step.abstract.")
        shardings = self._shardings(params, buffers)
        placed = self._phases.placed(params)
        with self._context():
            init = self._optimizer.init
            init = self._auto(init, shardings.opt_state) if self._explicit else init
            # The devices of an abstract mesh are those of the arguments, which an empty state does not read.
            opt_state = jax.jit(init, out_shardings=shardings.opt_state, keep_unused=True)(placed)
        kept = None if buffers is None else self._phases.placed_buffers(buffers, params)
        return jax.device_put(TrainState(_ZERO, placed, opt_state, kept, self._first_scale(params)), shardings)

    def abstract(self, params: Any, buffers: Any = None) -> TrainState:
        """Return shape, dtype and sharding of every array of the state, as orbax needs them to restore it.

        Args:
            params: a tree of arrays, or of shapes as `jax.eval_shape` returns them.
            buffers: likewise.

        >>> import optax, shardlib.jax as sj
        >>> step = train_step(lambda p, x: (p["w"] * x).sum(), optax.sgd(0.1), {"w": None}, sj.make_mesh("dp=1"))
        >>> step.abstract({"w": jax.ShapeDtypeStruct((3,), "float32")}).params["w"].shape
        (3,)
        """
        shardings = self._shardings(params, buffers)
        shapes = self._shapes(params, buffers)
        return jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, shardings)

    def __call__(self, state: TrainState, batch: Any, *, rng: Any = None) -> tuple[TrainState, dict[str, Any]]:
        """Return the next state, and metrics.

        Args:
            state: the state of `init`, or of the step before. Its memory is handed on, so it cannot be used again.
            batch: a tree of arrays with the rows of the global batch in their first dim. Numbers are for all rows.
            rng: a key of JAX, or a tree of keys, other ones at each step; each microbatch gets its own ones from them.

        Raises:
            InputError: a leaf of the batch is no array, is on other devices, or does not fit into the bits that JAX
                has for it; `rng` has something else than keys; a state that this step did not make.
        """
        program = self._program(state)
        batch = self._checked(batch, rng)
        concrete = [leaf for leaf in jax.tree.leaves(state) if not isinstance(leaf, jax.core.Tracer)]
        # Before the call: XLA may end the process when it is given memory that was handed on.
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in concrete):
            raise InputError(
                "The step was called with a state that an earlier call has used up: go on with the state that it "
                "returned, or pass donate=False to train_step."
            )
        if not all(self._is_here(leaf) for leaf in concrete):  # such as numpy's, read from a file
            state = copied(state, self._shardings(state.params, state.buffers))
        with self._context():
            return program(state, batch, **_key(rng))

    def _is_here(self, leaf: Any) -> bool:
        """Tell whether a leaf of a state is an array on the devices of the mesh."""
        return isinstance(leaf, jax.Array) and is_placed(leaf, self._phases.mesh)

    def lower(self, state: TrainState, batch: Any, *, rng: Any = None) -> Any:
        """Lower the step for arrays or shapes, as `jax.jit(...).lower` does; `.compile()` then compiles it.

        The program is called as the step is: `program(state, batch)`, with `rng=` if it was lowered with a key.
        """
        program = self._program(state)
        batch = self._checked(batch, rng, shapes=True)
        with self._context():
            return program.lower(state, batch, **_key(rng))

    def _checked(self, batch: Any, rng: Any, *, shapes: bool = False) -> Any:
        """Return the batch as JAX takes it, or refuse it or the key."""
        check_keys(rng, several=True)
        for key in jax.tree.leaves(rng):
            refuse_elsewhere(key, self._phases.mesh, "rng")
        return fitting_batch(batch, self._phases.mesh, shapes=shapes)

    def _program(self, state: Any) -> Any:
        """Return the jitted step for states of this structure.

        It has shardings of results: with constraints inside instead, XLA's spelling of a sharding would differ from
        ours, and the second step would be compiled anew.
        """
        self._check_context()
        if manual := jax.sharding.get_abstract_mesh().manual_axes:
            raise InputError(
                f"The step was called inside shard_map or pmap, over {', '.join(map(str, manual))}; it divides the "
                "batch over the mesh itself. Call it outside, with the global batch; shard_map may be in loss_fn."
            )
        if not isinstance(state, TrainState):
            raise InputError(
                f"The step was called with a state that is a {type(state).__name__}; begin with step.init(params)."
            )
        structure = jax.tree.structure(state)
        if structure not in self._jitted:
            self._check_state(state)
            shardings = self._shardings(state.params, state.buffers), None
            if self._explicit:
                update = functools.partial(self._typed_update, shardings)
                self._jitted[structure] = jax.jit(update, donate_argnums=self._donated)
            else:
                self._jitted[structure] = jax.jit(self._update, donate_argnums=self._donated, out_shardings=shardings)
        return self._jitted[structure]

    def _check_state(self, state: TrainState) -> None:
        """Refuse the state of a step with another optimizer or loss scale, or for parameters of other shapes."""
        self._check_buffers(state.buffers)
        own = self._shapes(state.params, state.buffers)
        for what, given, made in (("opt_state", state.opt_state, own.opt_state), ("scale", state.scale, own.scale)):
            shapes, wanted = ([getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(tree)] for tree in (given, made))
            if str(jax.tree.structure(given)) != str(jax.tree.structure(made)) or shapes != wanted:
                other = next((f", {a} for {b}" for a, b in zip(shapes, wanted, strict=False) if a != b), "")
                raise InputError(
                    f"The step was called with a state that another step made: its {what} is {_kinds(given)} with "
                    f"{len(shapes)} arrays, and this step has {_kinds(made)} with {len(wanted)} arrays{other}. Begin "
                    "with step.init(state.params)."
                )

    def _check_context(self) -> None:
        if not self._explicit:
            advice = "Give this mesh to train_step with rules, or leave jax.set_mesh out."
            refuse_explicit("A training step on axes of type Auto", advice)

    def _context(self) -> AbstractContextManager[Any]:
        mesh = self._phases.mesh
        return jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if self._explicit else nullcontext()

    def _auto(self, fn: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
        """Return a function with Explicit axes outside, and inside axes of type Auto, as the step's own code has."""
        specs = jax.tree.map(lambda s: PartitionSpec() if s is None else s.spec, shardings, is_leaf=lambda s: s is None)
        return jax.sharding.auto_axes(fn, out_sharding=specs)  # type: ignore[no-any-return]

    def _typed_update(self, shardings: Any, state: TrainState, batch: Any, rng: Any = None) -> Any:
        update = functools.partial(self._update, types=jax.tree.map(self._type_of, batch))
        return self._auto(update, shardings)(state, batch, rng)

    def _type_of(self, leaf: Any) -> PartitionSpec:
        """Return the axes of an array of the batch: as it is given, or else rows over the data axes."""
        spec = PartitionSpec(*getattr(jax.typeof(leaf).sharding, "spec", ()))
        rows = jnp.ndim(leaf) and leaf.shape[0] % (self._accumulate * self._shape.data_ranks) == 0
        return PartitionSpec(self._shape.data_axes) if rows and not any(spec) else spec

    def _check_buffers(self, buffers: Any) -> None:
        if (buffers is not None) != self._takes.buffers:
            raise InputError(
                "has_buffers=True and buffers belong together: pass has_buffers=True to train_step, and the buffers to "
                "step.init(params, buffers)."
            )

    # --- state ------------------------------------------------------------------------------------------------------

    def _shardings(self, params: Any, buffers: Any) -> TrainState:
        """Return the shardings of a state, for arrays or shapes of its parameters and buffers."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if hasattr(leaf, "dtype") and not _trainable(leaf.dtype):
                raise InputError(
                    f'"{name_of_path(path)}" is an array of {leaf.dtype} among the parameters, and has no gradient. '
                    "Pass it as a buffer, or in the batch; of flax's modules give the nnx.Param alone."
                )
        self._check_buffers(buffers)
        mesh = self._phases.mesh
        replicated = NamedSharding(mesh, PartitionSpec())
        stored = self._phases.shardings(params, "stored")
        kept = None if buffers is None else self._phases.of_buffers(buffers, params)
        shape = self._shapes(params, buffers)
        opt_state = self._phases.of_state(shape.opt_state, params)
        return TrainState(replicated, stored, opt_state, kept, jax.tree.map(lambda _: replicated, shape.scale))

    def _shapes(self, params: Any, buffers: Any) -> TrainState:
        """Return the shapes of a state."""
        return jax.eval_shape(self._whole_state, *jax.tree.map(_shape, (params, buffers)))  # type: ignore[no-any-return]

    def _whole_state(self, params: Any, buffers: Any) -> TrainState:
        return TrainState(_ZERO, params, self._optimizer.init(params), buffers, self._first_scale(params))

    def _first_scale(self, params: Any) -> dict[str, Any] | None:
        scale = self._scaler(params)
        if scale is None:
            return None
        return {"scale": jnp.float32(scale.init_scale), "good_steps": jnp.int32(0), "bad_steps": jnp.int32(0)}

    def _scaler(self, params: Any) -> LossScale | None:
        planned = self._phases.scaler(params)
        return planned if self._scale is None else self._scale

    # --- a step -----------------------------------------------------------------------------------------------------

    def _update(
        self, state: TrainState, batch: Any, rng: Any = None, *, types: Any = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """Make an update. `types` has the axes of the batch's arrays, where the loss is of Explicit types."""
        import optax

        found, grads = self._gradients(state, batch, rng, types)
        grads = _all_constrained(grads, self._phases.shardings(state.params, "grad"))
        metrics = {"loss": found.loss, "count": found.count}
        finite = None if state.scale is None else _all_finite(grads)
        if self._clip is not None:
            metrics["grad_norm"] = norm = _global_norm(grads)
            grads = jax.tree.map(
                lambda g: jnp.where(norm < self._clip, g, g * (self._clip / norm)).astype(g.dtype), grads
            )
        updates, opt_state = self._optimized(grads, state, found.loss)
        params = optax.apply_updates(state.params, updates)
        new = TrainState(state.step + 1, params, opt_state, found.buffers, state.scale)
        if finite is not None:
            new = jax.tree.map(functools.partial(jnp.where, finite), new, state)
            new = new._replace(scale=_next_scale(self._scaler(state.params), state.scale, finite))
            metrics |= {"scale": state.scale["scale"], "skipped": ~finite}
        metrics = {name: value for name, value in metrics.items() if value is not None}
        return new, metrics | ({"aux": found.aux} if self._takes.aux else {})

    def _optimized(self, grads: Any, state: TrainState, loss: Any) -> tuple[Any, Any]:
        """Return the optimizer's updates and its next state; those that read the loss are given it."""
        extra = {"value": loss} if _reads(self._optimizer.update, "value") else {}
        try:
            return self._optimizer.update(grads, state.opt_state, state.params, **extra)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise InputError(
                f"The optimizer asks for more than a step has: {error}. It is given gradients, its state, parameters, "
                "and value=, the loss. Choose one without a line search, or call it in a loop of your own."
            ) from error

    def _gradients(self, state: TrainState, batch: Any, rng: Any, types: Any) -> tuple[_Found, Any]:
        """Return what the loss found in the whole batch, and the gradients of its mean."""
        factor = None if state.scale is None else state.scale["scale"]
        self._check_rng(rng)
        differentiated = jax.value_and_grad(functools.partial(self._loss, types), has_aux=True)

        def of(buffers: Any, batch: Any, rng: Any) -> tuple[_Found, Any]:
            (_, found), grads = differentiated(state.params, buffers, batch, rng, factor)
            return found, grads

        if self._accumulate == 1:
            found, grads = of(state.buffers, self._rows_over(batch, 0), rng)
            count = found.count
        else:
            found, grads = self._summed(of, state, batch, rng)
            count = self._accumulate if found.count is None else found.count
        total = count if count is None or isinstance(count, int) else jnp.where(count == 0, 1, count)
        if total is not None:
            found = found._replace(loss=found.loss / total)
        divisor = [each for each in (total, factor) if each is not None]
        grads = jax.tree.map(lambda g, p: functools.reduce(jnp.divide, divisor, g).astype(p.dtype), grads, state.params)
        return found, grads

    def _check_rng(self, rng: Any) -> None:
        """Refuse a key that the loss function does not take, and the lack of one that it needs."""
        given, needed = _reads(self._loss_fn, "rng"), _needs(self._loss_fn, "rng")
        if rng is not None and not given:
            raise InputError(
                "The step was given rng=, and loss_fn takes no such argument. Write loss_fn(params, batch, rng), or "
                "leave rng= out."
            )
        if rng is None and needed:
            raise InputError(
                "loss_fn takes rng, and the step was given none. Call step(state, batch, rng=key), with another key of "
                "JAX at each step."
            )

    def _summed(self, of: Callable[..., Any], state: TrainState, batch: Any, rng: Any) -> tuple[_Found, Any]:
        """Add up microbatches: losses, counts and gradients are sums, aux is stacked."""
        arrays, numbers, structure = self._divided(batch)

        def one(carry: Any, each: Any) -> Any:
            (buffers, sums), (index, rows) = carry, each
            micro = jax.tree.unflatten(structure, [n if r is None else r for r, n in zip(rows, numbers, strict=True)])
            found, grads = of(buffers, micro, jax.tree.map(lambda key: jax.random.fold_in(key, index), rng))
            sums = jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums, grads)
            sums = _all_constrained(sums, grad_shardings)
            return (found.buffers, sums), (found.loss, found.count, found.aux)

        grad_shardings = self._phases.shardings(state.params, "grad")
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, _wide(p.dtype)), state.params)
        zeros = _all_constrained(zeros, grad_shardings)
        each = jnp.arange(self._accumulate), arrays
        (buffers, sums), (losses, counts, aux) = lax.scan(one, (state.buffers, zeros), each)
        count = None if counts is None else counts.sum()
        return _Found(losses.sum(), count, buffers, aux), sums

    def _loss(self, types: Any, params: Any, buffers: Any, batch: Any, rng: Any, factor: Any) -> tuple[Any, _Found]:
        def called(params: Any, buffers: Any, batch: Any, rng: Any) -> Any:
            args = (buffers, batch) if self._takes.buffers else (batch,)
            loss_fn = self._loss_fn if types is None else self._typed_loss(types, params, buffers)
            return loss_fn(self._phases.values(params), *args, **_key(rng))

        if self._remat is not None:
            called = jax.checkpoint(called, policy=self._remat)
        found = _read(called(params, buffers, batch, rng), self._takes, buffers)
        return found.loss if factor is None else found.loss * factor, found

    def _typed_loss(self, types: Any, params: Any, buffers: Any) -> Callable[..., Any]:
        """Return the loss function with axes of type Explicit inside, and of type Auto outside."""
        weights = jax.tree.map(lambda sharding: sharding.spec, self._phases.shardings(params, "compute"))
        kept = []
        if self._takes.buffers:
            kept = [jax.tree.map(lambda sharding: sharding.spec, self._phases.of_buffers(buffers, params))]

        def called(*args: Any, **key: Any) -> Any:
            specs = (weights, *kept, types), jax.tree.map(lambda _: PartitionSpec(), key)
            return jax.sharding.explicit_axes(lambda a, k: self._loss_fn(*a, **k), in_sharding=specs)(args, key)

        return called

    def _divided(self, batch: Any) -> tuple[list[Any], list[Any], Any]:
        """Return the leaves with rows in microbatches, those without rows, and the structure of the batch."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(batch)
        n = self._accumulate
        arrays: list[Any] = []
        numbers: list[Any] = []
        rows = {name_of_path(path): leaf.shape[0] for path, leaf in leaves if jnp.ndim(leaf)}
        if len({*rows.values()}) != 1 or any(count % n for count in rows.values()):
            raise InputError(
                f"train_step(accumulate={n}) was given a batch with rows {rows}; every array needs the same number of "
                f"rows, a multiple of {n}. Close over arrays without rows in loss_fn."
            )
        for path, leaf in leaves:
            if not jnp.ndim(leaf) and hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise InputError(
                    f'A key of JAX was given in the batch, at "{name_of_path(path)}", and all microbatches would draw '
                    "alike. Pass step(state, batch, rng=key)."
                )
            arrays.append(leaf.reshape(-1, n, *leaf.shape[1:]).swapaxes(0, 1) if jnp.ndim(leaf) else None)
            numbers.append(None if jnp.ndim(leaf) else leaf)
        return self._rows_over(arrays, 1), numbers, structure

    def _rows_over(self, batch: Any, dim: int) -> Any:
        """Divide rows over the data axes, where these divide them; other dims are the partitioner's."""
        axes, ranks = self._shape.data_axes, self._shape.data_ranks
        mesh = jax.sharding.get_abstract_mesh() if self._explicit else self._phases.mesh  # of type Auto here

        def divide(leaf: Any) -> Any:
            if jnp.ndim(leaf) <= dim or leaf.shape[dim] % ranks or not axes:
                return leaf
            free = [PartitionSpec.UNCONSTRAINED] * (leaf.ndim - dim - 1)
            spec = PartitionSpec(*[None] * dim, axes, *free)
            return constrained(leaf, NamedSharding(mesh, spec))

        return jax.tree.map(divide, batch)


_ZERO = np.zeros((), np.int32)


def _key(rng: Any) -> dict[str, Any]:
    return {} if rng is None else {"rng": rng}


def _reads(function: Callable[..., Any], name: str) -> bool:
    """Tell whether a function takes a keyword argument of this name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _needs(function: Callable[..., Any], name: str) -> bool:
    """Tell whether a function cannot be called without an argument of this name."""
    found = inspect.signature(function).parameters.get(name)
    return found is not None and found.default is found.empty


def _kinds(tree: Any) -> str:
    """Return the types of an optimizer's state."""
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return f"({', '.join(map(_kinds, tree))})"
    return "None" if tree is None else type(tree).__name__


def _trainable(dtype: Any) -> bool:
    if hasattr(dtype, "is_floating_point"):  # of torch
        return bool(dtype.is_floating_point or dtype.is_complex)
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _shape(leaf: Any) -> Any:
    """Return the shape of a tensor of torch, which JAX cannot trace; anything else as it is."""
    return jax.ShapeDtypeStruct(leaf.shape, name_of(leaf.dtype)) if hasattr(leaf, "untyped_storage") else leaf


def _all_constrained(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(constrained, tree, shardings)


def _wide(dtype: Any) -> Any:
    """Return the dtype in which values are summed: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def _read(result: Any, takes: _Takes, before: Any) -> _Found:
    """Read the results of a loss function, and refuse what it should not return."""
    form = "(sum, count)" if takes.count else "loss"
    if takes.aux or takes.buffers:
        second = "(buffers, aux)" if takes.aux and takes.buffers else "aux" if takes.aux else "buffers"
        form = f"({form}, {second})"
    loss, buffers, aux, count = result, before, None, None
    if takes.aux or takes.buffers:
        loss, second = _pair(loss, form, result)
        aux = second
        if takes.buffers:
            buffers, aux = _pair(second, form, result) if takes.aux else (second, None)
            _check_kept(before, buffers)
        _check_aux(aux if takes.aux else None)
    if takes.count:
        loss, count = _pair(loss, form, result)
        if isinstance(count, int | float) and not isinstance(count, bool):  # such as x.shape[0]
            count = jnp.asarray(count)
    scalars: tuple[Any, ...] = (loss, count) if takes.count else (loss,)
    for value in scalars:
        if not hasattr(value, "dtype") or jnp.ndim(value):
            raise _odd(form, result)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise InputError(f"loss_fn returned a loss of {loss.dtype}; a loss is a real number, such as loss.mean().")
    return _Found(loss.astype(_wide(loss.dtype)), count, buffers, aux)


def _pair(value: Any, form: str, result: Any) -> Any:
    if not isinstance(value, tuple) or len(value) != 2:
        raise _odd(form, result)
    return value


def _odd(form: str, result: Any) -> InputError:
    found = jax.tree.map(lambda leaf: jax.typeof(leaf).str_short() if hasattr(leaf, "dtype") else leaf, result)
    return InputError(
        f"loss_fn returned {found}, where {form} was expected; a loss, a sum and a count are scalars. has_aux=, "
        "has_count= and has_buffers= of train_step say what it returns beside the loss."
    )


def _check_aux(aux: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        if not is_array(leaf):
            at = f' at "{name_of_path(path)}"' if path else ""
            raise InputError(
                f"loss_fn returned aux with {type(leaf).__name__} {leaf!r}{at}; a compiled step returns arrays and "
                "numbers. Leave it out of aux, and keep it beside the step."
            )


def _check_kept(before: Any, after: Any) -> None:
    """Refuse buffers of another structure, shape or dtype than before: the next step could not take them."""
    was, now = (jax.tree.map(lambda a: (tuple(a.shape), str(a.dtype)), tree) for tree in (before, after))
    if str(jax.tree.structure(before)) != str(jax.tree.structure(after)) or was != now:
        raise InputError(
            f"loss_fn was given the buffers {was} and returned {now}; it must return the same arrays anew."
        )


def _all_finite(tree: Any) -> Any:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def _global_norm(tree: Any) -> Any:
    squares = [jnp.square(jnp.abs(leaf.astype(_wide(leaf.dtype)))).sum() for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares))


def _next_scale(settings: LossScale | None, now: Any, finite: Any) -> Any:
    """Return the state of the loss scale after a step, taken or skipped; see `LossScale`."""
    assert settings is not None  # the state has a scale
    scale, good, bad = now["scale"], now["good_steps"] + 1, now["bad_steps"] + 1
    grows = good >= settings.growth_interval
    grown = jnp.where(grows, jnp.minimum(scale * settings.growth_factor, settings.max_scale), scale)
    backs_off = jnp.maximum(scale * settings.backoff_factor, settings.min_scale)
    backed = jnp.where(bad >= settings.hysteresis, backs_off, scale)
    taken = {"scale": grown, "good_steps": jnp.where(grows, 0, good), "bad_steps": jnp.where(grows, 0, bad - 1)}
    skipped = {"scale": backed, "good_steps": jnp.zeros_like(good), "bad_steps": bad}
    return jax.tree.map(functools.partial(jnp.where, finite), taken, skipped)
