"""A run that begins in torch, goes on in flax and ends in torch, beside one that never leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardlib as sl
from tests.jax.refusals import raised

__all__ = ["NAMES", "TRANSPOSE", "begun", "ended", "gone_on", "never_left", "refused", "turned_dims"]

# The declared map: names of torch and of flax, and dims that stand the other way round.
NAMES = {
    "embed.weight": "embed.embedding",
    **{f"{at}.norm.{a}": f"{at}.norm.{b}" for at in ("blocks.0", "blocks.1") for a, b in (("weight", "scale"),)},
    **{f"blocks.{n}.{each}.weight": f"blocks.{n}.{each}.kernel" for n in range(2) for each in ("up", "down")},
    "head.weight": "head.kernel",
}
TRANSPOSE = {f"{name}.weight": (1, 0) for name in ("blocks.*.up", "blocks.*.down", "head")}
_OPTIONS = {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def _ids(step: int) -> torch.Tensor:
    return torch.arange(8 * 5).view(8, 5).mul(step + 3).remainder(11)


def _train(model: Any, optimizer: Any, steps: range, rows: slice = slice(None)) -> None:
    for step in steps:
        ids = _ids(step)[rows]
        nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def never_left() -> dict[str, torch.Tensor]:
    """Five steps on one device."""
    model = _model()
    _train(model, torch.optim.AdamW(model.parameters(), **_OPTIONS), range(5))
    return model.state_dict()


def begun(folder: Path) -> None:
    """Two steps of torch on four ranks, and a checkpoint."""
    rules = sl.Rules({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, unmatched="replicate")
    model = sl.shard_model(_model(), "dp=2,tp=2", rules, transforms=[sl.zero(1)])
    optimizer = torch.optim.AdamW(model.parameters(), **_OPTIONS)
    rank = torch.distributed.get_rank() // 2
    _train(model, optimizer, range(2), slice(4 * rank, 4 * rank + 4))
    sl.save(folder / "torch", model, optimizer)


def gone_on(folder: Path) -> None:
    """Two steps of flax on eight devices, a checkpoint of orbax, and one of torch."""
    import jax
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx

    import shardlib.jax as sj

    class FlaxBlock(nnx.Module):
        def __init__(self, **f64: Any) -> None:
            self.norm = nnx.LayerNorm(8, epsilon=1e-5, use_fast_variance=False, **f64)
            self.up, self.down = nnx.Linear(8, 16, **f64), nnx.Linear(16, 8, **f64)

        def __call__(self, x: Any) -> Any:
            return x + self.down(jnp.tanh(self.up(self.norm(x))))

    class FlaxModel(nnx.Module):
        def __init__(self) -> None:
            f64: Any = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(1)}
            self.embed, self.head = nnx.Embed(11, 8, **f64), nnx.Linear(8, 11, **f64)
            self.blocks = nnx.List([FlaxBlock(**f64), FlaxBlock(**f64)])

        def __call__(self, ids: Any) -> Any:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    graph, shapes = nnx.split(nnx.eval_shape(FlaxModel))

    def loss_fn(params: Any, ids: Any) -> Any:
        logits = nnx.merge(graph, params)(ids[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    rules = sl.Rules({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, unmatched="replicate")
    optimizer = optax.adamw(_OPTIONS["lr"], eps=_OPTIONS["eps"], weight_decay=_OPTIONS["weight_decay"])
    step = sj.train_step(loss_fn, optimizer, rules, sj.make_mesh("dp=2,tp=4"), transforms=[sl.zero(1)])
    state = sj.load(folder / "torch", step.abstract(shapes), names=NAMES, transpose=TRANSPOSE)
    assert int(state.step) == int(state.opt_state[0].count) == 2
    up = state.opt_state[0].mu["blocks"][0]["up"]["kernel"]
    assert up.shape == (8, 16) and "dp" in str(up.sharding.spec) and "tp" in str(up.sharding.spec)
    for number in (2, 3):
        state, _ = step(state, _ids(number).numpy())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder / "orbax", step.abstract(shapes))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), state, restored))
    model = Model().double()
    adamw = torch.optim.AdamW(model.parameters(), **_OPTIONS)
    sj.copy_to_torch(restored, model, adamw, names=NAMES, transpose=TRANSPOSE)
    sl.save(folder / "back", model, adamw)


def ended(folder: Path) -> dict[str, torch.Tensor]:
    """One more step of torch, on another mesh; the weights are in orbax's checkpoint, too."""
    model = sl.shard_model(Model().double(), "dp=4", sl.Rules({}, unmatched="replicate"), transforms=[sl.fsdp()])
    optimizer = torch.optim.AdamW(model.parameters(), **_OPTIONS)
    back = {f"params.{new}.value": old for old, new in NAMES.items()}

    def called(name: str) -> str | None:
        parameter = name.removeprefix("params.").removesuffix(".value")
        return back.get(name, parameter) if name.startswith("params.") else None

    sl.load(folder / "orbax", model, names=called, transpose={"params.**.kernel.value": (1, 0)})
    weights = sl.full_state_dict(model)
    sl.load(folder / "back", model, optimizer)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in sl.full_state_dict(model).items())
    rank = torch.distributed.get_rank()
    _train(model, optimizer, range(4, 5), slice(2 * rank, 2 * rank + 2))
    return sl.full_state_dict(model)


def turned_dims(folder: Path) -> None:
    """A kernel whose four dims all move, read by shards, and of tied tensors the name that the tree has."""
    import jax
    import optax

    import shardlib.jax as sj

    model = nn.Module()
    model.conv = nn.Conv2d(2, 8, (3, 5), bias=False)
    model.tied = model.conv.weight
    sl.save(folder / "conv", model, torch.optim.Adam(model.parameters()))
    kernel = jax.ShapeDtypeStruct((3, 5, 2, 8), "float32")
    into = sj.shard_params({"kernel": kernel}, sj.make_mesh("dp=1,tp=8"), {"kernel": "h w in out@tp"})
    for names in ({"conv.weight": "kernel", "tied": None}, {"tied": "kernel"}):
        tree = sj.load(folder / "conv", into, names=names, transpose={"conv.weight": (2, 3, 1, 0)})
        assert (tree["kernel"] == model.conv.weight.detach().permute(2, 3, 1, 0).numpy()).all()
    step = sj.train_step(lambda p, x: p["kernel"].sum(), optax.sgd(1.0), {"*": None}, sj.make_mesh("dp=8"))
    before = model.conv.weight.detach().clone()
    names, transpose = {"conv.weight": "kernel", "tied": None}, {"conv.weight": (2, 3, 1, 0)}
    sj.copy_to_torch(
        step.init(tree)._replace(params={"kernel": tree["kernel"] * 2}), model, names=names, transpose=transpose
    )
    assert torch.equal(model.conv.weight, before * 2)


def refused(folder: Path) -> dict[str, str]:
    """What is raised for what does not fit, before anything is changed."""
    import jax
    import optax

    import shardlib.jax as sj

    mesh, torch_names = sj.make_mesh("dp=8"), {"weight": "kernel"}
    step = sj.train_step(lambda p, x: (x @ p["kernel"] + p["bias"]).sum(), optax.adam(0.1), {"*": None}, mesh)
    shapes = {"kernel": jax.ShapeDtypeStruct((3, 2), "float32"), "bias": jax.ShapeDtypeStruct((2,), "float32")}
    model = nn.Linear(3, 2)

    def saved(name: str, optimizer: Any) -> Path:
        """The weight has made two steps, the bias one."""
        for parameter in model.parameters() if optimizer else ():
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        sl.save(folder / name, model, optimizer)
        return folder / name

    def loaded(path: Path, **options: Any) -> str:
        options = {"names": torch_names, "transpose": {"weight": (1, 0)}} | options
        return raised(lambda: sj.load(path, step.abstract(shapes), **options))

    none, adam = saved("none", None), saved("adam", torch.optim.Adam(model.parameters()))
    sgd = saved("sgd", torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    state = step.init({"kernel": torch.ones(3, 2), "bias": torch.ones(2)})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = {
        "no optimizer": loaded(none),
        "another optimizer": loaded(sgd),
        "one name": loaded(adam, names=lambda name: "kernel"),
        "no name": loaded(adam, names=lambda name: 3),
        "not turned": loaded(adam, transpose=None),
        "unnamed": loaded(adam, names=None),
        "left out": loaded(adam, names=lambda name: torch_names.get(name)),
        "steps": loaded(adam),
        "back unnamed": raised(lambda: sj.copy_to_torch(state, model, transpose={"weight": (1, 0)})),
        "back not turned": raised(lambda: sj.copy_to_torch(state, model, names=torch_names)),
        "back another optimizer": raised(
            lambda: sj.copy_to_torch(state, model, torch.optim.SGD(model.parameters()), names=torch_names)
        ),
    }
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return found
