"""torchtitan: models that its `parallelize_llama` and the like have sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardlib.errors import InputError
from shardlib.testing.auditing.hosts._host import Host, is_of

__all__ = ["Torchtitan"]


class Torchtitan(Host):
    """A model of torchtitan. Its FSDP sums gradients over data ranks, and its loss is divided by the tokens of all."""

    title: ClassVar[str] = "torchtitan"
    advice: ClassVar[tuple[str, ...]] = ("torchtitan", "torch")
    clips: ClassVar[str] = "torchtitan.distributed.utils.clip_grad_norm_"
    saves: ClassVar[str] = "dcp.save(model.state_dict())"
    stores: ClassVar[str] = "dcp.save of the flat states of model and optimizer"

    @classmethod
    def takes(cls, made: Sequence[Any]) -> bool:
        return any(is_of(each, "torchtitan.protocols.model.BaseModel") for each in made)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that `shard` returned, taken out of its container."""
        made: Any = super().optimizer
        inside = getattr(made, "optimizers", [made])
        if len(inside) > 1:
            raise InputError(
                f"shard= returned a container of {len(inside)} optimizers, of which an audit steps one. Return the "
                "model alone, which AdamW then trains."
            )
        return inside[0]  # type: ignore[no-any-return]

    def is_of_rank(self, buffer: str) -> bool:
        return buffer.endswith("tokens_per_expert_E")  # its trainer sums them before a step

    def clip(self, optimizer: torch.optim.Optimizer, norm: float) -> torch.Tensor | None:
        from torchtitan.distributed.utils import clip_grad_norm_

        experts = "ep" in self.axes()
        found: torch.Tensor = clip_grad_norm_(self.model.parameters(), norm, foreach=True, ep_enabled=experts)
        return found

    # Its state dicts have other names than its parameters, which the functions of torch do not find.

    def save(self, folder: Path) -> None:
        dcp.save(self.model.state_dict(), checkpoint_id=folder)

    def reads(self, folder: Path) -> bool:
        return (folder / ".metadata").exists()

    def read(self, folder: Path, build: Callable[[], nn.Module]) -> nn.Module:
        model = build()
        values = model.state_dict()
        dcp.load(values, checkpoint_id=folder, no_dist=True)
        model.load_state_dict(values)
        return model

    def store(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        dcp.save(self._states(optimizer), checkpoint_id=folder)

    def restore(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        from torchtitan.components.optimizer.utils import load_flat_optim_state_dict

        values = self._states(optimizer)
        dcp.load(values, checkpoint_id=folder)
        self.model.load_state_dict({name: values[name] for name in self.model.state_dict()})
        load_flat_optim_state_dict(optimizer, values)

    def _states(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the states of model and optimizer as torchtitan's checkpoints have them, in one dict."""
        from torchtitan.components.optimizer.utils import get_flat_optim_state_dict, init_optim_state

        names = {id(p): name for name, p in self.model.named_parameters()}
        for group in optimizer.param_groups:
            group["param_names"] = [names[id(p)] for p in group["params"]]
        init_optim_state(optimizer)
        return {**self.model.state_dict(), **get_flat_optim_state_dict(optimizer)}

    def forget(self) -> None:
        from torchtitan.distributed.utils import set_spmd_backend

        set_spmd_backend("spmd_types")  # as it is before anything sets it
