"""DeepSpeed: what `deepspeed.initialize` has made an engine of, by ZeRO 0 to 3."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import nn

from shardlib.errors import InputError
from shardlib.testing.auditing.hosts._host import Host, NotOffered, first_of, is_of
from shardlib.testing.equivalence.train import named_tensors

__all__ = ["DeepSpeed", "forget_groups"]

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_TAG = "audit"


class DeepSpeed(Host):
    """An engine. Where it has ZeRO, gradients, state and, from stage 3 on, parameters are in parts: reading them is
    collective."""

    title: ClassVar[str] = "DeepSpeed"
    advice: ClassVar[tuple[str, ...]] = ("deepspeed", "torch")
    clips: ClassVar[str] = "gradient_clipping"
    saves: ClassVar[str] = "engine.save_checkpoint and zero_to_fp32"
    stores: ClassVar[str] = "engine.save_checkpoint"
    knows_cuts: ClassVar[frozenset[str]] = frozenset({"clip", "resume"})  # of AutoTP

    @classmethod
    def takes(cls, made: Sequence[Any]) -> bool:
        return any(is_of(each, _ENGINE) for each in made)

    def __post_init__(self) -> None:
        self.engine: Any = first_of(self.made, _ENGINE)
        self.model: nn.Module = self.engine
        self.stage = int(self.engine.zero_optimization_stage())
        if getattr(self.engine, "basic_optimizer", None) is None:
            raise InputError(
                "shard= returned a DeepSpeed engine without an optimizer, which cannot train. Give "
                'deepspeed.initialize an optimizer=, or an "optimizer" in its config.'
            )
        self.zero: Any = self.engine.optimizer if self.stage else None
        if getattr(self.zero, "round_robin_gradients", False):
            raise InputError(
                "round_robin_gradients is on, with which DeepSpeed's safe_get_full_grad reads the gradients of other "
                'parameters. Let shard= leave it out of "zero_optimization": it decides where gradients lie alone.'
            )
        self.engine.lr_scheduler = None  # one device has none
        self.engine._config.gradient_clipping = 0.0  # `clip` clips

    @property
    def module(self) -> nn.Module:
        return self.engine.module  # type: ignore[no-any-return]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.engine.basic_optimizer  # type: ignore[no-any-return]

    def used(self) -> Iterator[str]:
        yield f"ZeRO {self.stage}"
        if self.engine.autotp_size() > 1:
            yield "AutoTP"

    # What is there

    def tensors(self) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        params, buffers = named_tensors(self.module)
        if self.stage < 3:
            return params, buffers
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(list(params.values())):
            return {name: p.detach().clone() for name, p in params.items()}, buffers

    def gradients(self) -> dict[str, torch.Tensor | None]:
        from deepspeed.utils import safe_get_full_grad

        return {name: safe_get_full_grad(p) for name, p in named_tensors(self.module)[0].items()}

    def groups(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        if self.zero is None:
            return groups
        params: dict[int, list[nn.Parameter]] = defaultdict(list)
        for i, part in enumerate(self._parts()):
            params[self._group_of(i)] += part
        return [{**group, "params": params[i]} for i, group in enumerate(groups)]

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        if self.zero is None:
            return super().state(optimizer)
        from deepspeed.utils import lazy_init_hp_params_optimizer_state, safe_get_full_optimizer_state

        names = {id(p): name for name, p in named_tensors(self.module)[0].items()}
        found = {}
        flats = self.zero.single_partition_of_fp32_groups if self.stage < 3 else self.zero.fp32_partitioned_groups_flat
        for part, flat in zip(self._parts(), flats, strict=True):
            if self.stage < 3:  # DeepSpeed does so after the step of the first group, and not after loading
                lazy_init_hp_params_optimizer_state(part, flat, optimizer.state)
            for p in part:
                for key, value in optimizer.state.get(flat, {}).items():
                    if isinstance(value, torch.Tensor):
                        whole = value if value.shape != flat.shape else safe_get_full_optimizer_state(p, key)
                        found[f"{names[id(p)]}: {key}"] = whole
        return found

    def _parts(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each of ZeRO's flat vectors."""
        return self.zero.bit16_groups if self.stage < 3 else self.zero.fp16_groups  # type: ignore[no-any-return]

    def _group_of(self, part: int) -> int:
        return part if self.stage < 3 else self.zero.sub_group_to_group_id[part]

    # Training

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.engine.gradient_accumulation_steps())  # by which it divides

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Let `engine.step`, which loops call after each pass, count passes and take no step."""
        steps = self.engine.gradient_accumulation_steps()
        if steps > 2:
            raise NotOffered(f"gradient_accumulation_steps is {steps}, and an audit runs two passes: set 2 in shard=")
        self.engine.set_gradient_accumulation_boundary(None)
        self.engine.micro_steps = 0
        with mock.patch.object(self.engine, "_take_model_step", lambda _: None):
            yield

    def clip(self, optimizer: torch.optim.Optimizer, norm: float) -> torch.Tensor | None:
        from deepspeed.runtime.utils import clip_grad_norm_, combine_grad_norm_groups

        if self.zero is None:
            return torch.as_tensor(clip_grad_norm_(self.module.parameters(), norm, mpu=self.engine.mpu))
        self.zero.clip_grad = norm  # to which `step` clips
        if self.stage < 3:
            return self.zero.scaled_global_norm()  # type: ignore[no-any-return]
        found = self.zero.averaged_gradients
        norms = [self.zero.get_grad_norm_direct(found[i], part) for i, part in enumerate(self._parts())]
        return combine_grad_norm_groups(norms)  # type: ignore[no-any-return]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.engine.step()

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop gradients as DeepSpeed does where they overflow: it has no other way but a step."""
        self.engine.zero_grad()
        if self.zero is None:
            return
        self.zero.zero_grad()
        for name in ("averaged_gradients", "all_grad_tensors"):
            kept = getattr(self.zero, name, {})
            kept.update(dict.fromkeys(kept))

    # Checkpoints

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag=_TAG)

    def reads(self, folder: Path) -> bool:
        return (folder / _TAG).exists()

    def read(self, folder: Path, build: Callable[[], nn.Module]) -> nn.Module:
        model = build()
        if self.zero is None:
            state = torch.load(folder / _TAG / "mp_rank_00_model_states.pt", weights_only=False)["module"]
        else:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            try:
                with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # it tells of its progress
                    state = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=_TAG)
            except ValueError as error:  # of experts it knows nothing
                raise NotOffered(f"zero_to_fp32 raises {error}") from error
        model.load_state_dict(state)
        return model

    def store(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        self.engine.save_checkpoint(str(folder), tag=_TAG)

    def restore(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        self.engine.load_checkpoint(str(folder), tag=_TAG)

    def forget(self) -> None:
        self.engine.destroy()
        forget_groups()


def forget_groups() -> None:
    """Forget the process groups that DeepSpeed keeps in the process."""
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    importlib.reload(groups)
    deepspeed.comm.comm.cdb = None
