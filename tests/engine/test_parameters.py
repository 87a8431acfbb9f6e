"""The parameter that a user holds is the one that autograd, hooks and optimizers act on, however it is stored.

Each program is what somebody does to a model: it runs on one device with the whole batch, and on two ranks with half of
it each, and gives tensors that have to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardlib as sl
from shardlib.errors import ShardingError

Tensors = dict[str, torch.Tensor]

KINDS: dict[str, tuple[Any, ...]] = {
    "replicate": (),
    "zero(1)": (sl.zero(1),),
    "zero(2)": (sl.zero(2),),
    "zero(3)": (sl.zero(3),),
    "fsdp": (sl.fsdp(),),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.tanh(self.first(x))))


def _model() -> Net:
    torch.manual_seed(0)
    return Net().double()


def _batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _full(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        return torch.zeros(())
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _gradients(model: nn.Module) -> Tensors:
    return {name: _full(p.grad) for name, p in model.named_parameters()}


def _weights(model: nn.Module) -> Tensors:
    return {name: _full(p) for name, p in model.named_parameters()}


# --- programs ---------------------------------------------------------------------------------------------------------


def hooks_change_gradients(model: nn.Module, x: torch.Tensor) -> Tensors:
    for p in model.parameters():
        p.register_hook(lambda grad: grad * 3)
    _loss(model, x).backward()
    _loss(model, x).backward()
    return _gradients(model)


def hooks_of_one_parameter_alone(model: Net, x: torch.Tensor) -> Tensors:
    seen = []
    model.last.weight.register_hook(lambda grad: seen.append(1))
    handle = model.first.bias.register_hook(lambda grad: -grad)
    _loss(model, x).backward()
    handle.remove()
    _loss(model, x).backward()
    return {**_gradients(model), "calls": torch.tensor(len(seen))}


def backward_of_some_inputs(model: Net, x: torch.Tensor) -> Tensors:
    _loss(model, x).backward(inputs=[model.last.weight, model.first.bias])
    return {**_gradients(model), "none": torch.tensor([p.grad is None for p in model.parameters()])}


def gradients_that_autograd_returns(model: nn.Module, x: torch.Tensor) -> Tensors:
    grads = torch.autograd.grad(_loss(model, x), list(model.parameters()))
    none = torch.tensor([p.grad is None for p in model.parameters()])
    return {**{str(i): _full(grad) for i, grad in enumerate(grads)}, "none": none}


def gradients_of_some_that_autograd_returns(model: Net, x: torch.Tensor) -> Tensors:
    (grad,) = torch.autograd.grad(_loss(model, x), [model.norm.weight])
    _loss(model, x).backward()
    return {**_gradients(model), "returned": _full(grad)}


def a_penalty_on_gradients(model: nn.Module, x: torch.Tensor) -> Tensors:
    """Of the inputs, and under double backward."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)
    (_loss(model, x) + grad.square().mean()).backward()
    return _gradients(model)


def a_graph_that_is_kept(model: nn.Module, x: torch.Tensor) -> Tensors:
    loss = _loss(model, x)
    loss.backward(retain_graph=True)
    loss.backward()
    return _gradients(model)


def several_losses_of_one_forward(model: nn.Module, x: torch.Tensor) -> Tensors:
    out = model(x)
    out.mean().backward(retain_graph=True)
    out.square().mean().backward()
    return _gradients(model)


def two_forwards_and_one_backward(model: nn.Module, x: torch.Tensor) -> Tensors:
    (_loss(model, x) + _loss(model, x * 2)).backward()
    return _gradients(model)


def two_forwards_and_two_backwards_in_the_other_order(model: nn.Module, x: torch.Tensor) -> Tensors:
    first, second = _loss(model, x), _loss(model, x * 2)
    second.backward()
    first.backward()
    return _gradients(model)


def a_backward_that_raises(model: nn.Module, x: torch.Tensor) -> Tensors:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise RuntimeError("no")

    handle = model.first.register_forward_hook(lambda _m, _a, out: Raises.apply(out))  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="no"):
        _loss(model, x).backward()
    handle.remove()
    model.zero_grad()
    _loss(model, x).backward()
    return _gradients(model)


def gradients_that_are_cleared(model: nn.Module, x: torch.Tensor) -> Tensors:
    _loss(model, x * 100).backward()
    model.zero_grad(set_to_none=False)
    _loss(model, x).backward()
    model.first.bias.grad = None  # type: ignore[union-attr]
    _loss(model, x).backward()
    return _gradients(model)


def gradients_that_are_edited(model: nn.Module, x: torch.Tensor) -> Tensors:
    _loss(model, x).backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(2)
            p.grad = p.grad + p.grad
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    return _weights(model)


def norms(model: nn.Module, x: torch.Tensor) -> Tensors:
    _loss(model, x).backward()
    of_weights = {f"{name}, weight": torch.tensor(float(p.detach().norm())) for name, p in model.named_parameters()}
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {
        **of_weights,
        **{name: torch.tensor(float(grad.norm())) for name, grad in grads.items() if grad is not None},
    }


def a_step_hook_that_edits_gradients(model: nn.Module, x: torch.Tensor) -> Tensors:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: list[bool] = []

    def hook(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        ours = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append(all(a is b for a, b in zip(ours, model.parameters(), strict=True)))
        for p in ours:
            p.grad = p.grad / p.grad.norm()

    for seed in range(3):
        if seed == 1:  # the first step has added the engine's hooks
            optimizer.register_step_pre_hook(hook)
            optimizer.register_step_post_hook(lambda o, *_: seen.append(len(o.state) == len(list(model.parameters()))))
        optimizer.zero_grad()
        _loss(model, x + seed).backward()
        optimizer.step()
    assert all(seen) and len(seen) == 4
    assert len(optimizer._optimizer_step_pre_hooks) <= 2 and len(optimizer._optimizer_step_post_hooks) <= 2
    return _weights(model)


class Normalized(torch.optim.AdamW):
    """Edits gradients, then goes on as its base does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad / p.grad.norm()
        return super().step(closure)


class Twice(Normalized):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(2)
        return super().step(closure)


def a_subclass_that_edits_gradients(model: nn.Module, x: torch.Tensor) -> Tensors:
    optimizer = Normalized(model.parameters(), lr=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        _loss(model, x + seed).backward()
        optimizer.step()
    return _weights(model)


def a_subclass_of_a_subclass(model: nn.Module, x: torch.Tensor) -> Tensors:
    optimizer = Twice(model.parameters(), lr=0.1)
    for seed in range(2):
        optimizer.zero_grad()
        _loss(model, x + seed).backward()
        optimizer.step()
    return _weights(model)


def a_step_that_raises(model: nn.Module, x: torch.Tensor) -> Tensors:
    """In a hook that comes after all others; what it has replaced is put back before the next step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _loss(model, x).backward()
    group = optimizer.param_groups[0]
    group["lr"], before = "wrong", group["lr"]
    errors = []
    try:
        optimizer.step()
    except Exception as error:
        errors.append(error)  # kept: its traceback keeps the frames of the step
    assert errors
    group["lr"] = before
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    return _weights(model)


PROGRAMS: list[Callable[..., Tensors]] = [
    hooks_change_gradients,
    hooks_of_one_parameter_alone,
    backward_of_some_inputs,
    gradients_that_autograd_returns,
    gradients_of_some_that_autograd_returns,
    a_penalty_on_gradients,
    a_graph_that_is_kept,
    several_losses_of_one_forward,
    two_forwards_and_one_backward,
    two_forwards_and_two_backwards_in_the_other_order,
    a_backward_that_raises,
    gradients_that_are_cleared,
    gradients_that_are_edited,
    norms,
    a_step_hook_that_edits_gradients,
    a_subclass_that_edits_gradients,
    a_subclass_of_a_subclass,
    a_step_that_raises,
]


def _on_rank(program: Callable[..., Tensors], kinds: Sequence[str] = tuple(KINDS)) -> dict[str, Tensors]:
    half = _batch().chunk(2)[torch.distributed.get_rank()]
    models = {kind: sl.shard_model(_model(), "dp=2", {"**": None}, transforms=KINDS[kind]) for kind in kinds}
    return {kind: program(model, half) for kind, model in models.items()}


def _assert_same(found: dict[str, Tensors], expected: Tensors) -> None:
    for kind, tensors in found.items():
        assert tensors.keys() == expected.keys(), kind
        for name, want in expected.items():
            close = torch.allclose(tensors[name].double(), want.double(), rtol=1e-10, atol=1e-12)
            assert close, f"{kind}, {name}: {tensors[name]} is not {want}"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_does_what_it_does_on_one_device(ranks, program: Callable[..., Tensors]):
    expected = program(_model(), _batch())
    for found in ranks(2).run(_on_rank, program):
        _assert_same(found, expected)


def a_penalty_on_gradients_of_weights(model: nn.Module, x: torch.Tensor) -> Tensors:
    grads = torch.autograd.grad(_loss(model, x), list(model.parameters()), create_graph=True)
    penalty = torch.stack([grad.square().sum() for grad in grads]).sum()
    (_loss(model, x) + penalty).backward()
    return _gradients(model)


def test_gradients_of_gradients_of_weights_that_are_not_stored_in_shards(ranks):
    expected = a_penalty_on_gradients_of_weights(_model(), _batch())
    for found in ranks(2).run(_on_rank, a_penalty_on_gradients_of_weights, ("replicate", "zero(1)", "zero(2)")):
        _assert_same(found, expected)


# --- what is refused --------------------------------------------------------------------------------------------------


def _replaces(model: Net) -> None:
    replaced = model.last.weight = nn.Parameter(torch.zeros(4, 8, dtype=torch.float64))
    try:
        model(_batch())
    finally:
        assert model.last.weight is replaced


def _ties(model: Net) -> None:
    model.norm.bias = model.norm.weight
    model(_batch())


def _parametrizes(model: Net) -> None:
    nn.utils.parametrizations.weight_norm(model.last)
    model(_batch())


def _calls_with_others(model: Net) -> None:
    others = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
    torch.func.functional_call(model, others, (_batch(),))


def _calls_a_part_with_others(model: Net) -> None:
    torch.func.functional_call(
        model.last, {"weight": torch.zeros(4, 8, dtype=torch.float64)}, (torch.zeros(2, 8).double(),)
    )


def test_another_tensor_in_the_place_of_a_stored_shard_is_refused(ranks):
    def messages() -> list[str]:
        texts = []
        for does in (_replaces, _ties, _parametrizes, _calls_with_others, _calls_a_part_with_others):
            model = sl.shard_model(_model(), "dp=2", {"**": None}, transforms=(sl.zero(3),))
            with pytest.raises(ShardingError) as raised:
                does(model)
            texts.append(str(raised.value))
        return texts

    for texts in ranks(2).run(messages):
        assert all("is stored in shards, and another tensor stands in its place" in text for text in texts)


def optimizers_in_backward(model: nn.Module, x: torch.Tensor) -> Tensors:
    optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for seed in range(2):
        _loss(model, x + seed).backward()
    return _weights(model)


def test_optimizers_may_step_in_backward_where_parameters_are_stored_in_shards(ranks):
    expected = optimizers_in_backward(_model(), _batch())
    for found in ranks(2).run(_on_rank, optimizers_in_backward, ("zero(3)", "fsdp")):
        _assert_same(found, expected)


def test_elsewhere_a_step_in_backward_is_refused(ranks):
    def messages() -> list[str]:
        texts = []
        for kind in ("replicate", "zero(1)", "zero(2)"):
            with pytest.raises(ShardingError) as raised:
                _on_rank(optimizers_in_backward, (kind,))
            texts.append(str(raised.value))
        return texts

    for texts in ranks(2).run(messages):
        assert all("stepped while a backward pass runs" in text for text in texts)


def test_hooks_from_before_sharding_are_refused_where_a_parameter_is_replaced(ranks):
    def message() -> str:
        model = _model()
        model.last.weight.register_hook(lambda grad: grad)
        before = list(model.parameters())
        with pytest.raises(ShardingError) as raised:
            sl.shard_model(model, "dp=2", {"**": None}, transforms=(sl.zero(3),))
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        return str(raised.value)

    assert all(text.startswith('"last.weight" has hooks on its gradient') for text in ranks(2).run(message))


def test_an_optimizer_of_other_parameters_is_left_alone(ranks):
    def counts() -> list[int]:
        model = sl.shard_model(_model(), "dp=2", {"**": None}, transforms=(sl.zero(2),))
        other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
        for p in other.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        before = dict(other.param_groups[0]), other.state
        other.step()
        assert other.param_groups[0] == before[0] and other.state is before[1] and model is not None
        return [len(other._optimizer_step_pre_hooks), len(other._optimizer_step_post_hooks)]

    assert ranks(2).run(counts) == [[0, 0]] * 2
