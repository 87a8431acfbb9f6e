"""Calls of the model and of its modules."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.contract.declare import (
    OTHER_STAGE,
    as_ddp,
    as_microbatches,
    everywhere,
    noticed,
    own_part,
    refused,
    refused_in_pipelines,
    refused_on_some_ranks,
)
from tests.contract.harness import Block, Net, Run

F = nn.functional


@refused_in_pipelines
def call_model(run: Run, model: Any):
    """Call the model on a batch."""
    return run.rows(model(run.batch()))


@refused_in_pipelines
def call_by_keyword(run: Run, model: Any):
    """Call the model with its batch as a keyword."""
    return run.rows(model(x=run.batch()))


@refused_in_pipelines
def call_forward(run: Run, model: Any):
    """Call `model.forward` in the place of the model."""
    loss = model.forward(run.batch()).square().mean()
    loss.backward()
    return run.mean(loss), run.gradients(model)


@refused("pp", " is on stage 0, and not on this rank")
@refused("zero(3), fsdp x tp", "that is stored in shards, and a plain tensor of shape")
def call_forward_of_a_module(run: Run, model: Any):
    """Call `forward` of a block in the place of the block."""
    x = model.stem(run.batch())
    for block in model.blocks:
        x = block.forward(x)
    loss = model.head(x).square().mean()
    loss.backward()
    return run.mean(loss), run.gradients(model)


@refused("pp", " is on stage 0, and not on this rank")
def call_modules_one_by_one(run: Run, model: Any):
    """Call the modules of the model one by one, outside of its forward."""
    x = model.stem(run.batch())
    for block in model.blocks:
        x = block(x)
    loss = model.head(x).square().mean()
    loss.backward()
    return run.mean(loss), run.gradients(model)


@everywhere
@own_part("pp", OTHER_STAGE, apart=True)
def call_one_block(run: Run, model: Any):
    """Call one block alone, and train it."""
    optimizer = torch.optim.SGD(model.blocks[0].parameters(), lr=0.1)
    for i in range(2):
        optimizer.zero_grad()
        x = F.pad(run.batch(i), (0, 2))
        model.blocks[0](x).square().mean().backward()
        optimizer.step()
    return run.weights(model)


@everywhere
@own_part("pp", OTHER_STAGE, apart=True)
@refused("zero(3), fsdp x tp", "that is stored in shards, and a plain tensor of shape")
def call_one_layer(run: Run, model: Any):
    """Call one split layer alone."""
    out = model.blocks[0].up(F.pad(run.batch(), (0, 2)))
    out.square().mean().backward()
    return run.rows(out), run.gradients(model)


@own_part("pp", OTHER_STAGE, apart=True)
@refused("zero(3), fsdp x tp", "that is stored in shards, and a plain tensor of shape")
def use_a_weight_directly(run: Run, model: Any):
    """Use a weight outside of its module, in `F.linear`."""
    out = F.linear(F.pad(run.batch(), (0, 2)), model.blocks[0].up.weight, model.blocks[0].up.bias)
    out.square().mean().backward()
    return run.rows(out), run.gradients(model)


def tie_by_use(run: Run):
    """Use one layer's weight in the forward of another, as tied embeddings do."""

    class Tied(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(super().forward(x), self.head.weight.t())

    torch.manual_seed(0)
    return run.trained(run.shard(Tied().double()))


@refused_in_pipelines
def call_twice(run: Run, model: Any):
    """Call the model on its own output."""
    out = model(F.pad(model(run.batch()), (0, 2)))
    out.square().mean().backward()
    return run.gradients(model)


class _Looped(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = self.blocks[0](x)
        return self.head(x)


@everywhere
def call_a_module_thrice(run: Run):
    """Call one block three times in a forward, and another one never."""
    torch.manual_seed(0)
    return run.trained(run.shard(_Looped().double()))


class _Choosing(Net):
    def forward(self, x: torch.Tensor, which: int = 0) -> torch.Tensor:
        return self.head(self.blocks[which](self.stem(x)))


@refused_in_pipelines
def call_other_modules_each_step(run: Run):
    """Call another block in each step."""
    torch.manual_seed(0)
    model = run.shard(_Choosing().double())
    optimizer = run.optimizer(model)
    for i in range(4):
        optimizer.zero_grad()
        model(run.batch(i), i % 2).square().mean().backward()
        optimizer.step()
    return run.weights(model)


@refused_in_pipelines
@noticed("zero(3)", "Ranks do different things")
def call_other_modules_on_each_rank(run: Run):
    """Call another block on each data rank, as routed models do."""
    torch.manual_seed(0)
    model = run.shard(_Choosing().double())
    if run.data_ranks == 1:
        a, b = run.batch().chunk(2)
        loss = (model(a, 0).square().mean() + model(b, 1).square().mean()) / 2
    else:
        loss = model(run.batch(), run.data_rank).square().mean()
    loss.backward()
    return run.gradients(model)


@everywhere
@refused("pp", "and has not come to")
def skip_layers_at_random(run: Run):
    """Skip blocks by a draw that is alike on all ranks."""

    class Skipping(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block, kept in zip(self.blocks, self.kept, strict=True):
                x = block(x) if kept else x
            return self.head(x)

    torch.manual_seed(0)
    model = run.shard(Skipping().double())
    optimizer, losses = run.optimizer(model), []
    for i, kept in enumerate([(True, False), (False, False), (True, True)]):
        model.kept = kept
        losses += run.train(model, optimizer, 1, start=i)
    return losses, run.weights(model)


# --- arguments and results --------------------------------------------------------------------------------------------


class _OfParts(Net):
    """A net whose forward gives what `pack` makes of its parts."""

    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(super().forward(x), x)


class _Pair(NamedTuple):
    logits: torch.Tensor
    inputs: torch.Tensor


@dataclass
class _Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


def _of_parts(run: Run, pack: Any) -> Any:
    torch.manual_seed(0)
    return run.shard(_OfParts(pack).double())


@refused_in_pipelines
def return_a_dict(run: Run):
    """Return a dict from forward."""
    model = _of_parts(run, lambda out, x: {"logits": out, "x": x, "none": None, "n": 3})
    out = model(run.batch())
    out["logits"].square().mean().backward()
    return run.rows(out["x"]), out["none"], out["n"], run.gradients(model)


@refused_in_pipelines
def return_a_named_tuple(run: Run):
    """Return a named tuple from forward."""
    model = _of_parts(run, _Pair)
    out = model(run.batch())
    out.logits.square().mean().backward()
    return run.rows(out.inputs), run.gradients(model)


@refused_in_pipelines
def return_a_dataclass(run: Run):
    """Return a dataclass from forward."""
    model = _of_parts(run, lambda out, x: _Output(out, out.square().mean()))
    out = model(run.batch())
    out.loss.backward()
    return run.rows(out.logits), run.gradients(model)


@refused_in_pipelines
def return_a_loss(run: Run):
    """Return the loss from forward, as models of transformers do."""
    model = _of_parts(run, lambda out, x: out.square().mean())
    optimizer = run.optimizer(model)
    for i in range(2):
        optimizer.zero_grad()
        model(run.batch(i)).backward()
        optimizer.step()
    return run.weights(model)


@refused_in_pipelines
def return_none(run: Run):
    """Return None from forward, and read the result from an attribute."""

    class Keeping(Net):
        def forward(self, x: torch.Tensor) -> None:
            self.last = super().forward(x)

    torch.manual_seed(0)
    model = run.shard(Keeping().double())
    model(run.batch())
    model.last.square().mean().backward()
    return run.gradients(model)


@everywhere
@refused_in_pipelines
def fill_a_list(run: Run):
    """Fill a list that forward is given, and use it in the loss."""

    class Filling(Net):
        def forward(self, x: torch.Tensor, hidden: list[Any]) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
                hidden.append(x)
            return self.head(x)

    torch.manual_seed(0)
    model, hidden = run.shard(Filling().double()), []
    out = model(run.batch(), hidden)
    (out.square().mean() + sum(h.square().mean() for h in hidden)).backward()
    return [run.rows(h) for h in hidden], run.gradients(model)


@own_part("pp", OTHER_STAGE)
def fill_a_dict_of_the_model(run: Run):
    """Write activations into a dict of the model in forward."""

    class Writing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, Any] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for i, block in enumerate(self.blocks):
                self.seen[f"block {i}"] = x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    model = run.shard(Writing().double())
    run.backward(model)
    return {name: run.rows(value) for name, value in model.seen.items()}


class _Masked(Net):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
        out = super().forward(x)
        return (out if mask is None else out * mask) * scale


@refused_in_pipelines
def optional_arguments(run: Run):
    """Give None, a mask and a keyword in one step or another."""
    torch.manual_seed(0)
    model = run.shard(_Masked().double())
    mask = run.part(torch.ones(8, 4, dtype=torch.float64).tril())
    losses = [
        model(run.batch()),
        model(run.batch(), None),
        model(run.batch(), mask),
        model(run.batch(), mask, scale=2.0),
    ]
    sum(out.square().mean() for out in losses).backward()
    return run.gradients(model)


@refused_in_pipelines
def nested_arguments(run: Run):
    """Give a batch as a dict of lists."""

    class Nested(Net):
        def forward(self, batch: dict[str, Any]) -> torch.Tensor:
            return super().forward(batch["xs"][0]) + super().forward(batch["xs"][1])

    torch.manual_seed(0)
    model = run.shard(Nested().double())
    model({"xs": [run.batch(), run.batch(1)], "name": "two"}).square().mean().backward()
    return run.gradients(model)


# --- in-place and views -----------------------------------------------------------------------------------------------


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


_MLP = {"up": "colwise", "down": "rowwise", "head": "colwise"}


class _Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mlp, self.head = nn.Linear(6, 8), _Mlp(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = self.stem(x)
        y = self.mlp(residual)
        y += residual
        return self.head(y)


def _sharded(run: Run, model: nn.Module, split: Any) -> Any:
    """Shard a model whose modules stand one after the other; the first half of them is the first stage."""
    names = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
    stages = f"{', '.join(names[: len(names) // 2])} | {', '.join(names[len(names) // 2 :])}"
    return run.shard(model.double(), split, stages)


def add_a_residual_in_place(run: Run):
    """Write `y = self.mlp(x); y += residual` in forward."""
    torch.manual_seed(0)
    return run.trained(_sharded(run, _Adds(), _MLP))


def relu_in_place(run: Run):
    """Use `nn.ReLU(inplace=True)` behind a split layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(stem=nn.Linear(6, 8), up=nn.Linear(8, 16), act=nn.ReLU(inplace=True), down=nn.Linear(16, 4))
    )
    return run.trained(_sharded(run, model, {"up": "colwise", "down": "rowwise"}))


@refused("pp", "it comes from an earlier stage")
def write_into_an_activation(run: Run):
    """Write into columns of an activation in forward."""

    class Writing(_Adds):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.mlp.up(self.stem(x))
            y[:, 0] = 0
            y[:, 3:5] *= 2
            return self.head(self.mlp.down(torch.tanh(y)))

    torch.manual_seed(0)
    return run.trained(_sharded(run, Writing(), _MLP))


@refused_in_pipelines
def edit_the_output_in_place(run: Run, model: Any):
    """Edit the model's output in place before the loss."""
    out = model(run.batch())
    out.mul_(2)
    out[:, 0] = 0
    out.square().mean().backward()
    return run.gradients(model)


@refused_in_pipelines
def edit_the_input_in_place(run: Run):
    """Edit the model's input in place in forward."""

    class Editing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return super().forward(x)

    torch.manual_seed(0)
    model = run.shard(Editing().double())
    x = run.batch()
    model(x).square().mean().backward()
    return run.rows(x), run.gradients(model)


# --- kinds of modules -------------------------------------------------------------------------------------------------


class _Norms(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), norm, nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))


@refused_in_pipelines
def batch_norm(run: Run):
    """Train BatchNorm behind a split layer, then evaluate."""
    torch.manual_seed(0)
    model = _sharded(run, _Norms(nn.BatchNorm1d(16)), {"up": "colwise", "down": "rowwise"})
    losses = run.train(model)
    model.eval()
    return losses, run.weights(model), run.buffers(model), run.outputs(model, 7)


@as_microbatches("BatchNorm normalises each microbatch by itself")
def batch_norm_on_transposed_activations(run: Run):
    """Train BatchNorm on activations that are not contiguous, behind a split layer."""

    class Transposed(_Norms):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(x.view(x.shape[0], 2, 3).repeat(1, 1, 2)).transpose(1, 2)
            return self.down(self.norm(y).transpose(1, 2).mean(1))

    torch.manual_seed(0)
    model = _sharded(run, Transposed(nn.BatchNorm1d(16)), {"up": "colwise", "down": "rowwise"})
    return run.trained(model), run.buffers(model)


def batch_norm_frozen(run: Run):
    """Keep BatchNorm in evaluation mode while the rest trains."""
    torch.manual_seed(0)
    model = _sharded(run, _Norms(nn.BatchNorm1d(16)), {"up": "colwise", "down": "rowwise"})
    model.train()
    model.norm.eval()
    return run.trained(model), run.buffers(model)


def group_norm(run: Run):
    """Train GroupNorm and RMSNorm behind a split layer."""
    torch.manual_seed(0)
    model = _sharded(
        run, _Norms(nn.Sequential(nn.GroupNorm(4, 16), nn.RMSNorm(16))), {"up": "colwise", "down": "rowwise"}
    )
    return run.trained(model)


class _Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.training:
            self.steps += 1
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        for block in self.blocks:
            x = block(x - self.average)
        return self.head(x)


@as_microbatches("a buffer is written for each microbatch")
def buffer_that_counts(run: Run):
    """Count steps in a buffer in forward."""

    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return super().forward(x) / self.steps

    torch.manual_seed(0)
    model = run.shard(Counting().double())
    return run.trained(model), run.buffers(model)


@as_ddp(
    "replicate, zero(1), zero(2), zero(3), fsdp x tp",
    "a buffer of one's own is of the rank's own examples; only BatchNorm's are of all",
)
@refused("pp", "writes a tensor of another stage into one of shape")
def buffer_of_batch_averages(run: Run):
    """Average activations of batches in a buffer in forward."""
    torch.manual_seed(0)
    model = run.shard(_Counting().double())
    return run.trained(model), run.buffers(model)


def buffer_that_is_replaced(run: Run):
    """Assign a new tensor to a buffer between steps."""
    torch.manual_seed(0)
    model = run.shard(_Counting().double())
    model.eval()
    model.average = torch.ones(8, dtype=torch.float64)
    return run.trained(model), run.buffers(model)


def buffer_registered_after_sharding(run: Run, model: Any):
    """Register a buffer after sharding, and use it in a hook."""
    model.register_buffer("shift", torch.ones(4, dtype=torch.float64))
    model.head.register_forward_hook(lambda _m, _args, out: out + model.shift)
    return run.trained(model), run.buffers(model)


class _Recurrent(nn.Module):
    def __init__(self, core: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.core, self.head = nn.Linear(3, 4), core(4, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.core(self.stem(x.view(x.shape[0], 2, 3)))
        return self.head(out[:, -1])


def recurrent(run: Run):
    """Train a GRU between split layers."""
    torch.manual_seed(0)
    return run.trained(_sharded(run, _Recurrent(nn.GRU), {"stem": "colwise", "head": "rowwise"}))


def recurrent_with_split_weights(run: Run):
    """Train an LSTM whose weights a rule splits."""
    torch.manual_seed(0)
    split = {"core.weight_ih_l0": "_@tp _", "head": "colwise"}
    return run.trained(_sharded(run, _Recurrent(nn.LSTM), split))


@refused("pp", "looks at values of tensors between its stages' modules")
def packed_sequences(run: Run):
    """Give a GRU packed sequences of several lengths."""

    class Packed(_Recurrent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lengths = torch.tensor([2, 1] * (x.shape[0] // 2))
            y = self.stem(x.view(x.shape[0], 2, 3))
            packed = nn.utils.rnn.pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=False)
            _, last = self.core(packed)
            return self.head(last[0])

    torch.manual_seed(0)
    return run.trained(_sharded(run, Packed(nn.GRU), {"stem": "colwise", "head": "rowwise"}))


class _Words(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(10, 8, **given), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.abs() * 100).long() % 10
        return self.down(torch.tanh(self.up(self.embed(ids).mean(1))))


_WORDS = {"embed": "vocab@tp embed", "up": "colwise", "down": "rowwise"}


def embedding(run: Run):
    """Train an embedding that is sharded by rows."""
    torch.manual_seed(0)
    return run.trained(_sharded(run, _Words(), _WORDS))


def embedding_with_padding(run: Run):
    """Train an embedding with `padding_idx`."""
    torch.manual_seed(0)
    return run.trained(_sharded(run, _Words(padding_idx=3), _WORDS))


@refused("replicate, zero(1), zero(2), zero(3), fsdp x tp", "each data rank has other examples")
def embedding_with_a_largest_norm(run: Run):
    """Train an embedding with `max_norm`, which writes into its weight in forward."""
    torch.manual_seed(0)
    return run.trained(_sharded(run, _Words(max_norm=1.0), _WORDS))


@as_ddp("replicate, zero(1), zero(2), zero(3), fsdp x tp", "words are counted among the rank's own examples")
@as_microbatches("words are counted in each microbatch")
def embedding_scaled_by_frequency(run: Run):
    """Train an embedding with `scale_grad_by_freq`."""
    torch.manual_seed(0)
    return run.trained(_sharded(run, _Words(scale_grad_by_freq=True), _WORDS))


def sparse_embedding(run: Run):
    """Train an embedding with `sparse=True` by SGD."""
    torch.manual_seed(0)
    model = _sharded(run, _Words(sparse=True), {"up": "colwise", "down": "rowwise"})
    return run.trained(model, torch.optim.SGD(model.parameters(), lr=0.1))


def embedding_bag(run: Run):
    """Train an `nn.EmbeddingBag`."""

    class Bags(_Words):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.EmbeddingBag(10, 8, mode="sum")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(self.embed((x.abs() * 100).long() % 10))))

    torch.manual_seed(0)
    return run.trained(_sharded(run, Bags(), {"up": "colwise", "down": "rowwise"}))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.attn, self.head = (
            nn.Linear(3, 8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.view(x.shape[0], 2, 3))
        return self.head(self.attn(x, x, x)[0].mean(1))


@refused_in_pipelines
def multihead_attention(run: Run):
    """Train `nn.MultiheadAttention` between split layers."""
    torch.manual_seed(0)
    model = _sharded(run, _Attention(), {"stem": "colwise", "head": "colwise"})
    return run.trained(model), run.outputs(model.eval(), 5)


@refused_in_pipelines
def transformer_encoder(run: Run):
    """Train an `nn.TransformerEncoderLayer`, and evaluate it by its fast path."""

    class Encoder(_Attention):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.attn(self.stem(x.view(x.shape[0], 2, 3))).mean(1))

    torch.manual_seed(0)
    model = _sharded(run, Encoder(), {"linear1": "colwise", "linear2": "rowwise"})
    return run.trained(model), run.outputs(model.eval(), 5)


def convolution(run: Run):
    """Train convolutions of which one is split."""

    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Conv1d(2, 8, 3, padding=1), nn.Conv1d(8, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.relu(self.up(x.view(x.shape[0], 2, 3)))).mean(2)

    torch.manual_seed(0)
    return run.trained(_sharded(run, Convolutions(), {"up": "colwise"}))


def bilinear(run: Run):
    """Train an `nn.Bilinear` behind a split layer."""

    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.both = nn.Linear(6, 8), nn.Bilinear(8, 6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.both(self.up(x), x)

    torch.manual_seed(0)
    return run.trained(_sharded(run, Bilinear(), {"up": "colwise"}))


@refused("pp", "Name the stages in the order in which their modules run")
def module_dict_and_parameter_list(run: Run):
    """Keep modules in `ModuleDict` and parameters in `ParameterList`."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"up": nn.Linear(6, 16), "down": nn.Linear(16, 4)})
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(4))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.layers["up"](x) * self.scales[0])
            return self.layers["down"](x) * self.scales[1]

    torch.manual_seed(0)
    return run.trained(_sharded(run, Kept(), {"up": "colwise", "down": "rowwise"}))


@refused_in_pipelines
def dropout(run: Run):
    """Evaluate a model with dropout, which then does nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(up=nn.Linear(6, 16), drop=nn.Dropout(0.5), down=nn.Linear(16, 4)))
    model = _sharded(run, model, {"up": "colwise", "down": "rowwise"}).eval()
    return run.outputs(model)


# --- hooks of modules -------------------------------------------------------------------------------------------------


@everywhere
@refused_in_pipelines
def hook_that_reads_a_weight(run: Run, model: Any):
    """Read a layer's weight in its forward hook."""
    norms: list[Any] = []
    model.blocks[0].up.register_forward_hook(lambda module, _args, _out: norms.append(module.weight.detach().norm()))
    run.loss(model).backward()
    return norms, run.gradients(model)


@refused_in_pipelines
def pre_hook_that_reads_a_weight(run: Run, model: Any):
    """Read a layer's weight in its forward pre-hook."""
    norms: list[Any] = []
    model.blocks[0].up.register_forward_pre_hook(lambda module, _args: norms.append(module.weight.detach().norm()))
    run.loss(model).backward()
    return norms, run.gradients(model)


@everywhere
@refused("pp", "has been modified by an inplace operation")
@refused("fsdp x tp, zero(3)", "was written to while its unit")
def pre_hook_that_edits_a_weight(run: Run, model: Any):
    """Normalise a layer's weight in its forward pre-hook."""

    def normalise(module: Any, _args: Any) -> None:
        with torch.no_grad():
            module.weight.div_(module.weight.norm())

    model.blocks[0].up.register_forward_pre_hook(normalise)
    return run.trained(model)


@everywhere
@refused_in_pipelines
def hook_that_reads_an_activation(run: Run, model: Any):
    """Record activations of every layer by forward hooks."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _args, out, name=name: seen.update({name: run.rows(out)}))
    run.loss(model)
    return seen


@everywhere
def hook_that_changes_an_activation(run: Run, model: Any):
    """Replace a module's output by its forward hook."""
    model.blocks[0].register_forward_hook(lambda _m, _args, out: out * 2)
    model.blocks[1].up.register_forward_hook(lambda _m, _args, out: out + 1)
    return run.trained(model)


def hook_from_before_sharding(run: Run):
    """Register forward hooks of modules before sharding."""
    model = run.model()
    model.blocks[0].register_forward_hook(lambda _m, _args, out: out * 2)
    model.blocks[1].up.register_forward_pre_hook(lambda _m, args: (args[0] + 1,))
    return run.trained(run.shard(model))


def hook_with_keywords(run: Run):
    """Register a pre-hook `with_kwargs=True`."""
    torch.manual_seed(0)
    model = run.shard(_Masked().double())
    model.register_forward_pre_hook(lambda _m, args, kwargs: (args, {**kwargs, "scale": 3.0}), with_kwargs=True)
    return run.trained(model)


@refused_in_pipelines
def global_module_hook(run: Run, model: Any):
    """Count calls by a hook of all modules."""
    calls: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, _args, _out: calls.append(type(m).__name__))
    try:
        run.loss(model).backward()
    finally:
        handle.remove()
    return calls


@everywhere
def patch_forward(run: Run, model: Any):
    """Assign another `forward` to a block after sharding."""
    block = model.blocks[0]
    old = block.forward
    block.forward = lambda x: old(x) * 2
    return run.trained(model)


def patch_forward_before_sharding(run: Run):
    """Assign another `forward` to a block before sharding."""
    model = run.model()
    block = model.blocks[0]
    old = block.forward
    block.forward = lambda x: old(x) * 2
    return run.trained(run.shard(model))


# --- evaluation -------------------------------------------------------------------------------------------------------


@refused_in_pipelines
def no_grad(run: Run, model: Any):
    """Evaluate under `no_grad` between steps."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    model.eval()
    out = run.outputs(model, 9)
    model.train()
    return out, run.trained(model, optimizer, 1, start=1)


@everywhere
@refused_in_pipelines
def no_grad_first(run: Run, model: Any):
    """Evaluate under `no_grad` before the first step."""
    return run.outputs(model, 9), run.trained(model)


@everywhere
@refused_in_pipelines
def inference_mode_first(run: Run, model: Any):
    """Evaluate under `inference_mode` before the first step."""
    with torch.inference_mode():
        out = run.rows(model(run.batch(9)).clone())
    return out, run.trained(model)


@everywhere
@refused_in_pipelines
def inference_mode_between(run: Run, model: Any):
    """Evaluate under `inference_mode` between two steps."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    with torch.inference_mode():
        out = run.rows(model(run.batch(9)).clone())
    return out, run.trained(model, optimizer, 1, start=1)


def shard_under_no_grad(run: Run):
    """Shard a model under `no_grad`."""
    with torch.no_grad():
        model = run.shard(run.model())
    return run.trained(model)


@noticed("tp, zero(3), fsdp x tp", "Ranks do different things:")
@refused_on_some_ranks("pp", "Call shardlib.pipeline_step", alone=True)
def evaluate_on_one_rank(run: Run, model: Any):
    """Evaluate on the first rank only."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    if run.rank == 0:
        with torch.no_grad():
            model(run.batch(9))
    return run.trained(model, optimizer, 1, start=1)


@everywhere
@refused_in_pipelines
def evaluate_other_shapes(run: Run, model: Any):
    """Evaluate batches of other sizes and with more dims."""
    with torch.no_grad():
        one = model(run.batch()[:1])
        more = model(run.batch().view(-1, 1, 6).expand(-1, 3, 6))
    return run.mean(one.sum() * 0), run.rows(more), run.trained(model)


# --- compiled, functional, checkpointed -------------------------------------------------------------------------------


@everywhere
def compile_before_sharding(run: Run):
    """Compile the model in place by `model.compile` before sharding."""
    model = run.model()
    with run.compiler():
        model.compile(backend="eager")
        return run.trained(run.shard(model))


@everywhere
def compile_after_sharding(run: Run, model: Any):
    """Compile the sharded model in place by `model.compile`."""
    with run.compiler():
        model.compile(backend="eager")
        return run.trained(model)


@everywhere
def compiled_wrapper(run: Run, model: Any):
    """Wrap the sharded model by `torch.compile`."""
    with run.compiler():
        compiled = torch.compile(model, backend="eager")
        return run.train(compiled), run.weights(model)


@everywhere
def compile_a_block_before_sharding(run: Run):
    """Compile one block in place before sharding."""
    model = run.model()
    with run.compiler():
        model.blocks[0].compile(backend="eager")
        return run.trained(run.shard(model))


@everywhere
def compile_a_block(run: Run, model: Any):
    """Compile one block of the sharded model in place."""
    with run.compiler():
        model.blocks[0].compile(backend="eager")
        return run.trained(model)


@everywhere
@refused_in_pipelines
def compile_the_step(run: Run, model: Any):
    """Compile the function that does forward and loss."""
    optimizer = run.optimizer(model)
    with run.compiler():
        step = torch.compile(lambda x: model(x).square().mean(), backend="eager")
        for i in range(2):
            optimizer.zero_grad()
            step(run.batch(i)).backward()
            optimizer.step()
    return run.weights(model)


@everywhere
@refused_in_pipelines
def functional_call(run: Run, model: Any):
    """Call the model with its own parameters by `functional_call`."""
    parameters = dict(model.named_parameters())
    out = torch.func.functional_call(model, parameters, (run.batch(),))
    out.square().mean().backward()
    return run.rows(out), run.gradients(model)


@everywhere
@refused("zero(3), fsdp x tp", "and another tensor stands in its place")
@refused_in_pipelines
def functional_call_with_scaled_weights(run: Run, model: Any):
    """Call the model with scaled parameters by `functional_call`."""
    parameters = {name: p * 2 for name, p in model.named_parameters()}
    out = torch.func.functional_call(model, parameters, (run.batch(),))
    out.square().mean().backward()
    return run.rows(out), run.gradients(model)


@refused("zero(3), fsdp x tp", "and another tensor stands in its place")
@refused_in_pipelines
def functional_call_with_plain_weights(run: Run, model: Any):
    """Call the model with plain tensors by `functional_call`."""
    parameters = {name: p.detach() * 2 for name, p in run.model().named_parameters()}
    return run.rows(torch.func.functional_call(model, parameters, (run.batch(),)))


def functional_call_of_a_layer(run: Run, model: Any):
    """Call one layer with other tensors by `functional_call`."""
    others = {"weight": torch.ones(16, 8, dtype=torch.float64), "bias": torch.zeros(16, dtype=torch.float64)}
    x = torch.nn.functional.pad(run.batch(), (0, 2))
    return run.rows(torch.func.functional_call(model.blocks[0].up, others, (x,)))


@everywhere
@refused("replicate, zero(1), zero(2)", "torch.func.grad transforms a model on data ranks")
@refused("tp, zero(3), fsdp x tp, pp, compiled", "A transform of torch.func, such as vmap, grad or jvp, calls a model")
def grad_of_a_function(run: Run, model: Any):
    """Take gradients by `torch.func.grad` of a functional call."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: Any) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (run.batch(),)).square().mean()

    return torch.func.grad(loss)(parameters)


@refused("replicate, zero(1), zero(2)", "torch.func.grad transforms a model on data ranks")
@refused("tp, zero(3), fsdp x tp, pp, compiled", "A transform of torch.func, such as vmap, grad or jvp, calls a model")
def gradients_of_each_example(run: Run, model: Any):
    """Take gradients of each example by `vmap` of `grad`."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x[None],)).square().mean()

    grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, run.batch())
    return {name: run.rows(grad) for name, grad in grads.items()}


@everywhere
@refused("tp, zero(3), fsdp x tp, pp, compiled", "A transform of torch.func, such as vmap, grad or jvp, calls a model")
def vmap_over_examples(run: Run, model: Any):
    """Call the model on each example by `vmap`."""
    return run.rows(torch.func.vmap(model)(run.batch()))


@refused("tp, zero(3), fsdp x tp, pp, compiled", "A transform of torch.func, such as vmap, grad or jvp, calls a model")
def jacobian_of_inputs(run: Run, model: Any):
    """Take the Jacobian of outputs by inputs, by `torch.func.jacrev`."""
    return run.rows(torch.func.vmap(torch.func.jacrev(model))(run.batch()))


@refused("tp, zero(3), fsdp x tp, pp, compiled", "A transform of torch.func, such as vmap, grad or jvp, calls a model")
def jvp_of_inputs(run: Run, model: Any):
    """Take a directional derivative by `torch.func.jvp`."""
    x = run.batch()
    _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return run.rows(tangent)


class _Checkpointed(Net):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


@everywhere
@refused("pp", "through torch.utils.checkpoint, which a pipeline cannot run")
def checkpoint_blocks(run: Run):
    """Recompute blocks by `checkpoint(use_reentrant=False)`."""
    torch.manual_seed(0)
    return run.trained(run.shard(_Checkpointed().double()))


@everywhere
@refused("pp", "through torch.utils.checkpoint, which a pipeline cannot run")
def checkpoint_blocks_reentrant(run: Run):
    """Recompute blocks by `checkpoint(use_reentrant=True)`."""
    torch.manual_seed(0)
    model = _Checkpointed().double()
    model.reentrant = True
    return run.trained(run.shard(model))


class _CheckpointsItself(Block):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def _checkpointing_itself(reentrant: bool) -> Net:
    torch.manual_seed(0)
    model = Net()
    model.blocks = nn.ModuleList(_CheckpointsItself() for _ in range(2))
    for block in model.blocks:
        block.reentrant = reentrant
    return model.double()


@everywhere
def checkpoint_inside_blocks(run: Run):
    """Recompute what blocks do inside of their forward, by `checkpoint(use_reentrant=False)`."""
    return run.trained(run.shard(_checkpointing_itself(reentrant=False)))


def checkpoint_inside_blocks_reentrant(run: Run):
    """Recompute what blocks do inside of their forward, by `checkpoint(use_reentrant=True)`."""
    return run.trained(run.shard(_checkpointing_itself(reentrant=True)))


@everywhere
@refused_in_pipelines
def checkpoint_from_outside(run: Run, model: Any):
    """Recompute the whole model by `checkpoint` around it."""
    optimizer = run.optimizer(model)
    for i in range(2):
        optimizer.zero_grad()
        checkpoint(model, run.batch(i), use_reentrant=False).square().mean().backward()
        optimizer.step()
    return run.weights(model)


@refused("pp", "through torch.utils.checkpoint, which a pipeline cannot run")
def checkpoint_a_sequence(run: Run):
    """Recompute parts of a sequential by `checkpoint_sequential`."""

    class Sequence(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint_sequential(list(self.blocks), 2, self.stem(x), use_reentrant=False))

    torch.manual_seed(0)
    return run.trained(run.shard(Sequence().double()))


@refused("tp, zero(3), fsdp x tp, pp", "torch.jit.trace calls a model whose parameters are sharded")
def scripted_by_trace(run: Run, model: Any):
    """Trace the evaluated model by `torch.jit.trace`."""
    with torch.no_grad():
        traced = torch.jit.trace(model.eval(), run.batch(), check_trace=False)
        return run.rows(traced(run.batch(1)))


@refused_in_pipelines
def wrap_in_another_module(run: Run, model: Any):
    """Put the sharded model into another module, and train that."""

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    wrapper = Wrapper(model)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for i in range(2):
        optimizer.zero_grad()
        wrapper(run.batch(i)).square().mean().backward()
        optimizer.step()
    return run.weights(wrapper)


@refused_in_pipelines
def subclass_of_tensor_as_input(run: Run, model: Any):
    """Give an `nn.Parameter` as the batch."""
    x = nn.Parameter(run.batch())
    model(x).square().sum().backward()
    return run.rows(x.grad)


_WRAPPED = "was given a model that shard_model has sharded."


@refused("all", _WRAPPED)
def wrap_in_ddp(run: Run, model: Any):
    """Wrap the model in `DistributedDataParallel`."""
    nn.parallel.DistributedDataParallel(model)
    return run.trained(model)


@refused("all", _WRAPPED)
def wrap_in_data_parallel(run: Run, model: Any):
    """Wrap a module that contains the model in `DataParallel`."""
    nn.DataParallel(nn.Sequential(model))
    return run.trained(model)


@refused("all", _WRAPPED)
def fully_shard_a_block(run: Run, model: Any):
    """Give a block to torch's `fully_shard`."""
    ranks = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    fully_shard(model.blocks[0], mesh=ranks)
    return run.trained(model)


def set_train_and_eval(run: Run, model: Any):
    """Switch `train` and `eval` of modules, and read their flags."""
    model.eval()
    model.blocks[0].train()
    flags = {name: module.training for name, module in model.named_modules()}
    return flags, run.trained(model)


def walk_modules(run: Run, model: Any):
    """Walk over names of modules, parameters and classes."""
    return (
        [(name, type(module).__name__) for name, module in model.named_modules()],
        isinstance(model.blocks[0].up, nn.Linear),
        isinstance(model, Net),
    )


def print_the_model(run: Run, model: Any):
    """Print the model."""
    return repr(model)


def get_submodules_by_name(run: Run, model: Any):
    """Take modules and parameters by `get_submodule` and `get_parameter`."""
    weight = model.get_parameter("blocks.0.up.weight")
    return model.get_submodule("blocks.0.up").weight is weight, tuple(weight.shape)
