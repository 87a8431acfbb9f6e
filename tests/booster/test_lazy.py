"""Models built without memory get the values that building them would have given."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.booster import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LazyInitContext,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
)
from shardlib.booster._lazy_init import values_of
from shardlib.errors import CheckpointError, ShardingError
from tests.engine.whole import values
from tests.families.transformer_models import build, small, text, transformers


class Everything(nn.Module):
    """What modules do while they are built."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.register_buffer("computed", torch.arange(8.0).pow(2) / 3, persistent=False)
        self.register_buffer("written", torch.tensor([1, 2, 3]))
        self.table = nn.Embedding(10, 8, padding_idx=0)
        nn.init.orthogonal_(self.first.weight)
        nn.init.trunc_normal_(self.table.weight, std=0.02)  # draws until all values fit
        with torch.no_grad():
            self.table.weight[0].zero_()
            self.first.bias.copy_(self.computed)
            self.first.weight.mul_(2.0)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)], torch.linspace(0, 0.1, 3).tolist()
        self.own = nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(5)), requires_grad=False)
        self.norm = nn.BatchNorm1d(8)
        self.chosen = nn.Parameter(torch.rand(6)[torch.rand(6) > 0.5])  # values decide about its shape
        self.split = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.recurrent = nn.LSTM(4, 4)
        self.low = nn.Conv2d(3, 4, 3).to(torch.bfloat16)
        self.permuted = nn.Parameter(torch.rand(3, 5).t())


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def _lazily(make: Callable[[], nn.Module]) -> nn.Module:
    with LazyInitContext():
        return make()


@pytest.mark.covering
@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("name", ["everything", "GPT2LMHeadModel", "LlamaForCausalLM", "ViTForImageClassification"])
def test_every_bit_is_that_of_the_model_built_at_once(name: str, exactly: bool):
    make = Everything if name == "everything" else lambda: getattr(transformers, name)(small(name))
    torch.manual_seed(3)
    with sl.exact_random() if exactly else nullcontext():
        at_once = make()
    torch.manual_seed(3)
    with sl.exact_random() if exactly else nullcontext():
        lazy = _lazily(make)
    assert all(tensor.is_meta for tensor in _tensors(lazy).values())
    assert lazy.state_dict().keys() == at_once.state_dict().keys()
    objects = {key: id(tensor) for key, tensor in _tensors(lazy).items() if "recurrent" not in key}

    LazyInitContext.materialize(lazy)

    assert {key: id(tensor) for key, tensor in _tensors(lazy).items() if "recurrent" not in key} == objects
    want, got = _tensors(at_once), _tensors(lazy)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert torch.equal(got[key], tensor), key
        same = "dtype", "requires_grad", "shape"
        assert [getattr(got[key], what) for what in same] == [getattr(tensor, what) for what in same]
        assert got[key].stride() == tensor.stride() and isinstance(got[key], type(tensor))
    if name == "everything":
        assert lazy.rates == at_once.rates and lazy.tied.weight is lazy.first.weight
        x = torch.ones(2, 3, 4)
        assert torch.equal(lazy.recurrent(x)[0], at_once.recurrent(x)[0])


def _copied_inside() -> nn.Module:
    model = Everything()
    copies = copy.deepcopy(model), copy.deepcopy(model.split), copy.copy(model.first)
    return nn.ModuleList([model, *copies, nn.Linear(2, 2)])


def _copied_later() -> nn.Module:
    model = _lazily(Everything)
    return nn.ModuleList([model, copy.deepcopy(model), _lazily(lambda: copy.deepcopy(model))])


@pytest.mark.parametrize("make", [lambda: _lazily(_copied_inside), _copied_later], ids=["inside", "later"])
def test_copies_have_the_values_of_what_they_copy(make: Callable[[], nn.Module]):
    """And copying harms no memory: the copied mode of a fake buffer would free references twice."""
    torch.manual_seed(3)
    at_once = Everything()
    torch.manual_seed(3)
    lazy = make()
    assert all(tensor.is_meta for tensor in _tensors(lazy).values())
    gc.collect()
    LazyInitContext.materialize(lazy)
    want = _tensors(at_once)
    for one, prefix in zip(lazy, ["", "", "split." if len(lazy) > 3 else "", "first."], strict=False):
        got = _tensors(one)
        assert all(torch.equal(got[key], want[prefix + key]) for key in got) and got
    assert lazy[1].tied.weight is lazy[1].first.weight is not lazy[0].first.weight


def test_copies_of_what_was_written_without_memory_are_no_values():
    lazy = _lazily(lambda: nn.Linear(2, 2))
    kept = copy.deepcopy(lazy)
    nn.init.zeros_(lazy.bias)
    with pytest.raises(ShardingError, match="was written to after the LazyInitContext that it was made in"):
        LazyInitContext.materialize(copy.deepcopy(lazy))
    assert not LazyInitContext.materialize(kept).bias.is_meta


def test_one_block_goes_on_with_the_numbers_after_those_of_the_last():
    torch.manual_seed(1)
    want = [nn.Linear(3, 3).weight for _ in range(2)]
    torch.manual_seed(1)
    lazy = [_lazily(lambda: nn.Linear(3, 3)) for _ in range(2)]
    again = []
    for _ in range(2):
        torch.manual_seed(1)
        again.append(_lazily(lambda: nn.Linear(3, 3)))
    before = torch.get_rng_state()
    got = [LazyInitContext.materialize(model).weight for model in reversed([*lazy, *again])][::-1]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, got, [want[0], want[1], want[0], want[0]]))


def test_a_seed_set_inside_counts():
    def make() -> nn.Module:
        first = nn.Linear(3, 3)
        torch.manual_seed(9)
        return nn.Sequential(first, nn.Linear(3, 3), nn.Dropout())

    torch.manual_seed(1)
    want = make().state_dict()
    torch.manual_seed(1)
    got = LazyInitContext.materialize(_lazily(make)).state_dict()
    assert all(torch.equal(got[key], want[key]) for key in want)


def _forked() -> Iterator[nn.Module]:
    yield nn.Linear(3, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        yield nn.Linear(3, 3)
    yield nn.Linear(3, 3)


def _restored() -> Iterator[nn.Module]:
    yield nn.Linear(3, 3)
    state = torch.get_rng_state()
    torch.rand(100)  # of no model
    yield nn.Linear(2, 2)
    torch.set_rng_state(state)
    yield nn.Linear(2, 2)
    torch.set_rng_state(state)  # another block goes on from here


def _seeded_alike() -> Iterator[nn.Module]:
    for _ in range(2):
        torch.manual_seed(1)  # also the seed outside
        yield nn.Linear(3, 3)


def _read_in_a_fork() -> Iterator[nn.Module]:
    first = nn.Linear(3, 3)
    yield first
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        nn.init.trunc_normal_(first.weight, std=3.0)
        yield nn.Linear(2, 2) if first.weight[0, 0] > 0 else nn.Linear(5, 5)
    yield nn.Linear(3, 3)


def _own_generator() -> Iterator[nn.Module]:
    first = nn.Linear(3, 3)
    yield first
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    nn.init.normal_(first.weight, generator=generator)
    nn.init.normal_(first.bias, generator=torch.default_generator)
    yield nn.Linear(3, 3)


@pytest.mark.parametrize("build", [_forked, _restored, _seeded_alike, _read_in_a_fork, _own_generator])
def test_states_of_the_generator_that_are_kept_and_restored_count(build: Callable[[], Iterator[nn.Module]]):
    torch.manual_seed(1)
    at_once = [*build(), *build()]
    torch.manual_seed(1)
    later = [*_lazily(lambda: nn.ModuleList(build())), *_lazily(lambda: nn.ModuleList(build()))]
    for module, reference in zip(later, at_once, strict=True):
        _equal(LazyInitContext.materialize(module), reference)


def _alive() -> list[torch.Tensor]:
    """Tensors with values that were made since `gc.freeze`, but for states of generators (5 kB each)."""
    every = (one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter))
    return [one for one in every if not one.is_meta and one.dtype is not torch.uint8]


def test_one_tensor_is_there_at_a_time():
    # Each weight is drawn when it is made, and drawn again when all modules are there: the first draw is not kept.
    lazy = _lazily(lambda: transformers.LlamaForCausalLM(small("LlamaForCausalLM", num_hidden_layers=2)))
    named = dict(lazy.named_parameters())
    largest = max(tensor.nbytes for tensor in named.values())
    seen = 0
    gc.collect()
    gc.freeze()  # what is there already would take a second to look through for each tensor
    try:
        for _name, _value in values_of(named):
            memory = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in _alive()}
            assert 0 < sum(size for address, size in memory.items() if address) <= 2 * largest
            seen += 1
    finally:
        gc.unfreeze()
    assert seen == len(named)


# --- on ranks ---------------------------------------------------------------------------------------------------------


def _equal(model: nn.Module, reference: nn.Module) -> None:
    got, want = values(model), values(reference)
    assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)


def _sharded(transform: tuple[Any, ...], rng: str) -> None:
    make = Everything if not transform and rng == "fast" else lambda: build("LlamaForCausalLM")
    torch.manual_seed(4)
    with sl.exact_random() if rng == "exact" else nullcontext():
        reference = make()
    torch.manual_seed(4)
    rules = {"**": None} if isinstance(reference, Everything) else None
    mesh = "dp=4" if rules else "dp=2,tp=2"
    model = sl.shard_model(_lazily(make), mesh, rules, transforms=transform, rng=rng, compile=None)
    _equal(model, reference)
    if isinstance(reference, Everything):
        x = torch.ones(2, 3, 4)
        assert torch.equal(model.recurrent(x)[0], reference.recurrent(x)[0])
    else:
        _, batch = text(0, labels="tokens")
        torch.testing.assert_close(model(**batch).loss, reference(**batch).loss)


@pytest.mark.parametrize(("transform", "rng"), [((), "fast"), ((sl.zero(3),), "fast"), ((sl.zero(1),), "exact")])
def test_ranks_get_their_shards(ranks, transform, rng):
    ranks(4).run(_sharded, transform, rng)


def _boosted(plugin: Any, lazily: str) -> None:
    make = lambda: transformers.LlamaForCausalLM(small("LlamaForCausalLM"))  # noqa: E731
    torch.manual_seed(4)
    reference = make()
    torch.manual_seed(4)
    with torch.device("meta") if lazily == "not" else LazyInitContext():
        model = copy.deepcopy(make()) if lazily == "copied inside" else make()
    if lazily == "copied":
        model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    other = torch.optim.AdamW(reference.parameters(), lr=0.01)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    _equal(model, reference)
    _, batch = text(0, labels="tokens")
    for _ in range(2):
        booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        reference(**batch).loss.backward()
        other.step()
        other.zero_grad()
    got, want = values(model), values(reference)
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-5)


@pytest.mark.covering
@pytest.mark.parametrize("lazily", ["lazily", "copied inside", "copied", "not"])
@pytest.mark.parametrize(
    "plugin",
    [
        TorchDDPPlugin(),
        LowLevelZeroPlugin(stage=2, precision="fp32"),
        GeminiPlugin(precision="fp32"),
        HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32", zero_stage=1),
    ],
    ids=lambda plugin: type(plugin).__name__,
)
def test_boosted_models_train_from_the_values_of_the_seed(ranks, plugin, lazily: str):
    ranks(2).run(_boosted, plugin, lazily)


def _read(folder: str) -> None:
    with LazyInitContext():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.training == reference.training and model.dtype == reference.dtype
    model = sl.shard_model(model, "tp=2", compile=None)
    _equal(model, reference)
    headed = transformers.LlamaForSequenceClassification.from_pretrained(folder, num_labels=3)
    torch.manual_seed(0)
    with LazyInitContext():
        lazy = transformers.LlamaForSequenceClassification.from_pretrained(folder, num_labels=3)
    rules = {"**": None}
    got = values(sl.shard_model(lazy, "dp=2", rules, compile=None))
    want = values(headed)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want if not key.startswith("score"))
    assert 0.01 < got["score.weight"].std() < 0.03  # the head that the files lack begins as the model's does


def test_from_pretrained_reads_when_the_model_is_sharded(ranks, tmp_path: Path):
    build("LlamaForCausalLM").save_pretrained(tmp_path)
    ranks(2).run(_read, str(tmp_path))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_blocks_are_not_nested():
    with LazyInitContext(), pytest.raises(ShardingError) as raised, LazyInitContext():
        pass
    assert str(raised.value) == (
        "LazyInitContext was entered inside of one. One block is enough: build all models there."
    )
    with LazyInitContext():  # and the failure has left nothing behind
        assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_its_own_kind_of_tensors_is_refused():
    with pytest.raises(ShardingError, match=r"^LazyInitContext was given a tensor_cls, which does not exist here\."):
        LazyInitContext(tensor_cls=torch.Tensor)


def test_an_error_inside_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError), LazyInitContext():
        nn.Linear(2, 2)
        raise ZeroDivisionError
    assert torch.ones(2).sum().item() == 2
    assert _lazily(lambda: nn.Linear(2, 2)).weight.is_meta


def test_what_was_written_without_memory_is_no_value():
    lazy = _lazily(lambda: nn.Linear(2, 2))
    nn.init.zeros_(lazy.bias)
    with torch.no_grad():
        lazy.bias.fill_(1.0)
    with pytest.raises(ShardingError) as raised:
        LazyInitContext.materialize(lazy)
    assert str(raised.value) == (
        '"1" was written to after the LazyInitContext that it was made in, when it had no memory. '
        "Initialise it inside, or after the model is sharded."
    )


def test_what_has_no_values_is_copied_and_not_pickled():
    with LazyInitContext():
        model, loose = nn.Linear(2, 2), torch.zeros(2)
        for tensor in (model.weight, loose):
            assert copy.copy(tensor).shape == tensor.shape
            with pytest.raises(ShardingError, match=r"materialize\(model\) after the block and pickle it then"):
                pickle.dumps(tensor)
    with pytest.raises(ShardingError, match=r"and has no values yet\. Shard or boost the model"):
        torch.save(model, io.BytesIO())
    LazyInitContext.materialize(model)
    assert torch.equal(pickle.loads(pickle.dumps(model)).weight, model.weight)


def test_exact_numbers_do_not_follow_decisions_of_others():
    torch.manual_seed(0)
    lazy = _lazily(lambda: nn.ParameterList([nn.init.trunc_normal_(torch.empty(400))]))
    with pytest.raises(
        ShardingError, match=r"Build it with exact ones: with shardlib\.exact_random\(\), LazyInitContext\(\)"
    ):
        sl.shard_model(lazy, "dp=1", {"**": None}, rng="exact")


def test_what_reading_later_cannot_do_is_refused(tmp_path: Path):
    build("LlamaForCausalLM").save_pretrained(tmp_path)
    with LazyInitContext(), pytest.raises(CheckpointError) as raised:
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, device_map="auto")
    assert str(raised.value) == (
        "LlamaForCausalLM.from_pretrained was given device_map='auto' inside a LazyInitContext, which makes the model "
        "and leaves reading to shard_model. Say it of the config, or read the model outside."
    )
