"""Mistakes in an engine like ours: a sum left out, done twice, over the wrong ranks; a wrong cut; a stale value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardlib.engine import _torch
from shardlib.engine.apply import rank_plan, shard
from shardlib.engine.data import gradients, optimizer, params, schedule
from shardlib.engine.data.executor import bucket, reduce
from shardlib.engine.feature import batchnorm, exact
from shardlib.engine.model import borders, linear, region
from shardlib.layout import Dim, Layout
from shardlib.rules import Rules
from shardlib.testing import models
from shardlib.testing.mutants._mutant import Arguments, Mutant, after_sharding, replaced, transformer
from shardlib.transforms import zero

__all__ = ["ENGINE"]


def _images(mesh: str, **options: Any) -> Arguments:
    model = models.ConvNet()
    return {
        "model": models.ConvNet,
        "batch": models.batch_for(model),
        "mesh": mesh,
        "rules": models.rules_for(model),
        "steps": 2,
        **options,
    }


def _relabelled(original: Any) -> Any:
    """Take a one-dimensional gradient that is a partial sum for the full one."""

    def lay_out(self: Any, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if isinstance(grad, DTensor) and self.compute_spec is not None and grad.ndim == 1:
            return _torch.wrap(_torch.local_of(grad), self.compute_spec)
        result: torch.Tensor = original(self, grad, **kwargs)
        return result

    return lay_out


def _changed_steps(**fields: Any) -> Callable[[Any], Any]:
    """Change what linear layers of any layout do."""

    def make(original: Any) -> Any:
        def steps(*specs: Any) -> Any:
            found = original(*specs)
            if found is None:
                return None
            made = {name: value(getattr(found, name)) if callable(value) else value for name, value in fields.items()}
            return dataclasses.replace(found, **made)

        return steps

    return make


def _as_replicated(spec: Any) -> Any:
    """Take partial sums for full values."""
    return _torch.spec_with(spec, tuple(Replicate() if p.is_partial() else p for p in spec.placements))


def _bias_on_every_rank(original: Any) -> Any:
    def forward(ctx: Any, x: DTensor, weight: DTensor, bias: DTensor | None, steps: Any) -> torch.Tensor:
        if bias is not None and steps.reduce_y is not None:
            bias = _torch.wrap(_torch.local_of(bias) * steps.y.mesh.size(), _torch.spec_of(bias))
        result: torch.Tensor = original(ctx, x, weight, bias, steps)
        return result

    return staticmethod(forward)


def _fused_cut_as_plain(original: Any) -> Any:
    def cut(here: Any, name: str, full: Any) -> torch.Tensor:
        layout = here.on_compute_axes(here.rows[name].compute)
        if any(isinstance(dim, Dim) and dim.fused and dim.axes for dim in layout.dims):
            layout = Layout.replicate(full.ndim).with_axes(0, tuple(layout.axes))
            return layout.take(full.detach(), here.shape, here.coordinate).clone()
        result: torch.Tensor = original(here, name, full)
        return result

    return cut


def _axes_in_the_wrong_order(original: Any) -> Any:
    def cut(here: Any, name: str, full: Any) -> torch.Tensor:
        swapped = {"tp": here.coordinate["sp"], "sp": here.coordinate["tp"]}
        elsewhere = dataclasses.replace(here, coordinate={**here.coordinate, **swapped})
        result: torch.Tensor = original(elsewhere, name, full)
        return result

    return cut


def _handed_out(change: Callable[[nn.Parameter, torch.Tensor], None]) -> Callable[[Any], Any]:
    """Change gradients when they leave their bucket."""

    def make(original: Any) -> Any:
        def set_grads(self: Any, is_used: Any) -> None:
            original(self, is_used)
            for slot in self.slots:
                if slot.param_state.param.grad is not None:
                    change(slot.param_state.param, slot.param_state.param.grad)

        return set_grads

    return make


def _embedding_twice(param: nn.Parameter, grad: torch.Tensor) -> None:
    if param.shape[0] == 16:  # the vocabulary
        grad.mul_(2)


def _last_rank_not_updated(original: Any) -> Any:
    def leaf_of(param: torch.Tensor, *others: Any) -> torch.Tensor:
        leaf: torch.Tensor = original(param, *others)
        if leaf is not param and leaf.ndim == 2 and leaf.shape[0] == 5:  # of a vocabulary of 11
            leaf.grad = None
        return leaf

    return leaf_of


def _moving_average(original: Any) -> Any:
    def begin(self: Any) -> None:
        if self.enabled and not self.is_running:
            for slot in self._slots:
                if slot.param_state.param.grad is not None:
                    slot.param_state.param.grad.mul_(0.5)
        original(self)

    return begin


def _not_sent(original: Any) -> Any:
    class _Done:
        def wait(self) -> None:
            pass

    def launch(self: Any) -> None:
        all_reduce = dist.all_reduce
        try:
            dist.all_reduce = lambda *_args, **_kwargs: _Done()
            original(self)
        finally:
            dist.all_reduce = all_reduce

    return launch


def _blind_to_thawed(original: Any) -> Any:
    def notice_unfrozen(self: Any) -> None:
        if not self.buckets:
            original(self)

    return notice_unfrozen


def _thaw(model: nn.Module, step: int) -> None:
    for name, param in model.named_parameters():
        if "mlp.up" in name:
            param.requires_grad_(step > 0)


def _frozen() -> nn.Module:
    model = models.Transformer()
    for name, param in model.named_parameters():
        param.requires_grad_("mlp.up" not in name)
    return model


def _cut_gradient(original: Any) -> Any:
    return staticmethod(lambda ctx, grad: (_torch.local_of(grad) if isinstance(grad, DTensor) else grad, None))


def _partial_taken_for_whole(original: Any) -> Any:
    def redistribute(x: DTensor, placements: Any) -> DTensor:
        spec = _torch.spec_of(x)
        if any(p.is_partial() for p in spec.placements):
            return _torch.wrap(_torch.local_of(x), _torch.spec_with(spec, placements))
        result: DTensor = original(x, placements)
        return result

    return redistribute


def _own_gradient(original: Any) -> Any:
    return staticmethod(lambda ctx, grad: (grad, None))


def _biased_variance(original: Any) -> Any:
    def update(module: Any, mean: torch.Tensor, var: torch.Tensor) -> None:
        original(module, mean, var * 0.97)

    return update


def _zero_buffers(model: nn.Module) -> None:
    if dist.get_rank():
        for _, buffer in model.named_buffers():
            buffer.zero_()


def _drift(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        norm: Any = model.get_submodule("blocks.0.norm1")
        local = _torch.local_of(norm.weight) if isinstance(norm.weight, DTensor) else norm.weight
        with torch.no_grad():
            local.detach().mul_(1 + 1e-14)


def _replicate_one(model: nn.Module) -> None:
    up: Any = model.get_submodule("blocks.0.mlp.up")
    full = up.weight.redistribute(placements=[Replicate()] * up.weight.device_mesh.ndim)
    up.weight = nn.Parameter(full.detach())


def _moments_lost(original: Any) -> Any:
    def finish(step: Any) -> None:
        original(step)
        if dist.get_rank() == dist.get_world_size() - 1:
            for param, state in step.optimizer.state.items():
                if isinstance(param, DTensor) and param.shape[0] == 4 * param.shape[-1] and "exp_avg" in state:
                    _torch.local_of(state["exp_avg"]).zero_()

    return finish


def _train_frozen(model: nn.Module) -> None:
    for param in model.parameters():
        param.requires_grad_(True)


def _one_place(original: Any) -> Any:
    return lambda self: exact.DataRank(0, 1) if self.exact_random else None


def _own_seed(model: nn.Module) -> None:
    def reseed(*_: Any) -> None:
        torch.manual_seed(100 + dist.get_rank())

    model.register_forward_pre_hook(reseed, prepend=True)


def _sent_twice(original: Any) -> Any:
    return lambda self, axes: 1.0 / self.passes


def _one_part_left_out(original: Any) -> Any:
    def scaled_sum(blocks: list[torch.Tensor], scale: float, out: torch.Tensor, *, index: int) -> None:
        original(blocks[:-1], scale, out, index=index)

    return scaled_sum


def _never_gathered(original: Any) -> Any:
    return lambda self, params: None


def _half_gradient(original: Any) -> Any:
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        found = original(ctx, grad)
        return (found[0] / found[0].device_mesh.size(), *found[1:])

    return staticmethod(backward)


# Cases that several mutants share pass once.
_ON_TP, _ON_DP, _ON_IMAGES = partial(transformer, "tp=2"), partial(transformer, "dp=2"), partial(_images, "dp=2")

ENGINE = (
    Mutant(
        "norm gradient", "the gradients of norm weights are not summed over tp under sequence parallelism",
        "NVIDIA/Megatron-LM#1446; EleutherAI/gpt-neox#1257; NVIDIA/apex#1686", r".*(norm|proj|down).*",
        lambda: transformer("tp=2", sequence=True), replaced(params.ParamState, "lay_out", _relabelled),
    ),
    Mutant(
        "row bias", "the bias of a row-parallel layer is added on every rank before the sum",
        "pytorch/torchtitan#2106", r"blocks\.0\.attn\.proj",
        _ON_TP, replaced(linear._Linear, "forward", _bias_on_every_rank),
    ),
    Mutant(
        "row sum", "the output of a row-parallel layer is not summed",
        "pytorch/pytorch#172932", r"blocks\.0\.attn\.proj",
        _ON_TP, replaced(linear, "_steps", _changed_steps(reduce_y=None)),
    ),
    Mutant(
        "column gradient", "the gradient of a column-parallel layer's input is not summed",
        "pytorch/torchtitan#1805, #4054", r"head",
        _ON_TP, replaced(linear, "_steps", _changed_steps(grad_x=_as_replicated)),
    ),
    Mutant(
        "region gradient", "the gradient of a region's replicated input is a partial sum, and is not summed",
        "pytorch/torchtitan#1805, #2416", r"head",
        _ON_TP, replaced(region._WrapReplicated, "backward", _cut_gradient),
    ),
    Mutant(
        "exit gradient", "the gradient of a region's output is divided by the number of ranks",
        "meta-pytorch/torchtune#2641", r"head",
        _ON_TP, replaced(region._UnwrapDTensor, "backward", _half_gradient),
    ),
    Mutant(
        "vocabulary sum", "the output of a vocabulary-parallel embedding is not summed over its ranks",
        "hpcaitech/ColossalAI#5110", r"embed",
        _ON_TP, replaced(borders, "redistribute", _partial_taken_for_whole),
    ),
    Mutant(
        "fused qkv", "a fused weight of q, k and v is sharded as one dim",
        "pytorch/pytorch#140069; tenstorrent/tt-metal#52818", r"blocks\.0\.attn\.qkv",
        _ON_TP, replaced(shard, "local_shard", _fused_cut_as_plain),
    ),
    Mutant(
        "axis order", "a dim of two axes is sharded over the inner axis first",
        "pytorch/pytorch#129206, #129229", r"(up|blocks\.0\.mlp\.up)",
        lambda: {
            "model": models.MLP, "batch": models.batch_for(models.MLP()), "mesh": "tp=2,sp=2",
            "rules": Rules({"up.weight": "out@(tp,sp) in"}, unmatched="replicate"), "steps": 1,
        },
        replaced(shard, "local_shard", _axes_in_the_wrong_order),
    ),
    Mutant(
        "data sum", "gradients are summed over data ranks, not averaged",
        "NVIDIA-NeMo/Automodel#3830; pytorch/torchtitan#2318", r"\(every module\)",
        _ON_DP, replaced(reduce.Averaging, "over", _sent_twice),
    ),
    Mutant(
        "data reduction", "gradients are not reduced",
        "NVIDIA-NeMo/Automodel#1260", r"\(every module\)",
        _ON_DP, replaced(schedule.Reductions, "_begin", _not_sent),
    ),
    Mutant(
        "tied twice", "the gradient of a tied weight is reduced once for each of its names",
        "pytorch/pytorch#176076", r"embed",
        lambda: transformer("dp=2", tied=True),
        replaced(reduce.AllReduceBucket, "set_grads", _handed_out(_embedding_twice)),
    ),
    Mutant(
        "uneven last rank", "the last, smaller shard of an uneven weight is never updated",
        "pytorch/pytorch#176076", r"(embed|head)",
        lambda: transformer("tp=2", vocab=11), replaced(optimizer, "_leaf", _last_rank_not_updated),
    ),
    Mutant(
        "moving average", "each accumulated backward pass averages its gradient with the accumulated one",
        "pytorch/torchtitan#1732", r"\(every module\)",
        lambda: transformer("dp=2", accumulate=2), replaced(gradients.GradientReducer, "begin", _moving_average),
    ),
    Mutant(
        "thawed parameter", "a parameter that is unfrozen later is in no bucket",
        "Lightning-AI/pytorch-lightning#20340; NVIDIA/apex#46", r"blocks\.0\.mlp\.up",
        lambda: transformer("dp=2", before_step=_thaw, steps=3),
        replaced(gradients.GradientReducer, "notice_unfrozen", _blind_to_thawed),
    ),
    Mutant(
        "frozen parameter", "sharding resets requires_grad of a frozen parameter",
        "facebookresearch/fairscale#721; pytorch/pytorch#105371", r"blocks\.0\.mlp\.up",
        lambda: {**transformer("tp=2"), "model": _frozen}, after_sharding(_train_frozen),
    ),
    Mutant(
        "a part left out", "the reduce-scatter of ZeRO leaves out one rank's gradient",
        "NVIDIA-NeMo/Automodel#1260; deepspeedai/DeepSpeed#5583", r"\(every module\)",
        lambda: transformer("dp=4", transforms=(zero(2),)), replaced(bucket, "_scaled_sum", _one_part_left_out),
    ),
    Mutant(
        "parts not gathered", "the updated shards are not all-gathered after the step",
        "facebookresearch/fairscale#601", r"\(every module\)",
        lambda: transformer("dp=2", transforms=(zero(1),)), replaced(schedule.Updates, "begin", _never_gathered),
    ),
    Mutant(
        "batch statistics", "BatchNorm normalizes with each rank's own examples",
        "pytorch/pytorch#62967", r"norm",
        _ON_IMAGES, mistaken=lambda: _images("dp=2", global_batch_norm=False),
    ),
    Mutant(
        "statistics gradient", "the gradient of BatchNorm's statistics is not summed over ranks",
        "pytorch/pytorch#36382, #64039", r"norm",
        _ON_IMAGES, replaced(batchnorm._SumOverRanks, "backward", _own_gradient),
    ),
    Mutant(
        "running variance", "BatchNorm's running variance lacks its correction",
        "pytorch/pytorch#40600", r"norm",
        _ON_IMAGES, replaced(batchnorm, "_update_running", _biased_variance),
    ),
    Mutant(
        "buffers not made", "non-persistent buffers are zero on all ranks but the first",
        "huggingface/transformers#45902; pytorch/torchtitan#110", r"position",
        lambda: transformer("dp=2", position="rotary"), after_sharding(_zero_buffers),
    ),
    Mutant(
        "replicas drift", "one rank's copy of a norm weight is off by rounding",
        "NVIDIA/Megatron-LM#1446", r"blocks\.0\.norm1",
        lambda: transformer("tp=2", steps=1), after_sharding(_drift),
    ),
    Mutant(
        "layout not the plan's", "a weight that the plan shards is replicated",
        "pytorch/pytorch#157182", r"blocks\.0\.mlp\.up",
        _ON_TP, after_sharding(_replicate_one),
    ),
    Mutant(
        "moments lost", "the last rank resets the optimizer state of some weights in each step",
        "areal-project/AReaL#1468; huggingface/transformers#48569", r"blocks\.0\.(mlp\.up|attn\..*)",
        _ON_TP, replaced(optimizer._Step, "finish", _moments_lost),
    ),
    Mutant(
        "one mask for all", "all data ranks draw the same dropout mask",
        "tenstorrent/tt-metal#55947; awslabs/slapo#21", r"blocks\.0\.(dropout1|attn)",
        lambda: transformer("dp=2", dropout=0.5), replaced(rank_plan.RankPlan, "place", _one_place),
    ),
    Mutant(
        "a mask for each", "ranks of a tensor-parallel group draw different masks for a replicated activation",
        "ecmwf/anemoi-core#595; PaddlePaddle/PaddleFleetX#1005", r"blocks\.0\.(dropout1|attn)",
        lambda: transformer("tp=2", dropout=0.5, rng="fast"), after_sharding(_own_seed),
    ),
)  # fmt: skip
