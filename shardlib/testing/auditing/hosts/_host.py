"""`Host`: how a model that a library sharded is read, trained, saved and loaded by the library's own means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardlib._mesh_shape import kind_of
from shardlib.errors import InputError
from shardlib.testing.equivalence.train import named_tensors

__all__ = ["Host", "NotOffered", "NotReached", "first_of", "is_of"]


class NotOffered(Exception):
    """Something that a host or a model cannot do, with the reason."""

    verdict: ClassVar[Literal["not offered", "not reached"]] = "not offered"


class NotReached(NotOffered):
    """Something that cannot be compared after what went before, with the reason."""

    verdict = "not reached"


@dataclass(eq=False)
class Host:
    """A sharded model, with what else `shard` has returned. This class is PyTorch's own; other hosts derive from it.

    Attributes:
        made: what `shard` returned, as a tuple.
        title: the name of the library, as its users write it.
    """

    made: tuple[Any, ...]

    title: ClassVar[str] = "torch"
    advice: ClassVar[tuple[str, ...]] = ("torch",)  # tables of advice, the first that speaks
    reshards: ClassVar[bool] = True  # whether `shard` can be called a second time in a process

    @classmethod
    def takes(cls, made: Sequence[Any]) -> bool:
        """Return whether this host sharded what `shard` returned."""
        return any(isinstance(each, nn.Module) for each in made)

    def __post_init__(self) -> None:
        models = [each for each in self.made if isinstance(each, nn.Module)]
        if not models:
            raise InputError(
                f"shard= returned {' and '.join(type(each).__name__ for each in self.made)}; it has to return the "
                "sharded model, or a tuple with the model in it."
            )
        self.model: nn.Module = models[0]

    @property
    def module(self) -> nn.Module:
        """The model without the wrapper of a host."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @property
    def returned(self) -> Any:
        """The value that `shard` returned, as functions of the user are given it."""
        return self.made if len(self.made) > 1 else self.made[0]

    # What is there

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that `shard` returned, if any."""
        return next((each for each in self.made if isinstance(each, torch.optim.Optimizer)), None)

    def tensors(self) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """Return parameters and buffers by their names on one device."""
        return named_tensors(self.model)

    def is_of_rank(self, buffer: str) -> bool:
        """Return whether a buffer counts what each rank sees, and may differ between ranks."""
        return False

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: p.grad for name, p in self.tensors()[0].items()}

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return the optimizer's tensors, by "parameter: key"."""
        return {
            f"{name}: {key}": value
            for name, p in self.tensors()[0].items()
            for key, value in optimizer.state.get(p, {}).items()  # type: ignore[call-overload]
            if isinstance(value, torch.Tensor)
        }

    def groups(self) -> Sequence[Mapping[str, Any]]:
        """Return the groups of the optimizer that `shard` returned, of the model's parameters."""
        made: Any = self.optimizer
        return getattr(made, "optimizer", made).param_groups  # type: ignore[no-any-return]

    def used(self) -> Iterator[str]:
        """Iterate over the names of the host's interfaces that sharded the model."""
        if isinstance(self.model, DistributedDataParallel):
            yield "DistributedDataParallel"
        if any(isinstance(module, FSDPModule) for module in self.model.modules()):
            yield "fully_shard"
            if any(kind_of(axis) == "model" for axis in self.axes()):
                yield "parallelize_module"
        elif any(isinstance(p, DTensor) for p in self.model.parameters()):
            yield "parallelize_module"

    def axes(self) -> set[str]:
        """Return the names of the mesh axes of all DTensors among the parameters."""
        meshes = [p.device_mesh for p in self.model.parameters() if isinstance(p, DTensor)]
        return {axis for mesh in meshes for axis in mesh.mesh_dim_names or ()}

    # Training

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        """Run a backward pass; `last` is whether a step follows, and no other pass."""
        loss.backward()

    def accumulating(self) -> AbstractContextManager[None]:
        """Return a context in which the user's own loop runs the backward passes of a step."""
        return nullcontext()

    def clip(self, optimizer: torch.optim.Optimizer, norm: float) -> torch.Tensor | None:
        """Clip all gradients to a norm; return the norm that they had, None where the library does not tell it."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()

    clips: ClassVar[str] = "torch.nn.utils.clip_grad_norm_"

    knows_cuts: ClassVar[frozenset[str]] = frozenset()  # of "clip", "save", "resume": those that know of plain shards

    # Checkpoints

    saves: ClassVar[str] = "get_model_state_dict(full_state_dict=True)"
    stores: ClassVar[str] = "torch.distributed.checkpoint"

    def save(self, folder: Path) -> None:
        """Save the model for one device. Collective."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        values = get_model_state_dict(self.module, options=options)
        if dist.get_rank() == 0:
            torch.save(values, folder / "model.pt")
        dist.barrier()

    def reads(self, folder: Path) -> bool:
        """Return whether a folder holds what `read` reads."""
        return (folder / "model.pt").exists()

    def read(self, folder: Path, build: Callable[[], nn.Module]) -> nn.Module:
        """Load what `save` has saved into a model on one device."""
        model = build()
        model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        return model

    def store(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Save model and optimizer, to go on from. Collective."""
        model_state, optimizer_state = get_state_dict(self.model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)

    def restore(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Load what `store` has saved. Collective."""
        model_state, optimizer_state = get_state_dict(self.model, optimizer)
        values: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(values, checkpoint_id=folder)
        set_state_dict(self.model, optimizer, model_state_dict=values["model"], optim_state_dict=values["optimizer"])

    def reshard(self) -> None:
        """Bring parameters that a forward has left unsharded back into shards."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def forget(self) -> None:
        """Reset what the library keeps in the process for one training run."""


def is_of(value: Any, *names: str) -> bool:
    """Return whether a value is of a class, by its dotted name: the library is not imported to find out."""
    return any(f"{base.__module__}.{base.__qualname__}" in names for base in type(value).__mro__)


def first_of(values: Sequence[Any], *names: str) -> Any:
    """Return the first value of one of these classes."""
    return next(value for value in values if is_of(value, *names))
