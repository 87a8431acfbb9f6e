"""Buckets of local shards: stored parameters, gathered before computation, and updated ones, after a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.distributed.tensor import DTensor

from shardlib._plan import Purpose, unit_of
from shardlib.engine import _torch
from shardlib.engine.data import offload
from shardlib.engine.data.executor import Executor
from shardlib.engine.data.executor.bucket import Bucket
from shardlib.engine.data.params import ParamState, local_of, movements_for
from shardlib.engine.ranks.transport import Handle

__all__ = ["UnshardBucket", "UpdateBucket"]


def _bucket(executor: Executor, param_states: Sequence[ParamState], dtype: torch.dtype, device: torch.device) -> Bucket:
    return Bucket(
        [one.shard_spec for one in param_states if one.shard_spec],
        param_states[0].transport,
        dtype,
        device,
        executor.workspace,
    )


# --- stored shards, before a unit computes ----------------------------------------------------------------------------


class UnshardBucket:
    """Parameters that are stored in shards, and are gathered into their unsharded tensors."""

    def __init__(self, executor: Executor, param_states: list[ParamState]) -> None:
        self.param_states = param_states
        self._bucket = _bucket(executor, param_states, param_states[0].dtype, param_states[0].device)
        self._unsharded = [one.memory for one in param_states]
        self._rows = self._bucket.rows_of(self._unsharded)
        self._moving: Handle | None = None

    def begin(self, purpose: Purpose) -> None:
        """Begin to gather; offloaded shards are copied to the device first, on a side stream."""
        shards = [local_of(one.param).reshape(-1) for one in self.param_states]
        carries = movements_for(self.param_states, purpose)
        if "stored" not in self.param_states[0].offloaded:
            self._moving = self._bucket.gather(shards, self._unsharded, carries)
            return
        for one in self.param_states:
            one.copied(purpose)
        with offload.side_stream(self._bucket.device):
            on_device = [offload.joined(shards, self._bucket.device)]
            self._moving = self._bucket.gather(on_device, self._unsharded, carries)

    def wait(self) -> None:
        if self._moving is not None:
            moving, self._moving = self._moving, None
            self._bucket.unpack(moving, self._unsharded, self._rows)


# --- updated shards, after a step -------------------------------------------------------------------------------------


class UpdateBucket:
    """Parameters of which each rank updates its own shards, which are then gathered into the full parameters.

    While an optimizer steps, each parameter is represented by a plain tensor of this rank's shard: a view of the
    parameter where the shard is contiguous in memory, else a copy.

    Attributes:
        ids: the ids of the parameters.
        units: the modules that wait for the parameters.
        shards: this rank's shards, one for each parameter.
    """

    def __init__(self, executor: Executor, param_states: list[ParamState], deferred: Collection[str]) -> None:
        self.param_states, self.ids = param_states, {id(one.param) for one in param_states}
        self.units = {unit_of(one.names, deferred) for one in param_states}
        first = local_of(param_states[0].param)
        self._bucket = _bucket(executor, param_states, first.dtype, first.device)
        self._moving: Handle | None = None
        self._addresses: list[int] = []  # the parameters' memory, for which the following were made:
        self._local_params: list[torch.Tensor] = []
        self._local = torch.empty(0)
        self.shards: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._loaded: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    @property
    def is_in_place(self) -> bool:
        """Whether the shards are a part of the parameter."""
        self._locals()
        return not self._loaded

    def load(self) -> None:
        """Copy the parameters into the shards, since others may have written to them (a checkpoint, an average)."""
        if not self.is_in_place:
            _torch.copy_all(self._loaded, self._sources)

    def _locals(self) -> list[torch.Tensor]:
        """Return the local tensors of the parameters: the same list, as long as their memory stays the same."""
        addresses = [one.memory.data_ptr() for one in self.param_states]
        if addresses != self._addresses:
            self._addresses, self._local_params = addresses, [local_of(one.param) for one in self.param_states]
            self._rows = self._bucket.rows_of(self._local_params)
            self._loaded, self._sources = [], []
            self._place_shards()
        return self._local_params

    def _place_shards(self) -> None:
        """Let the shards be a part of the parameter that travels alone; else copies, and say what is copied."""
        bucket, first = self._bucket, self._local_params[0]
        if bucket.alone and first.is_contiguous():
            self._local = bucket.local_block(first.view(-1))
            self.shards = bucket.shards_in(self._local)
            return
        self._local = torch.empty(bucket.shard_numel, dtype=first.dtype, device=first.device)
        self.shards = bucket.shards_in(self._local)
        for spec, local, shard in zip(bucket.specs, self._local_params, self.shards, strict=True):
            for source, chosen in spec.places(local, bucket.transport.index):
                self._sources.append(source)
                self._loaded.append(shard.narrow(spec.dim, chosen.start, chosen.stop - chosen.start))

    def begin(self) -> None:
        carries = movements_for(self.param_states, "updated parameters")
        self._moving = self._bucket.gather([self._local], self._locals(), carries)

    def wait(self) -> None:
        if self._moving is not None:
            moving, self._moving = self._moving, None
            self._bucket.unpack(moving, self._locals(), self._rows)

    def full_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parameters that have a gradient, each with its full gradient."""
        self._locals()
        grads = [local_of(one.param.grad) if one.param.grad is not None else None for one in self.param_states]
        shards = [
            torch.zeros_like(shard) if grad is None else grad for grad, shard in zip(grads, self.shards, strict=True)
        ]
        full = [torch.empty_like(local_of(one.param)) for one in self.param_states]
        carries = movements_for(self.param_states, "gradients, step", "unknown")
        flat = [shard.reshape(-1) for shard in shards]
        self._bucket.unpack(self._bucket.gather(flat, full, carries), full)
        return [
            (one.param, _torch.wrap(grad, _torch.spec_of(one.param)) if isinstance(one.param, DTensor) else grad)
            for one, grad, own_grad in zip(self.param_states, full, grads, strict=True)
            if own_grad is not None
        ]
