"""`equivalent` and `assert_equivalent`."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib._log import erase_bar
from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib._plan import Plan
from shardlib.errors import InputError, MeshError
from shardlib.testing._carry import why_not
from shardlib.testing._jax_devices import on_devices
from shardlib.testing._pool import RankError, shared_pool
from shardlib.testing.equivalence.case import Case
from shardlib.testing.equivalence.compare import Key, Measured, compare, in_order, limits, wrong
from shardlib.testing.equivalence.locate import Origin, locate
from shardlib.testing.equivalence.measure import FLOAT64_LIMIT
from shardlib.testing.equivalence.report import NotEquivalentError, Report, differences

__all__ = ["assert_equivalent", "equivalent"]

_GIB_A_RANK = 0.1  # that a process which has imported torch does not share with others


def equivalent(
    model: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    mesh: MeshLike,
    rules: Any = None,
    *,
    transforms: Callable[[Plan], Plan] | Sequence[Callable[[Plan], Plan]] = (),
    shard: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    split: Callable[[Any, int, int], Any] | None = None,
    steps: int = 2,
    accumulate: int = 1,
    no_sync: bool = False,
    clip: float | Callable[[nn.Module], torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    rng: Literal["exact", "fast"] | None = None,
    seed: int = 0,
    before_step: Callable[[nn.Module, int], Any] | None = None,
    timeout: float = 120.0,
    engine: Literal["torch", "jax"] = "torch",
    **options: Any,
) -> Report:
    """Train a model sharded and on one device, from the same weights on the same batches, and compare everything.

    After each step, compares the loss, the outputs, every gradient, parameter and buffer, the optimizer's state and the
    norm of the gradients. At the end, checks that replicas have equal bits, and that every tensor has the plan's
    layout. Where something differs, the run is repeated with every module traced, and the report names the origin.

    In an ordinary process, the function uses a warm pool of CPU processes over gloo. Called on all ranks of a running
    job, it uses these.

    Args:
        model: a function that builds the model for one device, on CPU; called on every rank with the same seed.
        batch: a function that returns the global batch of a step (of a backward pass, if several are accumulated): a
            tensor, a tuple of positional arguments, a mapping of keyword arguments, or (tuple, mapping). The same on
            every rank: draw it from a generator of its own.
        mesh: "dp=2,tp=2" or a `MeshShape`.
        rules: rules, layout file or plan, as for `shard_model`.
        transforms: as for `shard_model`.
        shard: a function (model, device_mesh) -> model that shards in another way than by rules, with
            `parallelize_module` or `fully_shard` for example; instead of rules.
        loss: a function (model, batch) -> scalar tensor that runs the forward, a mean over the rows of the batch. By
            default the `loss` of the model's output, else a mean of all its elements, weighted by feature.
        optimizer: from parameters to an optimizer; AdamW with lr=1e-2, eps=1e-5 by default.
        split: a function (batch, index, count) -> batch, the part of one of `count` data ranks; rows of dim 0 by
            default.
        steps: the number of training steps. The complete state is compared after each, so a second step, which starts
            from a changed state, finds what many steps would. With `zero(stage, overlap=True)` parameters are read
            after the last step only, so that they arrive while the next forward runs, as in training.
        accumulate: backward passes per step; by default the plan's number, with `sl.accumulate(n)` among the
            transforms.
        no_sync: run all but the last of them under `shardlib.no_sync`.
        clip: norm that gradients are clipped to, or a function (model) -> norm that clips them by your own means. Norms
            are compared without it too, except with `shard`.
        dtype: float64 tells rounding and mistakes apart (limit 1e-10). In float32, bfloat16 and float16 both runs are
            measured against a single device in float64, and the sharded run may err at most ten times as much; the
            derivation of limits is in `shardlib/testing/equivalence/measure.py`.
        rng: "exact", the default, draws dropout by global element, so that it is the same on any mesh; "fast" is
            PyTorch's own, which only meshes without data axes can be compared in. Stages of a pipeline draw as "fast":
            leave dropout out.
        seed: the seed of the weights and of every backward pass.
        before_step: a function (model, step) called on both models: freeze, thaw, change.
        timeout: seconds after which ranks that do not answer are abandoned, with a table of each rank's standing.
        engine: "jax" proves the JAX engine, on as many CPU devices as the mesh has, in a warm process of its own:
            `compile_model` and optax beside the single device on torch. The optimizer is `torch.optim.AdamW`, `Adam` or
            `SGD`; the model draws nothing; shard, split, no_sync, rng, before_step and options are for torch alone.
        **options: options of `shard_model`: compile, bucket_mb, global_batch_norm, ... (compile is None by default
            here).

    Returns:
        A report, which is true if all agrees, and prints as text.

    Raises:
        InputError, MeshError: arguments that cannot be compared.
        ShardlibError: an error of `shard_model`.
        RankError: a rank died or hung.

    Example:
        >>> rules = {"0": "colwise", "2": "rowwise"}
        >>> def mlp():
        ...     return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> report = equivalent(mlp, lambda step: torch.randn(4, 8), "tp=2", rules)  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
    """
    each_transform = (transforms,) if callable(transforms) else tuple(transforms)
    if not timeout > 0:
        raise InputError(f"equivalent() was given timeout={timeout!r}; give seconds above zero.")
    if engine == "jax" and rng is not None:
        raise InputError(
            f'equivalent(engine="jax") was given rng={rng!r}; random numbers on JAX are its own. Leave it out, and '
            "dropout too."
        )
    case = Case(
        model, batch, _shape(mesh), rules, each_transform, shard, loss, optimizer, split, steps, accumulate, no_sync,
        clip, dtype, "exact" if rng is None else rng, seed, before_step, options, engine,
    )  # fmt: skip
    world = case.mesh.world_size
    if engine == "jax":
        return _prove_on_jax(case, timeout)
    if dist.is_initialized() and dist.get_world_size() > 1:
        if dist.get_world_size() != world:
            raise MeshError(
                f'equivalent() was called on {dist.get_world_size()} ranks with mesh "{case.mesh}", which has {world}. '
                "Call it on as many ranks, or from a process of its own."
            )
        return prove(case)
    _check_room(case.mesh)
    with _failing_in_words(case):
        return shared_pool(world).run(prove, case, timeout=timeout)[0]


@contextmanager
def _failing_in_words(case: Case) -> Iterator[None]:
    """Name what cannot be sent to ranks, and erase the progress bar of ranks that were killed."""
    try:
        yield
    except BaseException as error:
        erase_bar()
        if type(error) is RankError:
            _explain_what_does_not_travel(case, error)
        raise


def _prove_on_jax(case: Case, timeout: float) -> Report:
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise MeshError(
            f'equivalent(engine="jax") was called on {dist.get_world_size()} ranks; its devices are in one process. '
            "Call it in an ordinary process."
        )
    with _failing_in_words(case):
        return on_devices(case.mesh.world_size, prove, case, timeout=timeout)


def assert_equivalent(*args: Any, **kwargs: Any) -> Report:
    """Run `equivalent`, and raise an error with its report where anything differs.

    Raises:
        NotEquivalentError: an AssertionError; its text says where the runs begin to differ and what it looks like.
    """
    __tracebackhide__ = True
    report = equivalent(*args, **kwargs)
    if not report:
        raise NotEquivalentError(report)
    return report


def _check_room(mesh: MeshShape) -> None:
    """Check that this machine's memory has room for a process per rank, each with torch and three models."""
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    need = mesh.world_size * _GIB_A_RANK
    if need > have:
        raise MeshError(
            f'equivalent() was given mesh "{mesh}": {mesh.world_size} processes, which need {need:.0f} GiB at least; '
            f"this machine has {have:.0f}. Mistakes show on two or three ranks an axis: give a smaller mesh. "
            "shardlib.plan() shows any mesh without processes."
        )


def _explain_what_does_not_travel(case: Case, error: RankError) -> None:
    for field in dataclasses.fields(case):
        if reason := why_not(getattr(case, field.name)):
            raise InputError(
                f"equivalent() was given {field.name}={getattr(case, field.name)!r}, which cannot be sent to the ranks "
                f"({reason}). It is pickled with everything that it captures: make that inside of the function instead."
            ) from error


def _shape(mesh: MeshLike) -> MeshShape:
    shape = MeshShape.of(mesh)
    if -1 in shape.sizes:
        raise MeshError(
            f'equivalent() was given mesh "{shape}"; give every size, for the pool of ranks to be as large.'
        )
    return shape


def prove(case: Case) -> Report:
    """Run `equivalent` on the ranks of a case's mesh; every rank returns the same report."""
    begun = time.perf_counter()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = compare(case)
        for at_one_scale, measured in found:
            limit = limits(at_one_scale, measured)
            failed = wrong(measured, limit)
            origin = locate(at_one_scale, measured, failed) if failed else _of_replicas(measured)
            if origin is not None:
                break
        if origin is not None and case.engine == "jax":  # one process holds all, and every value is whole
            origin = dataclasses.replace(origin, ranks=(), layout="")
    return Report(
        case.mesh,
        case.steps,
        case.dtype,
        differences({key: measured.errors[key] for key in in_order(measured.errors)}, limit, measured.alone),
        measured.replicas,
        measured.layouts,
        origin,
        measured.tensors,
        tuple(sorted(measured.gathered)),
        _notes(case, measured, limit),
        tuple(dict.fromkeys(str(warning.message) for warning in heard)),
        time.perf_counter() - begun,
        case.engine,
        tuple(each.paths for _, each in found if each.paths is not None),
    )


def _of_replicas(measured: Measured) -> Origin | None:
    """Describe values that agree and whose bits or layouts do not."""
    for title, found in (("bits", measured.replicas), ("layout", measured.layouts)):
        for name, text in found.items():
            tensor = name.split(" of ")[-1].split(": ")[0].split(" ")[-1]
            return Origin(tensor.rpartition(".")[0], f"the {title} of {name}: {text}", 0, 0.0)
    return None


def _notes(case: Case, measured: Measured, limit: dict[Key, float]) -> tuple[str, ...]:
    spared = sum(FLOAT64_LIMIT < error <= limit[key] for key, error in measured.errors.items())
    if case.dtype is not torch.float64 or not spared:
        return ()
    if measured.coarsest is None:
        limited = "ten units of their own dtype, which is coarser than float64"
    else:
        dtype = str(measured.coarsest).removeprefix("torch.")
        limited = (
            f"ten times what one unit of {dtype}, the coarsest dtype that the model computes in, in every parameter "
            "moves them on a single device"
        )
    return (f"{spared} values differ by more than {FLOAT64_LIMIT:g}, and by no more than {limited}",)
