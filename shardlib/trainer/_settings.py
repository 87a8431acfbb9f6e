"""Settings of a config: a plugin, and the engine's own options. Parsing them has no side effects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardlib._mesh_shape import MeshShape
from shardlib.booster import Config, HybridParallelPlugin, MixedPrecision, TorchDDPPlugin
from shardlib.booster._options import recipe
from shardlib.booster._plugins import _of_job
from shardlib.booster._precision import Transforms
from shardlib.errors import LaunchError, PlanError, RuleError, nearest, refuse
from shardlib.rules import registered_tensor_modes, tensor_mode
from shardlib.trainer._handlers import check_gradient_handlers
from shardlib.trainer._precision import NaiveAMP, amp_of
from shardlib.trainer._schedule import check_schedule
from shardlib.transforms import accumulate, offload

__all__ = ["EnginePlugin", "Settings", "shape_of"]


@recipe
class EnginePlugin(HybridParallelPlugin):
    """The plugin of a config: `HybridParallelPlugin`, with a precision as an object, and steps of several passes.

    Args:
        amp: the precision; by default the model's own.
        passes: backward passes per step.
        offloaded: whether parameters, gradients and state are in host memory.

    >>> EnginePlugin(precision="fp32", zero_stage=1, passes=4).transforms(nn.Linear(2, 2))
    (zero(1), accumulate(4))
    """

    amp: MixedPrecision | None = None
    passes: int = 1
    offloaded: bool = False

    def transforms(self, model: nn.Module) -> Transforms:
        low = () if self.amp is None else self.amp.transforms(model)
        away = (offload("all"),) if self.offloaded else ()
        several = (accumulate(self.passes),) if self.passes > 1 else ()
        return (*super().transforms(model), *low, *away, *several)


@dataclass(frozen=True)
class Settings:
    """The settings of a config.

    Attributes:
        plugin: mesh, rules and transforms.
        handlers: descriptions of gradient handlers.
        cudnn: the given flags of `torch.backends.cudnn`.
        schedule: the description of the schedule; None for the default.
    """

    plugin: EnginePlugin
    handlers: tuple[Mapping[str, Any], ...]
    cudnn: Mapping[str, bool]
    schedule: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Read the known keys; all others are the user's.

        Raises:
            PlanError: an unsupported key, with its replacement.
            LaunchError: sizes that do not fit the number of ranks.
        """
        check_sizes(config)
        options = {
            **_parallel(config),
            **_divided(config),
            "passes": _number(config, "gradient_accumulation", 1, whole=True),
            "max_norm": float(_number(config, "clip_grad_norm", 0)),
        }
        ddp = _ddp(config)
        return cls(
            EnginePlugin(precision="fp32", ddp_bucket_cap_mb=ddp.bucket_cap_mb, **options),
            check_gradient_handlers(config.get("gradient_handler") or ()),
            {name: bool(config[key]) for key, name in _CUDNN.items() if config.get(key) is not None},
            check_schedule(config.get("schedule"), staged=options["pp_size"] > 1),
        )


_CUDNN = {"cudnn_benchmark": "benchmark", "cudnn_deterministic": "deterministic"}


def shape_of(config: Config) -> MeshShape:
    """Return the mesh of a config, with the ranks of this job."""
    check_sizes(config)
    return EnginePlugin(precision="fp32", **_parallel(config)).mesh_shape().resolve(_of_job("WORLD_SIZE", 1))


# --- parallel ---


def check_sizes(config: Config) -> None:
    """Check that data ranks are what pipeline and tensor leave of all ranks.

    Raises:
        PlanError: an invalid size; stages without a number of microbatches.
        LaunchError: the number of data ranks is not an integer, or differs from `parallel.data`.
    """
    pipeline, tensor, data = (_size(config, part) for part in ("pipeline", "tensor", "data"))
    if (pipeline or 1) > 1:
        _stages(config)
    world, split = _of_job("WORLD_SIZE", 1), (pipeline or 1) * (tensor or 1)
    asked = f"parallel.pipeline={pipeline or 1} and parallel.tensor={tensor or 1}"
    if world % split:
        raise LaunchError(
            f"The config says {asked}, which takes a multiple of {split} ranks, and {world} "
            f"{'is' if world == 1 else 'are'} running. Start as many, as in `torchrun --nproc_per_node {split}`, or "
            "change a size."
        )
    if data is not None and data * split != world:
        raise LaunchError(
            f"The config says parallel.data={data}; with {asked}, {world} ranks leave {world // split}. Leave data "
            "out, or change a size."
        )


def _size(config: Config, part: str) -> int | None:
    """Return the size in `parallel=dict(tensor=2)` or `parallel=dict(tensor=dict(size=2))`; None if it is not set."""
    parallel = config.get("parallel")
    if parallel is None:
        return None
    if not isinstance(parallel, Mapping):
        raise PlanError(
            f"The config says parallel={parallel!r}; give a dict, such as dict(tensor=dict(size=2, mode='1d'))."
        )
    known = ("pipeline", "tensor", "data")
    for key in parallel:
        if key not in known:
            raise PlanError(f"The config has parallel.{key}; known are {', '.join(known)}.{nearest(key, known)}")
    given = parallel.get(part)
    size = given.get("size") if isinstance(given, Mapping) else given
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise PlanError(
            f"The config says parallel.{part}={given!r}; give a number of ranks from 1 up, or dict(size=...)."
        )
    return size


def _parallel(config: Config) -> dict[str, Any]:
    """Return the plugin's keywords for `parallel`."""
    tensor = (config.get("parallel") or {}).get("tensor")
    options = dict(tensor) if isinstance(tensor, Mapping) else {}
    mode = options.get("mode")
    named = {} if mode is None or str(mode).lower() == "1d" else _tensor_mode(str(mode), options)
    _only(options, ("size", "mode", "rules", *named.get("tensor_sizes", ())), "parallel.tensor")
    for part in ("pipeline", "data"):
        given = (config.get("parallel") or {}).get(part)
        _only(given if isinstance(given, Mapping) else (), ("size",), f"parallel.{part}")
    stages = _size(config, "pipeline") or 1
    sizes = {"tp_size": _size(config, "tensor") or 1, "pp_size": stages, "custom_policy": options.get("rules"), **named}
    return sizes if stages == 1 else {**sizes, **_stages(config)}


def _tensor_mode(mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of `mode="2.5d", depth=2`, in any case of letters."""
    try:
        found = tensor_mode(mode if mode in registered_tensor_modes() else mode.lower())
    except RuleError as fault:
        raise PlanError(
            f"The config says parallel.tensor.mode={mode!r}; it is '1d', None or a tensor mode. {fault}"
        ) from None
    sizes = {key: options[key] for key in options if key not in ("size", "mode", "rules")}
    return {"tensor_mode": found.name, "tensor_sizes": sizes}


def _stages(config: Config) -> dict[str, Any]:
    """Return the keywords of a pipeline's schedule."""
    if config.get("NUM_MICRO_BATCHES") is None:
        raise PlanError(
            "The config says parallel.pipeline and no NUM_MICRO_BATCHES; give the number of microbatches of a batch."
        )
    model = config.get("model")
    chunks = (model.get("num_chunks") if isinstance(model, Mapping) else None) or 1
    return {
        "num_microbatches": _number(config, "NUM_MICRO_BATCHES", 1, whole=True),
        "num_model_chunks": chunks,
        "pp_style": "interleaved" if chunks > 1 else "1f1b",
    }


# --- zero and fp16 ---

_STAGES = ("stage", "cpu_offload", "overlap_allgather", "communication_dtype", "bucket_size_in_m")
_OLDER = ("model_config", "optimizer_config")
_PLACES = ("cuda", "cpu", "auto")


def _divided(config: Config) -> dict[str, Any]:
    """Return the plugin's keywords for `zero` and `fp16`."""
    zero, amp = config.get("zero"), amp_of(config.get("fp16"))
    if zero is None:
        return {"amp": amp}
    if not isinstance(zero, Mapping):
        raise PlanError(f"The config says zero={zero!r}; give a dict, such as dict(stage=1).")
    _only(zero, (*_STAGES, *_OLDER), "zero")
    if "stage" in zero:
        if both := [key for key in _OLDER if key in zero]:
            raise PlanError(f"The config says zero.stage={zero['stage']} and zero.{both[0]}; give one of them.")
        return {"amp": amp, **_of_stage(zero)}
    if amp is not None:
        raise PlanError(
            "The config has fp16 and a zero without a stage, which trains in float16 by itself. Say zero=dict(stage=3) "
            "with fp16=dict(mode=AMP_TYPE.NAIVE), or leave fp16 out."
        )
    return _of_older(zero.get("model_config") or {}, zero.get("optimizer_config") or {})


def _of_stage(zero: Mapping[str, Any]) -> dict[str, Any]:
    stage = zero["stage"]
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise PlanError(f"The config says zero.stage={stage!r}; give 0, 1, 2 or 3.")
    names = {"stage": "zero_stage", "bucket_size_in_m": "zero_bucket_size_in_m"}
    return {names.get(key, key): value for key, value in zero.items()}


def _of_older(model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Check keywords of the older API: a sharded model in float16, its optimizer with copies in float32."""
    known = {
        "shard_strategy": (None, "the plan divides each tensor by its dims; sl.get_plan(model) shows how."),
        "gradient_predivide_factor": (1.0, "gradients are summed and then divided, in one place."),
    }
    acting = ("tensor_placement_policy", "fp32_reduce_scatter", "reduce_scatter_bucket_size_mb", "reuse_fp16_shard")
    _only(model, (*acting, *known), "zero.model_config")
    for key, (default, reason) in known.items():
        refuse("zero.model_config", key, model.get(key, default), default, reason)
    scale = (
        "initial_scale",
        "min_scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "hysteresis",
        "max_scale",
    )
    _only(optimizer, (*scale, "gpu_margin_mem_ratio"), "zero.optimizer_config")
    margin = optimizer.get("gpu_margin_mem_ratio", 0.0)
    refuse("zero.optimizer_config", "gpu_margin_mem_ratio", margin, 0.0, "state is placed where its parameters are.")
    policy = model.get("tensor_placement_policy", "cuda")
    if policy not in _PLACES:
        raise PlanError(
            f"The config says zero.model_config.tensor_placement_policy={policy!r}; give 'cuda' or 'cpu'."
            f"{nearest(str(policy), _PLACES)}"
        )
    if policy == "auto":
        raise PlanError(
            "The config says zero.model_config.tensor_placement_policy='auto': nothing is chosen for you; give 'cuda' "
            "to keep all on the device, or 'cpu' to keep it in host memory between uses."
        )
    options = {key: optimizer[key] for key in scale if key in optimizer}
    amp = NaiveAMP(wide_reduction=bool(model.get("fp32_reduce_scatter", False)), **options)
    bucket = float(model.get("reduce_scatter_bucket_size_mb", 25)) / 4
    return {"amp": amp, "zero_stage": 3, "offloaded": policy == "cpu", "zero_bucket_size_in_m": bucket}


# --- the rest ---


def _ddp(config: Config) -> TorchDDPPlugin:
    given = config.get("torch_ddp") or {}
    if not isinstance(given, Mapping):
        raise PlanError(f"The config says torch_ddp={given!r}; give a dict, such as dict(bucket_cap_mb=50).")
    if given and config.get("zero"):
        raise PlanError(
            "The config has torch_ddp and zero; leave torch_ddp out: zero reduces gradients in its own way."
        )
    try:
        return TorchDDPPlugin(**given)
    except PlanError as error:
        raise PlanError(f"The config's torch_ddp: {error}") from None


def _number(config: Config, key: str, least: int, *, whole: bool = False) -> Any:
    given = config.get(key)
    value = least if given is None else given
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not value >= least:
        kind = "an integer" if whole else "a number"
        raise PlanError(f"The config says {key}={given!r}; give {kind} from {least} up.")
    return value


def _only(given: Iterable[str], known: tuple[str, ...], where: str, besides: str = "") -> None:
    for key in given:
        if key not in known:
            raise PlanError(
                f"The config has {where}.{key}; known are {', '.join(known)}.{nearest(key, known)}"
                f"{' ' + besides if besides else ''}"
            )
