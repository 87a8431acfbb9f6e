"""A dry audit finds what is planted and nothing else, on meshes of any size."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from shardlib import engine
from shardlib.errors import InputError, MeshError, PlanError
from shardlib.testing.auditing.dry import DryReport, dry_audit
from shardlib.testing.auditing.foreign import not_on_cpus
from tests.testing import dry_cases as cases
from tests.testing.dry_cases import DIM, Words, ids

SP = "dp=4,tp=2"
EACH = "layers.0", "layers.1"


def _words(shard: Callable[..., Any], mesh: str = SP, **given: Any) -> DryReport:
    return dry_audit(Words, shard, mesh, ids, **given)


def _found(report: DryReport) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return [(each.kind, each.names, each.axes) for each in report.findings]


def _remarked(report: DryReport) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return [(each.kind, each.names, each.axes) for each in report.remarks]


@pytest.mark.parametrize("case", cases.RIGHT)
def test_right_code_has_no_findings(case: str):
    build, shard, mesh = cases.RIGHT[case]
    report = dry_audit(build, shard, mesh, ids)
    assert report and report.findings == (), str(report)
    assert next(each.name for each in report.parameters) == "embedding.weight"


# --- what is planted --------------------------------------------------------------------------------------------------


def test_a_norm_that_is_left_out_of_sequence_parallelism():
    report = _words(functools.partial(cases.sequence_parallel, norms=False))
    names = tuple(f"{layer}.norm.{one}" for layer in EACH for one in ("weight", "bias"))
    assert _found(report) == [("unreduced gradient", names, ("tp",))]
    assert report.findings[0].text == (
        'the gradient of layers.{0-1}.norm.weight x2, layers.{0-1}.norm.bias x2 differs over "tp" (2 ranks), whose '
        "ranks hold the same parameter, and nothing sums it: the ranks will drift apart; name the module in the plan "
        "(SequenceParallel() for a norm between split activations), or sum its gradient over tp"
    )


def test_a_row_parallel_layer_that_leaves_its_sum_to_be_done():
    report = _words(functools.partial(cases.tensor_parallel, down=RowwiseParallel(output_layouts=Partial())))
    first = report.findings[0]
    assert (first.kind, first.names, first.axes) == ("unfinished sum", ("layers.0.down", "layers.1.down"), ("tp",))
    assert "add in layers.{0-1} x2 takes it for the sum" in first.text


@pytest.mark.parametrize("shard", [cases.tensor_parallel, cases.sequence_parallel])
def test_a_data_axis_that_nothing_covers(shard: Callable[..., Any]):
    report = _words(functools.partial(shard, data=False))
    every = tuple(name for name, _ in Words().named_parameters())
    assert _found(report) == [("unreduced gradient", every, ("dp",))]
    assert report.findings[0].text.startswith('the gradient of every parameter differs over "dp" (4 ranks)')


def test_one_of_two_data_axes_that_nothing_covers():
    report = _words(lambda model, mesh: cases.data_parallel(model, mesh["fsdp"]), "dp=2,fsdp=2")
    assert [(each.kind, each.axes) for each in report.findings] == [("unreduced gradient", ("dp",))]


def test_a_head_that_every_rank_repeats():
    report = _words(functools.partial(cases.tensor_parallel, head=False))
    assert _found(report) == []
    kinds = {each.kind: each for each in report.remarks}
    assert kinds["replicated compute"].names == ("head",) and kinds["replicated compute"].axes == ("tp",)
    assert kinds["replicated parameters"].names == ("embedding.weight", "head.weight")
    assert kinds["replicated parameters"].bytes == 4 * 2 * cases.WORDS * DIM // 4 + 6 * 4 * DIM // 4
    (head, *others) = [each for each in report.work if each.module == "head"]
    tokens = ids().numel()
    assert head.alike == ("tp",) and head.flops == 2 * tokens * DIM * cases.WORDS and len(others) == 1


def test_local_tensors_whose_gradients_keep_the_placements_of_forward():
    def build(placements: Any = None) -> nn.Module:
        return nn.Sequential(cases.Local(placements), cases.Local(placements))

    batch = torch.zeros(2, DIM)
    report = dry_audit(build, cases.local_products, "tp=2", batch)
    assert _found(report) == [
        ("wrong placement", ("1", "0"), ("tp",)),
        ("unreduced gradient", ("0.norm.weight", "0.norm.bias", "1.norm.weight", "1.norm.bias"), ("tp",)),
    ]
    assert "in backward of {0-1} x2" in report.findings[0].text
    right = dry_audit(lambda: build([Partial()]), cases.local_products, "tp=2", batch)
    assert right.findings == (), str(right)


def test_parameters_that_are_no_longer_tied():
    def shard(model: Words, mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})

    report = dry_audit(lambda: Words(tied=True), shard, "tp=2", ids)
    (untied,) = [each for each in report.findings if each.kind == "untied parameter"]
    assert untied.names == ("embedding.weight", "head.weight") and untied.bytes == 4 * cases.WORDS * DIM // 2


def test_an_axis_that_divides_nothing():
    report = dry_audit(Words, lambda model, mesh: cases.data_parallel(model, mesh["dp"]), SP, ids)
    assert _found(report) == [] and _remarked(report) == [("idle axis", (), ("tp",))]


def test_gradients_that_stay_partial_are_remarked_upon():
    report = dry_audit(
        lambda: Words(layers=1), functools.partial(cases.sequence_parallel, data=False), "dp=1,tp=2", ids
    )
    names = ("layers.0.norm.weight", "layers.0.norm.bias", "norm.weight", "norm.bias")
    assert _found(report) == [] and ("pending gradient", names, ("tp",)) in _remarked(report)


def test_a_tensor_that_is_called_replicated_and_is_not():
    class Claims(nn.Linear):
        mesh: DeviceMesh | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mesh is not None:
                x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).to_local()
            return super().forward(x)

    def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model[0].mesh = mesh  # type: ignore[index]
        return cases.in_ddp(model, mesh)

    report = dry_audit(lambda: nn.Sequential(Claims(DIM, DIM)), shard, "dp=2", torch.zeros(2, DIM))
    assert _found(report)[0] == ("wrong placement", ("0",), ("dp",))
    assert "in forward of 0" in report.findings[0].text


@pytest.mark.parametrize("copies", [True, False])
def test_plain_tensors_that_are_split_by_hand(copies: bool):
    def build() -> nn.Module:
        return nn.Sequential(cases.ByHand(copies="sum" if copies else ""), cases.ByHand(copies="sum" if copies else ""))

    report = dry_audit(build, cases.by_hand, "tp=2", torch.zeros(2, DIM))
    norms = tuple(f"{i}.norm.{one}" for i in range(2) for one in ("weight", "bias"))
    assert _found(report) == ([] if copies else [("unreduced gradient", norms, ("tp",))])
    assert report.notes == (
        'Plain tensors of another shape than before, taken to be split over "tp": {0-1}.up.weight x2, '
        "{0-1}.down.weight x2.",
    )
    assert not [each for each in report.remarks if each.kind in ("idle axis", "replicated compute")]


def _broadcast(grad: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.broadcast(grad, 0, group=group)


def _max(grad: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(grad, dist.ReduceOp.MAX, group=group)


def _reduced_to_one(grad: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.reduce(grad, 0, group=group)
    grad.div_(dist.get_world_size(group))
    dist.broadcast(grad, 0, group=group)


def _averaged(grad: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(grad, dist.ReduceOp.AVG, group=group)
    dist.broadcast(grad, 0, group=group)


def _with_hooks(combine: Callable[..., None], model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: combine(each.grad, mesh.get_group("dp")))
    return model


def _by_communication_hook(combine: Callable[..., None], model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        combine(bucket.buffer(), group)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]})
    model = cases.in_ddp(model, mesh)
    model.register_comm_hook(mesh.get_group("dp"), hook)  # type: ignore[operator]
    return model


@pytest.mark.parametrize("shard", [_with_hooks, _by_communication_hook])
@pytest.mark.parametrize(
    ("combine", "why"),
    [
        (_broadcast, "broadcast gives all that of one rank; reduce it by SUM or AVG"),
        (_max, "all_reduce takes their MAX; reduce it by SUM or AVG"),
        (_reduced_to_one, None),
        (_averaged, None),
    ],
)
def test_gradients_that_are_made_alike_and_not_summed(shard: Any, combine: Callable[..., None], why: str | None):
    report = _words(functools.partial(shard, combine), "dp=4")
    assert [(each.kind, each.axes, each.text) for each in report.findings] == (why is not None) * [
        (
            "unreduced gradient",
            ("dp",),
            'the gradient of every parameter is not a sum over "dp" (4 ranks), whose ranks hold the same parameter '
            f"and compute gradients of their own: {why}",
        )
    ]


@pytest.mark.parametrize("copy", ["sum", "broadcast"])
def test_gradients_of_activations_that_are_not_summed(copy: str):
    report = dry_audit(
        lambda: nn.Sequential(cases.ByHand(copies=copy), cases.ByHand(copies=copy)),
        cases.by_hand,
        "tp=2",
        torch.zeros(2, DIM),
    )
    norms = tuple(f"{i}.norm.{one}" for i in range(2) for one in ("weight", "bias"))
    assert _found(report) == ([("unreduced gradient", norms, ("tp",))] if copy == "broadcast" else [])
    assert copy == "sum" or "is not a sum over" in report.findings[0].text


def test_a_scale_by_the_largest_value_of_all_ranks_keeps_gradients_as_they_are():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            largest = grad.abs().max()
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            return grad / (largest + 1) * (largest + 1)

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scaled.apply(super().forward(x))

    assert dry_audit(lambda: Model(DIM, DIM), cases.in_ddp, "dp=2", torch.zeros(2, DIM)).findings == ()


def test_a_recomputed_forward_may_take_the_largest_value_of_all_ranks():
    class Model(nn.Linear):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            largest = x.detach().clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            return super().forward(largest)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    assert dry_audit(lambda: Model(DIM, DIM), cases.in_ddp, "dp=2", torch.zeros(2, DIM)).findings == ()


@pytest.mark.parametrize("collective", [dist.reduce_scatter_single, dist.all_to_all_single])
def test_a_collective_that_gives_each_rank_another_part(collective: Callable[..., Any]):
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = len(x) // 2 if collective is dist.reduce_scatter_single else len(x)
            part = x.new_empty(rows, DIM)
            collective(part, x.contiguous())
            return super().forward(part)

    report = dry_audit(lambda: Model(DIM, DIM), lambda model, mesh: model, "tp=2", torch.zeros(2, DIM))
    assert ("unreduced gradient", ("tp",)) in [(each.kind, each.axes) for each in report.findings]


def test_a_group_that_does_not_follow_the_mesh_is_said():
    def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        group = dist.new_group([0, 1, 3])
        model.register_forward_pre_hook(lambda _, args: dist.all_reduce(args[0], group=group))
        return model

    report = dry_audit(lambda: nn.Linear(DIM, DIM), shard, "tp=4", torch.zeros(2, DIM))
    assert report.notes[-1].startswith("Some collectives are over groups that do not follow the axes of the mesh")


@pytest.mark.parametrize(
    ("mesh", "axis", "switch"),
    [
        ("dp=4", "dp", "set_requires_gradient_sync"),
        ("dp_replicate=2,dp_shard=4", "dp_replicate", "set_requires_all_reduce"),
        ("dp_replicate=2,dp_shard=4", "dp_shard", "set_requires_gradient_sync"),
    ],
)
def test_gradients_that_fully_shard_keeps(mesh: str, axis: str, switch: str):
    def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        getattr(cases.data_parallel(model, mesh), switch)(False)
        return model

    report = _words(shard, mesh)
    (found,) = [each for each in report.findings if each.axes == (axis,)]
    assert found.kind == "unreduced gradient" and found.names == tuple(name for name, _ in Words().named_parameters())
    assert f'not a sum over "{axis}" (' in found.text and f"{switch}(False) is left on; call it with" in found.text
    assert len(report.findings) == len(mesh.split(",")) - (switch == "set_requires_all_reduce")
    assert not [note for note in report.notes if "get no gradient" in note]


def test_gradients_that_fully_shard_keeps_beside_a_plan():
    def shard(model: Words, mesh: DeviceMesh) -> nn.Module:
        cases.tensor_parallel(model, mesh).set_requires_gradient_sync(False)  # type: ignore[operator]
        return model

    report = _words(shard)
    assert [(each.kind, each.axes) for each in report.findings] == [("unreduced gradient", ("dp",))]


def test_ddp_that_looks_for_unused_parameters():
    class Half(Words):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(ids))

    report = dry_audit(Half, functools.partial(cases.in_ddp, find_unused_parameters=True), "dp=4", ids)
    assert report.findings == () and "Parameters that get no gradient from this loss: layers" in report.notes[0]
    assert report.step.count(kind="all_reduce", axis="dp") == 2  # gradients, and which parameters were used


# --- what is reported -------------------------------------------------------------------------------------------------


def _recorded(shard: Callable[..., Any], names: tuple[str, ...], sizes: tuple[int, ...]) -> Counter[Any]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = Words()
    shard(model, mesh)
    with engine.record_collectives(model, mesh=mesh) as log:
        model(ids()).sum().backward()
    return Counter(log.collectives)


@pytest.mark.parametrize("shard", [cases.tensor_parallel, cases.sequence_parallel])
def test_collectives_are_those_of_a_real_run(shard: Callable[..., Any], ranks: Any):
    measured = ranks(4).run(_recorded, shard, ("dp", "tp"), (2, 2))[0]
    report = _words(shard, "dp=2,tp=2", loss=lambda model, batch: model(batch).sum())
    assert Counter(report.step.collectives) == measured and measured


def test_four_thousand_ranks():
    report = dry_audit(lambda: Words(layers=4), cases.sequence_parallel, "dp=512,tp=8", ids)
    assert report.mesh.world_size == 4096 and report.findings == ()
    gathers = [each for each in report.step.collectives if each.kind == "all_gather" and each.axes == ("dp",)]
    assert {each.size for each in gathers} == {512} and len(gathers) == 5 + 5 - 1
    assert str(report).startswith("Dry audit on dp=512,tp=8 (4,096 ranks), as rank 0: no findings\n")
    assert "Rank 0 (dp 0, tp 0) has the larger shards: " in str(report)


def test_a_report_is_text_and_data():
    report = _words(functools.partial(cases.sequence_parallel, norms=False))
    text, data = str(report), json.loads(report.to_json())
    assert not report and "1 finding\n  unreduced gradient: " in text
    assert "layers.{0-1}.down x2       forward   reduce_scatter  tp" in text
    assert "layers.{0-1}.norm.weight x2  tp" in text
    assert (data["mesh"], data["rank"], data["ok"]) == (SP, 0, False)
    assert data["findings"][0]["kind"] == "unreduced gradient" and data["findings"][0]["axes"] == ["tp"]
    assert sum(each["calls"] for each in data["collectives"]) == report.step.count()
    assert report.to_json() == _words(functools.partial(cases.sequence_parallel, norms=False)).to_json()


def test_parameters_as_a_rank_holds_them():
    kept = {each.name: each for each in _words(cases.tensor_parallel).parameters}
    assert kept["layers.0.up.weight"].sharded == ("dp", "tp") and kept["layers.0.up.weight"].replicated == ()
    assert kept["layers.0.norm.weight"].replicated == ("tp",) and kept["layers.0.norm.weight"].local_shape == (4,)
    assert kept["layers.0.up.weight"].bytes == 4 * 4 * DIM * DIM // 8


def test_a_model_is_built_with_values_where_meta_has_not_enough():
    def build() -> nn.Module:
        assert torch.ones(3).sum().item() == 3
        return Words()

    report = dry_audit(build, lambda model, mesh: cases.in_ddp(model, mesh), "dp=2", ids())
    assert report.notes == ("The model was built with values: on meta it raises RuntimeError.",)


def test_batches_are_those_of_one_data_rank_whatever_they_are_made_of():
    given = [ids(), ids().to("meta"), (ids(),), {"ids": ids()}, ids]
    found = {dry_audit(Words, cases.in_ddp, "dp=2", each).to_json() for each in given}
    assert len(found) == 1


def test_another_rank_and_a_tuple_with_an_optimizer():
    def shard(model: nn.Module, device_mesh: DeviceMesh) -> Any:
        assert dist.get_rank() == 3 == int(os.environ["RANK"]) and device_mesh.get_local_rank(0) == 1
        model = cases.tensor_parallel(model, device_mesh)
        return torch.optim.AdamW(model.parameters()), model

    report = dry_audit(Words, shard, "dp=2,tp=2", ids, rank=3)
    assert report.rank == 3 and report.findings == ()


def test_nothing_is_left_of_the_fake_world():
    def state() -> tuple[Any, ...]:
        torch_s = torch.compile, torch.cuda.set_device, torch.utils.swap_tensors, nn.Module.compile
        methods = DTensor.__new__, DTensor.to_local, DeviceMesh.__init__, DeviceMesh.__getitem__
        ddp = nn.parallel.DistributedDataParallel.__init__, dist.init_process_group
        return dist.is_initialized(), *torch_s, *methods, *ddp, dict(os.environ)

    before = state()
    _words(cases.tensor_parallel)
    with pytest.raises(PlanError):
        _words(lambda model, mesh: 1 / 0)
    assert state() == before


# --- what cannot be audited -------------------------------------------------------------------------------------------


class Reads(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


class Leaves(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.from_numpy(x.detach().numpy()))


@torch.library.custom_op("shardlib_test::no_fake", mutates_args=())
def _no_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Kernel(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_no_fake(x))


def _refused(build: Any, shard: Any = lambda model, mesh: model, mesh: str = "dp=2", example: Any = None) -> str:
    with pytest.raises((InputError, PlanError)) as caught:
        dry_audit(build, shard, mesh, torch.zeros(2, DIM) if example is None else example)
    return str(caught.value)


def test_what_raises_is_said_with_its_line():
    def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        raise ValueError("no such plan")

    line = shard.__code__.co_firstlineno + 1
    assert _refused(lambda: nn.Linear(DIM, DIM), shard) == (
        "shard=test_what_raises_is_said_with_its_line.<locals>.shard stopped the dry audit on dp=2 at "
        f"{__file__}:{line}: it raised ValueError: no such plan"
    )


@pytest.mark.parametrize("model", [Reads, Leaves])
def test_a_forward_that_reads_values(model: type[nn.Module]):
    said = _refused(lambda: model(DIM, DIM))
    line = model.forward.__code__.co_firstlineno + 1
    assert said.startswith(
        f"The training step stopped the dry audit on dp=2 at {__file__}:{line}: it reads the value of "
    )
    assert said.endswith("Compute it on the device, take it from a shape, or audit with ranks.")


def test_a_sharding_that_reads_values():
    def shard(model: nn.Linear, mesh: DeviceMesh) -> nn.Module:
        assert model.weight.abs().max() >= 0
        return model

    assert "it reads the value of a tensor" in _refused(lambda: nn.Linear(DIM, DIM), shard)


def test_a_mesh_in_another_order():
    def shard(model: Words, mesh: DeviceMesh) -> nn.Module:
        return cases.tensor_parallel(model, init_device_mesh("cuda", (2, 4), mesh_dim_names=("tp", "dp")))

    with pytest.raises(InputError) as caught:
        _words(shard)
    assert str(caught.value) == (
        'On mesh "dp=4,tp=2" rank 0 is on dp with ranks 0, 2, 4, 6; the mesh of "embedding.weight", "tp=2,dp=4", has '
        'it with 0, 1, 2, 3. Give the axes in the order of the mesh that shard= makes: "tp=2,dp=4".'
    )
    assert _words(shard, "tp=2,dp=4").findings == ()


def test_batch_norm_of_all_ranks_is_refused_as_an_audit_on_ranks_does():
    said = _refused(lambda: nn.SyncBatchNorm(DIM), cases.in_ddp)
    assert said.endswith(not_on_cpus("SyncBatchNorm"))


def test_only_our_message_is_shown(capfd: pytest.CaptureFixture[str]):
    said = _refused(lambda: nn.Sequential(nn.Linear(DIM, 3), nn.Linear(4, 3)))
    assert "it raised RuntimeError: a and b must have same reduction dim" in said
    assert capfd.readouterr() == ("", "")


def test_a_model_without_a_loss_is_told_in_words_of_the_audit():
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> str:
            return "a"

    said = _refused(lambda: Model(DIM, DIM))
    assert "has neither a loss nor a floating-point tensor. Give loss=: " in said and "equivalent" not in said


def test_a_kernel_that_does_not_say_its_shape():
    said = _refused(lambda: Kernel(DIM, DIM))
    assert "it calls a kernel that does not say the shape of its result" in said and "no_fake" in said


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        (lambda model, mesh: nn.Linear(3, 3), "shard= returned another model, a Linear without 2 of the 2 parameters"),
        (lambda model, mesh: None, "returned a NoneType; it has to return the model"),
        (lambda model, mesh: (mesh,), "returned a tuple; it has to return the model"),
        (
            lambda model, mesh, folder: model,
            "takes folder, the folder of a checkpoint; a dry audit has no values to load",
        ),
        (lambda path: path, "takes path, the folder of a checkpoint"),
        (lambda model, tp_size: model, 'shard= takes "tp_size", of which an audit knows nothing.'),
        (lambda mesh: mesh, "shard= takes neither a model nor the folder of a checkpoint"),
        ("fsdp", "shard= was given as a str; give a function (model, mesh) -> model."),
    ],
)
def test_a_shard_that_is_not_one(shard: Any, said: str):
    assert said in _refused(lambda: nn.Sequential(nn.Linear(DIM, DIM)), shard)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (nn.Linear(2, 2), "build= was given as a Linear; give a function that returns the model."),
        (lambda: 3, "returned a int; it has to return a torch.nn.Module."),
    ],
)
def test_a_build_that_is_not_one(build: Any, said: str):
    assert said in _refused(build)


def test_a_loss_that_trains_nothing():
    with pytest.raises(PlanError, match=r"The loss is a tensor of shape \(2, 8, 32\), which trains nothing"):
        dry_audit(Words, lambda model, mesh: model, "dp=2", ids, loss=lambda model, batch: model(batch))


@pytest.mark.parametrize(("mesh", "rank"), [("dp=-1", 0), ("dp=2", 2), ("what=2", 0)])
def test_a_mesh_that_is_not_one(mesh: str, rank: int):
    with pytest.raises((MeshError, PlanError)):
        dry_audit(Words, lambda model, mesh: model, mesh, ids, rank=rank)
