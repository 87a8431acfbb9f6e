"""Exact random numbers: the generator, its distributions, and PyTorch's random calls by global element index."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardlib as sl
from shardlib.engine import _torch, ops
from shardlib.engine.feature.exact import _bits as _bits_module
from shardlib.engine.feature.exact import _normal
from shardlib.engine.feature.exact._bits import GOLDEN, Stream, bits
from shardlib.engine.feature.exact._calls import RANDOM
from shardlib.engine.feature.exact._data_rank import DataRank
from shardlib.engine.feature.exact._draw import _normal as _normal_numbers
from shardlib.engine.feature.exact._draw import draw
from shardlib.engine.feature.exact._local_elements import LocalElements
from shardlib.engine.feature.exact._mode import ExactMode
from shardlib.errors import ShardingError

CPU = torch.device("cpu")


def _bits(stream: Stream, elements: LocalElements) -> torch.Tensor:
    parts = [chunk.clone() for _, chunk in bits(stream, elements, CPU)]
    return torch.cat(parts or [torch.empty(0, dtype=torch.int64)]).view(elements.local_shape)


# --- the generator ------------------------------------------------------------------------------------------------

# Vigna's splitmix64.c (prng.di.unimi.it), first outputs from two seeds.
_PUBLISHED = {
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B],
    1234567: [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ],
}  # fmt: skip


@pytest.mark.parametrize("seed", _PUBLISHED)
def test_the_bits_are_those_published_for_splitmix64(seed: int):
    found = _bits(Stream(seed), LocalElements.all_of((5,)))
    assert [value % 2**64 for value in found.tolist()] == _PUBLISHED[seed]


def test_a_key_gives_a_stream_an_odd_step_with_many_changes_of_bit():
    for key in range(1000):
        gamma = Stream.of(key).gamma
        assert gamma % 2 == 1
        assert (gamma ^ (gamma >> 1)).bit_count() >= 24


@st.composite
def _local_elements(draw: Any) -> LocalElements:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    runs = []
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(0, size), max_size=6)))
        runs.append(tuple(zip(cuts[::2], cuts[1::2], strict=False)))
    return LocalElements(shape, tuple(runs))


def _part(whole: torch.Tensor, elements: LocalElements) -> torch.Tensor:
    for dim, runs in enumerate(elements.runs):
        whole = whole.index_select(dim, torch.tensor([i for run in runs for i in range(*run)], dtype=torch.int64))
    return whole


@given(elements=_local_elements(), key=st.integers(0, 2**63 - 1), chunk=st.sampled_from([1, 3, 64, 1 << 15]))
def test_a_part_has_the_elements_of_the_whole_whatever_the_chunks(elements: LocalElements, key: int, chunk: int):
    whole = _bits(Stream.of(key), LocalElements.all_of(elements.shape))
    with mock.patch.object(_bits_module, "_CHUNK", chunk):
        assert torch.equal(_bits(Stream.of(key), elements), _part(whole, elements))
    assert LocalElements.from_flat(elements.shape, elements.flat()) == elements


# Bounds below are five to six standard deviations of what independent uniform bits would give; seeds are fixed, so that
# what passes once passes always, and a generator that is off by as little as that fails.
_N = 1 << 18
_KEYS = (0, 1, 12345, 2**63 - 1)


def _uniform(key: int, n: int = _N) -> torch.Tensor:
    return draw("uniform", (0.0, 1.0), key, LocalElements.all_of((n,)), torch.float64, CPU)


@pytest.mark.parametrize("key", _KEYS)
def test_each_byte_is_uniform(key: int):
    words = _bits(Stream.of(key), LocalElements.all_of((_N,)))
    for shift in range(0, 64, 8):
        counts = torch.bincount((words >> shift) & 255, minlength=256).double()
        expected = _N / 256
        chi_square = ((counts - expected).square() / expected).sum().item()
        assert abs(chi_square - 255) < 6 * math.sqrt(2 * 255)


@pytest.mark.covering
@pytest.mark.parametrize("key", _KEYS)
@pytest.mark.parametrize("lag", [1, 2, 3, 64, 4096])
def test_neighbours_do_not_depend_on_each_other(key: int, lag: int):
    u = _uniform(key) - 0.5
    correlation = (u[lag:] * u[:-lag]).mean() * 12  # of variance 1 / n
    assert abs(correlation) < 5 / math.sqrt(_N - lag)


@pytest.mark.covering
@pytest.mark.parametrize("key", _KEYS[:-1])
@pytest.mark.parametrize("step", [1, 2, 2**32, 2**62])
def test_streams_of_neighbouring_keys_do_not_depend_on_each_other(key: int, step: int):
    a, b = (_uniform(k) - 0.5 for k in (key, key + step))
    assert abs((a * b).mean() * 12) < 5 / math.sqrt(_N)
    assert abs((a[1:] * b[:-1]).mean() * 12) < 5 / math.sqrt(_N - 1)
    flipped = _bits(Stream.of(key), LocalElements.all_of((4096,))) ^ _bits(
        Stream.of(key + step), LocalElements.all_of((4096,))
    )
    ones = statistics.fmean((word % 2**64).bit_count() for word in flipped.tolist())
    assert abs(ones - 32) < 5 * 4 / math.sqrt(4096)  # 64 fair bits have a standard deviation of 4


def test_streams_are_not_one_stream_shifted():
    """SplitMix64 walks by GOLDEN: keys that differ by it would give the same numbers, one element on."""
    a, b = (_bits(Stream.of(key), LocalElements.all_of((64,))) for key in (5, 5 + GOLDEN))
    assert not set(a.tolist()) & set(b.tolist())


def test_the_most_extreme_bits_give_finite_and_symmetric_normal_numbers():
    low, high = (_normal_numbers(torch.float64, 0.0, 1.0, torch.tensor([z])) for z in (-(2**63), 2**63 - 1))
    assert low == -high
    assert 8 < high < 9


def test_the_first_elements_of_many_keys_are_uniform():
    first = torch.tensor([_bits(Stream.of(key), LocalElements.all_of((1,))).item() for key in range(20_000)])
    for shift in (0, 28, 56):
        counts = torch.bincount((first >> shift) & 255, minlength=256).double()
        chi_square = ((counts - 20_000 / 256).square() / (20_000 / 256)).sum().item()
        assert abs(chi_square - 255) < 6 * math.sqrt(2 * 255)


# --- distributions ------------------------------------------------------------------------------------------------


def test_the_quantile_is_that_of_the_standard_library():
    """`NormalDist.inv_cdf` is AS 241 too. It takes p, so p is chosen to be exact: k / 1024, and powers of two."""
    p = [k / 1024 for k in range(1, 1024)] + [2.0**-k for k in range(2, 53)]
    wanted = torch.tensor([statistics.NormalDist().inv_cdf(each) for each in p], dtype=torch.float64)
    found = _normal.quantile(torch.tensor([2 * each - 1 for each in p], dtype=torch.float64))
    # Rounding order differs: some 20 operations, each 2**-53 relative; the log's last place is magnified by at most 1.
    torch.testing.assert_close(found, wanted, rtol=20 * 2.0**-53, atol=1e-16)


def test_the_logarithm_is_right_to_two_units_in_the_last_place():
    x = torch.cat([torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2.0**e
                   for e in (-52, -3, 0, 1, 40)])  # fmt: skip
    wanted = torch.tensor([math.log(each) for each in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(_normal.log(x), wanted, rtol=2 * 2.0**-52, atol=2.0**-54)


# Mean and variance, and the fourth central moment for the error of the variance.
_MOMENTS: dict[tuple[str, tuple[float, ...]], tuple[float, float, float]] = {
    ("uniform", (-2.0, 4.0)): (1.0, 3.0, 6**4 / 80),
    ("normal", (1.5, 2.0)): (1.5, 4.0, 48.0),
    ("exponential", (2.0,)): (0.5, 0.25, 9 / 16),
    ("chance", (0.3,)): (0.3, 0.21, 0.21 * (0.7**3 + 0.3**3)),
    ("geometric", (0.5,)): (2.0, 2.0, 38.0),
    ("integer", (-3, 7)): (0.0, 4.0, 28.0),
}


@pytest.mark.parametrize(("kind", "params"), _MOMENTS, ids=str)
def test_moments_are_those_of_the_distribution(kind: str, params: tuple[float, ...]):
    mean, variance, fourth = _MOMENTS[kind, params]
    x = draw(kind, params, 7, LocalElements.all_of((_N,)), torch.float64, CPU)
    assert abs(x.mean() - mean) < 5 * math.sqrt(variance / _N)
    spread = math.sqrt((fourth - variance**2) / _N)
    assert abs((x - mean).square().mean() - variance) < max(5 * spread, 1e-3)


def test_normal_numbers_have_the_tails_they_should():
    x = draw("normal", (0.0, 1.0), 3, LocalElements.all_of((1 << 20,)), torch.float64, CPU)
    for z in (0.5, 1.0, 2.0, 3.0, 4.0):
        chance = math.erfc(z / math.sqrt(2))
        found = (x.abs() > z).double().mean().item()
        assert abs(found - chance) < 5 * math.sqrt(chance * (1 - chance) / 2**20)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_stay_below_their_upper_bound(dtype: torch.dtype):
    x = draw("uniform", (0.0, 1.0), 5, LocalElements.all_of((_N,)), dtype, CPU)
    assert x.min() >= 0
    assert x.max() < 1
    assert (x.double() - _uniform(5)).abs().max() <= torch.finfo(dtype).eps


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_chances_decide_alike_in_every_dtype_and_by_the_uniform_number(p: float):
    wanted = _uniform(9, 4096) < p
    for dtype in (torch.bool, torch.int64, torch.float64, torch.float32, torch.bfloat16):
        assert torch.equal(draw("chance", (p,), 9, LocalElements.all_of((4096,)), dtype, CPU), wanted.to(dtype))


# --- PyTorch's calls, on one device -------------------------------------------------------------------------------


def test_a_seed_holds_inside_the_block_and_leaves_no_trace():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    with sl.exact_random(0):
        first = torch.rand(4)
    assert torch.equal(torch.rand(3), wanted)
    torch.manual_seed(0)
    with sl.exact_random():
        assert torch.equal(torch.rand(4), first)
        assert not torch.equal(torch.rand(4), first)


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.float64)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_and_scales(p: float):
    x = torch.linspace(1, 2, 10_000, dtype=torch.float64, requires_grad=True)
    with sl.exact_random(1):
        y = F.dropout(x, p)
    y.backward(torch.ones_like(y))
    kept = y != 0
    assert abs(kept.double().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / 10_000)
    torch.testing.assert_close(y[kept], x[kept] / (1 - p), rtol=2.0**-51, atol=0)
    assert torch.equal(x.grad, kept.double() / (1 - p))


def test_dropout_of_nothing_and_of_everything():
    x = _ones(100)
    with sl.exact_random(1):
        state = torch.get_rng_state()
        for same in (F.dropout(x, 0.0), F.dropout(x, 0.5, training=False), nn.Dropout(0.5).eval()(x)):
            assert torch.equal(same, x)
        assert torch.equal(torch.get_rng_state(), state)
        assert not F.dropout(x, 1.0).any()
        again = F.dropout(x, 0.5, inplace=True)
    assert again is x
    assert set(x.tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_dropout_of_features_is_drawn_for_each_sample_and_channel(dims: int):
    module = [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d][dims - 1](0.5)
    with sl.exact_random(1):
        y = module(_ones(40, 30, *[2] * dims))
        noise = F.dropout(_ones(40, 30), 0.5)
    assert torch.equal(y, (y.flatten(2)[:, :, 0].view(40, 30, *[1] * dims)).expand_as(y))
    assert not torch.equal(noise, y.flatten(2)[:, :, 0])  # another call, another key
    assert 0.4 < (y != 0).double().mean() < 0.6


@pytest.mark.parametrize("module", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_keeps_mean_and_variance(module: type[nn.Module]):
    x = torch.randn(400, 400, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with sl.exact_random(1):
        y = module(0.2)(x)
    assert abs(y.mean()) < 0.03
    assert abs(y.var() - 1) < 0.03
    assert not torch.equal(x, y)


def test_a_generator_of_ones_own_is_left_alone():
    def mine() -> torch.Generator:
        return torch.Generator().manual_seed(3)

    wanted = torch.empty(5).normal_(generator=mine()), torch.randperm(9, generator=mine())
    with sl.exact_random(0):
        state = torch.get_rng_state()
        found = torch.empty(5).normal_(generator=mine()), torch.randperm(9, generator=mine())
        assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


_REFUSED: dict[str, Callable[[], Any]] = {
    "multinomial": lambda: torch.multinomial(torch.ones(5), 2),
    "randperm": lambda: torch.randperm(5),
    "poisson": lambda: torch.poisson(torch.ones(5)),
    "binomial": lambda: torch.binomial(torch.ones(5), torch.ones(5)),
    "cauchy_": lambda: torch.empty(5).cauchy_(),
    "log_normal_": lambda: torch.empty(5).log_normal_(),
    "_standard_gamma": lambda: torch.distributions.Gamma(1.0, 1.0).sample((3,)),
    "rrelu_with_noise": lambda: F.rrelu(-torch.ones(5), training=True),
}


@pytest.mark.parametrize("op", _REFUSED)
def test_what_cannot_be_drawn_by_element_is_refused(op: str):
    with sl.exact_random(0), pytest.raises(ShardingError, match=rf'rng="exact" cannot draw aten\.{op}\S*, element'):
        _REFUSED[op]()


def test_no_random_op_of_pytorch_is_let_through():
    """Whatever ATen marks as random is drawn, refused, or comes apart into what is."""
    missing = []
    for name in _torch.op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None) if space == "aten" else None
        if op is None or torch.Tag.nondeterministic_seeded not in op.tags or _torch.is_composite(op):
            continue
        takes_a_generator = "generator" in overload
        no_draw = "backward" in packet or "choice" in packet or "init" in packet
        if op not in RANDOM and not takes_a_generator and not no_draw:
            missing.append(name)
    assert missing == []


def test_the_error_of_an_unknown_kind_is_raised_first():
    with pytest.raises(ShardingError, match=r"""^rng='exactly' was given; give "fast" or "exact"\.$"""):
        sl.shard_model(nn.Linear(2, 2), "tp=1024", {}, rng="exactly")


def test_attention_drops_weights_exactly():
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with sl.exact_random(4):
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
    with sl.exact_random(4):
        mask = F.dropout(_ones(2, 4, 6, 6), 0.3)
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    torch.testing.assert_close(found, (scores.softmax(-1) * mask) @ v, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("inference", [True, False])
def test_inference_mode_draws_the_same(inference: bool):
    with sl.exact_random(1):
        wanted = F.dropout(_ones(50), 0.5)
    with sl.exact_random(1), torch.inference_mode(inference):
        assert torch.equal(F.dropout(_ones(50), 0.5), wanted)


# --- on a mesh ----------------------------------------------------------------------------------------------------

_CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "uniform_": lambda t: t.uniform_(-1, 1),
    "normal_": lambda t: t.normal_(2, 3),
    "exponential_": lambda t: t.exponential_(),
    "random_": lambda t: t.random_(3, 1000),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "kaiming_uniform_": lambda t: nn.init.kaiming_uniform_(t) if t.ndim > 1 and t.numel() else t,
    "xavier_normal_": lambda t: nn.init.xavier_normal_(t) if t.ndim > 1 and t.numel() else t,
    "trunc_normal_": lambda t: nn.init.trunc_normal_(t),
    "dropout": lambda t: F.dropout(t, 0.4),
    "dropout in place": lambda t: F.dropout(t, 0.4, inplace=True),
    "alpha_dropout": lambda t: F.alpha_dropout(t, 0.4, training=True),
    "feature_alpha_dropout": lambda t: F.feature_alpha_dropout(t, 0.4, training=True) if t.ndim > 1 else t,
    "rand_like": torch.rand_like,
    "randn_like": lambda t: torch.randn_like(t, dtype=torch.float32),
    "randint_like": lambda t: torch.randint_like(t, 1, 9),
    "bernoulli": torch.bernoulli,
    "native_dropout": lambda t: torch.native_dropout(t, 0.4, True)[0],
}
# n partial sums each hold an nth of the constant that is added, or of what `erfinv_` writes back in place.
_DIVIDES_A_SUM = ("alpha_dropout", "feature_alpha_dropout", "trunc_normal_")


@st.composite
def _dtensors(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    """Sizes of the mesh, global shape, placements: any dim cut by any axes, uneven or fused too, or partial sums."""
    mesh = draw(st.sampled_from([(2,), (3,), (4,), (2, 2)]))
    shape = list(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    placements: list[Placement] = []
    for size in mesh:
        dim = draw(st.integers(0, len(shape) - 1))
        kind = draw(st.sampled_from(["replicate", "shard", "fused", "partial"]))
        if kind == "fused" and not any(getattr(p, "dim", None) == dim for p in placements):
            shape[dim] = 2 * size * draw(st.integers(1, 2))
            placements.append(_StridedShard(dim, split_factor=2))
        elif kind == "partial":
            placements.append(Partial())
        else:
            taken = any(isinstance(p, _StridedShard) and p.dim == dim for p in placements)
            placements.append(Shard(dim) if kind == "shard" and not taken else Replicate())
    return mesh, tuple(shape), tuple(placements)


def _values(shape: Sequence[int]) -> torch.Tensor:
    return torch.linspace(0.05, 0.95, math.prod(shape), dtype=torch.float64).view(*shape)


def _as_on_one_device(mesh_sizes: tuple[int, ...], shape: tuple[int, ...], placements: Any, call: str) -> None:
    mesh = init_device_mesh("cpu", mesh_sizes)
    first = all(at == 0 for at, p in zip(mesh.get_coordinate(), placements, strict=True) if p.is_partial())
    without_sums = tuple(Replicate() if p.is_partial() else p for p in placements)
    local = _torch.shard(_values(shape), mesh, without_sums)
    local = local if first else torch.zeros_like(local)
    stride = _values(shape).stride()
    given = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    with ops.restored():
        ops.enable(mesh)
        with sl.exact_random(2):
            found = _CALLS[call](given)
        with sl.exact_random(2):
            wanted = _CALLS[call](_values(shape))
        assert isinstance(found, DTensor)
        assert found.dtype == wanted.dtype
        in_parts = any(p.is_partial() for p in found.placements)
        if in_parts:
            found = found.redistribute(placements=without_sums)
        kept = [a == b or a.is_partial() for a, b in zip(placements, found.placements, strict=True)]
        assert all(kept), f"{placements} became {found.placements}"
    mine, part = found.to_local(), _torch.shard(wanted, mesh, found.placements)
    if in_parts and call in _DIVIDES_A_SUM:
        # A constant below 4: each nth is rounded, and so are their n - 1 sums. Truncated normals, at most 2, are
        # divided after `erfinv_`, scaled, summed for `clamp_`, divided and summed again: (2 n + 2) eps.
        torch.testing.assert_close(mine, part, rtol=0.0, atol=4 * mesh.size() * torch.finfo(wanted.dtype).eps)
    else:
        assert torch.equal(mine, part)


@settings(max_examples=4 * settings.default.max_examples)
@given(case=_dtensors(), call=st.sampled_from(sorted(_CALLS)))
@example(case=((2, 2), (7, 5), (Shard(0), Shard(0))), call="normal_")
@example(case=((4,), (8, 3), (_StridedShard(0, split_factor=2),)), call="dropout")
@example(case=((3,), (2, 3), (Shard(0),)), call="trunc_normal_")
@example(case=((2,), (4,), (Partial(),)), call="uniform_")
@example(case=((3,), (3, 3), (Partial(),)), call="alpha_dropout")
@example(case=((3,), (2,), (Partial(),)), call="trunc_normal_")
def test_a_dtensor_gets_its_part_of_what_one_device_draws(ranks, case, call: str):
    ranks(math.prod(case[0])).run(_as_on_one_device, *case, call)


def _on_a_foreign_mesh() -> None:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(torch.distributed.tensor.distribute_tensor(torch.zeros(7, 4), mesh, [Shard(0)]))
    with sl.exact_random(0):
        nn.init.normal_(parameter)
    with sl.exact_random(0):
        whole = nn.init.normal_(torch.empty(7, 4))
    assert torch.equal(parameter.to_local(), whole.chunk(2)[mesh.get_local_rank()])


def test_initialisers_work_on_meshes_that_shardlib_knows_nothing_of(ranks):
    ranks(2).run(_on_a_foreign_mesh)


# --- on data axes -------------------------------------------------------------------------------------------------

_ROWS, _SEQ = 8, 3
# Tensors of a forward, by what they are in a batch of so many rows.
_SHAPES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "activation": lambda rows: (rows, _SEQ, 5),
    "flattened": lambda rows: (rows * _SEQ, 5),
    "heads first": lambda rows: (rows * 4, _SEQ, _SEQ),
    "a number for each example": lambda rows: (rows,),
    "sequence first": lambda rows: (_SEQ * 7, rows, 2),
    "a weight": lambda rows: (5, 7),
    "one number": lambda rows: (),
}


@pytest.mark.covering
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", _SHAPES)
def test_a_data_rank_draws_its_block_of_the_batch(count: int, name: str):
    shape = _SHAPES[name]
    with sl.exact_random(0):
        whole = torch.rand(shape(_ROWS))
    parts = []
    for index in range(count):
        torch.manual_seed(0)
        with ExactMode(DataRank(index, count, _ROWS // count)):
            parts.append(torch.rand(shape(_ROWS // count)))
    if name in ("a weight", "one number"):
        assert all(torch.equal(part, whole) for part in parts)
    else:
        assert torch.equal(torch.cat(parts, 1 if name == "sequence first" else 0), whole)
