"""`rng="exact"` draws what one device draws: dropout and initial values, in compiled and checkpointed models too."""

from __future__ import annotations

import copy
import functools
import itertools
import unittest.mock
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
from examples import gpt as example
from shardlib.engine.feature import randomness
from shardlib.errors import ShardingError
from shardlib.testing import assert_equivalent
from shardlib.testing.models import Numbers, Transformer, batch_for, rules_for
from tests.engine.whole import values, whole

MESHES = {"tp=2": 2, "dp=2": 2, "dp=2,tp=2": 4, "dp=2,fsdp=2": 4}
GPT = functools.partial(Transformer, vocab=15, heads=4, layers=2, tied=True)


def _mine(global_batch: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """This rank's rows."""
    shape = sl.get_plan(model).mesh
    index, count = shape.data_place(shape.coordinate(dist.get_rank()))
    return global_batch.chunk(count)[index]


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
    x = Numbers((8, 3, 6))(0)
    reference = _Masks().double()
    torch.manual_seed(dist.get_rank())  # exact means that the first rank's state is everybody's
    model = sl.shard_model(
        copy.deepcopy(reference), mesh, {"up": "colwise", "down": "rowwise"}, rng="exact", check=False
    )
    for step in range(2):
        torch.manual_seed(step)
        found = model(_mine(x, model))
        torch.manual_seed(step)
        with sl.exact_random():
            wanted = reference(x)
        for name, value in wanted.items():
            assert torch.equal(found[name], value if name == "weight" else _mine(value, model)), name
            assert name in ("depth", "noise") or len(value.unique()) > 1, name


@pytest.mark.filterwarnings("ignore:No rule splits")
@pytest.mark.parametrize("mesh", MESHES)
def test_masks_are_those_of_one_device(ranks, mesh: str):
    ranks(MESHES[mesh]).run(_masks, mesh)


def _masks_of_modules(mesh: str) -> None:
    """Modules are called one by one, outside of the model's forward, as generators and discriminators are."""
    x = Numbers((8, 3, 6))(0)
    reference = _Masks().double()
    rules = {"up": "colwise", "down": "rowwise"}
    model = sl.shard_model(copy.deepcopy(reference), mesh, rules, rng="exact", check=False)

    def drawn(of: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(1)
        return [whole(drop(of.up(x)).detach()) for drop in of.dropouts]

    with sl.exact_random():
        wanted = drawn(reference, x)
    for found, value in zip(drawn(model, _mine(x, model)), wanted, strict=True):
        assert torch.equal(found == 0, _mine(value == 0, model))
        torch.testing.assert_close(found, _mine(value, model), rtol=1e-10, atol=1e-12)
    torch.multinomial(torch.ones(3), 1)  # outside of a module, random calls are PyTorch's own again


@pytest.mark.filterwarnings("ignore:No rule splits")
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_masks_of_modules_that_are_called_by_themselves(ranks, mesh: str):
    ranks(2).run(_masks_of_modules, mesh)


def _state_after_sharding(rng: str) -> bytes:
    model = nn.Linear(4, 4)
    torch.manual_seed(dist.get_rank())
    sl.shard_model(model, "dp=2,tp=2", {"**": "colwise"}, rng=rng, check=False)
    return bytes(torch.get_rng_state().tolist())


def test_all_ranks_go_on_from_the_random_state_of_the_first(ranks):
    torch_state = torch.Generator().manual_seed(0).get_state()
    assert set(ranks(4).run(_state_after_sharding, "exact")) == {bytes(torch_state.tolist())}
    assert len(set(ranks(4).run(_state_after_sharding, "fast"))) == 4


class _Accelerator:
    """Stands in for `torch.cuda`: its generator's state is a number."""

    def __init__(self, state: int) -> None:
        self.state = torch.tensor([state], dtype=torch.uint8)

    def get_rng_state(self) -> torch.Tensor:
        return self.state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state


def _accelerator_state_after_sharding(rng: str) -> int:
    accelerator = _Accelerator(dist.get_rank())
    torch.manual_seed(0)
    with unittest.mock.patch.object(randomness, "accelerator_random", lambda: accelerator):
        sl.shard_model(nn.Linear(4, 4), "dp=2,tp=2", {"**": "colwise"}, rng=rng)
    return int(accelerator.state)


def test_ranks_of_a_model_axis_share_the_random_state_of_the_accelerator(ranks):
    assert ranks(4).run(_accelerator_state_after_sharding, "exact") == [0, 0, 0, 0]
    assert ranks(4).run(_accelerator_state_after_sharding, "fast") == [0, 0, 2, 2]


# --- training -----------------------------------------------------------------------------------------------------


def _prove(model: Callable[[], nn.Module], batch: Any, mesh: str, rules: Any, **options: Any) -> None:
    assert_equivalent(model, batch, mesh, rules, **{"rng": "exact", "steps": 2, **options})


class _Checkpointed(nn.Module):
    """The GPT, whose blocks are computed again in backward, and with them a dropout that no module draws."""

    def __init__(self, inner: Transformer, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.inner.embed(ids) + self.inner.position(torch.arange(ids.shape[1]))
        for block in self.inner.blocks:
            x = checkpoint(lambda x, block=block: F.dropout(block(x), 0.2), x, use_reentrant=self.use_reentrant)
        return self.inner.head(self.inner.norm(x))


def _dropping(checkpointed: bool | None = None) -> nn.Module:
    model = GPT(dropout=0.1)
    return model if checkpointed is None else _Checkpointed(model, use_reentrant=checkpointed)


def _prove_gpt(mesh: str, *, checkpointed: bool | None = None, sequence: bool = False, **options: Any) -> None:
    rules = rules_for(GPT(), sequence=sequence)
    _prove(functools.partial(_dropping, checkpointed), batch_for(GPT()), mesh, rules, **options)


@pytest.mark.parametrize("mesh", [pytest.param(mesh, marks=pytest.mark.deep) for mesh in MESHES if mesh != "dp=2,tp=2"])
def test_the_gpt_trains_with_dropout(mesh: str):
    _prove_gpt(mesh)


@pytest.mark.parametrize("mesh", [pytest.param("tp=2", marks=pytest.mark.deep), "dp=2,tp=2"])
def test_the_gpt_trains_with_dropout_of_a_split_sequence(mesh: str):
    _prove_gpt(mesh, sequence=True)


@pytest.mark.parametrize("mesh", ["dp=2,fsdp=2", "dp=2,tp=2"])
def test_each_of_several_backward_passes_has_masks_of_its_own(mesh: str):
    _prove_gpt(mesh, accumulate=2)


@pytest.mark.covering
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_checkpointing_draws_again_what_forward_drew(mesh: str, use_reentrant: bool):
    _prove_gpt(mesh, checkpointed=use_reentrant)


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


_TORCH_RULES = {"attention": "(qkv heads@tp head)", "attention.out_proj": "rowwise", "layer.linear1": "colwise",
                "layer.linear2": "rowwise"}  # fmt: skip


@pytest.mark.parametrize("mesh", [*(pytest.param(m, marks=pytest.mark.deep) for m in ("tp=2", "dp=2")), "dp=2,tp=2"])
def test_modules_of_torch_train_with_dropout(mesh: str):
    rules = sl.Rules(_TORCH_RULES, sizes={"qkv": 3, "heads": 4}, unmatched="replicate")
    _prove(_Torch, Numbers((8, 5, 8)), mesh, rules, optimizer=functools.partial(torch.optim.SGD, lr=1e-2))


# --- compiled -----------------------------------------------------------------------------------------------------


def _trained(
    compile: str | None, mesh: str, sequence: bool, attention: bool
) -> tuple[list[torch.Tensor], tuple[str, ...]]:
    """Outputs and gradients of two passes in float32, and what the plan says of compilation.

    The model is that of examples/gpt.py, whose ops a compiler leaves as they are.
    """
    torch.manual_seed(0)
    # 1 / 0.91 is another float32 than 1 / float32(0.91)
    model = example.GPT(example.GPTConfig(vocab_size=15, context=8, n_layer=2, n_head=4, d_model=16, dropout=0.09))
    for block in () if attention else model.blocks:
        block.attn.dropout = 0.0
    rules = sl.layouts.load("example_gpt", mode="sequence" if sequence else None)
    model = sl.shard_model(model, mesh, rules, rng="exact", compile=compile)
    outputs = []
    for step in range(2):
        outputs.append(model(_mine(batch_for(GPT())(step), model)))
        outputs[-1].square().mean().backward()
    return [t.detach() for t in (*outputs, *(whole(p.grad) for p in model.parameters()))], sl.get_plan(model).notes


def _compiled_bits(mesh: str, sequence: bool, attention: bool) -> None:
    eager, said = _trained(None, mesh, sequence, attention)
    assert said == ()
    compiled, said = _trained("auto", mesh, sequence, attention)
    assert said == ("Compiled with aot_eager: blocks.0, blocks.1.",)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
    assert not torch.equal(compiled[0], compiled[1])


# Not with a split sequence on dp=2,tp=2: gradients of the norms are partial sums there, which compiled blocks add up
# over the two axes in another order than eager ones, dropout or not (1e-7 in float32).
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("mesh", "sequence", "attention"),
    [
        ("tp=2", True, True),
        pytest.param("tp=2", True, False, marks=pytest.mark.deep),
        *(
            pytest.param(mesh, False, attention, marks=pytest.mark.deep)
            for mesh, attention in itertools.product(["tp=2", "dp=2,tp=2"], [False, True])
        ),
    ],
)
def test_compiled_blocks_have_the_bits_of_eager_ones(ranks, mesh: str, sequence: bool, attention: bool):
    ranks(MESHES[mesh]).run(_compiled_bits, mesh, sequence, attention)


@pytest.mark.compiled
@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_blocks_compiled_by_inductor_train_with_dropout(mesh: str):
    _prove_gpt(mesh, compile="inductor")


@pytest.mark.compiled
@pytest.mark.deep
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_compiled_blocks_are_checkpointed(use_reentrant: bool):
    """Under `shardlib.checkpoint_activations` they are by default: see test_recompute.py."""
    _prove_gpt("dp=2,tp=2", checkpointed=use_reentrant, compile="auto")


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
        model = GPT(tied=False)
    sl.shard_model(model, mesh, rules_for(model), init=watch, rng="exact", compile=None)
    return values(model), largest


@pytest.mark.filterwarnings("ignore:aten.linalg_qr")
@pytest.mark.parametrize("init", ["function", "reset_parameters"])
def test_initial_values_are_those_of_one_device_on_every_mesh(ranks, init: str):
    one_device = GPT(tied=False)
    with sl.exact_random(3):
        for module in one_device.modules():
            _init(module) if init == "function" else getattr(module, "reset_parameters", lambda: None)()
    wanted = values(one_device)
    for mesh, world_size in {"tp=1": 1, "dp=2": 2, "dp=2,tp=2": 4, "tp=4": 4}.items():
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
