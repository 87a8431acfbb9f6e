"""Every family of `layouts/` on JAX gives the numbers of torch on one device, and costs what Megatron costs."""

from __future__ import annotations

import pytest

from tests.jax import families, on_devices
from tests.jax.families import CONVOLUTIONS, FAMILIES, Case

BOTH, TP8 = "dp=2,tp=4", "tp=8"
CASES = [
    Case("example_gpt", BOTH, transform="zero(3)"),
    Case("gpt2", BOTH, transform="zero(1)"),
    Case("llama", BOTH),
    Case("mixtral", "dp=2,ep=2,tp=2", transform="zero(2)"),  # its loss has the router's, over the tokens of all ranks
    *(Case(family, "dp=2,tp=2", steps=1) for family in CONVOLUTIONS),
]
MORE = [
    Case("bert", BOTH, transform="fsdp()"),
    *(Case(family, BOTH) for family in ("mixtral", "vit", "t5", "resnet")),
    *(Case(family, TP8) for family in FAMILIES),
    *(Case(family, mesh) for family in CONVOLUTIONS for mesh in ("tp=1", "tp=2", BOTH, "dp=4,tp=2", "dp=2,tp=2,cp=2")),
    *(Case(family, "dp=4,tp=2", transform=f"zero({stage})") for family in FAMILIES for stage in (1, 3)),
]
# Rounding is 1.1e-16 of a result; sums of some hundred terms are added up in another order, some ten layers deep, and
# magnified by what a norm divides by. A mistake is of order one.
BOUND = 1e-12


def _check(case: Case) -> None:
    apart = on_devices.run(families.compared, case)
    assert max(apart.values()) <= BOUND, apart


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_gradients_and_three_steps_of_adamw_are_those_of_torch(case: Case):
    _check(case)


@pytest.mark.deep
@pytest.mark.parametrize("case", MORE, ids=str)
def test_numbers_on_other_meshes(case: Case):
    _check(case)


@pytest.mark.deep
@pytest.mark.parametrize("mesh", [BOTH, TP8])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_as_far_from_float64_as_that_of_torch(family: str, mesh: str):
    """Both round the same terms, in orders of their own, so that their errors are alike but for a small factor.

    A product in TF32 (11 bits) or bfloat16 (8 bits) in place of float32 (24 bits) rounds 2^13 or 2^16 times as
    coarsely. The bound is half of the way to the nearer one, in digits: 2^6.
    """
    error = on_devices.run(families.rounded, Case(family, mesh, "float32", steps=1), x64=False)
    for what in ("loss", "gradient"):
        assert error["jax"][what] <= 2**6 * max(error["torch"][what], 2**-24), error


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(f, marks=pytest.mark.deep) for f in ("example_gpt", "llama"))]
)
def test_a_block_costs_four_all_reduces_a_step_and_nothing_else(family: str):
    """Two forward, two backward (Shoeybi et al., arXiv 1909.08053, section 3); fused qkv needs no permutation."""
    added = on_devices.run(families.megatron, family, BOTH, x64=False)
    assert added == {"forward": {"all-reduce": 2}, "step": {"all-reduce": 4}}
