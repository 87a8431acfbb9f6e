"""Batches, and what ranks do differently."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardlib as sl
from tests.contract.declare import as_ddp, everywhere, noticed, refused, refused_in_pipelines
from tests.contract.harness import Run, kind_of, random_rows


def _cut(run: Run, batch: torch.Tensor, first: int) -> torch.Tensor:
    """Return `first` rows on the first data rank, and the others on the second."""
    return batch if run.data_ranks == 1 else batch.split([first, len(batch) - first])[run.data_rank]


@refused_in_pipelines
def sampler(run: Run, model: Any):
    """Read batches by `DataLoader` and `DistributedSampler`."""
    data = TensorDataset(random_rows(8))
    order = DistributedSampler(data, num_replicas=run.data_ranks, rank=run.data_rank, shuffle=False)
    optimizer = run.optimizer(model)
    for (x,) in DataLoader(data, batch_size=4 // run.data_ranks, sampler=order):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return {name: value.shape for name, value in run.weights(model).items()}


@everywhere
@refused_in_pipelines
def batches_of_other_sizes(run: Run, model: Any):
    """Train on batches of another size in each step, alike on all ranks."""
    optimizer = run.optimizer(model)
    for i, n in enumerate((8, 4, 12, 2)):
        optimizer.zero_grad()
        model(run.part(random_rows(n, i))).square().mean().backward()
        optimizer.step()
    return run.weights(model)


@as_ddp("replicate, zero(1), zero(2), zero(3), fsdp x tp", "the mean over ranks counts a rank and not a row")
@refused_in_pipelines
def uneven_batches(run: Run, model: Any):
    """Give data ranks different numbers of rows, and take each rank's mean."""
    model(_cut(run, random_rows(8), 6)).square().mean().backward()
    return run.gradients(model)


@refused_in_pipelines
def uneven_batches_by_counts(run: Run, model: Any):
    """Give data ranks different numbers of rows, and a loss with its count to an `OptimizerWrapper`."""
    if run.alone:
        run.train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return run.weights(model)
    optimizer = sl.OptimizerWrapper(torch.optim.SGD, model, lr=0.1)
    for i in range(2):
        optimizer.zero_grad()
        loss = model(_cut(run, random_rows(8, i), 6)).square()
        optimizer.backward((loss.sum(), loss.numel()))
        optimizer.step()
    return run.weights(model)


@refused_in_pipelines
def uneven_batches_scaled_by_hand(run: Run, model: Any):
    """Give data ranks different numbers of rows, and weigh each rank's mean by hand."""
    x = _cut(run, random_rows(8), 6)
    (model(x).square().sum() / 32 * run.data_ranks).backward()
    return run.gradients(model)


@refused_in_pipelines
def fewer_rows_than_ranks(run: Run, model: Any):
    """Give a batch of one row: the other data ranks have an empty one."""
    x = _cut(run, random_rows(1), 1)
    (model(x).square().sum() * run.data_ranks).backward()
    return run.gradients(model)


@everywhere
@refused_in_pipelines
def empty_batch(run: Run, model: Any):
    """Give an empty batch on all ranks."""
    model(random_rows(0)).square().sum().backward()
    return run.gradients(model)


@refused_in_pipelines
def empty_batch_on_one_rank(run: Run, model: Any):
    """Give an empty batch on the last data rank, and take sums."""
    x = _cut(run, random_rows(8), 8)
    (model(x).square().sum() * run.data_ranks).backward()
    return run.gradients(model)


@refused_in_pipelines
def mean_of_an_empty_batch(run: Run, model: Any):
    """Evaluate an empty batch, whose mean is NaN."""
    with torch.no_grad():
        return model(random_rows(0)).square().mean()


@refused_in_pipelines
def single_rows(run: Run, model: Any):
    """Give each data rank one row."""
    return run.rows(model(run.part(random_rows(2))))


def _of_this_rank(run: Run, i: int = 0) -> torch.Tensor:
    """Return another batch on each rank of the model axes."""
    return run.batch(i) + run.rank % (kind_of(run.kind).ranks // run.data_ranks)


@refused("tp, fsdp x tp", "work on the same examples, but were given different batches")
@refused_in_pipelines
def other_batches_within_tp(run: Run, model: Any):
    """Give each rank of a model axis its own batch at the first step, as a loader by global rank does."""
    model(_of_this_rank(run)).square().mean().backward()
    return run.gradients(model)


@noticed("tp, fsdp x tp", "work on the same examples, but were given different batches")
@refused_in_pipelines
def other_batches_within_tp_later(run: Run, model: Any):
    """Give each rank of a model axis its own batch at a later step."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    optimizer.zero_grad()
    model(_of_this_rank(run, 1)).square().mean().backward()
    optimizer.step()
    return run.weights(model)


@refused_in_pipelines
def batches_in_float32(run: Run, model: Any):
    """Give a float32 batch to a float64 model, which raises, and train on."""
    try:
        model(run.batch().float())
    except RuntimeError:
        return run.trained(model)
    return "no error"


@refused_in_pipelines
def batches_that_are_not_contiguous(run: Run, model: Any):
    """Give a batch that is not contiguous."""
    x = run.part(random_rows(8).t().contiguous().t())
    model(x).square().mean().backward()
    return run.gradients(model)


@refused_in_pipelines
def batches_that_require_gradients(run: Run, model: Any):
    """Give a batch that requires gradients, over two steps."""
    optimizer, grads = run.optimizer(model), []
    for i in range(2):
        optimizer.zero_grad()
        x = run.batch(i).requires_grad_()
        model(x).square().mean().backward()
        grads.append(run.rows(x.grad / run.data_ranks))
        optimizer.step()
    return grads, run.weights(model)


@refused_in_pipelines
def batches_by_generator(run: Run, model: Any):
    """Draw batches by a generator whose seed is the data rank's."""
    draw = torch.Generator().manual_seed(run.data_rank)
    x = torch.randn(4, 6, generator=draw, dtype=torch.float64)
    if run.alone or run.data_ranks == 1:
        more = torch.Generator().manual_seed(1)
        x = torch.cat([x, torch.randn(4, 6, generator=more, dtype=torch.float64)])
    model(x).square().mean().backward()
    return run.gradients(model)


@noticed("tp, zero(1), zero(2), zero(3), fsdp x tp, pp", "Ranks do different things:")
@as_ddp("replicate", "ranks go on from different weights")
def one_rank_skips_the_step(run: Run, model: Any):
    """Skip `optimizer.step()` on the last rank only, as for a loss that is not finite there."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    optimizer.zero_grad()
    run.backward(model, 1)
    if run.alone or run.rank != kind_of(run.kind).ranks - 1:
        optimizer.step()
    return run.trained(model, optimizer, 1, start=2)


@noticed("tp, replicate, zero(1), zero(2), zero(3), fsdp x tp", "Ranks do different things:")
@refused_in_pipelines
def one_rank_skips_the_backward(run: Run, model: Any):
    """Skip the backward on the last rank only, and step everywhere."""
    optimizer = run.optimizer(model)
    run.train(model, optimizer, 1)
    optimizer.zero_grad()
    loss = run.loss(model, 1)
    if run.alone or run.rank != kind_of(run.kind).ranks - 1:
        loss.backward()
    optimizer.step()
    return run.trained(model, optimizer, 1, start=2)


@noticed("zero(3), fsdp x tp", "Ranks do different things:")
@refused("pp", " is on stage 0, and not on this rank")
def one_rank_uses_a_part_of_the_model(run: Run, model: Any):
    """Leave the head out on the last data rank only."""
    x = run.batch()
    out = model.blocks[0](model.stem(x))
    if run.data_ranks == 1:
        first, second = out.chunk(2)
        loss = (model.head(first).square().mean() + second.square().mean()) / 2
    else:
        loss = (model.head(out) if run.data_rank == 0 else out).square().mean()
    loss.backward()
    return run.gradients(model)


@refused_in_pipelines
def loss_of_all_ranks_gathered(run: Run, model: Any):
    """Gather outputs of all data ranks by `torch.distributed`, for a metric."""
    out = model(run.batch()).detach()
    if run.data_ranks == 1:
        return out
    parts = [torch.empty_like(out) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, out)
    return torch.cat(parts[:: len(parts) // run.data_ranks])


@refused_in_pipelines
def loss_reduced_by_hand(run: Run, model: Any):
    """Average the loss over ranks by `torch.distributed.all_reduce`, for a log."""
    loss = run.loss(model)
    loss.backward()
    seen = loss.detach().clone()
    if not run.alone:
        torch.distributed.all_reduce(seen)
        seen /= torch.distributed.get_world_size()
    return seen, run.gradients(model)


def gradients_reduced_by_hand(run: Run, model: Any):
    """Average gradients once more by `torch.distributed.all_reduce`, which changes nothing."""
    run.backward(model)
    if run.data_ranks > 1:
        for p in model.parameters():
            grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            if not hasattr(p.grad, "to_local"):
                torch.distributed.all_reduce(grad)
                grad /= torch.distributed.get_world_size()
    return run.gradients(model)


@refused("tp, replicate, zero(1), zero(2), zero(3), fsdp x tp, pp", "The ranks start from different weights")
def seed_by_rank(run: Run):
    """Seed each rank differently before the model is built."""
    torch.manual_seed(run.rank)
    from tests.contract.harness import Net

    return run.trained(run.shard(Net().double()))
