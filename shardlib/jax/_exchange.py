"""Conversion between tensors and arrays, shard by shard, which share memory where both sides allow it.

JAX can alias a torch tensor that starts at a multiple of 64 bytes and is contiguous; torch can alias any array. Writes
are visible on both sides. JAX assumes that arrays never change, so wait for it (`jax.block_until_ready`) before torch
writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed as dist
from jax.sharding import Mesh, NamedSharding
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlib._mesh_shape import MeshShape
from shardlib.errors import InputError, MeshError
from shardlib.jax._bits import to_numpy
from shardlib.jax._dtypes import as_dtype, exact_dtype, torch_dtype
from shardlib.jax._mesh import make_mesh, named_sharding
from shardlib.jax._narrow import fitting, refuse_narrowed
from shardlib.layout import Layout

__all__ = ["shares_memory", "to_jax", "to_torch"]

_ALIGNED = 64


def to_jax(
    tensor: Any,
    mesh: Mesh | None = None,
    layout: Layout | str | None = None,
    *,
    pad: bool = False,
    copy: bool | None = None,
) -> Any:
    """Convert a tensor to a `jax.Array` with the same values on the same devices.

    A DTensor becomes a global array over one device of each process, sharded by its placements: every process calls
    this, and no data is sent. A plain tensor is a full value, and is sharded by `layout` over the mesh's devices. The
    result has no gradient history.

    Args:
        tensor: a tensor, or a mapping (also nested, and lists) of tensors.
        mesh: a JAX mesh. By default, for a DTensor one with the same axes over the processes' first devices; for a
            plain tensor the first device of this process. If it has more axes than the DTensor's mesh, the tensor is
            replicated over these.
        layout: the layout of a plain tensor, or its text; replicated by default.
        pad: add zeros at the end of a dim with uneven shards, which JAX does not have. Mask the padding, or remove it
            with `to_torch(..., global_shape=)`.
        copy: None shares memory where alignment allows, False raises where it does not, True never shares.

    Raises:
        InputError: uneven shards without `pad`; memory that cannot be shared, with `copy=False`; a dtype that JAX does
            not have or would narrow. Without `jax_enable_x64`, JAX has integers of 32 bits: those of 64 bits on the CPU
            are converted if their values fit, and refused otherwise.
        LayoutError: a layout without a JAX sharding: a factor of a fused dim is sharded, or it is partial.
        MeshError: torch and JAX run on different processes.

    >>> tensor = torch.arange(64.0)
    >>> array = to_jax(tensor)
    >>> float(array[3]), shares_memory(tensor, array)
    (3.0, True)
    """
    if isinstance(tensor, Mapping):
        return {name: to_jax(value, mesh, layout, pad=pad, copy=copy) for name, value in tensor.items()}
    if isinstance(tensor, list | tuple):
        return type(tensor)(to_jax(value, mesh, layout, pad=pad, copy=copy) for value in tensor)
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"to_jax was given {type(tensor).__name__}; give a tensor, or a mapping or list of tensors.")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise InputError(
            f"to_jax was given a tensor of {tensor.layout} on {tensor.device}; an array has values, and is dense. Give "
            "tensor.to_dense(), or a tensor with values."
        )
    _refuse_narrowed(tensor)
    if isinstance(tensor, DTensor):
        if layout is not None:
            raise InputError(
                f'to_jax was given a DTensor and layout="{layout}"; a DTensor has a layout. Leave one out.'
            )
        return _from_dtensor(tensor, mesh, pad, copy)
    if mesh is None and layout is not None:
        raise InputError(
            f'to_jax was given layout="{layout}" and no mesh, and one device holds all of the array. Give mesh=, as '
            'shardlib.jax.make_mesh("dp=2,tp=4") makes it.'
        )
    if mesh is None:
        return _on_device(tensor.detach(), jax.local_devices()[0], copy)
    return _from_whole(tensor.detach(), mesh, layout, pad, copy)


def to_torch(
    array: Any,
    device_mesh: DeviceMesh | None = None,
    *,
    global_shape: tuple[int, ...] | None = None,
    copy: bool | None = None,
) -> Any:
    """Convert a `jax.Array` to a tensor with the same values on the same devices.

    Args:
        array: an array, or a mapping (also nested, and lists) of arrays.
        device_mesh: a torch mesh with the axes of the array's mesh, or with those that it is sharded over: the result
            is a DTensor on it, whose local tensor is this process's shard. Without one the array must be on this
            process's devices, and the result is a plain tensor with the full value, which shares memory if one device
            holds it.
        global_shape: the shape without padding, which is removed.
        copy: None shares memory where it can, False raises where it cannot, True never shares.

    Raises:
        InputError: the array is on other processes too; memory that cannot be shared, with `copy=False`.
        MeshError: the meshes have different axes, or different processes.

    >>> tensor = to_torch(jnp.arange(4, dtype=jnp.bfloat16))
    >>> tensor.dtype, tensor.tolist()
    (torch.bfloat16, [0.0, 1.0, 2.0, 3.0])
    """
    if isinstance(array, Mapping):
        return {n: to_torch(v, device_mesh, global_shape=global_shape, copy=copy) for n, v in array.items()}
    if isinstance(array, list | tuple):
        return type(array)(to_torch(v, device_mesh, global_shape=global_shape, copy=copy) for v in array)
    if not isinstance(array, jax.Array):
        raise InputError(f"to_torch was given {type(array).__name__}; give a jax.Array, or a mapping or list of them.")
    if array.is_deleted():
        raise InputError("to_torch was given an array whose memory was handed on, by a jitted function that donates.")
    torch_dtype(array.dtype)  # refuses what torch has not
    _check_cut(array.shape, global_shape)
    if device_mesh is not None:
        return _to_dtensor(array, device_mesh, global_shape, copy)
    if not array.is_fully_addressable:
        raise InputError(
            "to_torch: the array is sharded over devices of several processes, but a plain tensor would hold all of "
            "it. Pass device_mesh= for a DTensor."
        )
    shards = array.addressable_shards
    if array.is_fully_replicated:
        full = _taken(shards[0].data, copy)
    elif copy is False:
        raise InputError(f"to_torch(copy=False): a full tensor of {len(shards)} shards takes new memory.")
    else:
        full = torch.empty(array.shape, dtype=_taken(shards[0].data[..., :0], None).dtype)
        for shard in shards:
            full[shard.index] = _taken(shard.data, None)
    return full if global_shape is None else full[tuple(slice(n) for n in global_shape)]


def _check_cut(shape: tuple[int, ...], wanted: tuple[int, ...] | None) -> None:
    if wanted is None:
        return
    if len(wanted) != len(shape) or any(n > size for n, size in zip(wanted, shape, strict=True)):
        raise InputError(
            f"to_torch(global_shape={tuple(wanted)}) was given for an array of shape {tuple(shape)}; give the shape "
            "without padding, with as many dims and none of them larger."
        )


def shares_memory(tensor: torch.Tensor, array: jax.Array) -> bool:
    """Return whether some shard of an array aliases a tensor's memory (for a DTensor, its local tensor's).

    >>> shares_memory(torch.zeros(16), to_jax(torch.zeros(16)))
    False
    """
    local: Any = tensor
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
    start = local.untyped_storage().data_ptr()
    stop = start + local.untyped_storage().nbytes()
    return any(start <= shard.data.unsafe_buffer_pointer() < stop for shard in array.addressable_shards)


# --- one piece ------------------------------------------------------------------------------------------------------


def _refuse_narrowed(tensor: torch.Tensor) -> None:
    """Refuse dtypes that JAX halves, but for integers whose values can be compared here, alike on every process."""
    refuse_narrowed(tensor.dtype, "A tensor", convert="the tensor")
    compared = tensor.device.type == "cpu" and not isinstance(tensor, DTensor)
    if as_dtype(tensor.dtype) != exact_dtype(tensor.dtype) and not compared:
        raise InputError(
            f"A {type(tensor).__name__} of {tensor.dtype} on {tensor.device.type} was given, and JAX would make it "
            f"{as_dtype(tensor.dtype).name}, since jax_enable_x64 is off. Call "
            'jax.config.update("jax_enable_x64", True) before the first array is made, or convert it with .int().'
        )


def _on_device(tensor: torch.Tensor, device: Any, copy: bool | None) -> jax.Array:
    """Convert a tensor to an array on one JAX device."""
    if tensor.device.type != "cpu":
        array = jax.dlpack.from_dlpack(tensor.contiguous())
        return jnp.copy(array) if copy else array
    values = fitting(to_numpy(tensor), "A tensor")
    if copy:
        values = np.array(values, order="C")
        return jax.block_until_ready(jnp.copy(jax.device_put(values, device)))
    why = _why_not_shared(tensor, device)
    if why and copy is False:
        raise InputError(f"to_jax(copy=False): memory cannot be shared, since {why}. Leave copy out, or copy=True.")
    # A copy is waited for: the tensor may change as soon as this returns.
    array = jax.device_put(values, device)
    return jax.block_until_ready(array) if why else array


def _why_not_shared(tensor: torch.Tensor, device: Any) -> str:
    if device.platform != "cpu":
        return f"the device is {device} and the tensor is on the CPU"
    if not tensor.is_contiguous():
        return "the tensor is not row-major"
    if tensor.is_conj() or tensor.is_neg():
        return "the tensor is conjugated or negated when it is read"
    if as_dtype(tensor.dtype) != exact_dtype(tensor.dtype):
        return f"{tensor.dtype} becomes {as_dtype(tensor.dtype).name} without jax_enable_x64"
    if tensor.numel() and tensor.data_ptr() % _ALIGNED:
        return f"the tensor begins at an address that is not a multiple of {_ALIGNED} bytes"
    return ""


def _taken(data: jax.Array, copy: bool | None) -> torch.Tensor:
    """Convert an array on one device to a tensor."""
    if copy is False and not data.is_fully_addressable:
        raise InputError("to_torch(copy=False): the array is not on this process's devices.")
    tensor = torch.from_dlpack(jax.block_until_ready(data))
    return tensor.clone() if copy else tensor


def _padded(local: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Pad with zeros at the end of each dim."""
    if tuple(local.shape) == shape:
        return local
    out = local.new_zeros(shape)
    out[tuple(slice(n) for n in local.shape)] = local
    return out


def _even(shape: tuple[int, ...], layout: Layout, mesh: MeshShape) -> tuple[int, ...]:
    """Return the shape with each dim rounded up to a multiple of its pieces."""
    pieces = [math.prod(mesh[axis] for axis in layout.axes_of(dim)) for dim in range(len(shape))]
    return tuple(-(-n // count) * count for n, count in zip(shape, pieces, strict=True))


def _refuse_uneven(shape: tuple[int, ...], even: tuple[int, ...], layout: Layout, mesh: MeshShape) -> None:
    dim = next(d for d, (n, m) in enumerate(zip(shape, even, strict=True)) if n != m)
    raise InputError(
        f'A tensor of global shape {shape} with layout "{layout}" on mesh "{mesh}" has uneven shards in dim {dim}, and '
        f"JAX has only even ones. Pass pad=True for an array of shape {even} that ends in zeros, and mask them."
    )


# --- whole values ---------------------------------------------------------------------------------------------------


def _from_whole(
    tensor: torch.Tensor, mesh: Mesh, layout: Layout | str | None, pad: bool, copy: bool | None
) -> jax.Array:
    if layout is None:
        layout = Layout.replicate(tensor.ndim)
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    shape = MeshShape(dict(mesh.shape))
    layout = layout.resolve(tuple(tensor.shape), shape)
    sharding = named_sharding(layout, mesh)
    even = _even(tuple(tensor.shape), layout, shape)
    if even != tuple(tensor.shape):
        if not pad:
            _refuse_uneven(tuple(tensor.shape), even, layout, shape)
        tensor = _padded(tensor, even)
    pieces = [
        _on_device(tensor[index] if tensor.ndim else tensor, device, copy)
        for device, index in sharding.addressable_devices_indices_map(even).items()
    ]
    return jax.make_array_from_single_device_arrays(even, sharding, pieces)


# --- DTensors -------------------------------------------------------------------------------------------------------


def _from_dtensor(tensor: DTensor, mesh: Mesh | None, pad: bool, copy: bool | None) -> jax.Array:
    _check_processes()
    shape, global_shape = MeshShape.of(tensor.device_mesh), tuple(tensor.shape)
    mesh = _over_processes(tensor.device_mesh) if mesh is None else mesh
    coordinate, device = _place(tensor.device_mesh, mesh)
    layout = Layout.from_placements(tensor.placements, shape, ndim=tensor.ndim)
    spec = layout.partition_spec()
    even = _even(global_shape, layout, shape)
    local: torch.Tensor = tensor.to_local().detach()
    if even != global_shape:
        if not pad:
            _refuse_uneven(global_shape, even, layout, shape)
        _refuse_nested(layout, global_shape, even, shape)
        local = _padded(local, layout.local_shape(even, shape, coordinate))
    piece = _on_device(local, device, copy)
    return jax.make_array_from_single_device_arrays(even, NamedSharding(mesh, spec), [piece])


def _refuse_nested(layout: Layout, shape: tuple[int, ...], even: tuple[int, ...], mesh: MeshShape) -> None:
    """Refuse an uneven dim that several axes split, if its shards begin elsewhere than those of the padded dim.

    The shards of all ranks are compared, so that all of them refuse."""
    for coordinate in map(mesh.at, range(mesh.world_size)):
        mine, padded = (layout.local_slices(size, mesh, coordinate) for size in (shape, even))
        for dim, (own, other) in enumerate(zip(mine, padded, strict=True)):
            if own[0].stop > own[0].start and own[0].start != other[0].start:
                raise InputError(
                    f'A tensor of global shape {shape} with layout "{layout}" on mesh "{mesh}" is sharded unevenly in '
                    f"dim {dim} over several axes; its shards are not those of a padded array. Redistribute it so that "
                    "one axis shards the dim."
                )


def _to_dtensor(
    array: jax.Array, device_mesh: DeviceMesh, global_shape: tuple[int, ...] | None, copy: bool | None
) -> DTensor:
    _check_processes()
    if not isinstance(array.sharding, NamedSharding):
        raise InputError(
            f"to_torch: the array's sharding is a {type(array.sharding).__name__}, which names no axes. Put it there "
            "with shardlib.jax.named_sharding first."
        )
    coordinate, _ = _place(device_mesh, array.sharding.mesh)
    shape = MeshShape.of(device_mesh)
    layout = Layout.from_partition_spec(array.sharding.spec, array.ndim)
    if others := sorted(axis for axis in layout.axes if axis not in shape.names):
        raise MeshError(
            f'The array is sharded over {", ".join(others)}, and the torch mesh "{shape}" does not have it; give one '
            "that has every axis of the array's sharding."
        )
    (shard,) = array.addressable_shards
    local = _taken(shard.data, copy)
    wanted = tuple(array.shape) if global_shape is None else tuple(global_shape)
    if wanted != tuple(array.shape):
        _refuse_nested(layout, wanted, tuple(array.shape), shape)
        local = local[tuple(slice(n) for n in layout.local_shape(wanted, shape, coordinate))]
    stride = torch.empty(wanted, device="meta").stride()
    return DTensor.from_local(
        local, device_mesh, layout.placements(shape), run_check=False, shape=torch.Size(wanted), stride=stride
    )


def _check_processes() -> None:
    ranks, mine = dist.get_world_size(), dist.get_rank()
    if (jax.process_count(), jax.process_index()) != (ranks, mine):
        raise MeshError(
            f"torch has {ranks} processes, of which this is {mine}; JAX has {jax.process_count()}, of which this is "
            f"{jax.process_index()}. Call jax.distributed.initialize(address, num_processes={ranks}, "
            f"process_id={mine}) before JAX is used."
        )


def _over_processes(device_mesh: DeviceMesh) -> Mesh:
    """Return a mesh of the first device of each process, in the order of the mesh of torch."""
    shape = MeshShape.of(device_mesh)
    if device_mesh.size() != dist.get_world_size():
        raise MeshError(
            f'The torch mesh "{shape}" has {device_mesh.size()} of {dist.get_world_size()} processes. Give to_jax '
            "the mesh of JAX over all of them, over whose other axes the tensor is replicated."
        )
    first: dict[int, Any] = {}
    for device in sorted(jax.devices(), key=lambda d: (d.process_index, d.id)):
        first.setdefault(device.process_index, device)
    return make_mesh(shape, devices=[first[int(rank)] for rank in device_mesh.mesh.flatten()])


def _place(device_mesh: DeviceMesh, mesh: Any) -> tuple[dict[str, int], Any]:
    """Return this process's coordinate in a mesh of torch, and its device in one of JAX, which may have more axes.

    Each process has to have the same place in both.
    """
    shape, whole, mine = MeshShape.of(device_mesh), MeshShape.of(mesh), dist.get_rank()
    shared = [at for at, name in enumerate(whole.names) if name in shape.names]
    if [whole.axes[at] for at in shared] != list(shape.axes):
        raise MeshError(
            f'The torch mesh is "{shape}", and the mesh of JAX is "{whole}". Give meshes with the same axes in the '
            "same order; the one of JAX may have more."
        )
    processes = np.array([device.process_index for device in mesh.devices.flat]).reshape(whole.sizes)
    groups = np.moveaxis(processes, shared, range(-len(shared), 0)).reshape(-1, device_mesh.size())
    ranks = [int(rank) for rank in device_mesh.mesh.flatten()]
    if sorted(processes.flat) != list(range(dist.get_world_size())) or ranks not in groups.tolist():
        raise MeshError(
            f'The torch mesh "{shape}" has the ranks {ranks}, and the mesh of JAX "{whole}" has devices of the '
            f"processes {processes.tolist()}; each process needs the same place in both, with one device. Give to_jax "
            "no mesh, or shardlib.jax.make_mesh(shape, devices=[one of each process, in the order of the ranks])."
        )
    return shape.at(ranks.index(mine)), mesh.devices[tuple(np.argwhere(processes == mine)[0])]
