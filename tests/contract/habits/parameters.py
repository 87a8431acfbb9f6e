"""Parameters and their data."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.contract.declare import (
    OTHER_STAGE,
    as_microbatches,
    everywhere,
    own_part,
    refused,
    refused_in_pipelines,
    refused_on_some_ranks,
)
from tests.contract.harness import Block, Run


@everywhere
def train_two_steps(run: Run, model: Any):
    """Train two steps."""
    return run.trained(model)


# --- data -------------------------------------------------------------------------------------------------------------


@everywhere
def assign_data(run: Run, model: Any):
    """Give every `p.data` a new tensor, and train."""
    for p in model.parameters():
        p.data = p.data * 2
    return run.trained(model)


def assign_data_between_steps(run: Run, model: Any):
    """Give every `p.data` a new tensor between two steps of one optimizer."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    for p in model.parameters():
        p.data = p.data.clone() * 0.5
    return run.trained(model, optimizer, 1, start=1)


def edit_data_in_place(run: Run, model: Any):
    """Write into `p.data` in place, and train."""
    for p in model.parameters():
        p.data.mul_(0.5)
        p.data += 0.1
    return run.trained(model)


@everywhere
def edit_weights_in_place(run: Run, model: Any):
    """Scale and shift weights in place under `no_grad`, between two steps."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5).add_(0.1)
    return run.trained(model, optimizer, 1, start=1)


def fill_weights(run: Run, model: Any):
    """Fill weights by `fill_` and `zero_`."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.zero_() if name.endswith("bias") else p.fill_(0.3)
    return run.trained(model)


@everywhere
def write_rows_by_index(run: Run, model: Any):
    """Write into some rows and columns of weights by index."""
    with torch.no_grad():
        for block in model.blocks:
            if block.up.weight is not None:
                block.up.weight[3] = 0.5
                block.up.weight[:, 1] *= 2
                block.down.weight[2:4, 5] = -1.0
    return run.trained(model)


@everywhere
def write_into_views(run: Run, model: Any):
    """Write into rows, columns, slices and other views of weights."""
    weight = model.blocks[0].up.weight
    with torch.no_grad():
        weight[1].mul_(2)
        weight[:, 2].zero_()
        weight[3:9].add_(0.5)
        weight.data[-1].fill_(0.25)
        weight[:2] = torch.ones(2, 8, dtype=torch.float64)
        weight.t()[0].neg_()
        weight.view(-1)[20:25].mul_(3)
        weight.clamp_min_(-0.2)
    return run.trained(model)


@everywhere
def write_by_mask(run: Run, model: Any):
    """Set negative weights to zero by a mask."""
    with torch.no_grad():
        for p in model.parameters():
            p[p < 0] = 0
    return run.trained(model)


def masked_fill_weights(run: Run, model: Any):
    """Set negative weights to zero by `masked_fill_`."""
    with torch.no_grad():
        for p in model.parameters():
            p.masked_fill_(p < 0, 0.0)
    return run.trained(model)


def clamp_weights_after_each_step(run: Run, model: Any):
    """Clamp weights after each step, as for Wasserstein critics."""
    optimizer, losses = run.optimizer(model), []
    for i in range(2):
        losses += run.train(model, optimizer, 1, start=i)
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)
    return losses, run.weights(model)


def copy_from_another_model(run: Run, model: Any):
    """Copy weights of a plain model into the sharded one by `copy_`."""
    torch.manual_seed(5)
    other = dict(copy.deepcopy(run.model()).named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(other[name] * 2)
    return run.trained(model)


def copy_into_data_from_another_model(run: Run, model: Any):
    """Copy weights of a plain model by `p.data.copy_(q.data)`."""
    other = dict(run.model().named_parameters())
    for name, p in model.named_parameters():
        p.data.copy_(other[name].data + 0.1)
    return run.trained(model)


def assign_plain_data(run: Run, model: Any):
    """Give every `p.data` the whole tensor of a plain model."""
    other = dict(run.model().named_parameters())
    for name, p in model.named_parameters():
        p.data = other[name].data + 0.1
    return run.trained(model)


def parameters_to_vector(run: Run, model: Any):
    """Flatten all weights by `parameters_to_vector`."""
    return run.stages(nn.utils.parameters_to_vector(model.parameters()))


def vector_to_parameters(run: Run, model: Any):
    """Write a flat vector into the weights by `vector_to_parameters`, and train."""
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    return run.trained(model)


def vector_to_parameters_after_a_forward(run: Run, model: Any):
    """Write a flat vector into the weights after a step, and train on."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    return run.trained(model, optimizer, 1, start=1)


def swap_data_of_two_parameters(run: Run, model: Any):
    """Swap the data of two parameters of one shape."""
    a, b = model.blocks[0].norm, model.blocks[0].down
    if a.bias is not None:
        a.bias.data, b.bias.data = b.bias.data, a.bias.data
    return run.trained(model)


def keep_data_of_slow_weights(run: Run, model: Any):
    """Keep the former `p.data` as slow weights, as lookahead does, and give parameters a copy."""
    slow = {}
    for name, p in model.named_parameters():
        slow[name] = p.data
        p.data = p.data.clone()
    trained = run.trained(model)
    return {name: value.detach().clone() for name, value in slow.items()}, trained


@own_part("pp", OTHER_STAGE, apart=True)
def read_single_elements(run: Run, model: Any):
    """Read single weights by index and `item()`."""
    return [model.blocks[0].up.weight[9, 3].item(), model.blocks[0].down.weight[3, 9].item()]


def read_numbers_of_weights(run: Run, model: Any):
    """Read shapes, numbers of elements, sums, norms and extremes of weights."""
    return {
        name: [tuple(p.shape), p.numel(), p.dim(), p.sum(), p.norm(), p.abs().max(), float(p.mean()), p.std()]
        for name, p in model.named_parameters()
    }


def read_numpy(run: Run, model: Any):
    """Read weights as numpy arrays."""
    return {name: torch.from_numpy(p.detach().cpu().numpy().copy()) for name, p in model.named_parameters()}


def read_lists(run: Run, model: Any):
    """Read biases by `tolist()`."""
    return {name: p.tolist() for name, p in model.named_parameters() if name.endswith("bias")}


def count_parameters(run: Run, model: Any):
    """Count the parameters that train."""
    return run.stages(torch.tensor([p.numel() for p in model.parameters() if p.requires_grad]))


@everywhere
@refused_in_pipelines
def l2_penalty(run: Run, model: Any):
    """Add a penalty on all weights to the loss."""
    loss = run.loss(model) + 0.01 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    return run.mean(loss), run.gradients(model)


@refused_in_pipelines
def l1_penalty_of_some(run: Run, model: Any):
    """Add the absolute values of some weights to the loss."""
    loss = run.loss(model) + 0.01 * sum(p.abs().sum() for n, p in model.named_parameters() if "up" in n)
    loss.backward()
    return run.mean(loss), run.gradients(model)


def penalty_alone(run: Run, model: Any):
    """Go back through a penalty on weights, without a forward of the model."""
    sum(p.square().sum() for p in model.parameters()).backward()
    return run.gradients(model)


@refused_in_pipelines
def orthogonality_penalty(run: Run, model: Any):
    """Add the distance of a weight's Gram matrix from the identity."""
    w = model.blocks[0].up.weight
    loss = run.loss(model) + (w.T @ w - torch.eye(8, dtype=torch.float64)).square().sum()
    loss.backward()
    return run.gradients(model)


@refused_in_pipelines
def elastic_penalty_to_first_weights(run: Run, model: Any):
    """Keep clones of the first weights, and penalise the distance from them."""
    first = [p.detach().clone() for p in model.parameters()]
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    optimizer.zero_grad()
    loss = run.loss(model, 1) + sum((p - q).square().sum() for p, q in zip(model.parameters(), first, strict=True))
    loss.backward()
    optimizer.step()
    return run.mean(loss), run.weights(model)


# --- initial values ---------------------------------------------------------------------------------------------------


def apply_constant_init(run: Run, model: Any):
    """Initialise by `model.apply` with constants after sharding."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)
            nn.init.zeros_(module.bias)

    model.apply(init)
    return run.trained(model)


def apply_random_init_before(run: Run):
    """Initialise by `model.apply` with random numbers before sharding."""
    model = run.model()
    model.apply(lambda m: nn.init.xavier_uniform_(m.weight) if isinstance(m, nn.Linear) else None)
    return run.trained(run.shard(model))


@own_part("pp", "a rank draws the random numbers of its own stages")
def apply_random_init_after(run: Run, model: Any):
    """Initialise by `model.apply` with random numbers after sharding; all ranks draw alike."""
    torch.manual_seed(1)
    model.apply(lambda m: nn.init.normal_(m.weight, std=0.2) if isinstance(m, nn.Linear) else None)
    return run.trained(model)


@own_part("pp", "a rank draws the random numbers of its own stages")
def reset_parameters(run: Run, model: Any):
    """Call `reset_parameters` of every module after sharding."""
    torch.manual_seed(1)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return run.trained(model)


def orthogonal_init(run: Run, model: Any):
    """Initialise a weight by `nn.init.orthogonal_` after sharding."""
    torch.manual_seed(1)
    nn.init.orthogonal_(model.blocks[0].up.weight)
    return run.trained(model)


def identity_init(run: Run, model: Any):
    """Initialise a weight by `nn.init.eye_` after sharding."""
    nn.init.eye_(model.blocks[0].up.weight)
    return run.trained(model)


# --- casts ------------------------------------------------------------------------------------------------------------


@refused("tp, replicate, zero(1), zero(2), zero(3), fsdp x tp, compiled", "Move and cast a model before shard_model")
@refused_in_pipelines
def cast_to_float(run: Run, model: Any):
    """Cast the sharded model by `.float()`, and train."""
    model = model.float()
    losses = []
    optimizer = run.optimizer(model)
    for i in range(2):
        optimizer.zero_grad()
        loss = model(run.batch(i).float()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(run.mean(loss))
    return losses, run.weights(model)


@refused("tp, replicate, zero(1), zero(2), zero(3), fsdp x tp, compiled", "Move and cast a model before shard_model")
@refused_in_pipelines
def cast_to_bfloat16(run: Run, model: Any):
    """Cast the sharded model by `.to(torch.bfloat16)`, and evaluate it."""
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        return run.rows(model(run.batch().bfloat16()))


@refused("tp, replicate, zero(1), zero(2), zero(3), fsdp x tp, compiled", "Move and cast a model before shard_model")
def cast_to_half(run: Run, model: Any):
    """Cast the sharded model by `.half()`, and read weights."""
    return run.weights(model.half())


@refused("tp, replicate, zero(1), zero(2), zero(3), fsdp x tp, compiled", "Move and cast a model before shard_model")
def cast_to_double(run: Run):
    """Shard in float32, and cast by `.double()` afterwards."""
    model = run.shard(run.model().float()).double()
    return run.trained(model)


@refused("tp, replicate, zero(1), zero(2), zero(3), fsdp x tp, compiled", "Move and cast a model before shard_model")
def cast_one_module(run: Run, model: Any):
    """Cast one module of the sharded model by `.float()`."""
    model.blocks[0].up.float()
    return {name: p.dtype for name, p in model.named_parameters()}


@refused("tp, replicate, zero(1), zero(2), zero(3), fsdp x tp, compiled", "Move and cast a model before shard_model")
@refused_in_pipelines
def cast_after_a_step(run: Run, model: Any):
    """Cast the sharded model between two steps to float32 and back."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    model.float()
    model.double()
    return run.outputs(model)


@refused_in_pipelines
def cast_before_sharding(run: Run):
    """Cast by `.float()` before sharding."""
    model = run.shard(run.model().float())
    out = model(run.batch().float())
    out.square().mean().backward()
    return run.rows(out), run.gradients(model)


# --- frozen and thawed ------------------------------------------------------------------------------------------------


def freeze_before_sharding(run: Run):
    """Freeze some parameters before sharding."""
    model = run.model()
    model.stem.requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)
    return run.trained(run.shard(model))


def freeze_after_sharding(run: Run, model: Any):
    """Freeze some parameters after sharding."""
    model.stem.requires_grad_(False)
    model.blocks[1].norm.requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    return run.trained(model), run.gradients(model)


@everywhere
def freeze_between_steps(run: Run, model: Any):
    """Freeze some parameters between two steps."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    for block in model.blocks:
        block.up.requires_grad_(False)
    return run.trained(model, optimizer, 1, start=1)


@everywhere
def thaw_between_steps(run: Run):
    """Freeze before sharding, and thaw between two steps."""
    model = run.model()
    model.blocks.requires_grad_(False)
    model = run.shard(model)
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    model.blocks.requires_grad_(True)
    return run.trained(model, optimizer, 1, start=1)


@everywhere
@refused("pp", " is on stage 0, and not on this rank")
def thaw_what_is_called_by_itself(run: Run, model: Any):
    """Thaw between two passes what is called by itself, as generators and discriminators are."""
    found = []
    for frozen in (True, False):
        model.stem.requires_grad_(not frozen)
        x = model.stem(run.batch())
        for block in model.blocks:
            x = block(x)
        model.head(x).square().mean().backward()
        found.append(run.gradients(model))
        model.zero_grad()
    return found


@own_part("pp", OTHER_STAGE, alone=True)
def freeze_everything_but_the_head(run: Run, model: Any):
    """Freeze everything but the head after sharding, and train the head."""
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return run.trained(model, optimizer)


@refused_in_pipelines
def freeze_all_and_train_an_input(run: Run, model: Any):
    """Freeze everything, and train the input, as for adversarial examples."""
    model.requires_grad_(False)
    x = run.batch().requires_grad_()
    model(x).square().sum().backward()
    return run.rows(x.grad)


def alternate_frozen_halves(run: Run, model: Any):
    """Train one half in odd steps and the other half in even ones."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for i in range(4):
        for j, block in enumerate(model.blocks):
            block.requires_grad_(i % 2 == j)
        losses += run.train(model, optimizer, 1, start=i)
    return losses, run.weights(model)


# --- other parameters and modules -------------------------------------------------------------------------------------


@everywhere
@own_part("pp", "if a parameter has several names, a stage uses the name in the first of its own modules that holds it")
def tie_before_sharding(run: Run):
    """Tie two weights before sharding."""
    model = run.model()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return run.trained(run.shard(model))


@refused_on_some_ranks("pp", "gets another place, and ", alone=True)
@refused("zero(3), fsdp x tp", "and another tensor stands in its place")
def tie_after_sharding(run: Run, model: Any):
    """Tie two weights after sharding."""
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return run.trained(model)


@refused("replicate, zero(1), zero(2), zero(3), fsdp x tp, pp", "is a new parameter, and ")
def untie_after_sharding(run: Run):
    """Tie two weights before sharding, and untie them after it."""
    model = run.model()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model = run.shard(model)
    model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight.detach().clone())
    return run.trained(model)


def replace_head_before_sharding(run: Run):
    """Replace the head before sharding."""
    model = run.model()
    model.head = nn.Linear(8, 2).double()
    return run.trained(run.shard(model))


@refused("replicate, zero(1), zero(2), zero(3), fsdp x tp, pp", "is a new parameter, and ")
def replace_head_after_sharding(run: Run, model: Any):
    """Replace the head after sharding, before the optimizer."""
    torch.manual_seed(1)
    model.head = nn.Linear(8, 2).double()
    return run.trained(model)


@refused("replicate, zero(1), zero(2), zero(3), fsdp x tp, pp", "is a new parameter, and ")
def replace_a_weight_after_sharding(run: Run, model: Any):
    """Assign a new `nn.Parameter` to a module after sharding."""
    torch.manual_seed(1)
    model.blocks[0].up.weight = nn.Parameter(torch.randn(16, 8, dtype=torch.float64))
    return run.trained(model)


@refused("replicate, zero(1), zero(2), zero(3), fsdp x tp, pp", "is a new parameter, and ")
def replace_a_weight_after_a_step(run: Run, model: Any):
    """Assign a new `nn.Parameter` to a module after a step, with a new optimizer."""
    run.train(model, steps=1)
    torch.manual_seed(1)
    model.blocks[0].up.weight = nn.Parameter(torch.randn(16, 8, dtype=torch.float64))
    return run.trained(model, start=1)


@everywhere
@refused("zero(3), fsdp x tp", "and another tensor stands in its place")
def remove_a_bias(run: Run, model: Any):
    """Set a bias to None after sharding."""
    model.blocks[0].up.bias = None
    return run.trained(model)


@everywhere
def replace_a_module_by_identity(run: Run, model: Any):
    """Replace a norm by `nn.Identity` after sharding."""
    model.blocks[0].norm = nn.Identity()
    return run.trained(model)


def delete_a_block(run: Run, model: Any):
    """Delete a block after sharding."""
    del model.blocks[1]
    return run.trained(model)


@refused("replicate, zero(1), zero(2), zero(3), fsdp x tp, pp", "is a new parameter, and ")
def append_a_block(run: Run, model: Any):
    """Append a block after sharding, before the optimizer."""
    torch.manual_seed(1)
    model.blocks.append(Block().double())
    return run.trained(model)


@refused("replicate, zero(1), zero(2), zero(3), fsdp x tp, pp", "is a new parameter, and ")
def add_a_parameter_before_the_optimizer(run: Run, model: Any):
    """Register a parameter after sharding, and use it by a hook, before the optimizer."""
    model.register_parameter("scale", nn.Parameter(torch.ones(4, dtype=torch.float64)))
    model.head.register_forward_hook(lambda _module, _args, out: out * model.scale)
    return run.trained(model)


@refused("replicate, zero(1), zero(2), zero(3), fsdp x tp, pp", "is a new parameter, and ")
def add_a_module_before_the_optimizer(run: Run, model: Any):
    """Add a module after sharding, called outside of the model, before the optimizer."""
    torch.manual_seed(1)
    model.extra = nn.Linear(4, 4).double()
    optimizer, losses = run.optimizer(model), []
    for i in range(2):
        optimizer.zero_grad()
        loss = model.extra(model(run.batch(i))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(run.mean(loss))
    return losses, run.weights(model)


@refused("replicate, zero(1), zero(2), zero(3), fsdp x tp, pp", "is a new parameter, and ")
def add_a_module_after_the_optimizer(run: Run, model: Any):
    """Add a module after a step, and give its parameters to the optimizer as a new group."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    torch.manual_seed(1)
    model.extra = nn.Linear(4, 4).double()
    optimizer.add_param_group({"params": model.extra.parameters()})
    optimizer.zero_grad()
    model.extra(model(run.batch(1))).square().mean().backward()
    optimizer.step()
    return run.weights(model)


def add_adapters_before_sharding(run: Run):
    """Freeze a model and add low-rank adapters before sharding."""
    model = run.model()
    model.requires_grad_(False)
    torch.manual_seed(1)
    for block in model.blocks:
        block.up = _Adapted(block.up)
    return run.trained(run.shard(model, {"up.linear": "colwise", "down": "rowwise"}))


@refused("replicate, zero(1), zero(2), zero(3), fsdp x tp, pp", "is a new parameter, and ")
def add_adapters_after_sharding(run: Run, model: Any):
    """Freeze a model and add low-rank adapters around its layers after sharding."""
    model.requires_grad_(False)
    torch.manual_seed(1)
    for block in model.blocks:
        block.up = _Adapted(block.up)
    return run.trained(model)


class _Adapted(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.a, self.b = nn.Linear(8, 2, bias=False).double(), nn.Linear(2, 16, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.b(self.a(x))


# --- parametrized -----------------------------------------------------------------------------------------------------


class _Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


class _Doubled(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return 2 * w


def parametrize_before(run: Run):
    """Register a parametrization before sharding."""
    model = run.model()
    parametrize.register_parametrization(model.blocks[0].up, "weight", _Doubled())
    return run.trained(run.shard(model, {"down": "rowwise"}))


@everywhere
@refused_on_some_ranks("pp", "gets another place, and ")
@refused("zero(3), fsdp x tp", "another tensor stands in its place since")
def parametrize_after(run: Run, model: Any):
    """Register a parametrization after sharding."""
    parametrize.register_parametrization(model.blocks[0].up, "weight", _Doubled())
    return run.trained(model)


@everywhere
def weight_norm_before(run: Run):
    """Apply `parametrizations.weight_norm` before sharding."""
    model = run.model()
    parametrizations.weight_norm(model.blocks[0].up)
    return run.trained(run.shard(model, {"down": "rowwise"}))


@refused("replicate, zero(1), zero(2), zero(3), fsdp x tp", "is a new parameter, and ")
@refused_on_some_ranks("pp", "is a new parameter, and ")
def weight_norm_after(run: Run, model: Any):
    """Apply `parametrizations.weight_norm` after sharding."""
    parametrizations.weight_norm(model.blocks[0].up)
    return run.trained(model)


def old_weight_norm_before(run: Run):
    """Apply the old `nn.utils.weight_norm`, that hooks a module, before sharding."""
    model = run.model()
    nn.utils.weight_norm(model.blocks[0].up)
    return run.trained(run.shard(model, {"down": "rowwise"}))


@everywhere
@refused("replicate, zero(1), zero(2), zero(3), fsdp x tp", "is a new parameter, and ")
@refused_on_some_ranks("pp", "is a new parameter, and ")
def old_weight_norm_after(run: Run, model: Any):
    """Apply the old `nn.utils.weight_norm` after sharding."""
    nn.utils.weight_norm(model.blocks[0].up)
    return run.trained(model)


@as_microbatches("each forward in training takes one power iteration")
def spectral_norm_before(run: Run):
    """Apply `parametrizations.spectral_norm` before sharding."""
    model = run.model()
    torch.manual_seed(1)
    parametrizations.spectral_norm(model.blocks[0].up)
    return run.trained(run.shard(model, {"down": "rowwise"}))


@refused("zero(3), fsdp x tp", "another tensor stands in its place since")
@refused_on_some_ranks("pp", "gets another place, and ")
def spectral_norm_after(run: Run, model: Any):
    """Apply `parametrizations.spectral_norm` after sharding."""
    torch.manual_seed(1)
    parametrizations.spectral_norm(model.blocks[0].up)
    return run.trained(model)


@as_microbatches("each forward in training takes one power iteration")
def old_spectral_norm_before(run: Run):
    """Apply the old `nn.utils.spectral_norm` before sharding."""
    model = run.model()
    torch.manual_seed(1)
    nn.utils.spectral_norm(model.blocks[0].up)
    return run.trained(run.shard(model, {"down": "rowwise"}))


def prune_before(run: Run):
    """Prune a layer by `prune.l1_unstructured` before sharding."""
    model = run.model()
    prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.5)
    return run.trained(run.shard(model, {"down": "rowwise"}))


@everywhere
@refused("zero(3), fsdp x tp", "another tensor stands in its place since")
@refused_on_some_ranks("pp", "gets another place, and ")
def prune_after(run: Run, model: Any):
    """Prune a layer by `prune.l1_unstructured` after sharding."""
    prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.5)
    return run.trained(model)


def prune_and_make_permanent(run: Run):
    """Prune a layer, make it permanent, and shard then."""
    model = run.model()
    prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.5)
    prune.remove(model.blocks[0].up, "weight")
    return run.trained(run.shard(model))


def mask_gradients_and_weights(run: Run, model: Any):
    """Keep pruned weights at zero by masks on weights after each step."""
    masks = {name: (p.detach() > 0).to(p.dtype) for name, p in model.named_parameters()}
    optimizer, losses = run.optimizer(model), []
    for i in range(2):
        losses += run.train(model, optimizer, 1, start=i)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.mul_(masks[name])
    return losses, run.weights(model)
