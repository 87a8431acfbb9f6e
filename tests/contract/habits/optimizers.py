"""Optimizers and schedulers."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

import shardlib as sl
from tests.contract.declare import ONE_STAGE, OTHER_STAGE, everywhere, own_part, refused, refused_in_pipelines
from tests.contract.harness import Run


def sgd(run: Run, model: Any):
    """Train by SGD with momentum and weight decay."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    return run.trained(model, optimizer, 3)


@everywhere
def adamw(run: Run, model: Any):
    """Train by AdamW."""
    return run.trained(model, torch.optim.AdamW(model.parameters(), lr=0.01), 3)


def adam_one_by_one(run: Run, model: Any):
    """Train by Adam with `foreach=False` and `amsgrad=True`."""
    return run.trained(model, torch.optim.Adam(model.parameters(), lr=0.01, foreach=False, amsgrad=True), 3)


def adam_foreach(run: Run, model: Any):
    """Train by Adam with `foreach=True` and `maximize=True`."""
    return run.trained(model, torch.optim.Adam(model.parameters(), lr=0.01, foreach=True, maximize=True), 3)


def adam_fused(run: Run, model: Any):
    """Train by Adam with `fused=True`."""
    return run.trained(model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True), 3)


def rmsprop(run: Run, model: Any):
    """Train by RMSprop."""
    return run.trained(model, torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9, centered=True), 3)


def adagrad(run: Run, model: Any):
    """Train by Adagrad, whose state is there before the first step."""
    return run.trained(model, torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.1), 3)


def adadelta(run: Run, model: Any):
    """Train by Adadelta."""
    return run.trained(model, torch.optim.Adadelta(model.parameters(), lr=0.5), 3)


def adamax_and_nadam(run: Run, model: Any):
    """Train by Adamax, then by NAdam and RAdam."""
    losses = []
    for i, kind in enumerate((torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam)):
        losses += run.train(model, kind(model.parameters(), lr=0.01), 2, start=2 * i)
    return losses, run.weights(model)


def rprop(run: Run, model: Any):
    """Train by Rprop."""
    return run.trained(model, torch.optim.Rprop(model.parameters(), lr=0.01), 3)


def asgd(run: Run, model: Any):
    """Train by ASGD."""
    return run.trained(model, torch.optim.ASGD(model.parameters(), lr=0.01), 3)


def adafactor(run: Run, model: Any):
    """Train by `torch.optim.Adafactor`, which needs rows and columns of whole matrices."""
    return run.trained(model, torch.optim.Adafactor(model.parameters(), lr=0.01), 3)


def muon(run: Run, model: Any):
    """Train matrices by `torch.optim.Muon`."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return run.trained(model, torch.optim.Muon(matrices, lr=0.01), 2)


def _by_closure(run: Run, model: Any, optimizer: torch.optim.Optimizer):
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = run.loss(model)
        loss.backward()
        return loss

    optimizer.step(closure)
    return run.weights(model)


@everywhere
@refused_in_pipelines
@refused("zero(3), fsdp x tp", "shardlib does not know whether it can")
def lbfgs(run: Run, model: Any):
    """Train by LBFGS with a closure."""
    return _by_closure(run, model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))


@refused_in_pipelines
@refused("zero(3), fsdp x tp", "shardlib does not know whether it can")
def lbfgs_line_search(run: Run, model: Any):
    """Train by LBFGS with the line search of Wolfe."""
    return _by_closure(run, model, torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe"))


@refused_in_pipelines
def closure_of_sgd(run: Run, model: Any):
    """Give SGD a closure that does the forward and the backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = run.loss(model)
        loss.backward()
        return loss

    return run.mean(optimizer.step(closure)), run.weights(model)


# --- built before or after, groups ------------------------------------------------------------------------------------


@refused("tp, zero(3), fsdp x tp, compiled", "Build the optimizer after shard_model")
def built_before_sharding(run: Run):
    """Build the optimizer before sharding."""
    model = run.model()
    optimizer = run.optimizer(model)
    return run.trained(run.shard(model), optimizer)


def built_after_a_backward(run: Run, model: Any):
    """Build the optimizer after the first backward."""
    run.backward(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    return run.weights(model)


def built_anew_each_step(run: Run, model: Any):
    """Build a new optimizer for each step."""
    losses = []
    for i in range(3):
        losses += run.train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1, start=i)
    return losses, run.weights(model)


def groups_by_name(run: Run, model: Any):
    """Give biases and norms a group without weight decay."""
    plain = [p for name, p in model.named_parameters() if p.dim() < 2]
    decayed = [p for name, p in model.named_parameters() if p.dim() == 2]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
    return run.trained(model, torch.optim.AdamW(groups, lr=0.01))


def groups_by_id(run: Run, model: Any):
    """Split parameters into groups by `id`, as older scripts do."""
    ids = {id(p) for p in model.head.parameters()}
    groups = [
        {"params": [p for p in model.parameters() if id(p) in ids], "lr": 0.1},
        {"params": [p for p in model.parameters() if id(p) not in ids]},
    ]
    return run.trained(model, torch.optim.SGD([group for group in groups if group["params"]], lr=0.01))


def named_parameters_given(run: Run, model: Any):
    """Give the optimizer `named_parameters()`."""
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    return run.trained(model, optimizer), run.stages(
        torch.tensor([len(n) for n in optimizer.param_groups[0]["param_names"]])
    )


def late_group(run: Run, model: Any):
    """Add the head as a group after a step."""
    body = [p for name, p in model.named_parameters() if "head" not in name]
    optimizer = torch.optim.SGD(body, lr=0.1, momentum=0.9)
    losses = run.train(model, optimizer, 1)
    optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.01})
    return losses, run.trained(model, optimizer, 2, start=1)


def two_optimizers(run: Run, model: Any):
    """Train one half by one optimizer and the other half by another."""
    names = dict(model.named_parameters())
    first = torch.optim.SGD([p for n, p in names.items() if "up" in n], lr=0.1)
    second = torch.optim.AdamW([p for n, p in names.items() if "up" not in n], lr=0.01)
    losses = []
    for i in range(2):
        first.zero_grad()
        second.zero_grad()
        losses.append(run.backward(model, i))
        first.step()
        second.step()
    return losses, run.weights(model)


def some_parameters_only(run: Run, model: Any):
    """Give the optimizer some parameters only; the others gather gradients."""
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "up" in n], lr=0.1)
    return run.trained(model, optimizer), run.gradients(model)


def learning_rate_by_hand(run: Run, model: Any):
    """Write another learning rate into the groups between steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = run.train(model, optimizer, 1)
    for group in optimizer.param_groups:
        group["lr"] *= 0.1
    return losses, run.trained(model, optimizer, 2, start=1)


def learning_rate_as_a_tensor(run: Run, model: Any):
    """Give the learning rate as a tensor."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    losses = run.train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"].mul_(0.5)
    return losses, run.trained(model, optimizer, 2, start=1)


def parameters_of_another_model_too(run: Run, model: Any):
    """Train a plain module beside the sharded model by one optimizer."""
    torch.manual_seed(1)
    plain = nn.Linear(2, 2).double()
    optimizer = torch.optim.SGD([*model.parameters(), *plain.parameters()], lr=0.1)
    for i in range(2):
        optimizer.zero_grad()
        run.backward(model, i)
        plain(torch.ones(1, 2, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    return run.weights(model), run.weights(plain)


# --- optimizers of one's own ------------------------------------------------------------------------------------------


class _Normalized(torch.optim.AdamW):
    """Edits gradients, then goes on as its base does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad / p.grad.norm()
        return super().step(closure)


class _Twice(_Normalized):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(2)
        return super().step(closure)


def subclass_that_edits_gradients(run: Run, model: Any):
    """Subclass AdamW to normalise gradients before `super().step()`."""
    return run.trained(model, _Normalized(model.parameters(), lr=0.01), 3)


def subclass_of_a_subclass(run: Run, model: Any):
    """Subclass a subclass of AdamW; each edits gradients."""
    return run.trained(model, _Twice(model.parameters(), lr=0.01), 3)


class _OwnSGD(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


class _OwnMomentum(_OwnSGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("m", torch.zeros_like(p))
                m.mul_(0.9).add_(p.grad)
                p.add_(torch.sign(m), alpha=-0.1 * group["lr"])


class _OwnNorms(_OwnSGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-3)), alpha=-group["lr"])


class _OwnData(_OwnSGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad.data


@refused("zero(3), fsdp x tp", "shardlib does not know whether it can")
def own_elementwise(run: Run, model: Any):
    """Write an optimizer that adds the gradient, element by element."""
    return run.trained(model, _OwnSGD(model.parameters()), 3)


@refused("zero(3), fsdp x tp", "shardlib does not know whether it can")
def own_elementwise_with_state(run: Run, model: Any):
    """Write an optimizer with momentum, as Lion has it."""
    return run.trained(model, _OwnMomentum(model.parameters()), 3)


@refused("zero(3), fsdp x tp", "shardlib does not know whether it can")
def own_with_norms(run: Run, model: Any):
    """Write an optimizer that scales by norms of whole tensors, as LARS does."""
    return run.trained(model, _OwnNorms(model.parameters()), 3)


@refused("zero(3), fsdp x tp", "shardlib does not know whether it can")
def own_that_assigns_data(run: Run, model: Any):
    """Write an optimizer that assigns `p.data`."""
    return run.trained(model, _OwnData(model.parameters()), 2)


@sl.register_optimizer(needs="shard")
class _RegisteredMomentum(_OwnMomentum):
    pass


@sl.register_optimizer(needs="tensor")
class _RegisteredNorms(_OwnNorms):
    pass


@sl.register_optimizer(needs="shard")
class _RegisteredData(_OwnData):
    pass


def own_registered_elementwise(run: Run, model: Any):
    """Write an optimizer with momentum, registered by `sl.register_optimizer`."""
    return run.trained(model, _RegisteredMomentum(model.parameters()), 3)


def own_registered_that_assigns_data(run: Run, model: Any):
    """Write an optimizer that assigns `p.data`, registered by `sl.register_optimizer`."""
    return run.trained(model, _RegisteredData(model.parameters()), 2)


def own_registered_per_tensor(run: Run, model: Any):
    """Write an optimizer that scales by norms, registered by `sl.register_optimizer`."""
    return run.trained(model, _RegisteredNorms(model.parameters()), 3)


@sl.register_optimizer(needs="shard")
class _RaisesOnce(_OwnMomentum):
    """Raises in its second step, when it has updated half of the parameters."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps != 2:
            super().step(closure)
            return
        for group in self.param_groups:
            for p in group["params"][: len(group["params"]) // 2]:
                with torch.no_grad():
                    p.add_(p.grad, alpha=-0.1)
        raise ArithmeticError("in a step")


@own_part("pp", ONE_STAGE)
def step_that_raises(run: Run, model: Any):
    """Catch an error of an optimizer that had updated some parameters, and train on with it."""
    optimizer = _RaisesOnce(model.parameters())
    run.train(model, optimizer, 1)
    try:
        run.train(model, optimizer, 1)
    except ArithmeticError:
        same = all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
        optimizer.zero_grad()
    cleared = all(p.grad is None for p in model.parameters())
    return same, cleared, run.trained(model, optimizer, 2, start=2)


def no_optimizer(run: Run, model: Any):
    """Step by hand under `no_grad`."""
    for i in range(2):
        model.zero_grad()
        run.backward(model, i)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return run.weights(model)


def no_optimizer_but_data(run: Run, model: Any):
    """Step by hand on `p.data`."""
    for i in range(2):
        model.zero_grad()
        run.backward(model, i)
        for p in model.parameters():
            p.data.add_(p.grad.data, alpha=-0.1)
    return run.weights(model)


class _Lookahead:
    """An optimizer around another one that keeps slow weights, as `Lookahead` does."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        self.base.zero_grad()

    def step(self) -> None:
        self.base.step()
        parameters = [p for group in self.base.param_groups for p in group["params"]]
        with torch.no_grad():
            for slow, p in zip(self.slow, parameters, strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


def lookahead(run: Run, model: Any):
    """Wrap an optimizer in one that keeps slow weights."""
    return run.trained(model, _Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)), 3)


@own_part("pp", ONE_STAGE)
def sharpness_aware(run: Run, model: Any):
    """Train by sharpness-aware minimisation: two passes a step, with weights that are moved and put back."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(2):
        optimizer.zero_grad()
        run.backward(model, i)
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.add_(p.grad * (0.05 / (norm + 1e-12)))
        optimizer.zero_grad()
        run.backward(model, i)
        with torch.no_grad():
            for p, before in zip(model.parameters(), kept, strict=True):
                p.copy_(before)
        optimizer.step()
    return run.weights(model)


# --- hooks, backward, scaler ------------------------------------------------------------------------------------------


@everywhere
@refused("pp", "one of the variables needed for gradient computation has been modified")
@refused("replicate, zero(1), zero(2)", "is not reduced yet: it is when backward() returns. Step then")
def optimizer_in_backward(run: Run, model: Any):
    """Step each parameter in its `register_post_accumulate_grad_hook`."""
    optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    losses = [run.backward(model, i) for i in range(2)]
    return losses, run.weights(model)


def step_hooks(run: Run, model: Any):
    """Edit gradients in a step's pre-hook, and read weights in its post-hook."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []

    def before(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = p.grad / p.grad.norm()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: seen.append(run.weights(model)))
    return run.trained(model, optimizer), seen


@refused_in_pipelines
def grad_scaler(run: Run, model: Any):
    """Train with `torch.amp.GradScaler`, unscale and clip."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for i in range(2):
        optimizer.zero_grad()
        scaler.scale(run.loss(model, i)).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
    return norms, scaler.get_scale(), run.weights(model)


@refused_in_pipelines
def grad_scaler_without_unscale(run: Run, model: Any):
    """Train with `torch.amp.GradScaler` that unscales in its step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(2):
        optimizer.zero_grad()
        scaler.scale(run.loss(model, i)).backward()
        scaler.step(optimizer)
        scaler.update()
    return run.weights(model)


@refused_in_pipelines
def grad_scaler_that_overflows(run: Run, model: Any):
    """Train with `torch.amp.GradScaler` where one data rank's loss overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        optimizer.zero_grad()
        loss = run.loss(model, i)
        scaler.scale(loss * float("inf") if i == 1 and run.data_rank == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), run.weights(model)


@everywhere
@refused_in_pipelines
def grad_scaler_and_one_infinite_element(run: Run, model: Any):
    """Train with `torch.amp.GradScaler` where one element of a gradient overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    factor = torch.ones(16, 8, dtype=torch.float64)
    factor[-1, -1] = float("inf")
    for i in range(3):
        optimizer.zero_grad()
        scaler.scale(run.loss(model, i)).backward()
        if i == 1:
            model.blocks[0].up.weight.grad.mul_(factor)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), run.weights(model)


@everywhere
@refused_in_pipelines
def autocast(run: Run, model: Any):
    """Evaluate a float32 model under `torch.autocast`."""
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        return run.rows(model(run.batch()))


def skip_a_step(run: Run, model: Any):
    """Skip a step whose loss is above a limit, alike on all ranks."""
    optimizer = run.optimizer(model)
    for i in range(3):
        optimizer.zero_grad()
        run.backward(model, i)
        if i != 1:
            optimizer.step()
    return run.weights(model)


def step_without_gradients(run: Run, model: Any):
    """Step without any gradient, then train."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.step()
    return run.trained(model, optimizer)


def step_twice_on_one_gradient(run: Run, model: Any):
    """Step twice on one gradient."""
    optimizer = run.optimizer(model)
    run.backward(model)
    optimizer.step()
    optimizer.step()
    return run.weights(model)


# --- averages ---------------------------------------------------------------------------------------------------------


def average_by_clones(run: Run, model: Any):
    """Keep an exponential average of weights in clones, and evaluate with it."""
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = run.optimizer(model)
    for i in range(3):
        run.train(model, optimizer, 1, start=i)
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].mul_(0.9).add_(p, alpha=0.1)
    return average


@refused_in_pipelines
def average_swapped_in(run: Run, model: Any):
    """Swap the average into the model for an evaluation, and back."""
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    with torch.no_grad():
        kept = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.copy_(average[name].lerp(p, 0.5))
        between = run.outputs(model)
        for name, p in model.named_parameters():
            p.copy_(kept[name])
    return between, run.trained(model, optimizer, 1, start=1)


def average_by_state_dict(run: Run, model: Any):
    """Keep an average of the values of `state_dict()`."""
    average = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = run.optimizer(model)
    for i in range(2):
        run.train(model, optimizer, 1, start=i)
        for name, value in model.state_dict().items():
            average[name] = 0.9 * average[name] + 0.1 * value
    return average


def averaged_model(run: Run, model: Any):
    """Keep an average by `AveragedModel` with an exponential average."""
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = run.optimizer(model)
    for i in range(2):
        run.train(model, optimizer, 1, start=i)
        average.update_parameters(model)
    return run.weights(average)


@own_part("pp", OTHER_STAGE, alone=True)
def averaged_model_before_sharding(run: Run):
    """Make an `AveragedModel` of the plain model before sharding, and update it from the sharded one."""
    model = run.model()
    average = swa_utils.AveragedModel(model)
    model = run.shard(model)
    optimizer = run.optimizer(model)
    for i in range(2):
        run.train(model, optimizer, 1, start=i)
        average.update_parameters(model)
    return run.weights(average)


@refused_in_pipelines
def averaged_model_evaluated(run: Run, model: Any):
    """Evaluate an `AveragedModel` of the sharded model."""
    average = swa_utils.AveragedModel(model)
    optimizer = run.optimizer(model)
    for i in range(2):
        run.train(model, optimizer, 1, start=i)
        average.update_parameters(model)
    return run.outputs(average)


# --- schedulers -------------------------------------------------------------------------------------------------------


def scheduler(run: Run, model: Any):
    """Step a scheduler after each step."""
    optimizer = run.optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    losses = []
    for i in range(3):
        losses += run.train(model, optimizer, 1, start=i)
        schedule.step()
    return losses, schedule.get_last_lr(), run.weights(model)


def scheduler_of_momentum(run: Run, model: Any):
    """Train with `OneCycleLR`, which changes momentum too."""
    optimizer = run.optimizer(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4)
    for i in range(3):
        run.train(model, optimizer, 1, start=i)
        schedule.step()
    return schedule.get_last_lr(), run.weights(model)


def scheduler_of_losses(run: Run, model: Any):
    """Train with `ReduceLROnPlateau`, given a number."""
    optimizer = run.optimizer(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for i in range(3):
        run.train(model, optimizer, 1, start=i)
        schedule.step(1.0 + i)
    return optimizer.param_groups[0]["lr"], run.weights(model)


def scheduler_in_sequence(run: Run, model: Any):
    """Warm up, then decay, by `SequentialLR`."""
    optimizer = run.optimizer(model)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [2])
    for i in range(4):
        run.train(model, optimizer, 1, start=i)
        schedule.step()
    return run.weights(model)


# --- state ------------------------------------------------------------------------------------------------------------


def state_dict_and_back(run: Run, model: Any):
    """Load the optimizer's own state dict into a new optimizer, and train on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.train(model, optimizer, 2)
    other = torch.optim.AdamW(model.parameters(), lr=0.01)
    other.load_state_dict(optimizer.state_dict())
    return run.trained(model, other, 1, start=2)


def state_dict_copied(run: Run, model: Any):
    """Load a deep copy of the state dict to go back some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.train(model, optimizer, 1)
    kept = copy.deepcopy(optimizer.state_dict())
    run.train(model, optimizer, 1, start=1)
    optimizer.load_state_dict(kept)
    return run.trained(model, optimizer, 1, start=2)


def state_dict_saved(run: Run, model: Any):
    """Save the optimizer's state by `torch.save`, and load it on the same ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.train(model, optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = torch.optim.AdamW(model.parameters(), lr=0.01)
    other.load_state_dict(torch.load(file, weights_only=False))
    return run.trained(model, other, 1, start=2)


def state_read(run: Run, model: Any):
    """Read the optimizer's state by `optimizer.state[p]`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.train(model, optimizer, 2)
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}


def state_reset(run: Run, model: Any):
    """Forget the optimizer's state by `optimizer.state.clear()`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.train(model, optimizer, 2)
    optimizer.state.clear()
    return run.trained(model, optimizer, 1, start=2)


def state_scaled(run: Run, model: Any):
    """Scale momentum in the optimizer's state in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.train(model, optimizer, 2)
    for p in model.parameters():
        optimizer.state[p]["exp_avg"].mul_(0.5)
    return run.trained(model, optimizer, 1, start=2)


def optimizer_copied(run: Run, model: Any):
    """Copy the model and its optimizer together by `deepcopy`, and train the copy."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.train(model, optimizer, 1)
    model, optimizer = copy.deepcopy((model, optimizer))
    return run.trained(model, optimizer, 1, start=1)


def step_by_partial(run: Run, model: Any):
    """Call the step through `functools.partial` and a local name."""
    optimizer = run.optimizer(model)
    step = functools.partial(optimizer.step)
    for i in range(2):
        optimizer.zero_grad()
        run.backward(model, i)
        step()
    return run.weights(model)


def profile_the_step(run: Run, model: Any):
    """Train under `torch.profiler`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return run.trained(model)
