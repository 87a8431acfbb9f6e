"""Lightning trains sharded models with the numbers that it has on one process without shardlib."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.errors import ShardlibError
from tests.families.params import params
from tests.integrations.lightning_training import (
    CASES,
    DEEP,
    EXPERTS,
    KINDS,
    MIXTURES,
    Lit,
    Trained,
    adversaries,
    alone,
    fit,
    grid,
    in_bfloat16,
    language,
    mixture_resumed,
    mixtures,
    trained,
    trainer,
)

from lightning.pytorch.callbacks import StochasticWeightAveraging  # isort: skip  after torchvision may be imported

# Sums reordered by another mesh differ by roundings.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
# The product of kinds and cases is deep.
SOME = {
    "tp=2": [*CASES],
    "dp=2": ["plain", "accumulation"],
    "dp=2 fsdp": ["plain", "accumulation", "late"],
    "dp=2 zero(2)": ["plain", "accumulation", "clipped by value", "manual"],
}


def assert_equal(run: Any, exact: Any, where: str) -> None:
    for name in ("losses", "metrics", "rates", "weights", "steps"):
        told = functools.partial("{}, {}: {}".format, where, name)
        torch.testing.assert_close(getattr(run, name), getattr(exact, name), **TOLERANCE, msg=told)
    first, step = run.share
    torch.testing.assert_close(run.predicted, exact.predicted[first::step], **TOLERANCE)


def assert_all_equal(everywhere: list[dict[str, dict[str, Trained]]], exact: dict[str, Trained]) -> None:
    for rank, found in enumerate(everywhere):
        for kind, runs in found.items():
            for case, run in runs.items():
                assert_equal(run, exact[case], f"{kind}, {case}, rank {rank}")


def resumed(folder: str, kind: str | None, path: str) -> Trained:
    return trained("plain", folder, kind, resume=path, max_epochs=2)


@pytest.mark.parametrize(
    ("mesh", "transforms"),
    [
        ("dp=2", ()),
        ("dp=2", "zero(1)"),
        ("dp=2", "zero(2)"),
        ("dp=2", "zero(3)"),
        ("tp=2", ()),
        pytest.param("dp=2,tp=2", "zero(3)", marks=pytest.mark.deep),
    ],
)
def test_adversaries_that_take_turns_have_the_weights_of_one_process(ranks, mesh: str, transforms: Any):
    (exact,) = ranks(1).run(adversaries, None)
    for weights in ranks(sl.MeshShape(mesh).world_size).run(adversaries, mesh, transforms):
        torch.testing.assert_close(weights, exact, **TOLERANCE)


def test_each_kind_of_sharding_has_the_numbers_of_one_process(ranks, tmp_path):
    """Rank 0 alone has the first weights; a kind resumes from the checkpoint of another one."""
    (exact,) = ranks(1).run(alone, [*CASES], str(tmp_path / "alone"), timeout=300)
    everywhere = ranks(2).run(grid, SOME, str(tmp_path / "ranks"), timeout=500)
    assert_all_equal(everywhere, exact)
    # From one process to ranks, and back.
    for run in ranks(2).run(resumed, str(tmp_path), "dp=2 zero(2)", exact["plain"].checkpoint):
        assert_equal(run, exact["resumed"], "resumed from one process")
    (run,) = ranks(1).run(resumed, str(tmp_path), None, everywhere[0]["tp=2"]["plain"].checkpoint)
    assert_equal(run, exact["resumed"], "resumed on one process")
    assert_near_in_bfloat16(ranks, 2, ["tp=2"], "plain", tmp_path, exact["plain"])


def assert_near_in_bfloat16(ranks: Any, world: int, kinds: list[str], case: str, folder: Any, exact: Trained) -> None:
    """Autocast rounds the same products in another order. The first loss is that of one pass; later, a router near a
    tie sends tokens of a mixture to other experts."""
    (rounded,) = ranks(1).run(in_bfloat16, [None], case, str(folder))
    assert rounded[None] != exact.losses
    later = 2**-8 if case == "plain" else 2e-2
    for losses in ranks(world).run(in_bfloat16, kinds, case, str(folder), timeout=500):
        for kind, own in losses.items():
            told = functools.partial("{} in {}: {}".format, case, kind)
            torch.testing.assert_close(own[0], rounded[None][0], rtol=2**-8, atol=2**-8, msg=told)
            torch.testing.assert_close(own, rounded[None], rtol=later, atol=later, msg=told)


@pytest.mark.parametrize(
    "kinds", params([("dp=2 zero(2)", "tp=2")], deep=[("dp=2 fsdp", "dp=2"), ("tp=2", "dp=2 fsdp")])
)
def test_a_loss_scale_is_that_of_one_process_and_resumes_on_another_mesh(ranks, tmp_path, kinds):
    """The first data rank alone overflows. float16 has 3 bits more than bfloat16, which is compared to 2**-8."""
    scaled = functools.partial(trained, "overflow", str(tmp_path), precision="16-mixed")
    (exact,) = ranks(1).run(scaled, None)
    assert exact.scales == [2.0**power for power in (10, 9, 9, 9, 10)]
    saved, loaded = kinds
    runs = ranks(2).run(scaled, saved)
    (resumed,) = ranks(1).run(scaled, None, resume=runs[0].checkpoint, max_epochs=2)
    assert len(resumed.scales) > 4 and len({*resumed.scales}) > 1
    runs_resumed = ranks(2).run(scaled, loaded, resume=runs[0].checkpoint, max_epochs=2)
    for of_one, of_ranks in ((exact, runs), (resumed, runs_resumed)):
        for run in of_ranks:
            assert (run.scales, run.rates) == (of_one.scales, of_one.rates)
            torch.testing.assert_close(run.losses, of_one.losses, rtol=2**-11, atol=2**-11)


REFUSED = {
    "16-true": (lambda: trainer(precision="16-true"), 'transforms=shardlib.precision("bf16")'),
    "bf16-true": (lambda: trainer(precision="bf16-true"), "float32 master weights"),
    "batch norm": (lambda: trainer(sync_batchnorm=True), "leave it out"),
    "pipeline": (lambda: trainer("pp=2"), "pipeline_step"),
    "devices": (lambda: trainer(devices=3), "runs 3 processes"),
    "devices of another mesh": (lambda: trainer("dp=2,tp=2"), "Trainer(devices=4)"),
    "flag of DDP": (lambda: trainer(find_unused_parameters=True), "Unused parameters need no flag"),
    "misspelled": (lambda: trainer(bucket=3), 'Did you mean "bucket_mb"'),
    "accumulate": (lambda: fit(trainer(transforms="accumulate(3)")), "write accumulate_grad_batches=3"),
    "fp16": (lambda: fit(trainer(transforms='precision("fp16")')), 'write precision="16-mixed"'),
    "averages": (lambda: fit(trainer(callbacks=[StochasticWeightAveraging(1e-2)])), "Leave it out"),
    "compiled": (lambda: fit(trainer(), torch.compile(Lit())), "ShardlibStrategy(compile=...)"),
    "another plan": (lambda: fit(trainer(transforms="fsdp"), fit(trainer())), "is sharded already"),
}


def refusals() -> dict[str, str]:
    found = {}
    for name, (call, _) in REFUSED.items():
        try:
            call()
        except ShardlibError as error:
            found[name] = str(error)
    return found


@pytest.mark.compiled
def test_what_cannot_be_is_refused_by_what_to_write(ranks):
    for found in ranks(2).run(refusals):
        for name, (_, said) in REFUSED.items():
            assert said in found.get(name, "nothing was refused"), name


def by_name() -> list[Any]:
    """The strategy by its name, values of data ranks, and a model that a second trainer finds sharded."""
    rank = torch.distributed.get_rank()
    model = fit(trainer(strategy="shardlib"))
    strategy = model.trainer.strategy
    gathered = strategy.all_gather(torch.tensor([rank]))
    mean, total = strategy.reduce(torch.tensor(2 + rank)), strategy.reduce(torch.tensor(rank), reduce_op="sum")
    x = torch.full((2, 4), 1.0 + rank) * torch.arange(2)[:, None]
    model.zero_grad()
    with strategy.block_backward_sync():
        model.loss((x, x)).backward()
    own = strategy.all_gather(model.model.down.bias.grad.clone())
    again = fit(trainer(strategy="shardlib"), model)
    alone = fit(trainer("tp=2", {"down": "rowwise", "up": "colwise", "norm": None})).trainer.strategy
    return [
        strategy.distributed_sampler_kwargs["num_replicas"],
        gathered.tolist(),
        mean.item(),
        total.item(),
        again is model,
        torch.equal(own[0], own[1]),
        alone.all_gather(torch.tensor([rank])).tolist(),
        alone.distributed_sampler_kwargs,
        str(sl.get_plan(alone.sharded_module).mesh),
    ]


def test_values_are_those_of_data_ranks(ranks):
    for rank, found in enumerate(ranks(2).run(by_name)):
        assert found == [2, [[0], [1]], 2.5, 1, True, False, [rank], {"num_replicas": 1, "rank": 0}, "tp=2"]


@pytest.mark.parametrize(("mesh", "transforms"), [("tp=2", ""), ("dp=2", "fsdp")])
def test_a_model_inside_is_sharded_by_its_layout_file(ranks, mesh, transforms):
    for weights, plain, split in ranks(2).run(language, mesh, transforms):
        torch.testing.assert_close(weights, plain, **TOLERANCE)
        assert (split > 0) == (mesh == "tp=2")


@pytest.mark.deep
def test_all_kinds_have_the_numbers_of_one_process(ranks, tmp_path):
    (exact,) = ranks(1).run(alone, [*CASES], str(tmp_path / "alone"), timeout=300)
    assert_all_equal(ranks(4).run(grid, {kind: [*CASES] for kind in DEEP}, str(tmp_path / "four"), timeout=900), exact)
    assert_all_equal(ranks(2).run(grid, {kind: [*CASES] for kind in KINDS}, str(tmp_path / "two"), timeout=900), exact)


@pytest.mark.deep
def test_a_mixture_of_experts_has_the_numbers_of_one_process_and_resumes_on_another_mesh(ranks, tmp_path):
    folder = str(tmp_path)
    alone = {case: ranks(1).run(trained, case, folder, None, timeout=300)[0] for case in MIXTURES}
    two = [kind for kind in EXPERTS if sl.MeshShape(EXPERTS[kind][0]).world_size == 2]
    four = [kind for kind in EXPERTS if kind not in two]
    on_two = ranks(2).run(mixtures, [*two, "tp=2", "dp=2 fsdp", "dp=2 zero(2)"], folder, timeout=900)
    on_four = ranks(4).run(mixtures, [*four, "dp=2,tp=2 zero(2)"], folder, timeout=900)
    assert_all_equal(on_two, alone)
    assert_all_equal(on_four, alone)
    (exact,) = ranks(1).run(mixture_resumed, None, folder, alone["mixture"].checkpoint)
    for world, loaded, path in (
        (4, "ep=2,tp=2 zero(2)", on_two[0]["ep=2"]["mixture"].checkpoint),
        (2, "ep=2", on_four[0]["ep=2,tp=2 zero(2)"]["mixture"].checkpoint),
        (2, "tp=2", on_two[0]["ep=2 zero(2)"]["mixture"].checkpoint),
    ):
        for run in ranks(world).run(mixture_resumed, loaded, folder, path, timeout=300):
            assert_equal(run, exact, f"resumed on {loaded}")


@pytest.mark.deep
@pytest.mark.parametrize("case", ["plain", "mixture"])
def test_bfloat16_is_the_autocast_of_one_process_on_every_mesh(ranks, tmp_path, case):
    kinds = KINDS | DEEP if case == "plain" else EXPERTS
    (exact,) = ranks(1).run(trained, case, str(tmp_path), None, timeout=300)
    for world in (2, 4):
        of_size = [kind for kind, (mesh, _) in kinds.items() if sl.MeshShape(mesh).world_size == world]
        assert_near_in_bfloat16(ranks, world, of_size, case, tmp_path, exact)
