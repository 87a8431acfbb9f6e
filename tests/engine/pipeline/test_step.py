"""What a step of a pipeline gives, from batches and losses of all kinds, and how it fails."""

from __future__ import annotations

import copy
import functools
import re
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib._plan.schedules import bubble, timeline
from shardlib.engine import _torch
from shardlib.engine.pipeline.messages import Channels
from shardlib.engine.ranks import agree, lost
from shardlib.engine.sharded import record_of
from shardlib.errors import InputError, LostRankError, PlanError, ShardingError, StageError
from shardlib.testing.models import Transformer
from shardlib.transforms import LossScale
from tests.alive import count_models, models_alive

_AT_MOST = 60.0  # seconds until ranks know of one that raised; groups would wait half an hour
TOLERANCE = 1e-10  # of float64; sums in another order differ by some 1e-15
STAGES = "embed, position, blocks.0 | blocks.1 | blocks.2 | blocks.3, norm, head"


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return Transformer(layers=4, vocab=7, tied=True, bias=False).double()


def tokens(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(7, (rows, 5), generator=torch.Generator().manual_seed(seed))


def sharded(
    mesh: str, *transforms: Any, stages: Any = None, dtype: torch.dtype = torch.float64, **options: Any
) -> nn.Module:
    rules = sl.Rules({"**": None}, stages=stages or sl.rules.Balanced())
    return sl.shard_model(gpt().to(dtype), mesh, rules, transforms=transforms, **options)


def own_rows(batch: torch.Tensor, mesh: str) -> torch.Tensor:
    index, count = sl.MeshShape(mesh).data_place(sl.MeshShape(mesh).coordinate(dist.get_rank()))
    return batch.tensor_split(count)[index]


def counted(output: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Tokens 0 do not count: every microbatch and every rank has another number of them."""
    kept = ids != 0
    losses = F.cross_entropy(output.flatten(0, 1), ids.flatten(), reduction="none")
    return (losses * kept.flatten()).sum(), int(kept.sum())


def mean(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), ids.flatten())


def differences(model: nn.Module, single: nn.Module) -> list[float]:
    """Of the gradients that this rank has whole."""
    want = dict(single.named_parameters(remove_duplicate=False))
    worst = []
    for name, param in model.named_parameters():
        reference = want[name].grad
        assert reference is not None and param.grad is not None, name
        worst.append(((param.grad - reference).abs().max() / reference.abs().max()).item())
    return worst


def _counts(mesh: str, options: dict[str, Any]) -> tuple[float, float, list[float]]:
    single, batch = gpt(), tokens(11)
    total, count = counted(single(batch), batch)
    (total / count).backward()
    model = sharded(mesh)
    step = sl.pipeline_step(model, own_rows(batch, mesh), counted, **options)
    return step.loss.item(), (total / count).item(), differences(model, single)


@pytest.mark.covering
@pytest.mark.parametrize("options", [{"microbatches": 3}, {"microbatch_size": 4}])
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2,pp=2", "dp=2"])
def test_losses_with_counts_are_divided_by_all_of_them(ranks, mesh: str, options: dict[str, Any]):
    """Eleven rows: 6 and 5 on two data ranks; 4, 4 and 3 in microbatches; tokens by chance. Without stages too."""
    for loss, want, wrong in ranks(sl.MeshShape(mesh).world_size).run(_counts, mesh, options):
        assert loss == pytest.approx(want, rel=TOLERANCE)
        assert max(wrong) < TOLERANCE


def _means(mesh: str) -> tuple[float, float, list[float], list[float]]:
    """Twice without zeroing: gradients are added up, those of the shared tensor once each."""
    single, batch = gpt(), tokens(11)
    loss = mean(single(batch), batch)
    loss.backward()
    model = sharded(mesh)
    step = sl.pipeline_step(model, own_rows(batch, mesh), mean, microbatches=4)
    once = differences(model, single)
    sl.pipeline_step(model, own_rows(batch, mesh), mean, microbatches=2)
    for param in single.parameters():
        param.grad *= 2
    return step.loss.item(), loss.item(), once, differences(model, single)


def test_means_weigh_by_rows_and_steps_add_up(ranks):
    for loss, want, once, twice in ranks(4).run(_means, "pp=2,dp=2"):
        assert loss == pytest.approx(want, rel=TOLERANCE)
        assert max(once) < TOLERANCE and max(twice) < TOLERANCE


def _executed(schedule: str, stages: Any, microbatches: int) -> Any:
    model = sharded("pp=2", sl.pipeline(schedule, microbatches), stages=stages)
    return sl.pipeline_step(model, tokens(microbatches), mean).executed


@pytest.mark.parametrize(
    ("schedule", "stages", "idle"),
    [
        ("gpipe", None, 1 / (4 + 1)),
        ("1f1b", None, 1 / (4 + 1)),
        ("interleaved", STAGES, 0.5 / (4 + 0.5)),
        ("interleaved-zb", STAGES, 1 / (3 * 2 * 4 + 1)),
        ("zbv", STAGES, 1 / (3 * 2 * 4 + 1)),
    ],
)
def test_what_was_executed_stands_idle_as_the_formulas_say(ranks, schedule: str, stages: Any, idle: float):
    """(p-1)/(m+p-1) for p=2 and m=4, divided by v=2 where interleaved; of unit costs."""
    executed = ranks(2).run(_executed, schedule, stages, 4)
    assert bubble(timeline(executed)) == pytest.approx(idle)


def _evaluated(mesh: str) -> Any:
    single, batch = gpt().eval(), tokens(5)
    model = sharded(mesh).eval()
    step = sl.pipeline_step(model, own_rows(batch, mesh), microbatches=2, forward_only=True)
    if step.outputs is None:
        return None, all(param.grad is None for param in model.parameters())
    want = own_rows(single(batch), mesh)
    return (step.outputs - want).abs().max().item(), step.loss is None


def test_inference_gives_outputs_on_the_last_stage(ranks):
    found = ranks(4).run(_evaluated, "dp=2,pp=2")
    assert [error is None for error, _ in found] == [True, False, True, False]
    assert all(said for _, said in found)
    assert all(error < TOLERANCE for error, _ in found if error is not None)


def _scaled() -> list[bool]:
    """float16 with a loss scale: an overflow on one stage skips the step on all."""
    model = sharded("pp=2", sl.precision("fp16", scaler=LossScale(init_scale=256.0)), dtype=torch.float32)
    opt = sl.OptimizerWrapper(torch.optim.SGD, model, lr=0.1)
    said = []
    for step in range(2):
        if step and dist.get_rank():
            model.get_parameter("norm.weight").register_hook(lambda grad: grad * float("inf"))
        opt.zero_grad()
        sl.pipeline_step(model, tokens(4), mean, optimizer=opt, microbatches=2)
        opt.clip_grad_norm_(1.0)
        opt.step()
        said.append(opt.step_was_skipped)
    return [*said, opt.scaler is not None and opt.scaler.scale == 128.0]


def test_a_loss_scale_is_that_of_all_stages(ranks):
    assert ranks(2).run(_scaled) == [[False, True, True]] * 2


def _of_few() -> tuple[float, bool]:
    """An optimizer of the output layer's norm alone, which one stage has."""
    model = sharded("pp=2")
    wanted = [param for name, param in model.named_parameters() if name == "norm.weight"]
    opt = sl.OptimizerWrapper(torch.optim.AdamW([{"params": wanted}]), model)
    sl.pipeline_step(model, tokens(4), mean, microbatches=2)
    norm = opt.clip_grad_norm_(1e-3)
    opt.step()
    return norm.item(), opt.step_was_skipped


def test_an_optimizer_may_have_parameters_of_one_stage_alone(ranks):
    single = gpt()
    mean(single(tokens(4)), tokens(4)).backward()
    gradient = single.get_parameter("norm.weight").grad
    assert gradient is not None
    assert ranks(2).run(_of_few) == [(pytest.approx(gradient.norm().item(), rel=1e-6), False)] * 2


def _in_few_bits(autocast: bool) -> list[bool]:
    """Beside two data ranks with the same rows, whose mean is each one's own."""
    how, batch = sl.precision("bf16", autocast=autocast), tokens(4)
    plain = sl.shard_model(gpt().float(), "dp=2", {"**": None}, transforms=[how])
    mean(plain(batch), batch).backward()
    model = sharded("pp=2", how, dtype=torch.float32)
    done = sl.pipeline_step(model, batch, mean, microbatches=1, return_outputs=True)
    want = dict(plain.named_parameters(remove_duplicate=False))
    same = [
        torch.equal(p.grad, want[n].grad)
        for n, p in model.named_parameters()
        if n not in ("embed.weight", "head.weight")
    ]
    return [*same, done.outputs is None or torch.equal(done.outputs, plain(batch))]


@pytest.mark.parametrize("autocast", [False, True])
def test_in_few_bits_stages_round_as_one_device_does(ranks, autocast: bool):
    """What travels is in the dtype that is computed in, so that even bits are the same."""
    for same in ranks(2).run(_in_few_bits, autocast):
        assert len(same) > 10 and all(same)


def _by_pairs() -> list[float]:
    """As on back ends without tags, each direction between two ranks has a group of its own."""
    single, batch = gpt(), tokens(6)
    mean(single(batch), batch).backward()
    by_order = functools.partial(Channels.open, lines=[[0, 1]], device=torch.device("cpu"))
    with mock.patch.object(Channels, "open", lambda group, *_args: by_order(group)):
        earlier, model = (sharded("pp=2", sl.pipeline("interleaved", 4), stages=STAGES) for _ in range(2))
    first, second = (record_of(each).pipeline.channels.pairs for each in (earlier, model))
    assert len({*second.values()}) == 2 and first == second
    sl.pipeline_step(model, batch, mean)
    return differences(model, single)


def test_messages_may_be_told_apart_by_their_order(ranks):
    for wrong in ranks(2).run(_by_pairs):
        assert max(wrong) < TOLERANCE


# --- from meta, to files and back -------------------------------------------------------------------------------------


def _from_meta() -> bool:
    """Drawn in the order of one device, whatever the stage; the shared tensor is the same on both."""
    made = []
    for mesh in ("dp=2", "pp=2"):
        with torch.device("meta"):
            model = Transformer(layers=4, vocab=7, tied=True, bias=False)
        torch.manual_seed(3)
        rules = sl.Rules({"**": None}, stages=sl.rules.Balanced())
        made.append(sl.shard_model(model, mesh, rules, init="reset_parameters"))
    want = dict(made[0].named_parameters(remove_duplicate=False))
    return all(torch.equal(param, want[name]) for name, param in made[1].named_parameters())


def test_a_model_on_meta_draws_what_one_device_draws(ranks):
    assert ranks(2).run(_from_meta) == [True, True]


def _train(model: nn.Module, opt: torch.optim.Optimizer, seed: int, mesh: str) -> float:
    opt.zero_grad()
    step = sl.pipeline_step(model, own_rows(tokens(8, seed), mesh), mean, microbatches=2)
    sl.clip_grad_norm_(model, 0.5)
    opt.step()
    return step.loss.item()


PLACES: list[tuple[str, tuple[Any, ...], Any]] = [
    ("pp=2,dp=2", (sl.zero(1),), None),
    ("pp=4", (), STAGES),
    ("dp=4", (sl.zero(3),), None),
    ("pp=2,dp=2", (sl.zero(3), sl.pipeline("gpipe")), "embed, position | blocks, norm, head"),
]


def _across(folder: str) -> list[float]:
    """Save on one cut, load on the next, train on."""
    losses = []
    for turn, (mesh, transforms, stages) in enumerate(PLACES):
        model = sharded(mesh, *transforms, stages=stages)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if turn:
            sl.load(f"{folder}/{turn - 1}", model, opt)
        losses.append(_train(model, opt, turn, mesh))
        sl.save(f"{folder}/{turn}", model, opt)
    return losses


def test_checkpoints_load_with_other_stages(ranks, tmp_path):
    model = gpt()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    want = []
    for turn in range(len(PLACES)):
        opt.zero_grad()
        loss = mean(model(tokens(8, turn)), tokens(8, turn))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        want.append(loss.item())
    for found in ranks(4).run(_across, str(tmp_path)):
        assert found == pytest.approx(want, rel=TOLERANCE)


def _whole_state() -> bool:
    model = sharded("pp=2")
    full = {name: value.clone() for name, value in sl.full_state_dict(model).items()}
    model.load_state_dict({name: value + 1 for name, value in full.items()})
    here = dict(model.named_parameters())
    moved = all(torch.equal(param, full[name] + 1) for name, param in here.items())
    same = all(torch.equal(full[name], value) for name, value in gpt().state_dict().items())
    return moved and same and set(full) == set(gpt().state_dict())


def test_whole_state_dicts(ranks):
    assert ranks(2).run(_whole_state) == [True] * 2


class _Buffered(nn.Linear):
    """A layer with a buffer of every kind that back ends cannot send as it is."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        ones = torch.ones(3)
        for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.bool):
            self.register_buffer(str(dtype).partition(".")[2], ones.to(dtype))
        self.register_buffer("conjugate", torch.complex(ones, ones).conj())
        self.register_buffer("number", torch.tensor(3, dtype=torch.int16))


def _buffers_of_all_stages() -> bool:
    model = sl.shard_model(
        nn.Sequential(_Buffered(), _Buffered()), "pp=2", sl.Rules({"**": None}, stages=sl.rules.Balanced())
    )
    want = dict(nn.Sequential(_Buffered(), _Buffered()).named_buffers())
    full = sl.full_state_dict(model)
    return all(agree.fingerprint(full[name]) == agree.fingerprint(value) for name, value in want.items())


def test_buffers_of_any_dtype_are_in_whole_state_dicts(ranks):
    assert ranks(2).run(_buffers_of_all_stages) == [True] * 2


# --- what fails
# ---------------------------------------------------------------------------------------------------------


class Fragile(nn.Module):
    """Blocks of which one raises for a certain value, and one gives another shape for another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Raising(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x > 1e6).any()):
            raise ValueError("too large")
        return super().forward(x)


class Tiring(nn.Linear):
    tired = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tired:
            raise ValueError("too tired")
        return super().forward(x)


class Shortening(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y[:, :3] if bool((y > 1e6).any()) else y


def _fails(kind: str) -> tuple[str, Any, Any, Any, bool, str]:
    torch.manual_seed(0)
    model = Fragile()
    model.blocks[1] = {"raises": Raising, "shape": Shortening}[kind](4, 4)
    sl.shard_model(model, "pp=2", sl.Rules({"**": None}, stages="blocks.0-1 | blocks.2-3"))
    good, bad = torch.ones(6, 4), torch.cat([torch.ones(4, 4), torch.full((2, 4), 1e9)])
    sl.pipeline_step(model, good, lambda y, x: y.mean(), microbatch_size=2)
    before = copy.deepcopy([param.grad for param in model.parameters()])
    try:
        sl.pipeline_step(model, bad, lambda y, x: y.mean(), microbatch_size=2)
    except StageError as error:
        kept = all(torch.equal(param.grad, old) for param, old in zip(model.parameters(), before, strict=True))
        sl.pipeline_step(model, good, lambda y, x: y.mean(), microbatch_size=2)  # and on it goes
        return str(error), error.rank, error.stage, error.microbatch, kept, type(error.__cause__).__name__
    return "", None, None, None, False, ""


def test_a_stage_that_raises_in_the_last_microbatch_is_named_everywhere(ranks):
    said = (
        "Stage 0 on rank 0 raised in the forward of microbatch 2: ValueError: too large\n"
        "No rank has stepped; this step's gradients are dropped."
    )
    assert ranks(2).run(_fails, "raises") == [
        (said, 0, 0, 2, True, "ValueError"),
        (said, 0, 0, 2, True, "NoneType"),
    ]


def _fails_on(bad: tuple[int, ...], mesh: str, rules: Any, transforms: Any) -> tuple[str, str, float]:
    """The second block raises on some ranks; others of their stage wait for it."""
    torch.manual_seed(0)
    model, good = Fragile(), torch.ones(4, 4)
    model.blocks[1] = tired = Tiring(4, 4)
    stages = sl.Rules(rules, stages="blocks.0-1 | blocks.2-3", unmatched="replicate")
    sl.shard_model(model, mesh, stages, transforms=transforms, compile=None)
    sl.pipeline_step(model, good, lambda y, x: y.mean(), microbatches=2)
    tired.tired = dist.get_rank() in bad
    start = time.monotonic()
    patience = 2.0 if len(bad) == 1 else lost._AGREEMENT_TIMEOUT  # one alone waits all of it
    try:
        with mock.patch.object(lost, "_AGREEMENT_TIMEOUT", patience):
            sl.pipeline_step(model, good, lambda y, x: y.mean(), microbatches=2)
    except (StageError, LostRankError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "nothing was raised", 0.0


_WAITING: dict[str, tuple[str, Any, Any]] = {
    "tp": ("pp=2,tp=2", {"blocks.0": "colwise", "blocks.1": "rowwise"}, []),
    "zero 3": ("pp=2,dp=2", {}, [sl.zero(3)]),
}


@pytest.mark.parametrize("case", _WAITING)
def test_a_rank_that_raises_alone_in_a_stage_is_named_everywhere(ranks, case: str):
    found = ranks(4).run(_fails_on, (1,), *_WAITING[case])
    said = (
        "Stage 0 on rank 1 raised in the forward of microbatch 0: ValueError: too tired\n"
        "Ranks waited for this one inside of modules and have been told; end them, and start the job again."
    )
    assert found[1][:2] == ("StageError", said)
    for rank in (0, 2, 3):
        assert found[rank][0] == "LostRankError" and found[rank][2] < _AT_MOST
        assert re.match(r"Rank 1 \(process .*\) raised ValueError: too tired while others waited", found[rank][1])


@pytest.mark.parametrize("case", _WAITING)
def test_ranks_that_raise_together_are_named_and_all_can_go_on(ranks, case: str):
    found = ranks(4).run(_fails_on, (0, 1), *_WAITING[case])
    assert {kind for kind, _, _ in found} == {"StageError"} and len({said for _, said, _ in found}) == 1
    assert re.match("Stage 0 on rank [01] raised in the forward of microbatch 0: ValueError: too tired\n", found[2][1])


_LOSSES: dict[str, tuple[Any, str]] = {
    "no number": (lambda y, x: (y.sum(), None), "the count None; give a number of examples or tokens, from 0 up."),
    "two": (lambda y, x: (y.sum(), torch.tensor([2, 2])), "the count tensor"),
    "negative": (lambda y, x: (y.square().sum(), -3), "the count -3; give"),
    "nan": (lambda y, x: (y.sum(), float("nan")), "the count nan; give"),
    "detached": (lambda y, x: y.detach().mean(), "have no graph of autograd, and train nothing"),
    "detached, counted": (lambda y, x: (y.detach().sum(), 2), "have no graph of autograd, and train nothing"),
}


def _told(which: str) -> str:
    model = sl.shard_model(Fragile(), "pp=2", sl.Rules({"**": None}, stages="blocks.0-1 | blocks.2-3"))
    with pytest.raises(StageError) as raised:
        sl.pipeline_step(model, torch.ones(4, 4), _LOSSES[which][0], microbatches=2)
    return str(raised.value)


@pytest.mark.parametrize("which", _LOSSES)
def test_what_is_no_loss_or_no_count_is_named_everywhere(ranks, which: str):
    for message in ranks(2).run(_told, which):
        assert message.startswith("Stage 1 on rank 1 raised in the forward") and _LOSSES[which][1] in message


def test_another_shape_in_the_last_microbatch_is_named_everywhere(ranks):
    said = (
        "Stage 0 on rank 0 raised in the forward of microbatch 2: PlanError: Stage 0 has made a tensor of shape (2, 3) "
        'for "blocks.2", where inputs of these shapes let expect (2, 4): a module gives other shapes for other values. '
        "Pad them.\nNo rank has stepped; this step's gradients are dropped."
    )
    assert [found[:4] for found in ranks(2).run(_fails, "shape")] == [(said, 0, 0, 2)] * 2


def _message(kind: type[Exception], call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing was raised"


class Skipping(nn.Module):
    """What the first block makes is read by the third one too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        return self.blocks[3](self.blocks[2](self.blocks[1](first)) + first)


class Forgetting(Skipping):
    """It returns what the first block makes, and not what the last one makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        self.blocks[3](self.blocks[2](self.blocks[1](first)))
        return first


class Collecting(Skipping):
    """Each block adds its part to one number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x))
        for block in self.blocks:
            x = block(x)
            total[:] += x.mean(1)
        return x + total[:, None]


IN_HALVES = sl.Rules({"**": None}, stages="blocks.0-1 | blocks.2-3")


def _other_numbers() -> str:
    model, mesh = sharded("dp=2,pp=2", sl.zero(3)), "dp=2,pp=2"
    mine = tokens(6) if sl.MeshShape(mesh).coordinate(dist.get_rank())["dp"] else tokens(3)
    return _message(InputError, lambda: sl.pipeline_step(model, mine, mean, microbatch_size=2))


def test_data_ranks_that_meet_in_modules_have_as_many_microbatches(ranks):
    said = (
        "Data ranks split their batches into 2 and 3 microbatches, but this model's modules communicate over all data "
        "ranks (stage 3, experts, or BatchNorm). Give all the same number: microbatches=."
    )
    assert ranks(4).run(_other_numbers) == [said] * 4


def _refusals() -> list[str]:
    rank, first, quiet = dist.get_rank(), torch.ones(4, 4), {"check": False}
    model = sl.shard_model(Skipping(), "pp=2", sl.Rules({"**": None}, stages="blocks.0 | blocks.1-3"), **quiet)

    def run(batch: Any, **given: Any) -> Any:
        return sl.pipeline_step(model, batch, lambda y, x: y.mean(), **given)

    return [
        _message(InputError, lambda: run(first + rank, microbatches=2)),
        _message(ShardingError, lambda: model(first)),
        _message(InputError, lambda: run(first)),
        _message(InputError, lambda: run(first[:1], microbatches=2)),
        _message(InputError, lambda: run(torch.ones(4 + 2 * rank, 4), microbatches=2)),
        _message(PlanError, lambda: sharded("pp=2", rng="exact")),
        _message(InputError, lambda: run((first, first), microbatches=2)),
        _message(StageError, lambda: _step_of(Forgetting)),
        _message(PlanError, lambda: _step_of(Collecting)),
    ]


def _step_of(kind: type[nn.Module]) -> None:
    model = sl.shard_model(kind(), "pp=2", IN_HALVES, check=False)
    sl.pipeline_step(model, torch.ones(4, 4), lambda y, x: y.mean(), microbatches=2)


def test_values_of_another_stage_that_forward_writes_in_place_are_refused_by_the_dry_run():
    with pytest.raises(PlanError, match="forward writes a tensor of another stage into one of shape"):
        sl.plan(Collecting(), "pp=2", IN_HALVES, example=torch.ones(4, 4))


def test_what_is_refused(ranks):
    found = ranks(2).run(_refusals)
    assert found[0] == found[1]
    values, alone, number, rows, shapes, exact, two, forgotten, *in_place = found[0]
    assert len(in_place) == 1
    for said in in_place:
        assert "forward writes a tensor of another stage into one of shape (" in said
    assert forgotten.startswith(
        "Stage 1 on rank 1 raised in the forward of microbatch 0: PlanError: The loss is computed from a tensor of an "
        "earlier stage, which the last one does not have."
    )
    assert alone.startswith("This Skipping is split into pipeline stages, none of which can run alone.")
    assert number.startswith("Give the number of microbatches of a batch, microbatches=8,")
    assert rows == (
        "The batch has 1 rows, which cannot be split into 2 microbatches. Give a larger batch, or fewer microbatches."
    )
    for told in (values, shapes):
        assert told.startswith("Ranks 0 and 1 work on the same examples, and were given different batches")
    assert exact.startswith('rng="exact" draws in the order of one device')
    assert "does not take what the batch holds, 2 by position (too many positional arguments)" in two


def test_a_pipeline_is_freed_with_its_model(ranks):
    ranks(2).run(count_models)
    ranks(2).run(_means, "pp=2")
    assert ranks(2).run(models_alive) == [0, 0]


# --- what is split into microbatches
# -----------------------------------------------------------------------------------


class Masked(nn.Module):
    """Attention with a mask, positions and weights of classes that are no part of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, extra: Any = None) -> torch.Tensor:
        scores = (x @ x.mT).masked_fill(~mask, float("-inf")).softmax(-1)
        y = self.body(scores @ x)
        if extra is not None:
            y = y + extra["place"][:, None]
        return self.head(y)


def _masked(mesh: str, rows: int, given: dict[str, Any]) -> tuple[float, float, list[str]]:
    torch.manual_seed(0)
    single = Masked().double()
    model = sl.shard_model(copy.deepcopy(single), mesh, sl.Rules({"**": None}, stages="body | head"), compile=None)
    x = torch.randn(rows, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    args = x, torch.ones(8, 8, dtype=torch.bool).tril(), {"place": torch.arange(8) / 8}
    want = single(*args).square().mean()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = sl.pipeline_step(model, args, lambda y, _: y.square().mean(), microbatches=rows, **given)
    return step.loss.item(), want.item(), [str(each.message) for each in caught]


@pytest.mark.covering
@pytest.mark.parametrize("mesh", ["pp=2", "dp=1"])
@pytest.mark.parametrize("rows", [4, 8])
def test_arguments_that_are_replicated(ranks, mesh: str, rows: int):
    for loss, want, said in ranks(sl.MeshShape(mesh).world_size).run(
        _masked, mesh, rows, {"replicate": ("mask", "extra.place")}
    ):
        assert loss == pytest.approx(want, rel=TOLERANCE) and not said


def test_a_number_of_rows_that_is_a_coincidence_is_warned_of(ranks):
    loss, want, said = ranks(1).run(_masked, "dp=1", 8, {})[0]
    assert loss != pytest.approx(want, rel=1e-6)
    assert said == [
        f'The batch has 8 rows, and "{name}" of shape {shape} is split into microbatches as one of its examples, but '
        '8 is also the size of another dim of "0". If it is not a part of the examples, call '
        f'pipeline_step(..., replicate=("{name}",)); if it is, replicate=().'
        for name, shape in (("1", (8, 8)), ("2.place", (8,)))
    ]


def _other_rows(sizes: tuple[int, int], given: dict[str, Any]) -> str:
    """A criterion with weights of six classes, in two steps."""
    torch.manual_seed(0)
    model = sl.shard_model(Weighted(), "pp=2", sl.Rules({"**": None}, stages="body | head"))
    for rows in sizes:
        batch = {"x": torch.ones(rows, 4), "weights": torch.ones(6)}
        step = functools.partial(sl.pipeline_step, model, batch, _weighted, microbatches=2, **given)
        said = _message(InputError, step)
    return said


def _weighted(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output * batch["weights"]).mean()


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_a_number_of_rows_that_changes_what_is_split_is_refused(ranks):
    said = (
        'The batch has 6 rows, and "weights" of shape (6,) would be split into microbatches; in a step of 4 rows it '
        'was not split. Name it if it is not a part of the examples, replicate=("weights",); if shapes say it in every '
        "step, replicate=()."
    )
    assert ranks(2).run(_other_rows, (4, 6), {}) == [said] * 2
    assert ranks(2).run(_other_rows, (4, 6), {"replicate": ["weights"]}) == ["nothing was raised"] * 2
    unknown = "replicate='wheights' names no argument of the batch, which has x, weights. Give names of arguments"
    assert all(found.startswith(unknown) for found in ranks(2).run(_other_rows, (4, 6), {"replicate": ["wheights"]}))


def _keywords(mesh: str) -> float:
    """The ranks give keywords in another order."""
    torch.manual_seed(0)
    model = sl.shard_model(Weighted(), mesh, sl.Rules({"**": None}, stages="body | head"))
    batch = {"x": torch.ones(4, 4), "weights": torch.ones(6)}
    batch = dict(sorted(batch.items(), reverse=dist.get_rank() == 1))
    done = sl.pipeline_step(
        model, batch, lambda y, b: (y * b["weights"]).mean(), microbatches=2, replicate=("weights",)
    )
    return done.loss.item()


def test_the_order_of_keywords_does_not_matter(ranks):
    first, second = ranks(2).run(_keywords, "pp=2")
    assert first == second


# --- what is kept
# ----------------------------------------------------------------------------------------------------


class Odd(Fragile):
    """With buffers of dtypes that a back end does not know."""

    def __init__(self) -> None:
        super().__init__()
        for i, dtype in enumerate((torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn)):
            self.blocks[i % 4].register_buffer(f"odd{i}", torch.tensor([1, 2 + i]).to(dtype))
        self.blocks[3].register_buffer("number", torch.tensor(3, dtype=torch.int16))


def _odd() -> list[str]:
    model = sl.shard_model(Odd(), "pp=2", IN_HALVES)
    found, want = sl.full_state_dict(model), Odd().state_dict()
    return [name for name in want if "odd" in name or "number" in name if found[name].tolist() != want[name].tolist()]


def test_whole_state_dicts_with_any_dtype(ranks):
    assert ranks(2).run(_odd) == [[], []]


def _own_forward() -> list[bool]:
    torch.manual_seed(0)
    model, x = Fragile(), torch.ones(4, 4)
    model.forward = lambda x, _model=model: Fragile.forward(_model, x) * 2
    want = model(x).mean().item()
    sl.shard_model(model, "pp=2", IN_HALVES)
    before = sl.pipeline_step(model, x, lambda y, _: y.mean(), microbatches=2).loss.item()
    return [before == pytest.approx(want), "forward" in vars(model)]


def test_a_forward_of_the_instance_is_run(ranks):
    assert ranks(2).run(_own_forward) == [[True, True]] * 2


def _groups_of_models(mesh: str) -> list[int]:
    """Process groups after each of three models."""
    counts = []
    for _ in range(3):
        torch.manual_seed(0)
        rules = sl.Rules({"**": None}, stages="blocks.0-1 | blocks.2-3" if "pp" in mesh else None)
        model = sl.shard_model(Fragile(), mesh, rules, transforms=sl.zero(2), check="always")
        if "pp" in mesh:
            sl.pipeline_step(model, torch.ones(4, 4), lambda y, _: y.mean(), microbatches=2)
        else:
            model(torch.ones(4, 4)).mean().backward()
        counts.append(len(_torch.process_groups()))
    return counts


@pytest.mark.parametrize("mesh", ["dp=2,fsdp=2", "pp=2,dp=2"])
def test_models_of_equal_meshes_have_the_same_process_groups(ranks, mesh: str):
    for counts in ranks(4).run(_groups_of_models, mesh):
        assert counts[0] == counts[1] == counts[2]
