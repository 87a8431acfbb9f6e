"""Gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from tests.contract.declare import (
    CUT_GRAPH,
    ONE_STAGE,
    OTHER_STAGE,
    as_ddp,
    as_microbatches,
    broken,
    everywhere,
    noticed,
    own_part,
    refused,
    refused_in_pipelines,
    refused_on_some_ranks,
)
from tests.contract.harness import Net, Run


def read_gradients(run: Run, model: Any):
    """Read gradients after a backward."""
    return run.backward(model), run.gradients(model)


# --- cleared, scaled and clipped --------------------------------------------------------------------------------------


def clear_by_none(run: Run, model: Any):
    """Clear gradients by `p.grad = None`."""
    run.backward(model)
    for p in model.parameters():
        p.grad = None
    run.backward(model, 1)
    return run.gradients(model)


def clear_by_zeros(run: Run, model: Any):
    """Clear gradients by `zero_grad(set_to_none=False)`."""
    run.backward(model)
    model.zero_grad(set_to_none=False)
    run.backward(model, 1)
    return run.gradients(model)


def clear_in_place(run: Run, model: Any):
    """Clear gradients by `p.grad.zero_()`."""
    run.backward(model)
    for p in model.parameters():
        p.grad.zero_()
    run.backward(model, 1)
    return run.gradients(model)


def clear_some(run: Run, model: Any):
    """Clear the gradients of some parameters and accumulate in the others."""
    run.backward(model)
    model.blocks[0].zero_grad()
    model.head.weight.grad = None
    run.backward(model, 1)
    return run.gradients(model)


def clear_with_the_optimizer(run: Run, model: Any):
    """Clear gradients by the optimizer, and read what is left."""
    optimizer = run.optimizer(model)
    run.backward(model)
    optimizer.zero_grad()
    return run.gradients(model)


def accumulate(run: Run, model: Any):
    """Accumulate the gradients of several backward passes."""
    for i in range(3):
        run.backward(model, i)
    return run.gradients(model)


@refused_in_pipelines
def accumulate_scaled_losses(run: Run, model: Any):
    """Accumulate losses that are divided by the number of passes, and step."""
    optimizer = run.optimizer(model)
    for step in range(2):
        optimizer.zero_grad()
        for i in range(2):
            (run.loss(model, 2 * step + i) / 2).backward()
        optimizer.step()
    return run.weights(model)


@everywhere
def accumulate_under_no_sync(run: Run, model: Any):
    """Accumulate under `sl.no_sync`, and step."""
    optimizer = run.optimizer(model)
    for step in range(2):
        optimizer.zero_grad()
        with run.no_sync(model):
            run.backward(model, 2 * step)
        run.backward(model, 2 * step + 1)
        optimizer.step()
    return run.gradients(model), run.weights(model)


@refused_in_pipelines
def clip_after_no_sync(run: Run, model: Any):
    """Accumulate under `sl.no_sync`, and clip by torch's `clip_grad_norm_` after it."""
    with run.no_sync(model):
        run.loss(model).backward()
    run.loss(model, 1).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return norm, run.gradients(model)


def scale_in_place(run: Run, model: Any):
    """Scale gradients in place by `mul_`."""
    run.backward(model)
    for p in model.parameters():
        p.grad.mul_(0.5)
    return run.gradients(model)


def scale_data(run: Run, model: Any):
    """Scale gradients by `p.grad.data.div_`, as old scripts do."""
    run.backward(model)
    for p in model.parameters():
        p.grad.data.div_(4)
    optimizer = run.optimizer(model)
    optimizer.step()
    return run.weights(model)


def scale_by_assigning(run: Run, model: Any):
    """Assign scaled gradients to `p.grad`, and step."""
    run.backward(model)
    for p in model.parameters():
        p.grad = p.grad * 0.5
    run.optimizer(model).step()
    return run.weights(model)


def scale_by_foreach(run: Run, model: Any):
    """Scale gradients by `torch._foreach_mul_`."""
    run.backward(model)
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)
    return run.gradients(model)


@own_part("pp", ONE_STAGE)
def clip_norm(run: Run, model: Any):
    """Clip by torch's `clip_grad_norm_`."""
    run.backward(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return norm, run.gradients(model)


@own_part("pp", ONE_STAGE)
def clip_norm_foreach(run: Run, model: Any):
    """Clip by torch's `clip_grad_norm_(foreach=True)`."""
    run.backward(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
    return norm, run.gradients(model)


@own_part("pp", ONE_STAGE)
def clip_norm_one_by_one(run: Run, model: Any):
    """Clip by torch's `clip_grad_norm_(foreach=False)`."""
    run.backward(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
    return norm, run.gradients(model)


@own_part("pp", ONE_STAGE)
def clip_infinite_norm(run: Run, model: Any):
    """Clip the largest gradient by `clip_grad_norm_(norm_type=inf)`."""
    run.backward(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))
    return norm, run.gradients(model)


@own_part("pp", ONE_STAGE)
def clip_first_norm(run: Run, model: Any):
    """Clip the sum of absolute values by `clip_grad_norm_(norm_type=1)`."""
    run.backward(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=1)
    return norm, run.gradients(model)


@own_part("pp", ONE_STAGE)
def clip_norm_of_each_block(run: Run, model: Any):
    """Clip the norm of each block by itself."""
    run.backward(model)
    norms = [nn.utils.clip_grad_norm_(block.parameters(), 0.1) for block in model.blocks]
    return norms, run.gradients(model)


def clip_norm_of_each_parameter(run: Run, model: Any):
    """Clip the norm of each parameter by itself."""
    run.backward(model)
    for p in model.parameters():
        nn.utils.clip_grad_norm_(p, 0.01)
    return run.gradients(model)


@own_part("pp", ONE_STAGE)
def total_norm_and_scaling(run: Run, model: Any):
    """Take `nn.utils.get_total_norm` and clip with it."""
    run.backward(model)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
    return norm, run.gradients(model)


def clip_value(run: Run, model: Any):
    """Clip every element by torch's `clip_grad_value_`."""
    run.backward(model)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return run.gradients(model)


def clip_by_our_function(run: Run, model: Any):
    """Clip by `sl.clip_grad_norm_`, as a pipeline needs."""
    run.backward(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1) if run.alone else sl.clip_grad_norm_(model, 0.1)
    return norm, run.gradients(model)


@own_part("pp", ONE_STAGE)
def clip_by_hand(run: Run, model: Any):
    """Sum the squares of all gradients by hand, and scale them."""
    run.backward(model)
    norm = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
    for p in model.parameters():
        p.grad.mul_(0.1 / norm)
    return norm, run.gradients(model)


@own_part("pp", ONE_STAGE)
def clip_by_stacked_norms(run: Run, model: Any):
    """Stack the norms of all gradients, and scale by their norm."""
    run.backward(model)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_(0.1 / norm)
    return norm, run.gradients(model)


def clip_adaptively(run: Run, model: Any):
    """Clip each gradient by the norm of its weight, as for NFNets."""
    run.backward(model)
    for p in model.parameters():
        limit = 0.01 * p.detach().norm().clamp(min=1e-3)
        norm = p.grad.norm()
        if norm > limit:
            p.grad.mul_(limit / norm)
    return run.gradients(model)


def add_noise_to_gradients(run: Run, model: Any):
    """Add noise to gradients, drawn alike on all ranks."""
    run.backward(model)
    for name, p in model.named_parameters():
        draw = torch.Generator().manual_seed(len(name))
        p.grad += 0.01 * torch.randn(p.shape, generator=draw, dtype=p.dtype)
    return run.gradients(model)


def look_for_what_is_not_finite(run: Run, model: Any):
    """Look for gradients that are not finite, and step if there are none."""
    optimizer = run.optimizer(model)
    run.backward(model)
    if all(torch.isfinite(p.grad).all() for p in model.parameters()):
        optimizer.step()
    return run.weights(model)


def drop_what_is_not_finite(run: Run, model: Any):
    """Replace what is not finite in gradients by `nan_to_num_`."""
    run.backward(model)
    for p in model.parameters():
        p.grad.nan_to_num_(0.0)
    return run.gradients(model)


@refused_on_some_ranks(
    "zero(1), zero(2), zero(3), fsdp x tp", "compute it on all ranks, and print it on one", alone=True
)
@broken("tp", "gloo ends the process where collectives of other sizes meet, as under torch's DTensor", alone=True)
def read_norms_on_one_rank(run: Run, model: Any):
    """Print the norm of every gradient on the first rank only, and train on."""
    run.backward(model)
    if run.rank == 0:
        for p in model.parameters():
            float(p.grad.norm())
    return run.trained(model)


# --- hooks ------------------------------------------------------------------------------------------------------------


@refused("tp, zero(3), fsdp x tp", "Register them after shard_model")
def hook_before_sharding(run: Run):
    """Hook a parameter's gradient before sharding."""
    model = run.model()
    model.head.weight.register_hook(lambda grad: grad * 2)
    model = run.shard(model)
    run.backward(model)
    return run.gradients(model)


@everywhere
def hooks_that_scale(run: Run, model: Any):
    """Scale gradients by hooks of parameters, over two passes."""
    for p in model.parameters():
        p.register_hook(lambda grad: grad * 3)
    run.backward(model)
    run.backward(model, 1)
    return run.gradients(model)


@as_ddp("replicate, zero(1), zero(2)", "a hook sees the gradient of its own rank, of which the mean is taken later")
@as_microbatches("a hook sees the gradient of each microbatch")
def hook_that_clips(run: Run, model: Any):
    """Clamp gradients by hooks of parameters."""
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    run.backward(model)
    return run.gradients(model)


@as_ddp("replicate, zero(1), zero(2)", "a hook sees the gradient of its own rank, of which the mean is taken later")
@as_microbatches("a hook sees the gradient of each microbatch")
def hook_that_reads(run: Run, model: Any):
    """Record gradients by hooks of parameters."""
    seen: dict[str, Any] = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda grad, name=name: seen.update({name: grad.detach().clone()}))
    run.backward(model)
    return seen


@own_part("pp", OTHER_STAGE)
def hook_that_is_removed(run: Run, model: Any):
    """Remove a hook of a parameter between two passes."""
    calls: list[int] = []
    handle = model.stem.bias.register_hook(lambda grad: -grad)
    model.head.weight.register_hook(lambda grad: calls.append(1))
    run.loss(model).backward()
    handle.remove()
    run.loss(model, 1).backward()
    return len(calls), run.gradients(model)


@as_ddp("replicate, zero(1), zero(2)", "a hook sees the gradient of its own rank, of which the mean is taken later")
def hook_after_accumulation(run: Run, model: Any):
    """Read `p.grad` in `register_post_accumulate_grad_hook`."""
    norms: dict[str, Any] = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: norms.update({name: p.grad.detach().clone()}))
    run.backward(model)
    return norms


@as_microbatches("a hook sees the gradient of each microbatch")
def hook_after_accumulation_that_scales(run: Run, model: Any):
    """Scale `p.grad` in place in `register_post_accumulate_grad_hook`."""
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_halve)
    run.backward(model)
    return run.gradients(model)


def _halve(p: torch.Tensor) -> None:
    p.grad.mul_(0.5)


@everywhere
def hook_on_activations(run: Run, model: Any):
    """Scale the gradient of an activation by a hook of the tensor."""
    model.blocks[0].register_forward_hook(lambda _m, _args, out: out.register_hook(lambda grad: grad * 2) and None)
    run.backward(model)
    return run.gradients(model)


@refused_in_pipelines
def hook_on_the_output(run: Run, model: Any):
    """Scale the gradient of the model's output by a hook of the tensor."""
    out = model(run.batch())
    out.register_hook(lambda grad: grad * 2)
    out.square().mean().backward()
    return run.gradients(model)


@everywhere
@refused_in_pipelines
def retain_the_gradient_of_an_activation(run: Run, model: Any):
    """Keep the gradient of an activation by `retain_grad`."""
    kept: list[Any] = []

    def keep(_module: Any, _args: Any, out: torch.Tensor) -> None:
        out.retain_grad()
        kept.append(out)

    model.blocks[0].register_forward_hook(keep)
    run.loss(model).backward()
    return run.rows(kept[0].grad / run.data_ranks)


@everywhere
@refused_in_pipelines
def full_backward_hook(run: Run, model: Any):
    """Record what `register_full_backward_hook` of modules is given."""
    norms: dict[str, Any] = {}

    def record(name: str) -> Any:
        return lambda _m, _inputs, outputs: norms.update({name: run.rows(outputs[0] / run.data_ranks)})

    for i, block in enumerate(model.blocks):
        block.register_full_backward_hook(record(f"block {i}"))
    run.loss(model).backward()
    return norms


@everywhere
@refused_in_pipelines
def full_backward_hook_of_a_split_layer(run: Run, model: Any):
    """Record what `register_full_backward_hook` of a linear layer is given."""
    seen: dict[str, Any] = {}
    model.blocks[0].down.register_full_backward_hook(
        lambda _m, inputs, outputs: seen.update(
            {"in": run.rows(inputs[0] / run.data_ranks), "out": run.rows(outputs[0] / run.data_ranks)}
        )
    )
    run.loss(model).backward()
    return seen


def full_backward_hook_that_scales(run: Run, model: Any):
    """Scale the gradient of a module's input by `register_full_backward_hook`."""
    model.blocks[1].register_full_backward_hook(lambda _m, inputs, _outputs: (inputs[0] * 2,))
    run.backward(model)
    return run.gradients(model)


def full_backward_pre_hook(run: Run, model: Any):
    """Scale the gradient of a module's output by `register_full_backward_pre_hook`."""
    model.blocks[1].register_full_backward_pre_hook(lambda _m, outputs: (outputs[0] * 2,))
    run.backward(model)
    return run.gradients(model)


@refused_in_pipelines
def multi_grad_hook(run: Run, model: Any):
    """Count calls of `register_multi_grad_hook` over all parameters."""
    calls: list[int] = []
    parameters = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.graph.register_multi_grad_hook(
        parameters, lambda grads: calls.append(sum(grad is not None for grad in grads))
    )
    run.loss(model).backward()
    run.loss(model, 1).backward()
    return calls


@everywhere
@refused_in_pipelines
def saved_tensor_hooks(run: Run, model: Any):
    """Pack saved tensors into copies by `saved_tensors_hooks`."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        loss = run.loss(model)
    loss.backward()
    return run.gradients(model)


@everywhere
@refused_in_pipelines
def save_on_cpu(run: Run, model: Any):
    """Keep activations on the host by `torch.autograd.graph.save_on_cpu`."""
    with torch.autograd.graph.save_on_cpu():
        loss = run.loss(model)
    loss.backward()
    return run.gradients(model)


# --- autograd ---------------------------------------------------------------------------------------------------------


@everywhere
@refused_in_pipelines
def autograd_grad(run: Run, model: Any):
    """Take gradients by `autograd.grad`, which leaves `p.grad` alone."""
    grads = torch.autograd.grad(run.loss(model), list(model.parameters()))
    return list(grads), run.gradients(model)


@refused_in_pipelines
def autograd_grad_of_some(run: Run, model: Any):
    """Take the gradients of some weights by `autograd.grad`, then all by `backward`."""
    (grad,) = torch.autograd.grad(run.loss(model), [model.blocks[0].norm.weight])
    run.loss(model).backward()
    return grad, run.gradients(model)


@refused("zero(1), zero(2)", "Run the last backward pass before a step outside of no_sync")
@refused_in_pipelines
def autograd_grad_assigned(run: Run, model: Any):
    """Assign what `autograd.grad` returns to `p.grad`, and step."""
    optimizer = run.optimizer(model)
    for i in range(2):
        grads = torch.autograd.grad(run.loss(model, i), list(model.parameters()))
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
        optimizer.step()
    return run.weights(model)


@as_ddp("replicate, zero(1), zero(2)", "what autograd.grad returns of a part that is called alone is not reduced")
@refused_on_some_ranks("pp", " is on stage 0, and not on this rank")
def autograd_grad_unused(run: Run, model: Any):
    """Take gradients by `autograd.grad(allow_unused=True)` where some are unused."""
    loss = model.stem(run.batch()).square().mean()
    grads = torch.autograd.grad(loss, [model.stem.weight, model.head.weight], allow_unused=True)
    return list(grads)


@refused_in_pipelines
def autograd_grad_of_inputs(run: Run, model: Any):
    """Take the gradient of the inputs by `autograd.grad`."""
    x = run.batch().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), [x])
    return run.rows(grad)


@refused_in_pipelines
def backward_of_inputs(run: Run, model: Any):
    """Go back to some parameters by `backward(inputs=)`."""
    run.loss(model).backward(inputs=[model.head.weight, model.stem.bias])
    return run.gradients(model)


@refused_in_pipelines
def autograd_backward(run: Run, model: Any):
    """Go back by `torch.autograd.backward` with gradients of outputs."""
    out = model(run.batch())
    torch.autograd.backward([out], [torch.ones_like(out) / out.numel()])
    return run.gradients(model)


@refused_in_pipelines
def backward_with_a_gradient(run: Run, model: Any):
    """Go back by `out.backward(gradient)`."""
    out = model(run.batch())
    out.backward(out.detach() / out.numel())
    return run.gradients(model)


@everywhere
@refused("compiled", "of whose graph torch has no second derivative")
@refused_in_pipelines
def gradient_penalty(run: Run, model: Any):
    """Penalise gradients of inputs, under double backward."""
    x = run.batch().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)
    (run.loss(model) + grad.square().mean()).backward()
    return run.gradients(model)


@refused_in_pipelines
def gradient_penalty_of_norms(run: Run, model: Any):
    """Train a critic with the penalty of WGAN-GP."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(2):
        optimizer.zero_grad()
        x = run.batch(i).requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out, [x], torch.ones_like(out), create_graph=True)
        (out.mean() + 10 * (grad.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
    return run.weights(model)


@everywhere
@refused("compiled", "of whose graph torch has no second derivative")
@refused(
    "zero(3), fsdp x tp",
    "its second derivatives cannot be computed. To compute them, keep it full between steps: zero(2)",
)
@refused_in_pipelines
def penalty_on_gradients_of_weights(run: Run, model: Any):
    """Penalise gradients of weights, under double backward."""
    grads = torch.autograd.grad(run.loss(model), list(model.parameters()), create_graph=True)
    (run.loss(model) + torch.stack([grad.square().sum() for grad in grads]).sum()).backward()
    return run.gradients(model)


@refused(
    "zero(3), fsdp x tp",
    "its second derivatives cannot be computed. To compute them, keep it full between steps: zero(2)",
)
@refused_in_pipelines
def inner_step_of_maml(run: Run, model: Any):
    """Take an inner step by hand with `create_graph=True`, and go back through it."""
    names = [name for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(run.loss(model), list(model.parameters()), create_graph=True)
    inner = {n: p - 0.1 * g for n, p, g in zip(names, model.parameters(), grads, strict=True)}
    torch.func.functional_call(model, inner, (run.batch(1),)).square().mean().backward()
    return run.gradients(model)


@refused(
    "zero(3), fsdp x tp",
    "its second derivatives cannot be computed. To compute them, keep it full between steps: zero(2)",
)
@refused_in_pipelines
def hessian_vector_product(run: Run, model: Any):
    """Take a Hessian-vector product by double backward."""
    parameters = list(model.parameters())
    grads = torch.autograd.grad(run.loss(model), parameters, create_graph=True)
    dot = sum((grad * p.detach()).sum() for grad, p in zip(grads, parameters, strict=True))
    return list(torch.autograd.grad(dot, parameters))


@everywhere
@refused_in_pipelines
def retain_graph(run: Run, model: Any):
    """Go back twice through one graph by `retain_graph=True`."""
    loss = run.loss(model)
    loss.backward(retain_graph=True)
    loss.backward()
    return run.gradients(model)


@refused_in_pipelines
def several_losses_of_one_forward(run: Run, model: Any):
    """Go back from two losses of one forward, one after the other."""
    out = model(run.batch())
    out.mean().backward(retain_graph=True)
    out.square().mean().backward()
    return run.gradients(model)


@refused_in_pipelines
def several_losses_at_once(run: Run, model: Any):
    """Go back from two losses of one forward by one call of `torch.autograd.backward`."""
    out = model(run.batch())
    torch.autograd.backward([out.mean(), out.square().mean()])
    return run.gradients(model)


@refused_in_pipelines
def two_forwards_one_backward(run: Run, model: Any):
    """Go back once from the losses of two forwards."""
    (run.loss(model) + run.loss(model, 1)).backward()
    return run.gradients(model)


@everywhere
@refused_in_pipelines
def two_forwards_and_backwards_in_the_other_order(run: Run, model: Any):
    """Go back from two forwards in the other order."""
    first, second = run.loss(model), run.loss(model, 1)
    second.backward()
    first.backward()
    return run.gradients(model)


@refused_in_pipelines
def forward_under_no_grad_between(run: Run, model: Any):
    """Evaluate under `no_grad` between a forward and its backward."""
    loss = run.loss(model)
    with torch.no_grad():
        between = run.mean(run.loss(model, 1))
    loss.backward()
    return between, run.gradients(model)


@refused_in_pipelines
def forward_without_backward(run: Run, model: Any):
    """Do a forward that no backward follows, and train on."""
    run.loss(model)
    run.loss(model, 1)
    return run.trained(model)


@refused_in_pipelines
def backward_through_a_freed_graph(run: Run, model: Any):
    """Go back twice through one graph, which raises, and train on."""
    loss = run.loss(model)
    loss.backward()
    raised = _raises(lambda: loss.backward())
    model.zero_grad()
    return raised, run.trained(model)


@refused_in_pipelines
def backward_through_an_old_graph(run: Run, model: Any):
    """Go back through a graph from before a step, which raises, and train on."""
    optimizer = run.optimizer(model)
    old = run.loss(model, 5)
    run.train(model, optimizer, 1)
    raised = _raises(lambda: old.backward())
    return raised, run.trained(model, optimizer, 1, start=1)


@refused_in_pipelines
def loss_kept_over_steps(run: Run, model: Any):
    """Sum losses with their graphs over steps, for a log."""
    optimizer, total = run.optimizer(model), torch.zeros((), dtype=torch.float64)
    for i in range(3):
        optimizer.zero_grad()
        loss = run.loss(model, i)
        total = total + loss
        loss.backward()
        optimizer.step()
    return run.mean(total), run.weights(model)


@own_part("pp", CUT_GRAPH)
def detach_in_the_middle(run: Run, model: Any):
    """Stop the gradient in the middle of the model by `detach`."""
    model.blocks[1].register_forward_pre_hook(lambda _module, args: (args[0].detach(),))
    run.backward(model)
    return run.gradients(model)


@refused_on_some_ranks("pp", " is on stage 0, and not on this rank")
def no_gradient_for_the_last_layer(run: Run, model: Any):
    """Take a loss of a part of the model; the rest has no gradient."""
    model.blocks[0](model.stem(run.batch())).square().mean().backward()
    return run.gradients(model)


@everywhere
@refused_in_pipelines
def undefined_gradient(run: Run, model: Any):
    """Go back through a function that gives no gradient, as `torch.linalg.norm(p, 0)` does."""
    loss = run.loss(model) + torch.linalg.norm(model.blocks[0].norm.weight, 0)
    loss.backward()
    return run.gradients(model)


@refused_on_some_ranks("pp", " is on stage 0, and not on this rank")
def undefined_gradient_alone(run: Run, model: Any):
    """Go back through `torch.linalg.norm(p, 0)` and through nothing else of this parameter."""
    loss = run.loss(lambda x: model.stem(x)) + torch.linalg.norm(model.head.bias, 0)
    loss.backward()
    return run.gradients(model)


@refused_in_pipelines
def function_that_returns_none(run: Run, model: Any):
    """Go back through an `autograd.Function` that returns None."""

    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    model.blocks[1].register_forward_pre_hook(lambda _module, args: (Stops.apply(args[0]),))
    run.loss(model).backward()
    return run.gradients(model)


# --- weights that other functions are given ---------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """Multiplies by a weight, as fused losses and kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class _Reads(Net):
    """Gives the head's weight to another function than the head's."""

    def __init__(self, multiply: Any) -> None:
        super().__init__()
        self.multiply = multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.multiply(x, self.head.weight)


def _reads(run: Run, multiply: Any) -> Any:
    torch.manual_seed(0)
    model = run.shard(_Reads(multiply).double())
    run.loss(model).backward()
    return run.gradients(model)


@everywhere
@refused_in_pipelines
def give_a_weight_to_an_autograd_function(run: Run):
    """Give a layer's weight to an `autograd.Function`, as fused losses do."""
    return _reads(run, _Product.apply)


@everywhere
@refused_in_pipelines
def give_a_weight_to_reentrant_checkpointing(run: Run):
    """Give a layer's weight to `checkpoint(use_reentrant=True)`."""
    return _reads(run, functools.partial(checkpoint, F.linear, use_reentrant=True))


# --- exceptions -------------------------------------------------------------------------------------------------------


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


def _raises(act: Any) -> bool:
    try:
        act()
    except sl.errors.ShardlibError:
        raise
    except Exception:
        return True
    return False


def _raise(*_args: Any) -> None:
    raise ValueError("no")


@everywhere
@refused_in_pipelines
def exception_in_forward(run: Run, model: Any):
    """Catch an exception of a forward, and train on."""
    handle = model.blocks[1].register_forward_pre_hook(_raise)
    raised = _raises(lambda: run.loss(model))
    handle.remove()
    return raised, run.trained(model)


@refused_in_pipelines
def exception_in_forward_after_a_step(run: Run, model: Any):
    """Catch an exception of a forward between two steps."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    handle = model.blocks[1].up.register_forward_hook(_raise)
    raised = _raises(lambda: run.loss(model, 7))
    handle.remove()
    return raised, run.trained(model, optimizer, 1, start=1)


@everywhere
@refused_in_pipelines
def exception_in_backward(run: Run, model: Any):
    """Catch an exception of a backward, clear gradients, and train on."""
    handle = model.blocks[0].register_forward_hook(lambda _m, _args, out: _Raises.apply(out))
    raised = _raises(lambda: run.loss(model).backward())
    handle.remove()
    model.zero_grad()
    return raised, run.trained(model)


@noticed("replicate, zero(1), zero(2), zero(3), fsdp x tp", "Ranks do different things:")
@refused_on_some_ranks("tp", "The ranks waited for one another", alone=True)
@refused_in_pipelines
def exception_in_backward_on_one_rank(run: Run, model: Any):
    """Catch an exception of a backward on one rank only, as out of memory, and train on."""
    handle = model.blocks[0].register_forward_hook(lambda _m, _args, out: _Raises.apply(out))
    if run.rank != 0:
        handle.remove()
    _raises(lambda: run.loss(model).backward())
    handle.remove()
    model.zero_grad()
    return run.trained(model)


@refused_on_some_ranks("pp", "Call shardlib.pipeline_step")
def exception_in_a_gradient_hook(run: Run, model: Any):
    """Catch an exception of a parameter's hook, clear gradients, and train on."""
    handle = model.blocks[0].up.weight.register_hook(_raise)
    raised = _raises(lambda: run.loss(model).backward())
    handle.remove()
    model.zero_grad()
    return raised, run.trained(model)


@refused_in_pipelines
def exception_under_no_sync(run: Run, model: Any):
    """Catch an exception of a forward under `sl.no_sync`, and train on."""

    def act() -> None:
        with run.no_sync(model):
            run.loss(model).backward()
            _raise()

    raised = _raises(act)
    model.zero_grad()
    return raised, run.trained(model)


@refused_in_pipelines
def exception_for_a_wrong_shape(run: Run, model: Any):
    """Catch the exception for a batch of a wrong shape, and train on."""
    raised = _raises(lambda: model(torch.zeros(4, 5, dtype=torch.float64)))
    return raised, run.trained(model)


@refused_in_pipelines
def exception_in_the_step(run: Run, model: Any):
    """Catch an exception of `optimizer.step()`, and train on with another optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.loss(model).backward()
    optimizer.param_groups[0]["lr"] = "wrong"
    raised = _raises(optimizer.step)
    return raised, run.trained(model)


@everywhere
def anomaly_mode(run: Run, model: Any):
    """Train under `detect_anomaly`."""
    with torch.autograd.detect_anomaly(check_nan=True):
        return run.trained(model)


# --- kept, and after exceptions ---------------------------------------------------------------------------------------


def keep_gradients(run: Run, model: Any):
    """Keep the gradients of one backward while the next ones run, as for PCGrad."""
    kept = []
    for i in range(3):
        run.backward(model, i)
        kept.append({name: p.grad for name, p in model.named_parameters()})
        model.zero_grad()
    return [{name: grad.detach().clone() for name, grad in grads.items()} for grads in kept]


def project_gradients(run: Run, model: Any):
    """Project the gradients of two losses on each other, and step on their sum, as PCGrad does."""
    optimizer = run.optimizer(model)
    kept = []
    for i in range(2):
        optimizer.zero_grad()
        run.backward(model, i)
        kept.append([p.grad for p in model.parameters()])
    for p, a, b in zip(model.parameters(), *kept, strict=True):
        p.grad = a + b - 0.5 * (a * b).sum() * a
    optimizer.step()
    return run.weights(model)


@broken("pp", "the sum of two steps is a new tensor: p.grad is right, and a tensor that was kept stays as it was")
def gradients_accumulate_in_place(run: Run, model: Any):
    """Keep the gradient of a parameter, which the next backward adds to."""
    run.backward(model)
    kept = {name: p.grad for name, p in model.named_parameters()}
    run.backward(model, 1)
    return [kept[name] is p.grad for name, p in model.named_parameters()].count(False), run.gradients(model)


class _Raise(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ArithmeticError("in backward")


@refused_in_pipelines
def accumulate_around_a_backward_that_raises(run: Run, model: Any):
    """Accumulate two backward passes, between which one raises before it has made a gradient."""
    run.backward(model)
    raised = _raises(lambda: _Raise.apply(run.loss(model, 1)).backward())
    before = run.gradients(model)
    run.backward(model, 2)
    return raised, before, run.gradients(model)


@refused_in_pipelines
@broken("zero(3), fsdp x tp", "what a pass that raised has made of parameters that are stored in shards is dropped")
def accumulate_after_a_backward_that_raises_late(run: Run, model: Any):
    """Accumulate to what a backward has made before it raised."""
    handle = model.blocks[0].register_forward_hook(lambda _module, _args, out: _Raise.apply(out))
    loss = run.loss(model)
    handle.remove()
    raised = _raises(loss.backward)
    run.backward(model, 1)
    return raised, run.gradients(model)


@refused_in_pipelines
def train_after_a_backward_that_raises_late(run: Run, model: Any):
    """Clear gradients after a backward that raised when it had made some of them, and train on."""
    handle = model.blocks[0].register_forward_hook(lambda _module, _args, out: _Raise.apply(out))
    loss = run.loss(model)
    handle.remove()
    raised = _raises(loss.backward)
    model.zero_grad()
    return raised, run.trained(model)


# --- OptimizerWrapper -------------------------------------------------------------------------------------------------


def _in_passes(run: Run, *, limit: float, counts: bool = False, by_value: bool = False) -> Any:
    """Two steps of three passes each, with clipping in the loop of passes, as README writes it."""
    model = run.shard(run.model(), transforms=(sl.accumulate(3),))
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = None if run.alone else sl.OptimizerWrapper(inner, model)
    clip = nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_
    norms = []
    for step in range(2):
        losses = []
        for i in range(3 * step, 3 * step + 3):
            batch = run.batch(i)
            rows = model(batch).square().mean(1)
            tokens = (batch[:, 0] > -0.5).sum() if counts else None
            losses.append((rows.sum() if counts else rows.mean(), tokens))
            if optimizer is None:
                continue
            optimizer.zero_grad()
            optimizer.backward(losses[-1] if counts else losses[-1][0])
            norm = optimizer.clip_grad_value_(limit) if by_value else optimizer.clip_grad_norm_(limit)
            optimizer.step()
        if optimizer is None:
            total = sum(loss for loss, _ in losses) / (sum(count for _, count in losses) if counts else 3)
            inner.zero_grad()
            total.backward()
            norm = clip(model.parameters(), limit)
            inner.step()
        norms.append(None if by_value else norm)
    return norms, run.weights(model)


@everywhere
@refused_in_pipelines
def clip_in_every_pass(run: Run):
    """Clip the norm in the loop of `accumulate(3)`, in every pass, where it binds."""
    return _in_passes(run, limit=0.05)


@everywhere
@refused_in_pipelines
def clip_values_in_every_pass(run: Run):
    """Clip the values in the loop of `accumulate(3)`, in every pass, where it binds."""
    return _in_passes(run, limit=0.01, by_value=True)


@refused_in_pipelines
def measure_the_norm_in_every_pass(run: Run):
    """Clip the norm to what it never reaches in the loop of `accumulate(3)`, in every pass."""
    return _in_passes(run, limit=1e9)


@refused_in_pipelines
def count_tokens_in_every_pass(run: Run):
    """Clip the norm to what it never reaches, in every pass of `accumulate(3)`, of losses with their counts."""
    return _in_passes(run, limit=1e9, counts=True)


@everywhere
@refused_in_pipelines
def count_tokens_and_clip_in_every_pass(run: Run):
    """Clip the norm where it binds, in every pass of `accumulate(3)`, of losses with their counts."""
    return _in_passes(run, limit=0.05, counts=True)
