"""Whole cases: everything that `assert_equivalent` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import nn

from shardlib._mesh_shape import MeshShape
from shardlib.engine._torch import pytree
from shardlib.errors import InputError
from shardlib.rules import Rules
from shardlib.testing.strategies._draws import among
from shardlib.testing.strategies._facts import facts
from shardlib.testing.strategies._meshes import mesh_shapes
from shardlib.testing.strategies._models import batch_sizes, convnets, draw_batch, mlps, transformers
from shardlib.testing.strategies._rules import draw_rules
from shardlib.testing.strategies._transforms import Transform, transforms

__all__ = ["Case", "cases"]


@dataclass(frozen=True)
class Case:
    """The arguments of `equivalent` and `assert_equivalent`: `assert_equivalent(**case)`.

    A value that can be pickled if its model and batch can. `arguments` gives the same as a dict.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    mesh: MeshShape
    rules: Rules = field(default_factory=lambda: Rules({}, unmatched="replicate"))
    transforms: tuple[Transform, ...] = ()
    accumulate: int = 1
    no_sync: bool = False
    clip: float | None = None
    rng: Literal["exact", "fast"] = "exact"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `equivalent`."""
        names = ("model", "batch", "mesh", "rules", "transforms", "accumulate", "no_sync", "clip", "rng")
        found = {name: getattr(self, name) for name in names}
        thaws = getattr(self.model, "thaw", False)
        return {**found, "before_step": self.model.before_step} if thaws else found  # type: ignore[attr-defined]

    def keys(self) -> Iterable[str]:
        """Return the keys of `**case`, with `case[key]`."""
        return self.arguments().keys()

    def __getitem__(self, name: str) -> Any:
        return self.arguments()[name]


def cases(
    model: Callable[[], nn.Module] | st.SearchStrategy[Callable[[], nn.Module]] | None = None,
    batch: Callable[[int], Any] | None = None,
    *,
    meshes: st.SearchStrategy[MeshShape] | None = None,
    max_world: int = 4,
) -> st.SearchStrategy[Case]:
    """Generate all arguments of `assert_equivalent`: `assert_equivalent(**case)`.

    Mesh, rules, transforms, accumulated backward passes (with and without `no_sync`), clipping; and model and batch
    where they are not given.

    Shrinks towards one axis of two ranks, the smallest model, no rule, one backward pass.

    Args:
        model: a function that makes your model, or a strategy of such functions; by default `transformers`, `mlps` and
            `convnets`.
        batch: a function from the step to a batch, as `equivalent` takes it; needed with a model of your own. Meshes
            are drawn so that their data ranks share its rows.
        meshes: a strategy of meshes; by default `mesh_shapes` of two model axes and a data axis.
        max_world: most ranks, where `meshes` is not given.

    Raises:
        InputError: a model that cannot be called, or one of your own without a batch.

    >>> from hypothesis import find
    >>> case = find(cases(), lambda case: case.mesh.data_axes)
    >>> case.mesh, case.model, case.rules
    (MeshShape("dp=2"), ModelFactory(MLP(ins=1, width=1, outs=1)), Rules({}, unmatched='replicate'))
    """
    if model is not None and not isinstance(model, st.SearchStrategy) and not callable(model):
        raise InputError(f"cases() was given model={model!r}; give a function that makes one, or a strategy of such.")
    if isinstance(model, nn.Module):
        raise InputError(
            f"cases() was given a {type(model).__name__}; give a function that makes one, as in `lambda: MyModel()`: "
            "each rank makes its own."
        )
    if model is not None and not isinstance(model, st.SearchStrategy) and batch is None:
        raise InputError(
            "cases() was given a model without a batch; give a function from the step to a batch, as in "
            "`lambda step: torch.randn(8, 16)`."
        )
    if meshes is None:
        rows = None if batch is None else _rows(batch)
        meshes = mesh_shapes(max_world, model_axes=("tp", "sp"), rows=rows)
    return _cases(model, batch, meshes)


def _rows(batch: Callable[[int], Any]) -> int:
    leaves = [leaf for leaf in pytree.tree_leaves(batch(0)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    return len(leaves[0]) if leaves else 1


@st.composite
def _cases(draw: st.DrawFn, model: Any, batch: Callable[[int], Any] | None, meshes: Any) -> Case:
    mesh = draw(meshes)
    if model is None:
        model = st.one_of(mlps(dropout=True), convnets(dropout=True), transformers(dropout=True))
    factory = draw(model) if isinstance(model, st.SearchStrategy) else model
    made = batch or draw(draw_batch(*batch_sizes(factory), mesh.data_ranks))
    rules = draw(draw_rules(facts(factory, made), mesh))
    accumulate = draw(st.integers(1, 2))
    rng = draw(among(("exact", "fast")))
    return Case(
        factory,
        made,
        mesh,
        rules,
        draw(transforms()),
        accumulate,
        no_sync=accumulate > 1 and draw(st.booleans()),
        clip=draw(st.sampled_from([None, 0.5])),
        # With rng="fast" each data rank draws a dropout of its own, which is that of no single device.
        rng=rng if mesh.data_ranks == 1 else "exact",
    )
