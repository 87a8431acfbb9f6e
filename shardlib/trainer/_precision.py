"""The values of `fp16=dict(mode=..., ...)` in a config."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch import nn

from shardlib.booster import FP16ApexMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision, MixedPrecision
from shardlib.booster._options import recipe
from shardlib.booster._precision import Transforms, batch_norms, scale_of
from shardlib.errors import PlanError, nearest
from shardlib.transforms import precision

__all__ = ["AMP_TYPE", "NaiveAMP", "amp_of"]


class AMP_TYPE(Enum):
    """Ways to train in float16, for `fp16=dict(mode=AMP_TYPE.TORCH)`; a config in TOML writes "torch".

        TORCH  autocast over float32 parameters, with a loss scale (`FP16TorchMixedPrecision`)
        APEX   Apex's levels by torch's own means (`FP16ApexMixedPrecision`)
        NAIVE  float16 parameters with copies in float32, and a loss scale

    >>> AMP_TYPE("naive")
    <AMP_TYPE.NAIVE: 'naive'>
    """

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"


@recipe
class NaiveAMP(FP16NaiveMixedPrecision):
    """`FP16NaiveMixedPrecision` with the keywords that older configs have besides.

    >>> NaiveAMP(growth_interval=2000, hysteresis=1, min_scale=2.0).transforms(nn.Linear(2, 2))
    (precision("fp16_naive", scaler=LossScale(min_scale=2.0)),)
    """

    min_scale: float = 1.0
    wide_reduction: bool = False

    def transforms(self, model: nn.Module) -> Transforms:
        reduce = "float32" if self.wide_reduction else None
        return (precision("fp16_naive", keep=batch_norms(model), scaler=scale_of(self), reduce=reduce),)


_KINDS: Mapping[AMP_TYPE, type[MixedPrecision]] = {
    AMP_TYPE.TORCH: FP16TorchMixedPrecision,
    AMP_TYPE.APEX: FP16ApexMixedPrecision,
    AMP_TYPE.NAIVE: NaiveAMP,
}


def amp_of(given: Any) -> MixedPrecision | None:
    """Parse the `fp16` of a config; None for none.

    Raises:
        PlanError: no mode, an unknown one, or an option that the mode does not have.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping) or "mode" not in given:
        raise PlanError(f"The config says fp16={given!r}; give a dict with a mode, such as dict(mode=AMP_TYPE.TORCH).")
    options = {key: value for key, value in given.items() if key != "mode"}
    try:
        return _KINDS[_mode(given["mode"])](**options)
    except PlanError as error:
        raise PlanError(f"The config's fp16: {error}") from None


def _mode(given: Any) -> AMP_TYPE:
    text = getattr(given, "value", given)
    names = [kind.value for kind in AMP_TYPE]
    if not isinstance(text, str) or text.lower() not in names:
        raise PlanError(f"mode={given!r} was given; the modes are {', '.join(names)}.{nearest(str(text), names)}")
    return AMP_TYPE(text.lower())
