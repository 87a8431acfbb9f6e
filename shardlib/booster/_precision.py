"""Mixed precision by name or as an object: which `precision` transform each stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from shardlib._plan import Plan
from shardlib.booster._options import Options, met, recipe, refuse_method, refused
from shardlib.errors import PlanError, nearest
from shardlib.transforms import LossScale, precision

__all__ = [
    "BF16MixedPrecision",
    "FP8MixedPrecision",
    "FP16ApexMixedPrecision",
    "FP16NaiveMixedPrecision",
    "FP16TorchMixedPrecision",
    "MixedPrecision",
    "Transforms",
    "known_precisions",
    "loss_scale",
    "mixed_precision_of",
    "precision_of",
    "scale_of",
]

Transforms = tuple[Callable[[Plan], Plan], ...]


class MixedPrecision(Options):
    """The base of values for `Booster(mixed_precision=...)`."""

    def transforms(self, model: nn.Module) -> Transforms:
        """Return the transforms of a model's plan."""
        raise NotImplementedError

    def configure(self, *args: Any, **options: Any) -> NoReturn:
        """Raise a `PlanError`, with the call that is meant."""
        refuse_method("MixedPrecision.configure")


@recipe
class FP16TorchMixedPrecision(MixedPrecision):
    """`torch.amp`: float32 parameters, forward under autocast to float16, a dynamic loss scale.

    >>> FP16TorchMixedPrecision(init_scale=2.0**10)
    FP16TorchMixedPrecision(init_scale=1024.0)
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def transforms(self, model: nn.Module) -> Transforms:
        scale = loss_scale(self.init_scale, self.growth_factor, self.backoff_factor, self.growth_interval)
        return (precision("fp16", scaler=scale),)


@recipe
class BF16MixedPrecision(MixedPrecision):
    """float32 parameters, forward under autocast to bfloat16."""

    def transforms(self, model: nn.Module) -> Transforms:
        return (precision("bf16", autocast=True),)


@recipe
class FP8MixedPrecision(MixedPrecision):
    """float32 parameters, forward under autocast to bfloat16, in which linear modules multiply in float8."""

    def transforms(self, model: nn.Module) -> Transforms:
        return (precision("fp8", autocast=True),)


@recipe
class FP16NaiveMixedPrecision(MixedPrecision):
    """float16 parameters but for BatchNorm's, with a copy of each in float32, and a dynamic loss scale."""

    log_num_zeros_in_grad: bool = refused("zeros are not counted; read p.grad before the step.", default=False)
    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32
    verbose: bool = refused("nothing is logged; optimizer.scaler.scale is the scale.", default=False)

    def transforms(self, model: nn.Module) -> Transforms:
        return (precision("fp16_naive", keep=batch_norms(model), scaler=scale_of(self)),)


@recipe
class FP16ApexMixedPrecision(MixedPrecision):
    """The levels of Apex, by torch's own means; Apex itself is not needed.

        "O0"  float32
        "O1"  float32 parameters, forward under autocast to float16, the loss is scaled
        "O2"  float16 parameters but for those of BatchNorm, a copy of each in float32, the loss is scaled
        "O3"  float16 throughout, without copies; the loss is not scaled

    >>> FP16ApexMixedPrecision(opt_level="O2").transforms(nn.Linear(2, 2))
    (precision("fp16_naive"),)
    """

    opt_level: str = "O1"
    cast_model_type: Any = refused('opt_level determines it: "O0" is float32, "O3" is float16.', default=None)
    patch_torch_functions: Any = refused('autocast replaces the patches of "O1".', default=None)
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str | None = None
    cast_model_outputs: Any = refused("outputs are float32; cast them yourself where you use them.", default=None)
    num_losses: int = refused("there is one loss scale; add the losses up before backward.", default=1)
    verbosity: int = met("nothing is logged.", default=1)
    min_loss_scale: float | None = None
    max_loss_scale: float = 2.0**24

    def transforms(self, model: nn.Module) -> Transforms:
        levels = ("O0", "O1", "O2", "O3")
        if self.opt_level not in levels:
            raise PlanError(f"{self}: opt_level is one of {', '.join(levels)}.{nearest(str(self.opt_level), levels)}")
        stored = self.opt_level in ("O2", "O3")
        for name in ("keep_batchnorm_fp32", "master_weights"):
            if getattr(self, name) is not None and not stored:
                raise PlanError(f"{self}: at {self.opt_level} parameters stay float32, so {name} says nothing.")
        if self.opt_level == "O0":
            return ()
        if not stored:
            return (precision("fp16", scaler=self._scale("dynamic")),)
        second = self.opt_level == "O2"
        master = second if self.master_weights is None else self.master_weights
        keep = second if self.keep_batchnorm_fp32 is None else self.keep_batchnorm_fp32
        names = batch_norms(model) if keep else ()
        return (precision("fp16_naive", master=master, keep=names, scaler=self._scale("dynamic" if second else 1.0)),)

    def _scale(self, default: float | str) -> LossScale | None:
        given = default if self.loss_scale is None else self.loss_scale
        if given == "dynamic":
            if self.min_loss_scale is None and self.max_loss_scale == 2.0**24:
                return None
            return loss_scale(min_scale=self.min_loss_scale or 1.0, max_scale=self.max_loss_scale)
        if isinstance(given, str):
            raise PlanError(f'{self}: loss_scale is a number or "dynamic".')
        fixed = float(given)
        return LossScale(fixed, 1.0, 1.0, min_scale=fixed, max_scale=fixed)


def batch_norms(model: nn.Module) -> tuple[str, ...]:
    """Return patterns of the BatchNorm modules that have parameters."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return tuple(f"^{name}" for name, m in model.named_modules() if isinstance(m, norms) and m.affine)


_BY_NAME: Mapping[str, type[MixedPrecision]] = {
    "fp16": FP16TorchMixedPrecision,
    "bf16": BF16MixedPrecision,
    "fp8": FP8MixedPrecision,
    "fp16_naive": FP16NaiveMixedPrecision,
    "fp16_apex": FP16ApexMixedPrecision,
}


def known_precisions() -> Sequence[type[MixedPrecision]]:
    """Return every class of a mixed precision."""
    return tuple(_BY_NAME.values())


def mixed_precision_of(given: Any) -> MixedPrecision | None:
    """Return the `MixedPrecision` of a name or an object; None and "fp32" are float32.

    Raises:
        PlanError: another name, or something else.
    """
    if given is None or given == "fp32" or isinstance(given, MixedPrecision):
        return given if isinstance(given, MixedPrecision) else None
    if isinstance(given, str) and given in _BY_NAME:
        return _BY_NAME[given]()
    raise PlanError(
        f"mixed_precision={given!r} was given; give one of {', '.join(map(repr, _BY_NAME))}, or an object such as "
        f"FP16TorchMixedPrecision(init_scale=2.0**10).{nearest(str(given), _BY_NAME)}"
    )


def loss_scale(
    init: float = 2.0**16,
    growth: float = 2.0,
    backoff: float = 0.5,
    interval: int = 2000,
    *,
    min_scale: float = 1.0,
    max_scale: float = 2.0**32,
    hysteresis: int = 1,
) -> LossScale:
    """Return a `LossScale` with bounds that include its initial value."""
    low, high = min(min_scale, init), max(max_scale, init)
    return LossScale(float(init), float(growth), float(backoff), interval, float(low), float(high), hysteresis)


def scale_of(options: Any) -> LossScale:
    """Return the `LossScale` of options with ColossalAI's names; not all of them have a minimum."""
    return loss_scale(
        options.initial_scale,
        options.growth_factor,
        options.backoff_factor,
        options.growth_interval,
        min_scale=getattr(options, "min_scale", 1.0),
        max_scale=options.max_scale,
        hysteresis=options.hysteresis,
    )


_NAMES = ("fp16", "bf16", "fp32", "fp16_naive", "fp8")


def precision_of(
    who: object,
    name: str,
    model: nn.Module,
    scale: LossScale,
    *,
    master: bool = True,
    reduce: Any = None,
    fp8: bool = False,
) -> Transforms:
    """Return the transforms of a plugin's keywords about precision.

    Args:
        who: the plugin, for messages.
        name: "fp16", "bf16", "fp32", "fp16_naive" or "fp8".
        model: parameters of its BatchNorm modules stay float32, as their statistics do.
        scale: the loss scale, if the name needs one.
        master: whether low-precision parameters have a copy in float32.
        reduce: the dtype in which gradients travel.
        fp8: linear modules multiply in float8.

    Raises:
        PlanError: another name; float8 beside anything but "bf16".
    """
    if name not in _NAMES:
        raise PlanError(f"{who}: precision is one of {', '.join(map(repr, _NAMES))}.{nearest(str(name), _NAMES)}")
    if fp8 and name not in ("bf16", "fp8"):
        raise PlanError(f'{who}: use_fp8 multiplies in float8 beside bfloat16; give precision="bf16" with it.')
    if name == "fp32" and reduce is None:
        return ()  # the model in its own dtype, float64 too
    name = "fp8" if fp8 else "fp16_naive" if name == "fp16" and not master else name
    dtype = reduce if reduce is None or isinstance(reduce, torch.dtype) else str(reduce)
    low = name in ("bf16", "fp16_naive", "fp8")
    scaler = scale if name in ("fp16", "fp16_naive") else None
    keep = batch_norms(model) if low else ()
    return (precision(name, master=master or not low, reduce=dtype, keep=keep, scaler=scaler),)
