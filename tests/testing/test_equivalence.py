"""`equivalent` passes what is right, fails what is wrong, and says where it begins."""

from __future__ import annotations

import functools
import threading
from collections import UserList
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import shardlib as sl
from shardlib import MeshShape, Rules
from shardlib.engine._torch.trees import flatten_with_path
from shardlib.engine.sharded import is_sharded
from shardlib.errors import InputError, MeshError, RuleError
from shardlib.testing import models
from shardlib.testing.equivalence import NotEquivalentError, Report, assert_equivalent, compare, equivalent, twins
from shardlib.testing.equivalence.case import Case
from shardlib.testing.mutants import prove
from shardlib.testing.mutants._mutant import after_sharding, transformer
from tests.alive import MADE, count_models, models_alive
from tests.logged import progress_logged

RULES = {"0": "colwise", "2": "rowwise"}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def rows(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


@pytest.mark.covering
@pytest.mark.parametrize("mesh", ["tp=1", "tp=2", "dp=2", "dp=2,tp=2", "tp=2,dp=2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_sharded_run_is_equivalent(mesh: str, dtype: torch.dtype):
    report = assert_equivalent(**transformer(mesh, dropout=0.2, tied=True, accumulate=2, clip=0.5), dtype=dtype)
    assert set(report.worst()) == {"parameter", "output", "loss", "gradient", "norm", "state"}
    assert report.tensors == 17 and report.origin is None and not report.failures


@pytest.mark.compiled
@pytest.mark.deep
@pytest.mark.parametrize(("mesh", "sequence"), [("tp=2", True), ("dp=2,tp=2", False), ("dp=2,tp=2", True)])
def test_compiled_blocks_with_dropout(mesh: str, sequence: bool):
    """By default they are proved in test_exact_models.py, with a split sequence, and in test_recompute.py."""
    arguments = transformer(mesh, layers=2, dropout=0.2, sequence=sequence, steps=2)
    assert_equivalent(**arguments, compile="aot_eager", no_sync=False)


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=2,pp=2"])
def test_a_plan_says_how_many_passes_make_a_step(mesh: str):
    given = transformer(mesh, layers=2, clip=0.5)
    given["rules"] = given["rules"].with_stages(sl.rules.Balanced())
    assert_equivalent(**given, transforms=[sl.zero(2), sl.accumulate(3)])
    with pytest.raises(InputError, match="was given accumulate=2, and the plan's accumulate\\(3\\) makes a step"):
        assert_equivalent(**given, accumulate=2, transforms=[sl.accumulate(3)])


def test_passes_under_no_sync():
    assert_equivalent(**transformer("dp=2,tp=2", accumulate=3), no_sync=True)


def test_functions_may_be_local_to_the_test():
    width = 24
    report = equivalent(
        lambda: nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3)),
        lambda step: (rows(step), torch.arange(4) % 3),
        "dp=2,tp=2",
        RULES,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    )
    assert report.ok and report


def test_batches_of_every_form():
    for batch in (rows(0), (rows(0),), {"input": rows(0)}, ((), {"input": rows(0)}), ((rows(0),), {})):
        assert equivalent(mlp, lambda step, batch=batch: batch, "dp=2", {"**": None}, steps=1)


class Pair(UserList[Any]):
    """A container that its library registered without names for what it holds."""


class Named(dict[str, Any]):
    """A mapping that its library registered so, as diffusers' outputs are."""


class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp()

    def forward(self, pair: Pair) -> tuple[Pair, Named]:
        return Pair([self.mlp(pair[0]), pair[1]]), Named(sample=pair[1] * 2)


def _register_pairs() -> None:
    if Pair not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(Pair, lambda pair: (list(pair), None), lambda items, _: Pair(items))
        pytree.register_pytree_node(
            Named,
            lambda found: (list(found.values()), list(found)),
            lambda items, keys: Named(zip(keys, items, strict=True)),
        )


def _on_pairs() -> Report:
    _register_pairs()
    return equivalent(
        Paired,
        lambda step: (Pair([rows(step), rows(step + 1)]),),
        "tp=2",
        {"mlp.0": "colwise", "mlp.2": "rowwise"},
        loss=lambda model, batch: model(*batch)[0][0].square().mean(),
        steps=1,
    )


def _names_of_leaves() -> list[str]:
    _register_pairs()
    one, two, three = (torch.ones(1) for _ in range(3))
    trees = (Named(sample=one), (Named(sample=one, pair=[two]), three), (Pair([one, two]), {"x": three}))
    return ["".join(pytree.keystr(path) + " " for path, _ in flatten_with_path(tree)[0]) for tree in trees]


def test_a_mapping_without_names_for_what_it_holds_has_those_of_a_dict(ranks):
    assert ranks(1).run(_names_of_leaves)[0] == ["['sample'] ", "[0]['sample'] [0]['pair'][0] [1] ", "[0] [1] [2] "]


def test_containers_that_have_no_names_for_what_they_hold(ranks):
    report = ranks(2).run(_on_pairs)[0]
    assert report.ok and "output[0]" in {difference.name for difference in report.differences}


def _on_the_ranks() -> Report:
    return equivalent(mlp, rows, "tp=2", RULES, steps=1)


def test_runs_on_ranks_that_are_there_already(ranks):
    first, second = ranks(2).run(_on_the_ranks)
    assert first and first.differences == second.differences


def _progress_of_a_wrong_run() -> list[str]:
    with progress_logged() as lines:
        assert not equivalent(mlp, rows, "tp=2", {"0": "colwise", "2": "rowwise"}, before_step=_change, accumulate=2)
    return lines


def _change(model: nn.Module, step: int) -> None:
    """Change the sharded model in the second step."""
    if step == 1 and is_sharded(model):
        model[2].bias.data.add_(1.0)


def test_ranks_log_the_passes_that_they_compare(ranks):
    for lines in ranks(2).run(_progress_of_a_wrong_run):
        assert [lines[0], lines[-1]] == ["proving on tp=2: 4 passes", "locating the first difference: 4 passes"]


def _on_too_many_ranks() -> str:
    with pytest.raises(MeshError) as raised:
        _on_the_ranks()
    return str(raised.value)


def test_ranks_of_another_number_than_the_mesh(ranks):
    message = ranks(3).run(_on_too_many_ranks)[0]
    assert message.startswith('equivalent() was called on 3 ranks with mesh "tp=2", which has 2.')


# --- what is wrong is found, and where ------------------------------------------------------------------------------


def _spoilt(plant: Callable[[], AbstractContextManager[Any]], arguments: dict[str, Any]) -> Report:
    with plant():
        return equivalent(**arguments)


def _scale_output(name: str, model: nn.Module) -> None:
    module = model.get_submodule(name)
    module.register_forward_hook(lambda _module, _args, output: output * 1.001)


def _scale_gradient(name: str, model: nn.Module) -> None:
    module = model.get_submodule(name)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 1.001

    module.register_forward_pre_hook(lambda _module, args: (Scaled.apply(args[0]), *args[1:]))


def _scale_parameter_gradient(name: str, model: nn.Module) -> None:
    model.get_parameter(name).register_hook(lambda grad: grad * 1.001)


IN_BLOCKS = ["norm1", "attn", "attn.qkv", "attn.proj", "norm2", "mlp", "mlp.up", "mlp.down"]
NAMES = ["norm", "head", *(f"blocks.{i}.{name}" for i in (0, 1) for name in IN_BLOCKS)]
# One of each kind: what adds to the residual stream and what does not, a module of modules, columns and rows.
SOME = ["norm", "head", "blocks.0.attn", "blocks.0.attn.qkv", "blocks.1.mlp.down"]
BELOW = [name if name in SOME else pytest.param(name, marks=pytest.mark.deep) for name in NAMES]


@pytest.mark.covering
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2"])
@pytest.mark.parametrize("name", ["embed", "position", *BELOW])
def test_the_module_whose_output_is_spoilt_is_named(ranks, name: str, mesh: str):
    spoil = after_sharding(functools.partial(_scale_output, name))
    report = ranks(2).run(_spoilt, spoil, transformer(mesh, layers=2, steps=1))[0]
    assert report.origin is not None
    assert (report.origin.module, report.origin.what) == (name, f"the output of {name}")
    assert report.origin.causes[0].startswith("1.001 times a single device's")


@pytest.mark.covering
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2"])
@pytest.mark.parametrize("name", BELOW)
def test_the_module_whose_gradient_is_spoilt_is_named(ranks, name: str, mesh: str):
    spoil = after_sharding(functools.partial(_scale_gradient, name))
    report = ranks(2).run(_spoilt, spoil, transformer(mesh, layers=2, steps=1))[0]
    assert report.origin is not None
    assert report.origin.module == name
    assert report.origin.what == f"the gradient that {name} passes on to its input"


@pytest.mark.covering
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2"])
@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "position.weight",
        "blocks.0.attn.qkv.bias",
        *(pytest.param(f"blocks.1.{name}", marks=pytest.mark.deep) for name in ("norm1.bias", "mlp.up.weight")),
    ],
)
def test_the_parameter_whose_gradient_is_spoilt_is_named(ranks, name: str, mesh: str):
    spoil = after_sharding(functools.partial(_scale_parameter_gradient, name))
    report = ranks(2).run(_spoilt, spoil, transformer(mesh, layers=2, steps=1))[0]
    assert report.origin is not None
    assert report.origin.module == name.rpartition(".")[0] and report.origin.what == f"the gradient of {name}"


def _spoil_at_second_step(model: nn.Module) -> None:
    calls = []

    def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return output * 1.001 if len(calls) > 1 else output

    model.get_submodule("blocks.0.mlp").register_forward_hook(hook)


def test_a_difference_of_a_later_step_is_found_there(ranks):
    report = ranks(2).run(_spoilt, after_sharding(_spoil_at_second_step), transformer("tp=2", steps=3))[0]
    assert report.origin is not None
    assert (report.origin.module, report.origin.step) == ("blocks.0.mlp", 1)


def _spoil_when_compiled(model: nn.Module) -> None:
    from shardlib import get_plan

    if any(note.startswith("Compiled with") for note in get_plan(model).notes):
        _scale_output("norm", model)


@pytest.mark.compiled
def test_a_difference_of_compiled_blocks_alone(ranks):
    arguments = {**transformer("tp=2", layers=2, steps=1), "compile": "aot_eager"}
    report = ranks(2).run(_spoilt, after_sharding(_spoil_when_compiled), arguments)[0]
    assert report.origin is not None
    assert report.origin.what == "compiled blocks alone: with compile=None everything agrees"


def test_the_report_says_what_a_reader_needs():
    report = prove("row bias", planted=True)
    text = str(report)
    assert not report and text.startswith(
        "NOT equivalent to a single device: mesh tp=2, 2 steps, float64, 18 tensors, "
    )
    assert "First difference, step 0: the output of blocks.0.attn.proj\n  global shape   (8, 5, 8), off by " in text
    assert (
        "  on ranks       0, 1\n"
        '  layout         "_ _ _" of local shape (8, 5, 8)\n'
        '  rule           "attn.proj": weight "out in@tp"\n'
        '                 "attn.proj": bias "out"\n' in text
    )
    assert "  looks like     the bias is in it 2 times (tp=2): it was added on every rank before the sum\n" in text


def test_the_error_is_an_assertion_with_the_report():
    class Lossy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.distributed.get_world_size() ** 0.001 * (1 + 0.1 * len(x))

    with pytest.raises(NotEquivalentError) as raised:
        assert_equivalent(lambda: Lossy(8, 8), rows, "dp=2", {"**": None}, steps=1)
    assert isinstance(raised.value, AssertionError)
    assert raised.value.report.origin is not None and str(raised.value) == str(raised.value.report)


class InFloat32(nn.Module):
    """Module with outputs in float32, as logits of many transformers are; the loss is then a mean in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))).float()


IN_FLOAT32 = {"model": InFloat32, "batch": rows, "mesh": "dp=2,tp=2", "rules": {"up": "colwise", "down": "rowwise"}}


def test_values_of_a_coarser_dtype_may_differ_by_units_of_it():
    report = equivalent(**IN_FLOAT32)
    assert report and any("ten units of their own dtype" in note for note in report.notes)
    assert 1e-10 < max(d.error for d in report.differences) <= max(d.limit for d in report.differences) < 2e-6


def _summed_in_float32(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean().double()


def test_a_model_that_computes_in_float32_inside_passes_by_what_rounding_does_to_it():
    report = equivalent(**IN_FLOAT32, loss=_summed_in_float32)
    assert report and any("one unit of float32" in note for note in report.notes)
    assert max(d.error for d in report.differences if d.kind == "loss") > 1e-10


def test_noise_of_a_bias_before_batch_norm_is_told_from_mistakes():
    """Its gradient is zero in exact arithmetic; AdamW makes an update of the noise, and running means follow that."""
    model = functools.partial(models.ConvNet, channels=1)
    rules = Rules(
        {"first": "rowwise", "last": "colwise"},
        activations={"first.output": "_@sp _ _ _"},
        unmatched="replicate",
        axis="sp",
    )
    assert_equivalent(model, models.Numbers((5, 3, 6, 6)), "sp=3", rules, steps=2)


def test_float32_inside_hides_no_mistake(ranks):
    spoil = after_sharding(functools.partial(_scale_output, "down"))
    report = ranks(4).run(_spoilt, spoil, IN_FLOAT32)[0]
    assert not report and report.origin.module == "down"


class LossInFloat32(nn.Module):
    """A loss that the weights hardly move, and that ranks round each for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.down(F.gelu(self.up(x)))
        return {"loss": (1e-9 * y.sum(-1) + x.exp().sum(-1)).float().mean(), "y": y}


def test_a_loss_in_float32_counts_as_rounded_to_it(ranks):
    arguments = {**IN_FLOAT32, "model": LossInFloat32, "steps": 3}
    report = equivalent(**arguments)
    assert report.worst()["loss"].error > 1e-10 and report, report
    spoil = after_sharding(functools.partial(_scale_gradient, "down"))
    spoilt = ranks(4).run(_spoilt, spoil, arguments)[0]
    assert not spoilt and spoilt.origin.module == "down"  # not the model, for a loss that each rank has of its own rows


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_a_loss_that_is_zero_in_exact_arithmetic(mesh: str):
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8))

    def batch(step: int) -> torch.Tensor:
        return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))

    rules = {**RULES, "3": None}
    report = equivalent(model, batch, mesh, rules, loss=lambda model, batch: model(batch).mean())
    assert report and all(d.limit < 1e-6 for d in report.differences if d.kind == "loss")


@pytest.mark.parametrize(("model", "dtype"), [(mlp, torch.float64), (LossInFloat32, torch.float32)])
def test_the_dtype_that_batches_are_made_in_is_not_the_models(model: Callable[[], nn.Module], dtype: torch.dtype):
    assert rows(0).dtype is torch.float32
    assert compare._errors_of_rounding(Case(model, rows, MeshShape("tp=2"), steps=1))[0] is dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sgd_of_more_than_one_vector(dtype: torch.dtype):
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)

    assert_equivalent(mlp, rows, "tp=2", RULES, optimizer=sgd, dtype=dtype)


def test_a_learning_rate_that_is_a_tensor():
    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=torch.tensor(0.1))

    report = assert_equivalent(mlp, rows, "tp=2", RULES, optimizer=adam)
    assert report.worst()["parameter"].error < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_finds_mistakes_larger_than_its_rounding(ranks, dtype: torch.dtype):
    def double(model: nn.Module) -> None:
        model.get_submodule("blocks.0.mlp").register_forward_hook(lambda _m, _a, output: output * 3)

    report = ranks(2).run(_spoilt, after_sharding(double), {**transformer("tp=2"), "dtype": dtype})[0]
    assert not report and report.origin.module == "blocks.0.mlp"


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": mlp()}, InputError, "equivalent() was given model=a Sequential; give a function that makes one"),
        ({"batch": rows(0)}, InputError, "equivalent() was given batch=a Tensor; give a function that makes one"),
        ({"steps": -1}, InputError, "equivalent() was given steps=-1; give an integer from 0 up."),
        ({"accumulate": 0}, InputError, "equivalent() was given accumulate=0; give an integer from 1 up."),
        ({"clip": 0.0}, InputError, "equivalent() was given clip=0.0; give a gradient norm above zero"),
        ({"dtype": torch.int64}, InputError, "equivalent() was given dtype=torch.int64; give one of torch.float64"),
        ({"no_sync": "yes"}, InputError, "equivalent(no_sync='yes') was given; give True or False."),
        ({"rng": "slow"}, InputError, 'equivalent() was given rng=\'slow\'; give "exact" or "fast".'),
        ({"shard": print}, InputError, "equivalent() was given both shard= and rules."),
        ({"mesh": "dp=2,tp=-1"}, MeshError, 'equivalent() was given mesh "dp=2,tp=-1"; give every size'),
        ({"rules": {"3": "colwise"}}, RuleError, 'Rule "3": "colwise" matches nothing'),
        ({"model": lambda: 3}, InputError, "model= returned a int; it has to make an nn.Module."),
        ({"loss": lambda model, batch: model(batch)}, InputError, "The loss is (4, 8); loss= has to return a scalar"),
        ({"mesh": "dp=3", "rules": {"**": None}}, InputError, "The batch has 4 rows, which 3 data ranks cannot share"),
        ({"colour": "red"}, TypeError, "equivalent() was given colour=, which neither it nor shard_model takes."),
        ({"lossx": 1}, InputError, 'lossx=, which neither it nor shard_model takes. Did you mean "loss"?'),
        ({"model": lambda size: mlp()}, InputError, "which does not take its arguments; give a function ()."),
        ({"batch": lambda: rows(0)}, InputError, "which does not take its arguments; give a function (step)."),
        ({"loss": 3}, InputError, "equivalent() was given loss=3; give a function (model, batch), or leave it out."),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, InputError, "optimizer=a SGD; give a function (params)"),
        ({"rules": None, "shard": lambda model: model}, InputError, "give a function (model, mesh)."),
        ({"clip": "1"}, InputError, "equivalent() was given clip='1'; give a gradient norm above zero"),
        ({"seed": "a"}, InputError, "equivalent() was given seed='a'; give an integer from 0 up."),
        ({"timeout": 0}, InputError, "equivalent() was given timeout=0; give seconds above zero."),
        ({"mesh": "dp=64,tp=1024"}, MeshError, "65536 processes, which need 6554 GiB at least; this machine has "),
        ({"optimizer": lambda params: None}, InputError, "optimizer= returned a NoneType; it has to return a torch."),
        ({"optimizer": torch.optim.LBFGS}, InputError, "optimizer= returned LBFGS, which runs the model several"),
        ({"batch": lambda step: None}, InputError, "batch(0) returned nothing. It has to return the batch"),
        ({"batch": lambda step: rows(0).to("meta")}, InputError, "returned a tensor on meta, which has no values"),
        (
            {"loss": lambda model, batch: model(batch).detach().mean()},
            InputError,
            "The loss has no gradient on the single device: it does not depend on the model's output, or was detached",
        ),
        (
            {"model": lambda: mlp().requires_grad_(False)},
            InputError,
            "The loss has no gradient on the single device: no parameter of the model requires a gradient.",
        ),
        (
            {"loss": lambda model, batch: model(batch).mean() * float("nan")},
            InputError,
            "The loss is nan on the single device, with which nothing can be compared.",
        ),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], message: str):
    arguments: dict[str, Any] = {"model": mlp, "batch": rows, "mesh": "tp=2", "rules": RULES, "steps": 1}
    with pytest.raises(error) as raised:
        equivalent(**{**arguments, **changes})
    assert message in str(raised.value)


def test_a_frozen_weight_beside_a_bias_that_trains():
    """In float32 the backward of a convolution gives both gradients where one is asked for."""

    def made() -> nn.Module:
        model = models.ConvNet()
        model.get_parameter("second.weight").requires_grad_(False)
        return model

    rules = Rules({"first": "colwise", "second.bias": "out@tp"}, unmatched="replicate")
    assert_equivalent(made, models.batch_for(models.ConvNet()), "tp=2", rules, dtype=torch.float32, steps=1)


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()
    with pytest.raises(InputError, match=r"given batch=<function .*, which cannot be sent to the ranks .*_thread.lock"):
        equivalent(mlp, lambda step: (lock, rows(step))[1], "tp=2", RULES)


class FailsAt(nn.Module):
    """Module whose forward fails the n-th time."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.up, self.calls, self.n = nn.Linear(8, 8), 0, n

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.n and (self.n == 1 or isinstance(self.up.weight, DTensor)):
            raise ValueError("not again")
        return self.up(x)


def test_a_forward_that_fails_says_in_which_run():
    for n, said in (
        (1, "On the single device, step 0: the model fails on this batch and loss before"),
        (2, "In the sharded run, step 1; the single device's step went through"),
    ):
        with pytest.raises(ValueError, match="not again") as raised:
            equivalent(lambda n=n: FailsAt(n), rows, "tp=2", {"up": "colwise"})
        assert any(said in note for note in raised.value.__notes__)


class Turned(nn.Module):
    """Features turned by complex numbers, a buffer, as Llama's first code has its rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * self.turn
        return self.down(F.gelu(self.up(torch.view_as_real(turned).flatten(-2).to(x.dtype))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_complex_buffers_stay_complex(dtype: torch.dtype):
    rules = {"up": "colwise", "down": "rowwise"}
    report = assert_equivalent(Turned, rows, "dp=2,tp=2", rules, dtype=dtype)
    assert not [warning for warning in report.warnings if "imaginary" in warning]
    assert twins.in_dtype(Turned(), torch.float64).turn.dtype is torch.complex128


def test_a_model_on_meta():
    def made() -> nn.Module:
        with torch.device("meta"):
            return mlp()

    with pytest.raises(InputError, match="model= made a model on the meta device"):
        equivalent(made, rows, "tp=2", RULES)


def test_batches_that_depend_on_the_rank():
    def batch(step: int) -> torch.Tensor:
        return rows(step) + torch.distributed.get_rank()

    with pytest.raises(InputError, match=r"batch\(0\) made other values on some ranks than on others"):
        equivalent(mlp, batch, "dp=2", {"**": None}, steps=1)


def test_fast_random_numbers_of_data_ranks_cannot_be_compared():
    with pytest.raises(InputError, match='with rng="fast" each data rank draws its own'):
        equivalent(**transformer("dp=2", dropout=0.5, rng="fast"))
    assert equivalent(**transformer("tp=2", dropout=0.5, rng="fast"))


def test_a_plan_in_place_of_rules():
    import shardlib as sl

    assert equivalent(mlp, rows, "tp=2", sl.plan(mlp(), "tp=2", Rules(RULES)), steps=1)


def test_models_of_the_library_have_rules_that_are_equivalent():
    for make in (models.MLP, models.ConvNet):
        model = make()
        assert_equivalent(make, models.batch_for(model), "dp=2,tp=2", models.rules_for(model), steps=2)


def test_models_that_depend_on_the_rank():
    def made() -> nn.Module:
        model = mlp()
        with torch.no_grad():
            model[0].bias.add_(torch.distributed.get_rank())
        return model

    with pytest.raises(InputError, match="The single device's loss at step 0 is another one on some ranks"):
        equivalent(made, rows, "dp=2", {"**": None}, steps=1, check=False)


def _is_counted() -> bool:
    before, model = len(MADE), models.Transformer()
    return model in MADE and len(MADE) == before + 1


def test_a_proof_leaves_no_model_behind(ranks):
    ranks(2).run(count_models)
    assert all(ranks(2).run(_is_counted))
    assert equivalent(**transformer("tp=2", steps=1))
    assert not prove("row bias", planted=True)
    assert ranks(2).run(models_alive) == [0, 0]


class Causal(nn.Module):
    """A model that takes a sequence in parts; its layers leave what they need of the last part in a list, and count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Remembering() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor | None] = [None, None]
        made = []
        for part in x.chunk(2, 1):
            at = [0]
            for layer in self.layers:
                part = layer(part, kept, at)
            made.append(part)
        return torch.cat(made, 1)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, kept: list[Any], at: list[int]) -> torch.Tensor:
        inner, before = self.up(x).tanh(), kept[at[0]]
        kept[at[0]] = inner
        at[0] += 1
        return x + self.down(inner if before is None else inner + before)


@pytest.mark.compiled
def test_what_a_region_stores_in_a_list_that_it_was_given_is_seen_outside():
    regions = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.output": "replicate"}

    def sequence(step: int) -> torch.Tensor:
        return rows(step)[:, None].expand(-1, 4, -1)

    report = assert_equivalent(Causal, sequence, "tp=2", rules=regions, steps=2, compile="aot_eager")
    assert any("it was given a list, in which it can leave tensors behind" in warning for warning in report.warnings)


def test_a_model_with_the_old_weight_norm():
    """Its weight is no parameter; a hook computes it before each call."""

    def build() -> nn.Module:
        return nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(8, 32)), nn.GELU(), nn.Linear(32, 8))

    assert_equivalent(build, rows, "tp=2", rules={"0.weight_*": "_ _", "0.bias": "_", "2": "rowwise"}, steps=2)
