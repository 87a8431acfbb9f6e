"""Units alternate between two buffers, in whatever order the model runs them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.errors import ShardingError
from shardlib.testing import assert_equivalent
from shardlib.testing.at_scale import at_scale
from shardlib.testing.models import Numbers
from tests.engine.whole import gradients, whole


class Shuffled(nn.Module):
    """Layers run in another order than they are registered in; some twice, one as a branch beside others."""

    def __init__(self, order: tuple[int, ...], reads_outside: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(4))
        self.norm = nn.LayerNorm(6)
        self.order, self.reads_outside = order, reads_outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin = x = self.norm(self.first(x))
        for index in self.order:
            x = x + self.blocks[index](x)
        x = self.norm(x + self.blocks[self.order[0]](begin))
        return self.last(nn.functional.linear(x, self.first.weight) if self.reads_outside else x)


ROWS = Numbers((8, 6))


@pytest.mark.covering
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 2), (3, 1, 0, 2, 3), (2, 2, 0, 0)], ids=str)
@pytest.mark.parametrize("transform", [sl.zero(3), sl.fsdp()], ids=repr)
@pytest.mark.parametrize("bucket_mb", [1e-4, 5e-4, 25], ids=["apart", "in pairs", "as one"])
def test_units_run_in_any_order(transform, order: tuple[int, ...], bucket_mb: float):
    """Also several times, and where units that follow each other take the same buffer."""
    model = functools.partial(Shuffled, order)
    assert_equivalent(
        model, ROWS, mesh="dp=2", rules={"**": None}, transforms=(transform,), steps=2, bucket_mb=bucket_mb
    )


@pytest.mark.parametrize(
    ("transform", "bucket_mb"), [(sl.fsdp(), 25), (sl.zero(3), 25), (sl.zero(3), 1e-4)], ids=["kept", "one", "apart"]
)
def test_a_layer_may_be_read_by_others_after_it(transform, bucket_mb: float):
    model = functools.partial(Shuffled, (0, 1), True)
    assert_equivalent(model, ROWS, "dp=2", {"**": None}, transforms=(transform,), steps=2, bucket_mb=bucket_mb)


class Reading(nn.Module):
    """A block that reads the weight of another one, which lies in any buffer."""

    def __init__(self, others: nn.ModuleList) -> None:
        super().__init__()
        self.own = nn.Linear(6, 6)
        self.__dict__["others"] = others

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((self.own(x) @ other.weight.T for other in self.others), x)


class Read(nn.Module):
    """Weights that a block reads before and after their own modules run; one of them never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.blocks = nn.ModuleList(Reading(self.layers) for _ in range(2))
        self.last = nn.MultiheadAttention(6, 2, batch_first=True)  # reads the weight of its own out_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.layers[1](self.layers[0](x)))
        x = self.layers[0](self.layers[2](self.blocks[1](x))).unsqueeze(1)
        return self.last(x, x, x)[0]


@pytest.mark.parametrize(
    ("mesh", "transforms"),
    [
        ("dp=2", (sl.zero(3),)),
        ("dp=2", (sl.fsdp(), sl.accumulate(2))),
        ("fsdp=2,tp=2", (sl.fsdp("fsdp"),)),
        ("dp=2,pp=2", (sl.zero(3), sl.pipeline("1f1b", 2))),
    ],
    ids=str,
)
def test_a_layer_may_be_read_before_it_runs_again(mesh: str, transforms: tuple[Any, ...]):
    """Its gradient is of all its uses, whichever unit is in its buffer when it is read."""
    stages = "layers, blocks | last" if "pp" in mesh else None
    rules = sl.Rules({"layers.*": "colwise"} if "tp" in mesh else {}, unmatched="replicate", stages=stages)
    assert_equivalent(Read, ROWS, mesh, rules, transforms=transforms, steps=2, bucket_mb=1e-4)


class Asking(nn.Module):
    """Asks something of another layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.ask: Callable[[torch.Tensor], Any] = torch.Tensor.size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.first.weight.shape == (6, 6) and self.first.weight.device.type == "cpu"
        x = self.last(self.first(x))
        self.ask(self.first.weight)
        return x


class Writing(nn.Module):
    """Writes into a weight in forward, once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.writes:
            self.layers[-1].weight.detach().mul_(2)
        return x


def _mended() -> bool:
    torch.manual_seed(0)
    plain = Writing()
    model = sl.shard_model(copy.deepcopy(plain), "dp=2", {"**": None}, transforms=(at_scale, sl.zero(3), at_scale))
    model.layers[0].register_forward_pre_hook(
        lambda layer, _args: layer.weight.detach().mul_(2) if model.writes else None
    )
    model.writes = True
    with pytest.raises(ShardingError, match="was written to"):
        model(ROWS(0).float())
    model.writes = False
    return torch.equal(model(ROWS(0).float()), plain(ROWS(0).float()))


def test_a_model_whose_forward_was_refused_runs_once_it_is_mended(ranks):
    """Two units were written to; all have their shards again, of which nothing was written to."""
    assert all(ranks(2).run(_mended))


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda weight: weight.data,
    "__set__": lambda weight: setattr(weight, "requires_grad", False),
    "register_hook": lambda weight: weight.register_hook(print),
    "grad": lambda weight: torch.autograd.grad(weight.sum(), weight),
}


def test_what_a_copy_cannot_do_for_it_is_refused(ranks):
    def said() -> list[str]:
        model = sl.shard_model(Asking(), "dp=2", {"**": None}, transforms=(sl.zero(3),), bucket_mb=1e-4)
        texts = []
        for model.ask in (*REFUSED.values(), lambda weight: weight.detach().mul_(2)):
            with pytest.raises(ShardingError) as raised:
                model(ROWS(0).float())
            texts.append(str(raised.value))
        return texts

    for *texts, written in ranks(2).run(said):
        for what, text in zip(REFUSED, texts, strict=True):
            assert text == (
                f'"first.weight" is stored in shards, and {what} was asked of it while its own module was not running, '
                "when a copy stands for it that others only read. Do so outside of forward, or keep it full between "
                "steps: zero(2), or only= patterns without it (of a plugin: zero_stage=2, shard_param_frac=0, or "
                'sharding_strategy="NO_SHARD").'
            )
        assert written.startswith('"first.weight" is stored in shards and was written to while its unit "first" was')


def _penalty_from_another_thread(transform: Any) -> tuple[Any, Any]:
    """Return the gradients of a penalty on those of inputs, which another thread makes, as one of an accelerator does:
    of a sharded model and of one device."""

    def penalised(model: nn.Module) -> dict[str, torch.Tensor | None]:
        x = ROWS(0).float().requires_grad_()
        out = model(x)
        with ThreadPoolExecutor(1) as thread:
            (slope,) = thread.submit(torch.autograd.grad, out.sum(), x, create_graph=True).result()
        (out.mean() + slope.square().mean()).backward()
        return gradients(model)

    torch.manual_seed(0)
    plain = Shuffled((0, 1, 2, 3))
    sharded = sl.shard_model(copy.deepcopy(plain), "dp=2", {"**": None}, transforms=(at_scale, transform))
    return penalised(sharded), penalised(plain)


def test_gradients_made_by_another_thread_are_right_or_refused(ranks):
    """Make gradients in another thread: autograd runs what was made last, by a number that each thread counts."""
    kept = functools.partial(_penalty_from_another_thread, sl.fsdp(reshard_after_forward=False))
    for found, expected in ranks(2).run(kept):
        torch.testing.assert_close(found, expected)
    with pytest.raises(ShardingError, match=r"in another thread than forward.*fsdp\(reshard_after_forward=False\)"):
        ranks(2).run(functools.partial(_penalty_from_another_thread, sl.zero(3)))


class Leaving(nn.Module):
    """A block that leaves its weight behind: in an attribute, in a hook's list, or as a result."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(6, 6), nn.Linear(6, 6), how
        self.up.weight.scale = 1.5  # an attribute of one's own

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.down(torch.tanh(self.up(x))) * self.up.weight.scale
        if self.how == "attribute":
            self.kept = (self.up.weight,)
        return (x, self.up.weight) if self.how == "result" else x


class Left(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks, self.how = nn.ModuleList(Leaving(how) for _ in range(4)), how
        self.found: list[torch.Tensor] = []
        for block in self.blocks if how == "hook" else ():
            block.register_forward_hook(lambda block, *_: self.found.append(block.up.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found.clear()
        for block in self.blocks:
            x = block(x)
            if isinstance(x, tuple):
                x, weight = x
                self.found.append(weight)
            if self.how == "attribute":
                self.found.append(block.kept[0])
        return x


def _read_where_they_were_left(how: str, transform: Any, mesh: str) -> list[tuple[Any, ...]]:
    """Losses and gradients with a penalty on weights after forward, and norms that are read then and after a change: of
    a sharded model and of one device."""
    torch.manual_seed(0)
    plain = Left(how)
    with torch.no_grad():
        for i, block in enumerate(plain.blocks):
            block.up.weight.mul_(i + 1)
    rules = {"up": "colwise", "down": "rowwise"} if "tp" in mesh else {"**": None}
    given = Left(how)  # a copy of a parameter has no attributes of one's own
    given.load_state_dict(plain.state_dict())
    model = sl.shard_model(given, mesh, rules, transforms=(at_scale, transform, at_scale), compile=None)
    of_each: list[tuple[Any, ...]] = []
    for each in (model, plain):
        found: list[Any] = []
        for _ in range(2):
            each.zero_grad()
            out = each(ROWS(0).float())
            penalty = sum((i + 1) * whole(weight.square().sum()) for i, weight in enumerate(each.found))
            loss = out.square().mean() + penalty
            loss.backward()
            found.append((loss.detach(), gradients(each)))
        with torch.no_grad():
            each(ROWS(0).float())
            found.append([whole(weight.norm()) for weight in each.found])
            for param in each.parameters():
                param.mul_(2)
            if how != "result" or "tp" not in mesh:  # a result of a module that computes on DTensors is a copy
                found.append([whole(weight.norm()) for weight in each.found])
        of_each.append(tuple(found))
    return of_each


@pytest.mark.parametrize("how", ["attribute", "hook", "result"])
@pytest.mark.parametrize(
    ("transform", "mesh"),
    [(sl.zero(3), "dp=2"), (sl.fsdp(reshard_after_forward=False), "dp=2"), (sl.fsdp(), "dp=2,tp=2")],
    ids=["zero(3)", "kept", "tp"],
)
def test_a_weight_that_was_left_elsewhere_has_its_own_values(ranks, how: str, transform: Any, mesh: str):
    """The memory that it was computed with has those of another block then."""
    for found, expected in ranks(4 if "tp" in mesh else 2).run(_read_where_they_were_left, how, transform, mesh):
        torch.testing.assert_close(found, expected)
