"""Device meshes, and caches by mesh, which are cleared when process groups are gone."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from shardlib.engine._torch._private import private
from shardlib.engine._torch.patches import patch

private(
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
    why="to find the mesh that a sub-mesh was sliced from",
    without="a checkpoint does not know which ranks hold a tensor, nor a recorded collective the names of its axes",
)
private(
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    why="to read the ranks of a mesh in a dry run",
    without="a mesh, which is a tensor of ranks, has no values there",
)
private(
    "torch.distributed.device_mesh.DeviceMesh.__getstate__",
    why="to pickle meshes without their hash, which is another one in each process (2.13, 2.14)",
    without="inductor compiles the graphs of sharded blocks in each process anew, and does not read them from disk",
    marks=("_hash",),
)
private(
    "torch.distributed.tensor._collective_utils.MeshTopoInfo.build_from_mesh",
    why="to drop what DTensor remembers of a mesh whose process groups are gone",
    without="an equal mesh of the next job would use the old groups",
)

from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor._collective_utils import MeshTopoInfo

__all__ = [
    "cached_by_mesh",
    "forget_specs",
    "forget_with_meshes",
    "live_meshes",
    "pickle_meshes_without_hash",
    "ranks_of_mesh",
    "root_mesh",
]

P = ParamSpec("P")
R = TypeVar("R")
_BY_MESH: list[Callable[[], None]] = [MeshTopoInfo.build_from_mesh.cache_clear]


def forget_with_meshes(clear: Callable[[], None]) -> Callable[[], None]:
    """Have a cache that holds meshes cleared whenever an equal mesh may stand for other process groups."""
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


def forget_specs() -> None:
    """Clear every cache that is looked up by mesh and holds one: an equal mesh may have other process groups.

    A mesh that is kept keeps its groups, each with threads of its own.
    """
    for clear in _BY_MESH:
        clear()


def pickle_meshes_without_hash() -> None:
    """Let graphs of DTensors be found in the compiler's cache on disk: their keys contain pickled meshes."""
    patch(pickle_meshes_without_hash, _pickle_without_hash)


def _pickle_without_hash() -> Callable[[], None]:
    state_of = DeviceMesh.__getstate__

    def without_hash(mesh: DeviceMesh) -> dict[str, Any]:
        return {key: value for key, value in state_of(mesh).items() if key != "_hash"}

    DeviceMesh.__getstate__ = without_hash  # type: ignore[assignment]
    return functools.partial(setattr, DeviceMesh, "__getstate__", state_of)


def live_meshes() -> list[DeviceMesh]:
    """List every mesh of this process."""
    return [each for each in gc.get_objects() if type(each) is DeviceMesh]


root_mesh = DeviceMesh._get_root_mesh  # the mesh that a sub-mesh was sliced from, or the mesh itself


def ranks_of_mesh(mesh: DeviceMesh) -> list[int]:
    """List the global ranks of a mesh, its last axis fastest."""
    with unset_fake_temporarily():
        return mesh.mesh.flatten().tolist()
