"""The one file of private PyTorch interfaces. Each says what it is for and the versions it was seen on.

Seen on torch 2.13.0 and 2.14.1; where the two differ, code asks which names there are. `shardlib/_supported.py` has the
versions that shardlib runs on.
"""

from __future__ import annotations

import collections
import functools
import gc
import inspect
import json
import math
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.tensor._random as dtensor_random
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, _redistribute, distribute_tensor
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpInfo, OpSchema, OutputSharding, RuntimeSchemaInfo
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    clear_redistribute_planner_cache,
    redistribute_local_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
    return_and_correct_aliasing,
)
from torch.utils.flop_counter import flop_registry

from shardlib.errors import PlanError

__all__ = [
    "AsyncTensor",
    "BatchNorm",
    "DTensorSpec",
    "Op",
    "OpInfo",
    "OpSchema",
    "OutputSharding",
    "RuntimeSchemaInfo",
    "TensorMeta",
    "TorchDispatchMode",
    "_StridedShard",
    "accumulation_of",
    "all_reduced",
    "all_to_all",
    "asks_for_gradient",
    "backward_id",
    "backward_of_inputs",
    "backward_of_weights",
    "cached_by_mesh",
    "call_below_subclass",
    "call_eagerly",
    "calls_step_of_base",
    "check_input_dim",
    "clamp_all",
    "clear_propagation_cache",
    "collective_name",
    "compile_errors",
    "compiled_call",
    "compiler_is_off",
    "copy_all",
    "default_store",
    "depth_of_step",
    "dispatcher",
    "drawn_by_tracker",
    "exchanged",
    "fake_attributes",
    "fake_tensor_errors",
    "fake_tensors",
    "fake_world",
    "find_weights_again",
    "flattened",
    "flop_formulas",
    "forget_global_hooks",
    "forget_meshes",
    "forget_with_meshes",
    "gather_uneven_splits_in_turn",
    "give_fused_splits_real_offsets",
    "global_metas",
    "go_around",
    "go_through",
    "graph_backend",
    "graph_breaks_raise",
    "group_to_sum_over",
    "has_gradient_hooks",
    "has_values",
    "hook_around_step",
    "hooks_of",
    "imagined_in",
    "imagining",
    "implicit_replication",
    "inductor_backend",
    "innermost_mode",
    "intercept_propagation",
    "intercept_redistribution",
    "is_composite",
    "is_imagined",
    "is_traceable_wrapper_subclass",
    "is_view",
    "joined",
    "keep_compiler_out_of",
    "leaves_of",
    "limit_of",
    "local_of",
    "local_shape_and_offset",
    "make_hooks",
    "memory_of",
    "move_handlers",
    "moved",
    "multiply_all",
    "named_arguments",
    "new_group",
    "next_node_number",
    "no_modes",
    "norms_of",
    "op_database",
    "op_names",
    "own_tensors",
    "part",
    "place_of_group",
    "process_groups",
    "pytree",
    "ranks_of_collective",
    "ranks_of_mesh",
    "rebind_checkpointed",
    "recorded_collectives",
    "recording_imagined",
    "redistribute_local",
    "replace_conversion",
    "replace_kernels",
    "replicated_spec",
    "restore_handlers",
    "return_and_correct_aliasing",
    "root_mesh",
    "run_at_end_of_backward",
    "running_node",
    "scaled_product",
    "schema_of",
    "seed_all",
    "set_compiled_call",
    "set_implicit_replication",
    "set_local",
    "set_timeouts",
    "shard",
    "share_memory",
    "spec",
    "spec_of",
    "spec_with",
    "splits",
    "step_without_hooks",
    "sum_scattered",
    "told_by_meta",
    "wait_for",
    "watch_new_buffers",
    "watch_new_parameters",
    "with_values",
    "wrap",
    "written_to",
]

Op = torch._ops.OpOverload
P = ParamSpec("P")
R = TypeVar("R")


def local_of(tensor: DTensor) -> torch.Tensor:
    """The local shard itself: no autograd, no copy. `to_local()` would make a view that autograd records."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> Any:
    """Mesh, placements and global metadata of a DTensor, as the value that `wrap` takes."""
    return tensor._spec


# `DTensor.__new__` without the guard that keeps dynamo from tracing it: `wrap` is never traced, and the guard costs as
# much as the rest. (Where a later torch has no guard, this is `DTensor.__new__` itself.)
_new_dtensor: Any = getattr(DTensor.__new__, "__wrapped__", DTensor.__new__)


def wrap(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor around a local shard, an eighth of the cost of `DTensor.from_local` (no autograd, no checks)."""
    if local.dtype != spec.tensor_meta.dtype:
        meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return _new_dtensor(DTensor, local, spec, requires_grad=False)


def shard(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """This rank's local shard of a plain tensor that every rank holds whole: no communication, always a copy."""
    return local_of(distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)).clone()


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors lie in one storage; fake ones too (2.13.0)."""
    return torch._C._is_alias_of(a, b)  # type: ignore[attr-defined]


_BY_MESH: list[Callable[[], None]] = []


def forget_with_meshes(clear: Callable[[], None]) -> Callable[[], None]:
    """Have a memory that holds meshes cleared whenever an equal mesh may stand for other process groups."""
    _BY_MESH.append(clear)
    return clear


def cached_by_mesh(fn: Callable[P, R]) -> Callable[P, R]:
    """Remember results by arguments that hold a mesh, until the mesh may stand for other process groups.

    Meshes are equal when their ranks and names are, whatever their groups: those of a world that is gone, or of a dry
    run, must not be met again.
    """
    cached = functools.lru_cache(maxsize=4096)(fn)
    forget_with_meshes(cached.cache_clear)
    return cached  # type: ignore[return-value]


@cached_by_mesh
def _replicated_spec(mesh: DeviceMesh, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> DTensorSpec:
    return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=TensorMeta(shape, stride, dtype))


def replicated_spec(tensor: torch.Tensor, mesh: DeviceMesh) -> Any:
    """What `wrap` needs to know of a plain tensor that is the same on all ranks of `mesh`."""
    return _replicated_spec(mesh, tensor.shape, tensor.stride(), tensor.dtype)


@cached_by_mesh
def _spec(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def spec(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int], dtype: torch.dtype) -> Any:
    """What `wrap` needs to know of a contiguous tensor of this global shape."""
    return _spec(mesh, placements, tuple(shape), dtype)


@cached_by_mesh
def spec_with(spec: DTensorSpec, placements: tuple[Placement, ...]) -> Any:
    """The spec of the same tensor in other placements."""
    return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)


def splits(placement: Placement, dim: int) -> bool:
    """Whether a placement splits this tensor dim, plainly or inside a fused dim."""
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def moved(placement: Placement, dim: int) -> Placement:
    """The same split of another tensor dim."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


@cached_by_mesh
def group_to_sum_over(mesh: DeviceMesh, now: tuple[Placement, ...], want: tuple[Placement, ...]) -> str | None:
    """The name of the one group whose all-reduce makes partial sums whole, if that is all that differs."""
    changing = [axis for axis, (a, b) in enumerate(zip(now, want, strict=True)) if a != b]
    if len(changing) == 1 and now[changing[0]].is_partial("sum") and want[changing[0]].is_replicate():
        return mesh.get_group(changing[0]).group_name
    return None


def seed_all(number: int) -> None:
    """`torch.manual_seed`, which formats the stack for each kind of accelerator, whether there is one or not (2.13.0).

    That takes as long as a small step of training.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A group that waits as long as the job's own; None on ranks outside of it. All ranks of the job call it."""
    group = dist.new_group(list(ranks), timeout=_timeout_of(dist.group.WORLD))
    return group if dist.get_rank() in ranks else None


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> tuple[tuple[torch.Tensor | None, ...], Any]:
    """The half of a backward pass that another stage waits for, as `torch.distributed.pipelining` does it (2.13.0).

    Returns the gradients of the inputs, and what `backward_of_weights` goes on from.
    """
    from torch.distributed.pipelining import _backward

    return _backward.stage_backward_input(list(outputs), list(gradients), list(inputs), iter(weights))  # type: ignore[arg-type]


def backward_of_weights(weights: Sequence[torch.Tensor], rest: Any) -> None:
    """The other half: gradients are added to those of the weights."""
    from torch.distributed.pipelining import _backward

    _backward.stage_backward_weight(iter(weights), rest)  # type: ignore[arg-type]


def all_reduced(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """A new tensor, the sum over a group: DTensor's own op, without a word to autograd, which costs as much again."""
    collective = torch.ops._c10d_functional
    with torch._C._AutoDispatchBelowAutograd():
        return collective.wait_tensor.default(collective.all_reduce.default(tensor, "sum", group))


def all_to_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A new tensor: row i came from rank i of the group, which got this rank's row for it."""
    collective = torch.ops._c10d_functional
    ones = [1] * len(tensor)
    with torch._C._AutoDispatchBelowAutograd():
        return collective.wait_tensor.default(
            collective.all_to_all_single.default(tensor, ones, ones, group.group_name)
        )


def exchanged(
    tensor: torch.Tensor, group: dist.ProcessGroup, to: int, source: int, shape: Sequence[int]
) -> Callable[[], torch.Tensor]:
    """Every rank of a group sends a tensor to one rank and gets `source`'s, of local `shape`, once it asks for it.

    An all-to-all with pieces for one rank only, as `permute_tensor` of functional collectives, which takes one shape.
    """
    collective = torch.ops._c10d_functional
    size, shape = dist.get_world_size(group), tuple(shape)
    sent = [tensor.numel() if i == to else 0 for i in range(size)]
    received = [math.prod(shape) if i == source else 0 for i in range(size)]
    with torch._C._AutoDispatchBelowAutograd():
        flat = tensor.contiguous().flatten()
        coming = collective.all_to_all_single.default(flat, received, sent, group.group_name)

    def wait() -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return collective.wait_tensor.default(coming).reshape(shape)

    return wait


def flattened(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """The one-axis mesh over several axes of a mesh, in any order, so that one collective spans them all.

    This very mesh remembers it, since an equal one may stand for other process groups.
    """
    known: dict[tuple[str, ...], DeviceMesh] = mesh.__dict__.setdefault("_shardlib_flattened", {})
    axes = tuple(name for name in mesh.mesh_dim_names or () if name in axes)
    if axes not in known:
        with unset_fake_temporarily():  # a mesh is a tensor of ranks
            known[axes] = mesh[axes[0]] if len(axes) == 1 else mesh[axes]._flatten()
            if len(axes) > 1:
                set_timeouts(known[axes])
    return known[axes]


def set_timeouts(mesh: DeviceMesh) -> None:
    """Let the groups of a mesh wait as long as the job's own, which its user chose in `init_process_group(timeout=)`.

    Torch (2.13.0) gives a new group its own default, half an hour, whatever that of the job is. Where a user chose
    another one for an axis, it stays.
    """
    world = _timeout_of(dist.group.WORLD)
    if world is None:
        return
    for axis in mesh.mesh_dim_names or ():
        group = mesh.get_group(axis)
        if _timeout_of(group) in (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout or world):
            group.set_timeout(world)


def _timeout_of(group: Any) -> timedelta | None:
    """None for groups whose operations do not wait, as imagined ones, and for back ends that do not say."""
    if dist.get_backend(group) == dist.Backend.FAKE:
        return None
    try:
        return group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, RuntimeError):
        return None


def limit_of(group: Any) -> timedelta | None:
    """How long `wait_for` waits for sends and receives of a group: no longer than the group's timeout.

    Of itself gloo (2.13.0) waits for these as long as was said when the group was made, whatever has been set since.
    On NCCL, a wait with a timeout would hold up the host.
    """
    return _timeout_of(group) if dist.get_backend(group) == dist.Backend.GLOO else None


def wait_for(works: Iterable[dist.Work], limit: timedelta | None) -> None:
    """Wait for sends and receives, each no longer than that."""
    for work in works:
        if limit is None:
            work.wait()
        else:
            work.wait(limit)


def default_store() -> dist.Store:
    """The store over which the ranks of this job met."""
    return c10d._get_default_store()


def set_implicit_replication(enabled: bool) -> bool:
    """Whether a plain tensor that meets a DTensor counts as replicated, in this thread. Returns what it was."""
    before = torch._C._get_dtensor_allow_implicit_replication()
    torch._C._set_dtensor_allow_implicit_replication(enabled)
    return before


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Plain tensors that meet a DTensor count as replicated inside this block."""
    before = set_implicit_replication(True)
    try:
        yield
    finally:
        set_implicit_replication(before)


@functools.cache
def gather_uneven_splits_in_turn() -> None:
    """Have DTensor gather a dim that two axes split unevenly one axis after the other, as it split it.

    Where a mesh has a flattened form, PyTorch (2.13.0) makes one all-gather of the two. Nine rows on 2 x 2 ranks are
    3, 2, 2, 2, but flattened they would be 3, 3, 3, 0, and the wrong rows come back as padding.
    `tests/engine/test_properties.py` shows it.
    """
    merged = getattr(_redistribute, "_optimize_transform_infos", None)
    if merged is None:
        return

    def merge(infos: list[Any], mesh: DeviceMesh, *placements: Any) -> list[Any]:
        return infos if any(_is_uneven_gather(info, mesh) for info in infos) else merged(infos, mesh, *placements)

    _redistribute._optimize_transform_infos = merge  # type: ignore[assignment]


def _is_uneven_gather(info: Any, mesh: DeviceMesh) -> bool:
    source, target = info.src_dst_placements
    if not target.is_replicate() or not isinstance(source, Shard | _StridedShard):
        return False
    return isinstance(source, _StridedShard) or info.logical_shape[source.dim] % mesh.size(info.mesh_dim) != 0


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[Any]) -> None:
    """`target.copy_(source)` for each pair, in one call."""
    torch._foreach_copy_(targets, sources)  # type: ignore[arg-type]


def call_below_subclass(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of tensors as if they were of no subclass of `torch.Tensor`."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def clamp_all(tensors: Sequence[torch.Tensor], limit: float) -> None:
    """`tensor.clamp_(-limit, limit)` for each, in two calls."""
    if tensors:
        torch._foreach_clamp_min_(list(tensors), -limit)
        torch._foreach_clamp_max_(list(tensors), limit)


def multiply_all(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """`tensor.mul_(factor)` for each, in one call."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def norms_of(tensors: Sequence[torch.Tensor], p: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The p-norm of each that is not empty, in one call; by default computed and given in their own dtype."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    return list(torch._foreach_norm(filled, p, dtype)) if filled else []


def run_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run once the backward pass that is now in progress has finished, before `backward()` returns."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_id() -> int:
    """A number for the backward pass in progress, -1 outside of one."""
    return torch._C._current_graph_task_id()


def accumulation_of(param: torch.Tensor) -> Any:
    """The AccumulateGrad node of a parameter."""
    return torch.autograd.graph.get_gradient_edge(param).node


def asks_for_gradient(node: Any) -> bool | None:
    """Whether the backward pass in progress adds a gradient to the parameter of an AccumulateGrad node; None where it
    gives it to the caller of `autograd.grad` instead."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None


def has_gradient_hooks(param: torch.Tensor) -> bool:
    """Whether somebody has registered hooks on a parameter's gradient."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def depth_of_step(optimizer: torch.optim.Optimizer) -> int:
    """How many calls of an optimizer's step are running, its own and those of its base classes: asked by a hook.

    Told by the stack, since a step that raises calls no hook. All steps share the code of `profile_hook_step`.
    """
    code = _HOOKED_STEP
    frame = inspect.currentframe()
    depth = 0
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is optimizer:
            depth += 1
        frame = frame.f_back
    return depth


_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__  # type: ignore[attr-defined]


def hook_around_step(
    optimizer: torch.optim.Optimizer, before: Callable[..., Any], after: Callable[..., Any]
) -> tuple[Any, Any]:
    """Register hooks, the last before and the first after each step that runs, those of base classes included.

    torch lets a class call hooks when the first optimizer of exactly that class is made.
    """
    for kind in type(optimizer).__mro__:
        step = vars(kind).get("step")
        if step is not None and kind is not torch.optim.Optimizer and not hasattr(step, "hooked"):
            kind.step = torch.optim.Optimizer.profile_hook_step(step)  # type: ignore[attr-defined]
            kind.step.hooked = True  # type: ignore[attr-defined]
    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    optimizer._optimizer_step_post_hooks.move_to_end(handles[1].id, last=False)  # type: ignore[attr-defined]
    return handles


@functools.cache
def calls_step_of_base(kind: type) -> bool:
    """Whether the code of a class's step calls that of a base class, as far as its names tell."""
    code = getattr(inspect.unwrap(vars(kind)["step"]), "__code__", None)
    return code is not None and ("__class__" in code.co_freevars or "step" in code.co_names)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """A step of an optimizer's own code: what `Optimizer.profile_hook_step` has wrapped (2.13.0)."""
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


_OPTIMIZER_HOOKS = (
    "step_pre",
    "step_post",
    "state_dict_pre",
    "state_dict_post",
    "load_state_dict_pre",
    "load_state_dict_post",
)


def make_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Make what `Optimizer.register_..._hook` fill, for a subclass that does not call `__init__` (2.13.0, 2.14.1)."""
    for when in _OPTIMIZER_HOOKS:
        setattr(optimizer, f"_optimizer_{when}_hooks", collections.OrderedDict())


def hooks_of(optimizer: torch.optim.Optimizer, when: str) -> list[Callable[..., Any]]:
    """Hooks that a user has registered, in order: those of "step_pre" and so on."""
    assert when in _OPTIMIZER_HOOKS
    return list(getattr(optimizer, f"_optimizer_{when}_hooks").values())


def forget_meshes() -> None:
    """Drop what DTensor remembers of meshes whose process groups are gone: cached propagation, the RNG tracker."""
    _forget_specs()
    dtensor_random._rng_tracker = None
    torch._C._set_dtensor_allow_implicit_replication(False)
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    # Compiled code keeps meshes after all (2.13.0), a mesh keeps its groups, and each of gloo's groups has threads that
    # wake a hundred times a second.
    for mesh in _live_meshes():
        getattr(mesh, "_pg_registry", {}).clear()


def _live_meshes() -> list[DeviceMesh]:
    return [each for each in gc.get_objects() if type(each) is DeviceMesh]


def forget_global_hooks() -> None:
    """Take away the hooks that run for every module and every optimizer of the process."""
    for home in ("torch.nn.modules.module", "torch.optim.optimizer"):
        for name, hooks in vars(sys.modules[home]).items():
            if name.startswith("_global_") and isinstance(hooks, dict):
                hooks.clear()


def process_groups() -> list[dist.ProcessGroup]:
    """The groups that this process is in. Whoever holds them decides when their sockets and threads end."""
    return list(c10d._world.pg_map)


def recorded_collectives() -> list[dict[str, Any]]:
    """The last collectives of this process, oldest first, as torch's flight recorder writes them down (2.13.0).

    It records those of gloo too; an entry that is not "retired" is still under way. Empty where torch has no recorder.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    return json.loads(dump()).get("entries", []) if dump else []


def place_of_group(name: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The ranks of a process group, and the names of the mesh axes that it serves."""
    found = [group for group in process_groups() if group.group_name == name]
    ranks = tuple(dist.get_process_group_ranks(found[0])) if found else ()
    axes = [
        axis
        for mesh in _live_meshes()
        for axis, served in zip(mesh.mesh_dim_names or (), getattr(mesh, "_dim_group_names", ()), strict=False)
        if served == name
    ]
    return ranks, tuple(dict.fromkeys(axes))


def _forget_specs() -> None:
    """Everything that is looked up by mesh and holds one: an equal mesh may have other process groups.

    A mesh that is kept keeps its groups, each with threads of its own.
    """
    clear_propagation_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    for clear in _BY_MESH:
        clear()


def clear_propagation_cache() -> None:
    """Make DTensor ask for the sharding of every op again (this thread's C++ cache, and the Python one)."""
    # torch.distributed.tensor.debug has both in one function, but importing it brings inductor and sets a variable of
    # the environment.
    dispatcher().sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def schema_of(op: Op) -> Any:
    """Names, types, defaults and aliases of an op's arguments and results."""
    return op._schema


def written_to(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call of an op changes."""
    values = (args[i] if i < len(args) else kwargs.get(name) for i, name in _changed_arguments(op))
    return [leaf for value in values for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@functools.cache
def _changed_arguments(op: Op) -> tuple[tuple[int, str], ...]:
    """The place and the name of each."""
    given = enumerate(schema_of(op).arguments)
    return tuple((i, each.name) for i, each in given if each.alias_info is not None and each.alias_info.is_write)


def is_view(op: Op) -> bool:
    """Whether the op's result shares the storage of an operand."""
    return op._schema._is_view_op()


def op_names() -> list[str]:
    """Every registered op, as in "aten::add.Tensor"."""
    return torch._C._dispatch_get_all_op_names()


def is_composite(op: Op) -> bool:
    """Whether autograd sees through the op, which then reaches DTensor under inference mode only."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C.DispatchKey.CompositeImplicitAutograd)


def set_local(tensor: DTensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Give a DTensor another local tensor, and the global shape and placements that this has."""
    tensor._local_tensor, tensor._spec = local, spec


def intercept_propagation(ours: Callable[..., Any]) -> Callable[[], None]:
    """Have DTensor ask `ours(original, op, args, kwargs, info, try_cache)` for what its C++ cache does not know.

    `ours` returns an `OutputSharding`, which is cached and carried out, or the result itself. Returns the undoing.
    """
    target = dispatcher()
    original = target._propagate_op_sharding_dispatch_slow_path
    target._propagate_op_sharding_dispatch_slow_path = functools.partial(ours, original)
    return lambda: vars(target).pop("_propagate_op_sharding_dispatch_slow_path", None)


def intercept_redistribution(ours: Callable[..., Any]) -> Callable[[], None]:
    """Have `DTensor.redistribute` and `full_tensor` ask `ours(original, local, source, target, **options)`.

    Returns the undoing.
    """
    original = _redistribute.redistribute_local_tensor
    _redistribute.redistribute_local_tensor = functools.partial(ours, original)  # type: ignore[assignment]
    return lambda: setattr(_redistribute, "redistribute_local_tensor", original)


def move_handlers(ops: Sequence[Op]) -> dict[Op, Any]:
    """Take ops out of the handlers that DTensor calls before it looks at its cache; returns the handlers."""
    table = dispatcher()._custom_op_handlers
    return {op: table.pop(op) for op in ops if op in table}


def restore_handlers(handlers: Mapping[Op, Any]) -> None:
    """Undo `move_handlers`."""
    dispatcher()._custom_op_handlers.update(handlers)


def replace_kernels(kernels: Mapping[tuple[str, str], Callable[..., Any]]) -> Callable[[], None]:
    """Register kernels of aten ops, by name and dispatch key, above those that there are; returns what undoes it."""
    library = torch.library.Library("aten", "IMPL")
    for (op, key), kernel in kernels.items():
        library.impl(op, kernel, key)
    return library._destroy


def drawn_by_tracker(op: Op) -> bool:
    """Whether DTensor's random number tracker offsets the generator for this op, on devices that it supports."""
    return op in dispatcher()._random_ops


def dispatcher() -> Any:
    """The process's DTensor op dispatcher: its handlers, its propagator, its slow path."""
    return DTensor._op_dispatcher


def global_metas(schema: OpSchema) -> Any:
    """Global shape, stride and dtype of what an op returns: `TensorMeta`s in the op's own structure.

    Raises what the op raises on fake tensors, among it the errors of data-dependent shapes.
    """
    if told_by_meta(schema.op) and not _get_current_dispatch_mode_stack():
        given = (schema.args_schema, schema.kwargs_schema)
        if all(0 not in leaf.shape for leaf in pytree.tree_leaves(given) if isinstance(leaf, DTensorSpec)):
            args, kwargs = pytree.tree_map_only(DTensorSpec, _on_meta, given)
            return pytree.tree_map(_meta_of, schema.op(*args, **kwargs))
    return dispatcher().sharding_propagator._propagate_tensor_meta_non_cached(schema)


# Of these and of pointwise ops, kernels for meta tensors tell strides and dtypes on any device. They take a tenth of
# a millisecond where fake tensors take one to five, and training begins with hundreds. Other ops ask for the device.
_TOLD_BY_META = {
    torch.ops.aten._log_softmax.default,
    torch.ops.aten._log_softmax_backward_data.default,
    torch.ops.aten._softmax.default,
    torch.ops.aten._softmax_backward_data.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.cat.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.embedding.default,
    torch.ops.aten.embedding_dense_backward.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.gelu_backward.default,
    torch.ops.aten.mean.dim,
    torch.ops.aten.mm.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.stack.default,
    torch.ops.aten.sum.dim_IntList,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.view.default,
}


@functools.cache
def told_by_meta(op: Any) -> bool:
    """Whether an op's kernel for meta tensors may be asked what it returns."""
    pointwise = torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags
    return op in _TOLD_BY_META or (pointwise and not any(a.name == "device" for a in schema_of(op).arguments))


def _on_meta(spec: DTensorSpec) -> torch.Tensor:
    meta = spec.tensor_meta
    assert meta is not None
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def _meta_of(result: Any) -> TensorMeta | None:
    return TensorMeta(result.shape, result.stride(), result.dtype) if isinstance(result, torch.Tensor) else None


def redistribute_local(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """The local tensor of `source` as the local tensor of `target`, with the collectives that takes."""
    if source.placements == target.placements:
        return local
    return redistribute_local_tensor(local, source, target)


def joined(local: torch.Tensor, mesh: DeviceMesh, axis: int, now: Any, shape: Sequence[int]) -> torch.Tensor:
    """What the ranks of one mesh axis hold together: their shards side by side, or their sum.

    `shape` is that of the result. A fused split has to be even.
    """
    if isinstance(now, Partial):
        found = now._reduce_value(local, mesh, axis)
    elif isinstance(now, Shard | _StridedShard):
        found = Shard(now.dim)._to_replicate_tensor(local.contiguous(), mesh, axis, shape)
    else:
        return local
    found = _arrived(found)
    if isinstance(now, _StridedShard):
        turns = found.unflatten(now.dim, (mesh.size(axis), int(now.split_factor), -1))
        found = turns.transpose(now.dim, now.dim + 1).flatten(now.dim, now.dim + 2)
    return found


def sum_scattered(local: torch.Tensor, mesh: DeviceMesh, axis: int, dim: int) -> torch.Tensor:
    """This rank's chunk, along a dim, of the sum of what the ranks of one mesh axis hold."""
    return _arrived(Shard(dim)._reduce_shard_tensor(local, mesh, "sum", axis))


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def part(tensor: torch.Tensor, mesh: DeviceMesh, axis: int, want: Any) -> torch.Tensor:
    """This rank's part, along one mesh axis, of a tensor that all ranks of that axis hold alike."""
    if isinstance(want, Partial):
        return want._partition_value(tensor, mesh, axis)
    if not isinstance(want, Shard | _StridedShard):
        return tensor
    factor = int(want.split_factor) if isinstance(want, _StridedShard) else 1
    turns = tensor.unflatten(want.dim, (factor, -1)) if factor > 1 else tensor.unsqueeze(want.dim)
    size = turns.shape[want.dim + 1]
    chunk = -(-size // mesh.size(axis))
    start = min(chunk * mesh.get_local_rank(axis), size)
    return turns.narrow(want.dim + 1, start, min(chunk, size - start)).clone().flatten(want.dim, want.dim + 1)


def local_shape_and_offset(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """This rank's local shape, and where it begins in the global tensor (of no meaning for a fused split).

    Plain arithmetic, so that it works while a block is traced, where upstream's own helper makes tensors.
    """
    local, offset = list(shape), [0] * len(shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for index, n, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            dim, size = placement.dim, local[placement.dim]
            chunk = -(-size // n)
            start = min(chunk * index, size)
            local[dim], offset[dim] = min(chunk, size - start), offset[dim] + start
    return tuple(local), tuple(offset)


# Recording. `_current_autograd_node`, `_sequence_nr` and the op namespaces were seen on 2.13.0.

AsyncTensor = AsyncCollectiveTensor


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a sub-mesh was sliced from, or the mesh itself."""
    return mesh._get_root_mesh()


def ranks_of_mesh(mesh: DeviceMesh) -> list[int]:
    """The global ranks of a mesh, its last axis fastest."""
    with unset_fake_temporarily():
        return mesh.mesh.flatten().tolist()


def leaves_of(*values: Any) -> Iterator[Any]:
    """The leaves of values, in `pytree`'s order. Plain containers are taken apart here, which takes less long."""
    for value in values:
        if isinstance(value, _LEAVES):
            yield value
        elif type(value) in (tuple, list):
            yield from leaves_of(*value)
        elif type(value) is dict:
            yield from leaves_of(*value.values())
        else:
            yield from pytree.tree_leaves(value)


_LEAVES = (torch.Tensor, type(None), bool, int, float, str)


def next_node_number() -> int:
    """The number that autograd will give to the next node it records in this thread."""
    return torch.autograd._get_sequence_nr()


def running_node() -> int:
    """The number of the node that backward runs now; no node of a forward has it between nodes, or at a leaf."""
    node: Any = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else -1


def collective_name(op: Any) -> str | None:
    """The bare name of an op of c10d, functional collectives or DTensor; None for any other op."""
    return op._opname if op.namespace in ("c10d", "_c10d_functional", "_dtensor") else None


def named_arguments(op: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments of an op by the names of its schema."""
    return {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)}


def ranks_of_collective(arguments: dict[str, Any]) -> list[int]:
    """The global ranks that take part in a collective op, from its named arguments."""
    if "group_name" in arguments:
        group = c10d._resolve_process_group(arguments["group_name"])
    else:
        group = dist.ProcessGroup.unbox(arguments["process_group"])
    return dist.get_process_group_ranks(group)


# The dry run: fake tensors, and a world of fake ranks. Seen on 2.13.0.

_WORLD_TABLES = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_tags_to_pg",
    "_pg_to_tag",
    "_group_count",
    "_world",
)
# Groups are known to C++ by name, real and fake ones in one table; counting from here keeps the names apart.
_FIRST_FAKE_GROUP = 1_000_000_000


class _Remembering(FakeTensorMode):
    """Gives the same tensor again where an op was called with the same ones: each op of fake tensors (2.13.0) costs as
    much as a small block computes, and every microbatch goes the same way.

    Not where autograd would write its history into what is given, and not for ops that change what they are given.
    """

    most = 10_000

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._made: dict[Any, tuple[Any, Any, Any]] = {}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = _call_key(func, args, kwargs or {})
        known = self.known(key)
        if known is not None:
            return known
        made = super().dispatch(func, types, args, kwargs or {})
        if isinstance(made, FakeTensor):
            made.__class__ = _Remembered
            if key is not None:
                if len(self._made) >= self.most:
                    self._made.clear()
                self._made[key] = made, _state_of(made), (args, kwargs)  # whose identities are in the key
        return made

    def from_tensor(self, tensor: torch.Tensor, **given: Any) -> FakeTensor:
        made = super().from_tensor(tensor, **given)
        made.__class__ = _Remembered
        return made

    def known(self, key: Any) -> torch.Tensor | None:
        """What a call gave before, unless somebody has changed that in place."""
        made, state, _ = self._made.get(key, _NOTHING) if key is not None else _NOTHING
        return made if made is not None and state == _state_of(made) else None


class _Remembered(FakeTensor):
    """Asks its mode what it knows before the mode is entered, which takes several times as long (2.13.0)."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0] if args else None
        if isinstance(first, _Remembered):
            mode: Any = first.fake_mode
            known = mode.known(_call_key(func, args, kwargs or {}))
            if known is not None:
                return known
        _refuse_lost_values(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def _refuse_lost_values(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse to write what has no values into a tensor that has some: it would keep its old ones, and say nothing.

    Raises:
        PlanError: for an op in place, or one with `out=`.
    """
    kept = [tensor for tensor in written_to(op, args, kwargs) if not is_imagined(tensor)]
    if kept and any(map(is_imagined, _fakes((args, kwargs)))):
        raise PlanError(
            f"forward writes a tensor of another stage into one of shape {tuple(kept[0].shape)} that this stage has "
            f"made ({op}), outside of the stages' modules: only what the first module of a stage is given comes from "
            "the stage before it. Cut the model elsewhere, name the modules that make both on one stage, or pass the "
            "tensor through the modules between them."
        )


_NOTHING = None, None, None


def _state_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.requires_grad


# Asked for a new tensor, often to be changed or to be told from its source.
_FRESH = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}


@functools.cache
def _gives_what_it_was_given(op: Any) -> bool:
    """An op in place, or a view: autograd notes in its result whose it is."""
    return op._schema.is_mutable or any(each.alias_info is not None for each in op._schema.returns)


def _call_key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What calls with the same result have in common; None where there may be none."""
    if func in _FRESH or not isinstance(func, torch._ops.OpOverload) or _gives_what_it_was_given(func):
        return None
    leaves: list[Any] = [func, *kwargs]
    if not any(isinstance(arg, FakeTensor) for arg in (*args, *kwargs.values())):
        return None  # two tensors made of nothing are two
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, FakeTensor):
            leaves.append(id(arg))
        elif isinstance(arg, torch.Tensor):
            leaves.append((arg.shape, arg.stride(), arg.dtype, arg.device))
        elif isinstance(arg, list | tuple):
            if any(isinstance(each, torch.Tensor | list | tuple) for each in arg):
                return None
            leaves.append(tuple(arg))
        else:
            leaves.append((type(arg), arg))
        if isinstance(arg, torch.Tensor) and arg.requires_grad:
            return None
    return tuple(leaves)


class _DryMode(FakeTensorMode):
    """Of a dry run."""


class _Marking(TorchDispatchMode):
    """In a dry run, in which no tensor has values, tells those that would have none in a real run either.

    They are marked: what is made while `depth` is not zero, and what comes of marked ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) or t is AsyncTensor for t in types):
            return NotImplemented
        if not self.depth:
            _refuse_lost_values(op, args, kwargs or {})
        made = op(*args, **(kwargs or {}))
        if self.depth or any(is_imagined(leaf) for leaf in _fakes((args, kwargs))):
            for leaf in _fakes(made):
                leaf._shardlib_imagined = True
        return made


def _fakes(tree: Any) -> Iterator[Any]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, FakeTensor))


class _Marked:
    """What `imagining` gives in a dry run; it can be entered many times."""

    def __init__(self, mode: _Marking) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._mode.depth += 1

    def __exit__(self, *exc: object) -> None:
        self._mode.depth -= 1

    def from_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        with self:
            return tensor.detach()


@contextmanager
def fake_tensors(*, with_stages: bool = False) -> Iterator[None]:
    """Tensors made inside have shape, dtype and device, and no values. Real ones may meet them.

    `with_stages` lets `is_imagined` tell which of them would have none in a real run either.
    """
    give_fused_splits_real_offsets()
    with _DryMode(allow_non_fake_inputs=True), _Marking() if with_stages else nullcontext():
        yield


def imagining() -> Any:
    """A context of its own in which tensors have no values; what is made there stays so outside of it."""
    marking = next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Marking)), None)
    return _Remembering(allow_non_fake_inputs=True) if marking is None else _Marked(marking)


def is_imagined(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape, a dtype and a device, and no values; in a dry run, whether it would have none."""
    if isinstance(tensor, FakeTensor):
        return not isinstance(tensor.fake_mode, _DryMode) or hasattr(tensor, "_shardlib_imagined")
    return False


def imagined_in(mode: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes a tensor without values of one that has some."""
    return lambda tensor: tensor if is_imagined(tensor) else mode.from_tensor(tensor.detach())


def recording_imagined(record: Callable[[Any, Any, Any], Any]) -> AbstractContextManager[Any]:
    """A context in which tensors have no values, and every operation goes through `record(op, args, kwargs)`.

    Nothing else keeps weak references to the tensors, so that others can be swapped into their places.
    """
    stack = ExitStack()
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # each call's own tensors: what is recorded is told apart by them
    memo = mode.fake_tensor_converter.tensor_memo

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            try:
                return record(op, args, kwargs or {})
            finally:
                memo.clear()

    stack.enter_context(mode)
    stack.enter_context(Recording())
    return stack


@contextmanager
def no_modes() -> Iterator[None]:
    """Nothing looks at operations inside: no mode of dispatch that is on outside."""
    with _disable_current_modes():
        yield


@functools.cache
def fake_attributes() -> frozenset[str]:
    """Attributes that a tensor without values has, besides those that users give it."""
    return frozenset(vars(FakeTensorMode().from_tensor(torch.empty(0)))) | {"_is_param"}


def memory_of(tensor: torch.Tensor) -> tuple[int, Any]:
    """What tells the memory of a tensor from others, also if it is imagined; as long as the second of both lives."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage


# Call `register(hook)` of these: the hook gets each module, name and tensor when a module takes it in.
watch_new_parameters = torch.nn.modules.module.register_module_parameter_registration_hook
watch_new_buffers = torch.nn.modules.module.register_module_buffer_registration_hook


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be read: one of a dry run cannot, nor one on meta."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def with_values(make: Callable[[], R]) -> R:
    """What a function makes, in a dry run too, where tensors would have no values."""
    with unset_fake_temporarily():
        return make()


@functools.cache
def give_fused_splits_real_offsets() -> None:
    """Let DTensor tell the shards of a fused split in a dry run and while a block is traced.

    It reads their offsets back from a small tensor of its own (2.13.0), which has no values there.
    """
    strided = _StridedShard.local_shard_size_and_offset

    def with_real_offsets(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return strided(*args, **kwargs)

    _StridedShard.local_shard_size_and_offset = with_real_offsets  # type: ignore[method-assign]


def fake_tensor_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise where a value would be needed."""
    from torch._subclasses import fake_tensor

    return (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)


@contextmanager
def fake_world(axes: Mapping[str, int], device_type: str, rank: int = 0) -> Iterator[DeviceMesh]:
    """Be one rank, by default the first, of as many as a mesh has, all others imagined; collectives return at once.

    Real process groups of this process, the default one included, are out of sight inside the block and back after
    it. What DTensor has cached names meshes, and a real and a fake mesh of one shape are equal to it: caches are
    dropped on both sides.
    """
    import torch.testing._internal.distributed.fake_pg as fake_pg

    before = {name: getattr(c10d, name) for name in _WORLD_TABLES}
    tracker = dtensor_random._rng_tracker
    _forget_specs()
    for name, value in before.items():
        setattr(c10d, name, _FIRST_FAKE_GROUP if isinstance(value, int) else type(value)())
    try:
        world = math.prod(axes.values())
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=world)
        yield _fake_mesh(axes, device_type, rank)
    finally:
        for name in list(c10d._world.pg_names.values()):
            c10d._unregister_process_group(name)
        for name, value in before.items():
            setattr(c10d, name, value)
        _forget_specs()
        dtensor_random._rng_tracker = tracker


def _fake_mesh(axes: Mapping[str, int], device_type: str, rank: int) -> DeviceMesh:
    """Only the groups of this rank are made, so that a mesh of many thousand ranks costs nothing."""
    ranks = torch.arange(math.prod(axes.values())).view(*axes.values())
    place = (ranks == rank).nonzero()[0].tolist()
    groups = []
    for dim in range(ranks.ndim):
        row = ranks[tuple(slice(None) if other == dim else place[other] for other in range(ranks.ndim))]
        groups.append(dist.new_group(row.tolist()))
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(axes))


@functools.cache
def flop_formulas() -> Mapping[Any, Callable[..., int]]:
    """PyTorch's own, and for the CPU's attention (missing in 2.13.0) those of the same kernel elsewhere."""
    aten = torch.ops.aten
    forward, backward = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward
    on_cpu = {
        aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[forward],
        aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[backward],
    }
    return {**on_cpu, **flop_registry}


def op_database() -> list[Any]:
    """PyTorch's own samples of some six hundred ops, for the checker only (needs the package `expecttest`)."""
    # The import forbids the process to set flags such as `torch.backends.cudnn.benchmark`; leaving this undoes it.
    with torch.backends.__allow_nonbracketed_mutation():
        from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


# Modules and tensor subclasses. Seen on 2.13.0.

BatchNorm = torch.nn.modules.batchnorm._BatchNorm
no_torch_function: Any = torch._C._disabled_torch_function_impl
wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_unit: torch.Tensor,
    b_unit: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`(a * a_unit) @ (b * b_unit) + bias`, a and b in float8, summed in float32 and rounded once."""
    return torch._scaled_mm(a, b, scale_a=a_unit, scale_b=b_unit, bias=bias, out_dtype=dtype, use_fast_accum=False)


def own_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own parameters and buffers, as the dicts that hold them."""
    return module._parameters, module._buffers


def find_weights_again(module: torch.nn.Module) -> None:
    """A recurrent module keeps a list of its weights beside them."""
    if isinstance(module, torch.nn.RNNBase):
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def check_input_dim(module: Any, x: torch.Tensor) -> None:
    """A BatchNorm's own complaint about an input of another number of dims."""
    module._check_input_dim(x)


def compiled_call(module: torch.nn.Module) -> Any:
    """What `module.compile()` made its calls go through, or None."""
    return module._compiled_call_impl


def set_compiled_call(module: torch.nn.Module, call: Any) -> None:
    """Let calls of a module go through `call`; None for its own forward and hooks."""
    module._compiled_call_impl = call


def go_through(module: torch.nn.Module, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Let calls of a module, compiled or not, go through `wrapper(call, *args, **kwargs)`; returns what undoes it."""
    before = module._compiled_call_impl
    inner = before if before is not None else functools.partial(_call_if_there, weakref.ref(module))
    module._compiled_call_impl = functools.partial(wrapper, inner)
    return functools.partial(set_compiled_call, module, before)


def replace_conversion(module: torch.nn.Module, convert: Callable[..., torch.nn.Module]) -> Callable[[], None]:
    """Let `convert(module, function, recurse)` do what `to`, `cpu`, `half` and their like ask of a module, and of the
    modules that hold it, which is to map a function over its tensors (2.13.0); returns what undoes it."""
    module._apply = types.MethodType(convert, module)  # type: ignore[method-assign]
    return functools.partial(module.__dict__.pop, "_apply", None)


_calls: weakref.WeakKeyDictionary[torch.nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()


def go_around(module: torch.nn.Module, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """`go_through`, around all that a class does in `__call__`: there the layers of transformers wrap themselves in
    activation checkpointing, which keeps the arguments that it is given. Such a module gets a class of the same name.
    """
    kind = type(module)
    if kind.__call__ is torch.nn.Module.__call__:
        return go_through(module, wrapper)
    _calls[module] = functools.partial(wrapper, functools.partial(_call_as, kind, weakref.ref(module)))
    module.__class__ = _calling(kind)  # type: ignore[arg-type]

    def undo() -> None:
        module.__class__ = kind
        _calls.pop(module, None)

    return undo


def _call_as(kind: Any, module: weakref.ref[torch.nn.Module], *args: Any, **kwargs: Any) -> Any:
    return kind.__call__(module(), *args, **kwargs)


@functools.cache
def _calling(kind: Any) -> type:
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        around = _calls.get(self)
        return kind.__call__(self, *args, **kwargs) if around is None else around(*args, **kwargs)  # type: ignore[operator]

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**names, "__call__": call})


def _call_if_there(module: weakref.ref[torch.nn.Module], *args: Any, **kwargs: Any) -> Any:
    here = module()
    assert here is not None, "who calls it holds it"
    return call_eagerly(here, *args, **kwargs)


def call_eagerly(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, past what `compile` put before it."""
    return module._call_impl(*args, **kwargs)


def graph_backend(decompositions: Mapping[Op, Callable[..., Any]] | None = None) -> Any:
    """What "aot_eager" does for `torch.compile`: the traced graphs of forward and backward run op by op, in Python.

    Below autograd, which has no part in them: its kernels, and the Python that stands in their place for collectives,
    cost more than the ops of a small model. `decompositions` stand in the graph in the place of their ops.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        call = boxed_nop(graph, inputs)

        def run(args: list[Any]) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return call(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_autograd(
        fw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
        decompositions=dict(decompositions or {}),
    )


def inductor_backend(decompositions: Mapping[Op, Callable[..., Any]]) -> Any:
    """What "inductor" does for `torch.compile`, with other decompositions for some ops."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.decomposition import select_decomp_table

        return compile_fx(graph, inputs, decompositions={**select_decomp_table(), **decompositions})

    return compile_graph


def keep_compiler_out_of(package: str) -> None:
    """Have dynamo never compile the functions of a package by themselves, where a model calls them eagerly."""
    torch._dynamo.trace_rules.add(package)


def compile_errors() -> tuple[type[Exception], ...]:
    """What dynamo raises when it or its backend cannot compile. Importing it eagerly would import the compiler."""
    return (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)


def compiler_is_off() -> bool:
    """Whether the environment switches `torch.compile` off: dynamo reads the first when it is called and the second
    when it is imported (2.13, 2.14)."""
    return any(os.environ.get(name) == "1" for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"))


def graph_breaks_raise() -> Any:
    """A context in which what dynamo cannot trace raises, where it would otherwise run between two graphs."""
    return torch._dynamo.error_on_graph_break(True)


def innermost_mode() -> Any:
    """The `TorchDispatchMode` that sees ops first, or None."""
    return _get_current_dispatch_mode()


@functools.cache
def rebind_checkpointed(bind: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have activation checkpointing compute again what `bind(function)` computes, in the place of the function.

    `bind` is called in forward. Both kinds keep the function for backward, where no mode of the forward is on any more.
    """
    from torch.utils import checkpoint

    name = "_checkpoint_without_reentrant_generator"
    if hasattr(checkpoint, f"{name}_impl"):  # since 2.14, where nothing calls the other any more
        name = f"{name}_impl"
    reentrant, otherwise = checkpoint.CheckpointFunction.forward, getattr(checkpoint, name)

    def forward(ctx: Any, function: Any, *args: Any) -> Any:
        return reentrant(ctx, bind(function), *args)

    def without_reentrant(function: Any, *args: Any, **kwargs: Any) -> Any:
        return otherwise(bind(function), *args, **kwargs)

    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    setattr(checkpoint, name, without_reentrant)
