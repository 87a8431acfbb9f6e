"""Results that leave a block by another way than its output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.contract.declare import broken, everywhere, refused_in_pipelines
from tests.contract.harness import Block, Net, Run

_CLOSURE = (
    "autograd raises that a weight was modified: nothing tells that a block has given the tensor to a function of its "
    "surroundings, so that its parameters are not gathered again, as under fully_shard. Return it, or keep it in an "
    "attribute of the block"
)

_INSIDE = (
    "autograd raises that a weight was modified: the hook sees a tensor inside of the block, by which the second "
    "backward comes to the block, and no input of it, as under fully_shard"
)

_STAGES = "stem, blocks.0, blocks.1 | blocks.2, blocks.3, head"


@dataclass
class _Inner:
    hidden: torch.Tensor


@dataclass
class _Outer:
    inner: _Inner
    others: list[_Inner] = field(default_factory=list)
    name: str = "outer"


class _Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class _Block(Block):
    """Gives its result to `give`, and returns what that returns."""

    def __init__(self, give: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.give = give

    def forward(self, x: torch.Tensor) -> Any:
        return self.give(self, super().forward(x))


class _Model(Net):
    """A net that takes the results of its blocks by `take`."""

    def __init__(self, give: Callable[[Any, torch.Tensor], Any], take: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(give) for _ in range(4))
        self.take = take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.take(block, block(x))
        return self.head(x)


def _trained(run: Run, give: Callable[[Any, torch.Tensor], Any], take: Callable[[Any, Any], torch.Tensor]) -> Any:
    torch.manual_seed(0)
    model = run.shard(_Model(give, take).double(), stages=_STAGES)
    run.loss(model).backward()
    return run.gradients(model), run.trained(model, steps=1)


@refused_in_pipelines
def a_dataclass_from_blocks(run: Run):
    """Return a plain dataclass from blocks."""
    return _trained(run, lambda _, y: _Inner(y), lambda _, out: out.hidden)


@refused_in_pipelines
def nested_dataclasses_from_blocks(run: Run):
    """Return dataclasses inside of a dataclass from blocks."""
    return _trained(run, lambda _, y: _Outer(_Inner(y), [_Inner(2 * y)]), lambda _, out: out.others[0].hidden / 2)


@refused_in_pipelines
def an_object_from_blocks(run: Run):
    """Return an object of a class of one's own from blocks."""
    return _trained(run, lambda _, y: SimpleNamespace(at={"hidden": y}), lambda _, out: out.at["hidden"])


@refused_in_pipelines
def an_object_with_slots_from_blocks(run: Run):
    """Return an object with `__slots__` from blocks."""
    return _trained(run, lambda _, y: _Slots(y), lambda _, out: out.hidden)


@refused_in_pipelines
def a_distribution_from_blocks(run: Run):
    """Return a `torch.distributions.Normal` from blocks, and draw by its mean."""

    def give(_: Any, y: torch.Tensor) -> Any:
        return torch.distributions.Normal(y, 1.0, validate_args=False)

    return _trained(run, give, lambda _, out: out.mean)


@refused_in_pipelines
def a_generator_from_blocks(run: Run):
    """Return a generator from blocks, which computes when it is asked."""

    class _Lazy(Block):
        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:  # type: ignore[override]
            yield x + self.down(torch.tanh(self.up(self.norm(x))))

    torch.manual_seed(0)
    model = _Model(lambda _, y: y, lambda _, out: next(iter(out))).double()
    model.blocks = nn.ModuleList(_Lazy() for _ in range(4)).double()
    model = run.shard(model, stages=_STAGES)
    run.loss(model).backward()
    return run.gradients(model)


def _keep(block: Any, y: torch.Tensor) -> None:
    block.kept = y


@refused_in_pipelines
def an_attribute_of_blocks(run: Run):
    """Keep the result of a block in an attribute of it, as routers keep their auxiliary loss."""
    return _trained(run, _keep, lambda block, _: block.kept)


def _keep_nested(block: Any, y: torch.Tensor) -> None:
    block.down.results = {"last": [y]}


@refused_in_pipelines
def an_attribute_of_an_inner_module(run: Run):
    """Keep the result of a block in a dict of one of its modules."""
    return _trained(run, _keep_nested, lambda block, _: block.down.results["last"][0])


@refused_in_pipelines
def a_list_that_blocks_fill(run: Run):
    """Give blocks a list that they fill, and use it in the loss alone."""

    class _Filling(Block):
        def forward(self, x: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            y = super().forward(x)
            found.append(y.square().mean())
            return y.detach()

    class _Filled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(_Filling() for _ in range(4))

        def forward(self, x: torch.Tensor) -> Any:
            found: list[torch.Tensor] = []
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, found)
            return self.head(x), found

    torch.manual_seed(0)
    model = run.shard(_Filled().double(), stages=_STAGES)
    out, found = model(run.batch())
    (out.square().mean() + sum(found)).backward()
    return run.gradients(model)


class _Given(Net):
    """Gives each block a value that it fills, and returns it too."""

    def __init__(self, block: type[Block], make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.blocks, self.make = nn.ModuleList(block() for _ in range(4)), make

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        given = self.make(x)
        for block in self.blocks:
            x = block(x, given)
        return self.head(x), given


@everywhere
@refused_in_pipelines
def a_dict_that_blocks_fill(run: Run):
    """Give blocks a dict that they fill, as a cache, and use it in the loss."""

    class _Filling(Block):
        def forward(self, x: torch.Tensor, found: dict[Any, Any]) -> torch.Tensor:  # type: ignore[override]
            y = super().forward(x)
            found[len(found)] = y
            found["last"]["means"].append(y.mean())
            return y

    torch.manual_seed(0)
    model = run.shard(_Given(_Filling, lambda _: {"last": {"means": []}}).double(), stages=_STAGES)
    out, found = model(run.batch())
    means, squares = found.pop("last")["means"], [y.square().mean() for y in found.values()]
    (out.square().mean() + sum(squares) + sum(means)).backward()
    return len(squares), len(means), run.gradients(model)


@everywhere
@refused_in_pipelines
def a_tensor_that_blocks_write_into(run: Run):
    """Give blocks a tensor to which they add their results in place, and use it in the loss."""

    class _Adding(Block):
        def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            y = super().forward(x)
            total.add_(y)
            return y

    torch.manual_seed(0)
    model = run.shard(_Given(_Adding, torch.zeros_like).double(), stages=_STAGES)
    out, total = model(run.batch())
    (out.square().mean() + total.square().mean()).backward()
    return run.rows(total), run.gradients(model)


@refused_in_pipelines
def weights_that_hooks_keep(run: Run, model: Any):
    """Keep weights in forward hooks, and penalise them in the loss."""
    kept: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, *_: kept.append(block.up.weight))
    loss = run.loss(model)
    (loss + 0.01 * sum((i + 1) * weight.square().sum() for i, weight in enumerate(kept))).backward()
    return run.gradients(model)


@refused_in_pipelines
@broken("zero(3), fsdp x tp", _CLOSURE)
def a_closure_that_blocks_call(run: Run):
    """Let blocks append their results to a list of their surroundings, and use it in the loss alone."""
    found: list[torch.Tensor] = []

    def give(_: Any, y: torch.Tensor) -> torch.Tensor:
        found.append(y)
        return y.detach()

    torch.manual_seed(0)
    model = run.shard(_Model(give, lambda _, out: out).double(), stages=_STAGES)
    out = model(run.batch())
    (out.square().mean() + sum(y.square().mean() for y in found)).backward()
    return run.gradients(model)


@refused_in_pipelines
def a_hook_that_replaces_outputs(run: Run):
    """Replace the output of each block by a dataclass in a forward hook."""
    torch.manual_seed(0)
    model = run.shard(_Model(lambda _, y: y, lambda _, out: out.hidden).double(), stages=_STAGES)
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _args, out: _Inner(out + 1))
    run.loss(model).backward()
    return run.gradients(model)


@refused_in_pipelines
def results_of_two_calls(run: Run, model: Any):
    """Call the model on two batches, and go back through the second one first."""
    first, second = run.loss(model, 0), run.loss(model, 1)
    second.backward()
    first.backward()
    return run.gradients(model)


@refused_in_pipelines
@broken("fsdp x tp", _INSIDE)
def gradients_of_inputs_of_each_block(run: Run, model: Any):
    """Penalise the gradient of the loss by the input of each block."""
    inputs: list[torch.Tensor] = []
    handles = [block.register_forward_pre_hook(lambda _m, args: inputs.append(args[0])) for block in model.blocks]
    loss = run.loss(model)
    for handle in handles:
        handle.remove()
    found = torch.autograd.grad(loss, inputs, create_graph=True)
    # A row's gradient is of the mean over this rank's rows: of all rows it is as many times smaller as there are ranks.
    penalty = sum((grad / run.data_ranks).square().sum() * run.data_ranks for grad in found)
    (loss + penalty).backward()
    return run.gradients(model)
