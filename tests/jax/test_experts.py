"""Mixtures of experts on JAX: experts that ask for their tokens compute what torch computes on one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import shardlib as sl
from shardlib.testing import equivalent
from tests.engine.mixture import Model
from tests.jax import on_devices, routed

CASES: dict[str, tuple[dict[str, Any], str, sl.Rules, list[Any]]] = {
    "some ranks have one expert, some two": ({}, "ep=4", routed.RULES, []),
    "all tokens choose one expert": ({"favourites": (2,)}, "dp=2,ep=2", routed.RULES, [sl.zero(3, only="router")]),
    "two experts and half of the ranks have no tokens": ({"favourites": (0, 1)}, "ep=4", routed.RULES, []),
    "each split over tp": ({}, "dp=2,ep=2,tp=2", routed.SPLIT, [sl.zero(1)]),
    "each split over tp, on all ranks": ({}, "dp=2,tp=2", routed.SPLIT, []),
}


_DEEP = "two experts and half of the ranks have no tokens", "each split over tp, on all ranks"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.deep) if case in _DEEP else case for case in CASES]
)
def test_training_gives_the_numbers_of_one_device(case: str):
    options, mesh, rules, transforms = CASES[case]
    model = functools.partial(Model, **options)
    report = equivalent(model, routed.batch, mesh, rules, transforms=transforms, engine="jax", steps=1)
    assert report, str(report)


_NORMAL = "masks", "sorted", "Mixtral", "GptOss"  # the others are as one of these, or as what is trained above


@pytest.mark.parametrize(
    "module", [pytest.param(name, marks=() if name in _NORMAL else pytest.mark.deep) for name in routed.MODULES]
)
def test_a_module_that_routes_in_its_own_way_has_torch_s_gradients(module: str):
    on_devices.run(routed.as_torch, module)


@pytest.mark.parametrize("implementation", ["grouped_mm", pytest.param("batched_mm", marks=pytest.mark.deep)])
def test_experts_of_transformers_may_be_computed_in_any_of_its_ways(implementation: str):
    on_devices.run(routed.as_torch, "GptOss", implementation)


@pytest.mark.parametrize("check", routed.CHECKS)
def test_experts(check: str):
    on_devices.run(routed.CHECKS[check])


REFUSED: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "dropping": (("dropping",), ('"experts" was exported as it is, since it draws random numbers (aten.',)),
    "branching": (("branching",), ("since what it does depends on values of tokens, weights or parameters (aten.",)),
    "mixing": (
        ("mixing",),
        ("since its result is not the sum of what each chosen expert makes of each token by itself.",),
    ),
    "buffered": (("buffered",), ("since it has buffers, which belong to no expert.",)),
    "pairs": (("pairs",), ("since it raises 'ValueError: not enough values to unpack (expected 2, got 1)' for a few",)),
    "listed": (
        ("listed",),
        ("Experts are compiled in a module forward(self, tokens, numbers, weights) with all their parameters, whose",),
    ),
    "a capacity": (
        ("mixing", 1.0),
        ('PlanError: "experts" has a limited capacity by expert_capacity', "Leave expert_capacity out, or let"),
    ),
    "a capacity of odd rows": (
        ("", 1.0, 3),
        ("InputError: expert_capacity limits the choices of each data rank, and 3 tokens do not divide evenly over",),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_expert_by_expert_is_refused(case: str):
    given, words = REFUSED[case]
    text = on_devices.run(routed.refused, *given)
    assert all(word in text for word in words), text
