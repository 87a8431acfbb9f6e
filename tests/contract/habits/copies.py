"""Copies, state dicts, devices and dtypes."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

import shardlib as sl
from tests.contract.declare import OTHER_STAGE, OWN_STATE, everywhere, own_part, refused, refused_in_pipelines
from tests.contract.harness import Net, Run


def deepcopy_before_sharding(run: Run):
    """Copy the model by `deepcopy` before sharding, and shard the copy."""
    return run.trained(run.shard(copy.deepcopy(run.model())))


@everywhere
@refused_in_pipelines
def deepcopy_and_evaluate(run: Run, model: Any):
    """Copy the sharded model by `deepcopy`, and evaluate the copy."""
    run.train(model, steps=1)
    other = copy.deepcopy(model)
    run.train(model, steps=1, start=1)
    return run.outputs(other, 5), run.outputs(model, 5)


@everywhere
def deepcopy_and_train(run: Run, model: Any):
    """Copy the sharded model by `deepcopy`, and train the copy."""
    run.train(model, steps=1)
    other = copy.deepcopy(model)
    return run.trained(other, start=1), run.weights(model)


@everywhere
@refused_in_pipelines
def deepcopy_as_a_teacher(run: Run, model: Any):
    """Copy the sharded model as a frozen teacher, and distil from it."""
    teacher = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = run.optimizer(model)
    for i in range(2):
        optimizer.zero_grad()
        with torch.no_grad():
            target = teacher(run.batch(i)) * 2
        (model(run.batch(i)) - target).square().mean().backward()
        optimizer.step()
    return run.weights(model), run.weights(teacher)


@own_part("pp", OTHER_STAGE)
@refused("fsdp x tp", "was given DTensors on two meshes")
@refused("zero(3)", "that is stored in shards, and a plain tensor of shape")
def deepcopy_a_block(run: Run, model: Any):
    """Copy one block of the sharded model by `deepcopy`, and call the copy."""
    block = copy.deepcopy(model.blocks[0])
    with torch.no_grad():
        return run.rows(block(nn.functional.pad(run.batch(), (0, 2))))


@own_part("pp", OTHER_STAGE)
def deepcopy_a_weight(run: Run, model: Any):
    """Copy one parameter by `deepcopy`."""
    return copy.deepcopy(model.blocks[0].up.weight).detach()


@refused_in_pipelines
def shallow_copy(run: Run, model: Any):
    """Copy the sharded model by `copy.copy`, and evaluate the copy."""
    return run.outputs(copy.copy(model))


@everywhere
@refused("all", "is tied to process groups")
def pickle_the_model(run: Run, model: Any):
    """Pickle the sharded model, and evaluate what comes back."""
    other = pickle.loads(pickle.dumps(model))
    return run.outputs(other)


@everywhere
@refused("all", "is tied to process groups")
def save_the_model(run: Run, model: Any):
    """Save the whole sharded model by `torch.save`, and load it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return run.outputs(torch.load(file, weights_only=False))


def shard_two_models(run: Run):
    """Shard two models, and train both in turns."""
    first, second = run.shard(run.model()), run.shard(run.model())
    optimizers = [run.optimizer(first), run.optimizer(second)]
    for i in range(2):
        run.train(first, optimizers[0], 1, start=i)
        run.train(second, optimizers[1], 1, start=5 + i)
    return run.weights(first), run.weights(second)


@refused_in_pipelines
def train_a_model_on_another(run: Run):
    """Train one sharded model through another one, as generators are."""
    first, second = run.shard(run.model()), run.shard(run.model())
    optimizer = run.optimizer(first)
    for i in range(2):
        optimizer.zero_grad()
        second(nn.functional.pad(first(run.batch(i)), (0, 2))).square().mean().backward()
        optimizer.step()
    return run.weights(first), run.gradients(second)


# --- state dicts ------------------------------------------------------------------------------------------------------


def state_dict(run: Run, model: Any):
    """Read `state_dict()` after a step."""
    run.train(model, steps=1)
    return dict(model.state_dict())


def state_dict_of_a_module(run: Run, model: Any):
    """Read `state_dict()` of one block."""
    return dict(model.blocks[0].state_dict())


def state_dict_keeps_up(run: Run, model: Any):
    """Read a `state_dict()` from before a step; its tensors are the model's."""
    state = model.state_dict()
    run.train(model, steps=1)
    return {name: value.detach().clone() for name, value in state.items()}


def state_dict_with_gradients(run: Run, model: Any):
    """Take `state_dict(keep_vars=True)`, whose values are the parameters."""
    state = model.state_dict(keep_vars=True)
    parameters = dict(model.named_parameters())
    return [name for name in state if state[name] is not parameters[name]]


def state_dict_and_back(run: Run, model: Any):
    """Load the model's own state dict of an earlier step."""
    run.train(model, steps=1)
    kept = copy.deepcopy(model.state_dict())
    run.train(model, steps=1, start=1)
    model.load_state_dict(kept)
    return run.trained(model, start=2)


def clones_of_the_state_dict(run: Run, model: Any):
    """Load clones of the model's own state dict, between steps of one optimizer."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    run.train(model, optimizer, 1, start=1)
    model.load_state_dict(kept)
    return run.trained(model, optimizer, 1, start=2)


def _other_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return Net().double().state_dict()


@everywhere
def load_a_plain_state_dict(run: Run, model: Any):
    """Load the state dict of a plain model into the sharded one."""
    answer = model.load_state_dict(_other_state())
    return str(answer), run.trained(model)


def load_before_sharding(run: Run):
    """Load a state dict before sharding."""
    model = run.model()
    model.load_state_dict(_other_state())
    return run.trained(run.shard(model))


def load_between_steps(run: Run, model: Any):
    """Load the state dict of a plain model between steps of one optimizer."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    model.load_state_dict(_other_state())
    return run.trained(model, optimizer, 1, start=1)


def load_a_part(run: Run, model: Any):
    """Load a part of a state dict by `strict=False`."""
    state = {name: value for name, value in _other_state().items() if "head" not in name}
    answer = model.load_state_dict(state | {"other": torch.zeros(1)}, strict=False)
    return sorted(answer.missing_keys), sorted(answer.unexpected_keys), run.trained(model)


@own_part("pp", OTHER_STAGE, alone=True)
def load_into_a_module(run: Run, model: Any):
    """Load a state dict into one block."""
    state = {n.removeprefix("blocks.0."): v for n, v in _other_state().items() if n.startswith("blocks.0.")}
    model.blocks[0].load_state_dict(state)
    return run.trained(model)


@refused(
    "tp, replicate, zero(1), zero(2), zero(3), fsdp x tp, pp", "Load without assign: values are copied into the shards"
)
def load_by_assignment(run: Run, model: Any):
    """Load a plain state dict by `assign=True`, before the optimizer."""
    model.load_state_dict(_other_state(), assign=True)
    return run.trained(model)


@refused(
    "tp, replicate, zero(1), zero(2), zero(3), fsdp x tp, pp", "Load without assign: values are copied into the shards"
)
def load_by_assignment_its_own(run: Run, model: Any):
    """Load clones of the model's own state dict by `assign=True`."""
    model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()}, assign=True)
    return run.trained(model)


def load_another_dtype(run: Run, model: Any):
    """Load a float32 state dict into a float64 model."""
    model.load_state_dict({name: value.float() for name, value in _other_state().items()})
    return run.trained(model)


def load_missing_keys(run: Run, model: Any):
    """Catch the error for a missing key, and train on."""
    state = _other_state()
    del state["head.weight"]
    try:
        model.load_state_dict(state)
    except (RuntimeError, sl.errors.CheckpointError) as error:
        return "head.weight" in str(error), run.trained(model)
    return False


def load_a_wrong_shape(run: Run, model: Any):
    """Catch the error for a wrong shape, and train on."""
    state = run.model().state_dict() | {"head.weight": torch.zeros(3, 8)}
    try:
        model.load_state_dict(state)
    except (RuntimeError, sl.errors.CheckpointError) as error:
        return "head.weight" in str(error), run.trained(model)
    return False


def load_parameter_by_parameter(run: Run, model: Any):
    """Copy a state dict by hand with `state_dict()[name].copy_`."""
    state = model.state_dict()
    for name, value in _other_state().items():
        if name in state:
            state[name].copy_(value)
    return run.trained(model)


def state_dict_hooks(run: Run, model: Any):
    """Rename keys in a state dict hook and in a load pre-hook."""
    model.register_state_dict_post_hook(lambda _m, state, *_: state.update({"version": torch.ones(1)}) and None)
    model.register_load_state_dict_pre_hook(lambda _m, state, *_: state.pop("version", None) and None)
    model.load_state_dict(model.state_dict())
    return "version" in model.state_dict(), run.trained(model)


def full_state_dict(run: Run, model: Any):
    """Read `sl.full_state_dict`, the way that fits every kind."""
    run.train(model, steps=1)
    return model.state_dict() if run.alone else sl.full_state_dict(model)


def full_state_dict_into_a_plain_model(run: Run, model: Any):
    """Load `sl.full_state_dict` into a plain model, and evaluate it."""
    run.train(model, steps=1)
    plain = run.model()
    plain.load_state_dict(model.state_dict() if run.alone else sl.full_state_dict(model))
    return run.outputs(plain)


def save_the_state_dict(run: Run, model: Any):
    """Save `state_dict()` by `torch.save`, and load it into the same model."""
    run.train(model, steps=1)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    run.train(model, steps=1, start=1)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=False))
    return run.trained(model, start=2)


def save_the_state_dict_on_one_rank(run: Run, model: Any):
    """Save `state_dict()` by `torch.save` on the first rank only, and train on."""
    if run.rank == 0:
        torch.save(model.state_dict(), io.BytesIO())
    return run.trained(model)


@own_part("tp, zero(3), fsdp x tp, pp", OWN_STATE, alone=True)
def save_on_one_rank_for_a_plain_model(run: Run, model: Any):
    """Save `state_dict()` on the first rank only, and load it into a plain model there."""
    run.train(model, steps=1)
    if run.rank:
        return {}
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = run.model()
    plain.load_state_dict(torch.load(file, weights_only=False))
    return {}


def resume(run: Run):
    """Save model and optimizer, shard a new model, load both and train on."""
    model = run.shard(run.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.train(model, optimizer, 2)
    kept = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = run.shard(run.model())
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    other.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    return run.trained(other, optimizer, 1, start=2)


def keep_the_best(run: Run, model: Any):
    """Keep the best weights in a dict of clones, and load them at the end."""
    best: dict[str, torch.Tensor] = {}
    optimizer = run.optimizer(model)
    for i in range(3):
        run.train(model, optimizer, 1, start=i)
        if i == 1:
            best = OrderedDict((name, value.detach().clone()) for name, value in model.state_dict().items())
    model.load_state_dict(best)
    return run.weights(model)


# --- devices and dtypes -----------------------------------------------------------------------------------------------


def to_the_same_device(run: Run, model: Any):
    """Move the sharded model to the device on which it is, between steps."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    model = model.to("cpu")
    return run.trained(model, optimizer, 1, start=1)


def to_the_same_dtype(run: Run, model: Any):
    """Cast the sharded model to the dtype that it has."""
    model = model.to(torch.float64).double().cpu().to(device="cpu", dtype=torch.float64)
    return run.trained(model)


def to_another_tensor(run: Run, model: Any):
    """Move the sharded model to a tensor's device and dtype, which are its own."""
    return run.trained(model.to(torch.zeros(1, dtype=torch.float64)))


@refused("tp, replicate, zero(1), zero(2), zero(3), fsdp x tp", "Move and cast a model before shard_model")
def to_meta(run: Run, model: Any):
    """Move the sharded model to the meta device."""
    model.to("meta")
    return [p.device.type for p in model.parameters()][:1]


def to_another_memory_format(run: Run, model: Any):
    """Ask the sharded model for `channels_last`."""
    return run.trained(model.to(memory_format=torch.channels_last))


@refused("tp, zero(3), fsdp x tp", "each process has its own local shards")
def share_memory(run: Run, model: Any):
    """Call `share_memory()` of the sharded model."""
    return run.trained(model.share_memory())


@refused("tp, replicate, zero(1), zero(2), zero(3), fsdp x tp", "Move and cast a model before shard_model")
def apply_a_function_to_tensors(run: Run, model: Any):
    """Multiply every tensor of the model by `_apply`."""
    model._apply(lambda t: t * 2)
    return run.trained(model)


@refused("tp, replicate, zero(1), zero(2), zero(3), fsdp x tp, compiled", "Move and cast a model before shard_model")
def half_for_evaluation(run: Run, model: Any):
    """Copy the sharded model and cast the copy by `.half()`."""
    other = copy.deepcopy(model).half()
    return {name: p.dtype for name, p in other.named_parameters()}
