"""`rng="exact"` draws what one device draws: dropout and initial values, in compiled and checkpointed models too."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.errors import ShardingError
from tests.engine import models
from tests.engine.same_numbers import assert_same_numbers, data_place, local_rows, values

MESHES = {"tp=2": 2, "dp=2": 2, "dp=2,tp=2": 4, "dp=2,fsdp=2": 4}
_SEQUENCE = {"blocks.*.output": "batch seq@tp embed"}


def _gpt_rules(more: dict[str, Any] | None = None) -> sl.Rules:
    return sl.Rules({**models.GPT_RULES, **(more or {})}, sizes=models.GPT_SIZES, unmatched="replicate")


# --- masks, bit for bit -------------------------------------------------------------------------------------------


class _Masks(nn.Module):
    """Random tensors of many kinds in one forward, some on DTensors and some plain."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 5, bias=False)
        self.dropouts = nn.ModuleList([nn.Dropout(0.4), nn.AlphaDropout(0.4), nn.FeatureAlphaDropout(0.4)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.up(x)  # split over tp
        q = hidden.view(*hidden.shape[:2], 4, 2).transpose(1, 2)  # heads are split
        kept = {f"{type(m).__name__} of {kind}": m(torch.ones_like(t)) for m in self.dropouts
                for kind, t in (("split", hidden), ("plain", x))}  # fmt: skip
        with sdpa_kernel(SDPBackend.MATH):
            attended = F.scaled_dot_product_attention(q * 0, q * 0, torch.ones_like(q), dropout_p=0.4)
        return kept | {
            "attention": attended.transpose(1, 2),
            "channels": F.dropout1d(torch.ones_like(hidden), 0.4),
            "flattened": F.dropout(torch.ones_like(hidden.flatten(0, 1)), 0.4),
            "depth": torch.rand(len(x), 1, 1),
            "noise": torch.randn_like(hidden),
            "weight": F.dropout(torch.ones_like(self.down.weight), 0.4),
            "sum": self.down(hidden) * 0 + F.dropout(torch.ones(*x.shape[:2], 5, dtype=x.dtype), 0.4),
        }


def _masks(mesh: str) -> None:
    (x,), _ = _inputs(0)
    reference = _Masks().double()
    torch.manual_seed(dist.get_rank())  # exact means that the first rank's state is everybody's
    model = sl.shard_model(
        copy.deepcopy(reference), mesh, {"up": "colwise", "down": "rowwise"}, rng="exact", check=False
    )
    index, count = data_place(sl.plan_of(model).mesh)
    for step in range(2):
        torch.manual_seed(step)
        found = model(local_rows(x, sl.plan_of(model).mesh))
        torch.manual_seed(step)
        with sl.exact_random():
            wanted = reference(x)
        for name, whole in wanted.items():
            mine = whole if name == "weight" else whole.chunk(count)[index]
            assert torch.equal(found[name], mine), name
            assert name in ("depth", "noise") or len(whole.unique()) > 1, name


def _inputs(step: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    return (torch.randn(8, 3, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64),), {}


@pytest.mark.filterwarnings("ignore:No rule splits")
@pytest.mark.parametrize("mesh", MESHES)
def test_masks_are_those_of_one_device(ranks, mesh: str):
    ranks(MESHES[mesh]).run(_masks, mesh)


def _state_after_sharding(rng: str) -> bytes:
    model = nn.Linear(4, 4)
    torch.manual_seed(dist.get_rank())
    sl.shard_model(model, "dp=2,tp=2", {"**": "colwise"}, rng=rng, check=False)
    return bytes(torch.get_rng_state().tolist())


def test_all_ranks_go_on_from_the_random_state_of_the_first(ranks):
    torch_state = torch.Generator().manual_seed(0).get_state()
    assert set(ranks(4).run(_state_after_sharding, "exact")) == {bytes(torch_state.tolist())}
    assert len(set(ranks(4).run(_state_after_sharding, "fast"))) == 4


# --- training -----------------------------------------------------------------------------------------------------


def _train(
    make_model: Callable[[], nn.Module], make_batch: Any, loss_of: Any, mesh: str, rules: Any, options: dict[str, Any]
) -> None:
    options = {"steps": 2, "rng": "exact", "same_random": True, "compile": None, **options}
    assert_same_numbers(make_model, make_batch, loss_of, mesh, rules, **options)


def _gpt(checkpointed: bool | None = None) -> nn.Module:
    model = models.gpt(dropout=0.1)
    return model if checkpointed is None else _Checkpointed(model, use_reentrant=checkpointed)


class _Checkpointed(nn.Module):
    """The GPT, whose blocks are computed again in backward, and with them a dropout that no module draws."""

    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant, self.config = inner, use_reentrant, inner.config

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.inner.embed(ids) + self.inner.position(torch.arange(ids.shape[1]))
        for block in self.inner.blocks:
            x = checkpoint(lambda x, block=block: F.dropout(block(x), 0.2), x, use_reentrant=self.use_reentrant)
        return self.inner.head(self.inner.norm(x))


def _train_gpt(mesh: str, more: dict[str, Any], options: dict[str, Any], checkpointed: bool | None = None) -> None:
    _train(lambda: _gpt(checkpointed), models.tokens, models.spread, mesh, _gpt_rules(more), options)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_gpt_trains_with_dropout(ranks, mesh: str):
    ranks(MESHES[mesh]).run(_train_gpt, mesh, {}, {})


def test_the_gpt_trains_with_dropout_of_a_split_sequence(ranks):
    ranks(2).run(_train_gpt, "tp=2", _SEQUENCE, {})
    ranks(4).run(_train_gpt, "dp=2,tp=2", _SEQUENCE, {})


def test_each_of_several_backward_passes_has_masks_of_its_own(ranks):
    ranks(4).run(_train_gpt, "dp=2,tp=2", {}, {"accumulate": 2})


@pytest.mark.covering
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_checkpointing_draws_again_what_forward_drew(ranks, mesh: str, use_reentrant: bool):
    ranks(MESHES[mesh]).run(_train_gpt, mesh, {}, {}, use_reentrant)


class _Torch(nn.Module):
    """Attention and a block of PyTorch's own, with dropout in every place that they have."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 4, dropout=0.2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for need_weights in (True, False):
            x = x + self.attention(x, x, x, need_weights=need_weights)[0]
        return self.recurrent(self.layer(x))[0]


def _sequences(step: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    return (torch.randn(8, 5, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64),), {}


_TORCH_RULES = {"attention": "(qkv heads@tp head)", "attention.out_proj": "rowwise", "layer.linear1": "colwise",
                "layer.linear2": "rowwise"}  # fmt: skip


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2", "dp=2,tp=2"])
def test_modules_of_torch_train_with_dropout(ranks, mesh: str):
    rules = sl.Rules(_TORCH_RULES, sizes={"qkv": 3, "heads": 4}, unmatched="replicate")
    options = {"optimizer": torch.optim.SGD}
    ranks(MESHES[mesh]).run(_train, _Torch, _sequences, models.spread, mesh, rules, options)


def _train_gpt2(mesh: str, attention: str) -> None:
    from tests.families import transformer_models as hf

    def make() -> nn.Module:
        return hf.build("GPT2LMHeadModel", attention, attn_pdrop=0.2, embd_pdrop=0.1, resid_pdrop=0.1, use_cache=False)

    def batch(step: int) -> Any:
        return hf.text(step)

    options = {"optimizer": torch.optim.SGD}
    _train(make, batch, lambda out: models.spread(out.logits), mesh, sl.layouts.load("gpt2"), options)


@pytest.mark.covering
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_gpt2_of_hugging_face_trains_with_attention_dropout(ranks, mesh: str, attention: str):
    ranks(MESHES[mesh]).run(_train_gpt2, mesh, attention)


# --- compiled -----------------------------------------------------------------------------------------------------


def _trained(
    compile: str | None, mesh: str, more: dict[str, Any], attention: bool
) -> tuple[list[torch.Tensor], tuple[str, ...]]:
    """Outputs and gradients of two passes in float32, and what the plan says of compilation."""
    torch.manual_seed(0)
    model = models.gpt(dropout=0.09)  # 1 / 0.91 is another float32 than 1 / float32(0.91)
    for block in () if attention else model.blocks:
        block.attn.dropout = 0.0
    model = sl.shard_model(model, mesh, _gpt_rules(more), rng="exact", compile=compile)
    outputs = []
    for step in range(2):
        (ids,), _ = local_rows(models.tokens(step), sl.plan_of(model).mesh)
        outputs.append(model(ids))
        models.spread(outputs[-1]).backward()
    gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return [t.detach() for t in (*outputs, *gradients)], sl.plan_of(model).notes


def _compiled_bits(mesh: str, more: dict[str, Any], attention: bool) -> None:
    eager, said = _trained(None, mesh, more, attention)
    assert said == ()
    compiled, said = _trained("auto", mesh, more, attention)
    assert said == ("Compiled with aot_eager: blocks.0, blocks.1.",)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
    assert not torch.equal(compiled[0], compiled[1])


# Not with a split sequence on dp=2,tp=2: gradients of the norms are partial sums there, which compiled blocks add up
# over the two axes in another order than eager ones, dropout or not (1e-7 in float32).
@pytest.mark.covering
@pytest.mark.parametrize(("mesh", "more"), [("tp=2", {}), ("dp=2,tp=2", {}), ("tp=2", _SEQUENCE)], ids=str)
@pytest.mark.parametrize("attention", [True, False])
def test_compiled_blocks_have_the_bits_of_eager_ones(ranks, mesh: str, more: dict[str, Any], attention: bool):
    ranks(MESHES[mesh]).run(_compiled_bits, mesh, more, attention)


def _train_compiled(mesh: str, backend: str, checkpointed: bool | None = None) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
        _train_gpt(mesh, {}, {"compile": backend}, checkpointed)


@pytest.mark.parametrize("mesh", ["tp=2", pytest.param("dp=2,tp=2", marks=pytest.mark.deep)])
def test_blocks_compiled_by_inductor_train_with_dropout(ranks, mesh: str):
    ranks(MESHES[mesh]).run(_train_compiled, mesh, "inductor")


@pytest.mark.parametrize("use_reentrant", [pytest.param(False, marks=pytest.mark.deep), True])
def test_compiled_blocks_are_checkpointed(ranks, use_reentrant: bool):
    ranks(4).run(_train_compiled, "dp=2,tp=2", "auto", use_reentrant)


# --- errors -------------------------------------------------------------------------------------------------------


class _Sampling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] < 0:
            raise ValueError("negative")
        return torch.multinomial(self.linear(x).softmax(-1), 1) if x[0, 0] > 0 else torch.rand_like(self.linear(x))


def _raising() -> None:
    model = sl.shard_model(_Sampling(), "dp=2", {"linear": None}, rng="exact")
    for first, error in ((1.0, ShardingError), (-1.0, ValueError)):
        with pytest.raises(error):
            model(torch.full((2, 6), first))
        torch.multinomial(torch.ones(3), 1)  # outside of the forward, random calls are PyTorch's own again
    torch.manual_seed(1)
    drawn = model(torch.zeros(2, 6))
    other = drawn.clone()
    dist.broadcast(other, 0)
    assert torch.equal(drawn, other) == (dist.get_rank() == 0)


def test_an_error_in_forward_ends_what_forward_began(ranks):
    ranks(2).run(_raising)


# --- initial values -----------------------------------------------------------------------------------------------


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=0.5, a=-1, b=1)
    if isinstance(module, nn.Linear):
        elementwise = module.in_features != module.out_features
        nn.init.normal_(module.weight) if elementwise else nn.init.orthogonal_(module.weight)
        if module.bias is not None:
            nn.init.uniform_(module.bias, -1, 1)
    if isinstance(module, nn.LayerNorm):
        module.reset_parameters()


def _made_on(mesh: str, init: Any) -> tuple[dict[str, torch.Tensor], int]:
    """The initial values of a GPT from `meta`, and the most elements of a split tensor that this rank ever held."""
    largest = 0

    def watch(module: nn.Module) -> None:
        nonlocal largest
        for tensor in module.parameters(recurse=False):
            if not hasattr(tensor, "to_local") and isinstance(module, nn.Linear | nn.Embedding):
                largest = max(largest, tensor.numel())
        _init(module) if init == "function" else getattr(module, "reset_parameters", lambda: None)()

    torch.manual_seed(3 + dist.get_rank())
    with torch.device("meta"):
        model = models.gpt(tied=False, context=4)
    sl.shard_model(model, mesh, _gpt_rules({"head": "colwise"}), init=watch, rng="exact", compile=None)
    return values(model), largest


@pytest.mark.filterwarnings("ignore:aten.linalg_qr")
@pytest.mark.parametrize("init", ["function", "reset_parameters"])
def test_initial_values_are_those_of_one_device_on_every_mesh(ranks, init: str):
    one_device = models.gpt(tied=False, context=4)
    with sl.exact_random(3):
        for module in one_device.modules():
            _init(module) if init == "function" else getattr(module, "reset_parameters", lambda: None)()
    wanted = values(one_device)
    for mesh, world_size in {"tp=1": 1, "tp=2": 2, "dp=2": 2, "dp=2,tp=2": 4, "tp=4": 4}.items():
        for found, largest in ranks(world_size).run(_made_on, mesh, init):
            assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
            if "tp" in mesh and world_size > 1:
                assert largest <= 16 * 16, "a split tensor was made whole"  # biases and positions are not split


def test_a_model_that_is_built_in_the_order_of_its_modules_starts_from_the_same_values(ranks):
    with sl.exact_random(3):
        built = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    assert all(torch.equal(v, values(built)[n]) for n, v in ranks(2).run(_sequential)[0].items())


def _sequential() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    torch.manual_seed(3)
    rules = {"0": "colwise", "1": "rowwise"}
    return values(sl.shard_model(model, "tp=2", rules, init="reset_parameters", rng="exact"))


def _unlike_parts(module: nn.Module) -> None:
    """Fails on DTensors, after it has drawn."""
    for tensor in module.parameters(recurse=False):
        nn.init.normal_(tensor)
        tensor.detach().numpy()


def _made_by(init: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    return values(sl.shard_model(model, "tp=2", {"0": "colwise", "1": "rowwise"}, init=init, rng="exact"))


def _normal(module: nn.Module) -> None:
    for tensor in module.parameters(recurse=False):
        nn.init.normal_(tensor)


def test_an_initialiser_that_takes_no_dtensors_gets_whole_tensors(ranks):
    (found, _), (wanted, _) = (ranks(2).run(_made_by, init) for init in (_unlike_parts, _normal))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
