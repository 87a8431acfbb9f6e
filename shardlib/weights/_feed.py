"""Send a model's weights into inference engines, whose own loaders take them group by group.

An engine's ranks find out once what their loader reads of each tensor. From then on every rank knows which boxes move,
as between two plans, and each engine rank is sent what it reads and no more. Its loader gets tensors of full shape, in
which the rest has no values.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from shardlib._dtypes import name_of
from shardlib._plan.moves import Laid, Moves
from shardlib.checkpoint._items import Item
from shardlib.checkpoint._peers import Peers
from shardlib.engine.torn import refuse_torn
from shardlib.layout._boxes import Box
from shardlib.weights._carry import BUCKET, carry
from shardlib.weights._lying import everywhere, items_of, local_of, refuse_in_backward
from shardlib.weights._names import Convert
from shardlib.weights._views import Read, View, in_groups, on_meta, views_of

__all__ = ["Feed", "Loader", "arriving"]


class Loader(Protocol):
    """An engine's loader of checkpoints, on one of its ranks.

    Attributes:
        device: where it takes them.
        partly: names of the engine's parameters that `load` does not fill, known after `reads`.
    """

    device: torch.device
    partly: Sequence[str]

    def reads(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Read]:
        """Return what `load` reads of each tensor, from tensors on the meta device."""

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load the weights of a model, each by its name in a checkpoint."""


class Feed:
    """Weights on their way from a model into engines: what moves is computed once, and sent again after each step.

    Attributes:
        moves: what moves, by group. Equal on all ranks.
        unread: names of the model's tensors that no engine reads, such as those that it ties.
        partly: names of the engine's parameters that keep some of their values, such as padding.
    """

    def __init__(
        self,
        everyone: Peers,
        *,
        trainers: int,
        model: nn.Module | None = None,
        convert: Convert | None = None,
        loader: Loader | None = None,
        group_bytes: int = 2**28,
        node: int = 8,
    ) -> None:
        """Agree on what moves. Collective over all ranks.

        Args:
            everyone: the ranks of the training job, the first ones, and those of the engines.
            trainers: the number of ranks of the training job.
            model: the model; None on ranks that are an engine's alone.
            convert: from the model's tensors by name to those of a checkpoint; as `model`.
            loader: what takes weights on this rank; None on ranks of the training job alone.
            group_bytes: most bytes of tensors that a loader is given at a time, or one tensor that is larger.
            node: the number of ranks that share a node.
        """
        self._everyone, self._trainers, self._model, self._loader = everyone, trainers, model, loader
        self._limit, self._node = group_bytes, node
        self._laid = self._tell()
        named = everyone.gather("name the tensors", lambda: [] if convert is None else self._views(convert))[0]
        self._named = [View(name, source, Box(*map(tuple, box)), tuple(dims)) for name, source, box, dims in named]
        told = everyone.gather("see what the engine reads", self._reads)
        self._read = [
            {name: (getattr(torch, dtype), [Box(*map(tuple, box)) for box in boxes]) for name, dtype, boxes in read}
            for read, _ in told
        ]
        self.partly = list(dict.fromkeys(name for _, partly in told for name in partly))
        self._plan()

    def send(self) -> None:
        """Send the weights that the model has now. Collective over all ranks.

        Raises:
            CheckpointError: a rank has raised or is lost; on all ranks.
            ShardingError: a backward pass is running.
        """
        laid = self._tell()
        if laid != self._laid:  # the model has been resharded
            self._laid = laid
            self._plan()
        if self._loader is None:
            for _ in self._arriving():
                pass
            self._end(None)
        else:
            self._load(self._loader)

    # --- what moves ---------------------------------------------------------------------------------------------------

    def _tell(self) -> list[Laid]:
        self._everyone.run("check arguments", self.check)
        self._everyone.complete()
        ranks = tuple(range(self._trainers))
        self._items = self._everyone.run("look at the model", lambda: items_of(self._model, ranks, self._trainers))
        return everywhere(self._everyone, "tell of the model", self._model, self._items)

    def check(self) -> None:
        """Check that the model has weights that can be sent.

        Raises:
            ShardingError: a backward pass is running, or the model has a part of its own weights.
        """
        refuse_torn("send_weights", self._model)
        refuse_in_backward("send_weights", self._model)

    def _views(self, convert: Convert) -> list[Any]:
        found = views_of(convert, {laid.name: on_meta(laid.shape, laid.dtype) for laid in self._laid})
        return [[view.name, view.source, [view.box.offsets, view.box.sizes], view.dims] for view in found]

    def _reads(self) -> list[Any]:
        if self._loader is None:
            return [[], []]
        dtypes = {laid.name: laid.dtype for laid in self._laid}
        found = self._loader.reads({view.name: on_meta(view.shape, dtypes[view.source]) for view in self._named})
        read = [
            [name, name_of(each.dtype), [[box.offsets, box.sizes] for box in each.boxes]]
            for name, each in found.items()
        ]
        return [read, [*self._loader.partly]]

    def _plan(self) -> None:
        sources = {laid.name: laid for laid in self._laid}
        wanted = []
        for view in self._named:
            of_rank = {rank: read[view.name] for rank, read in enumerate(self._read) if view.name in read}
            dtypes = [dtype for dtype, _ in of_rank.values()]
            boxes = {rank: boxes for rank, (_, boxes) in of_rank.items()}
            wanted.append((view, view.laid(sources[view.source], boxes, dtypes[0] if dtypes else None)))
        read_by_some = [(view, laid) for view, laid in wanted if laid.ranks]
        self._groups = list(in_groups(read_by_some, sources, self._limit, self._node))
        self.moves = [moves for _, moves in self._groups]
        read = {view.source for view, laid in wanted if laid.ranks}
        self.unread = [laid.name for laid in self._laid if laid.name not in read]

    # --- moving it ----------------------------------------------------------------------------------------------------

    def _arriving(self) -> Iterator[tuple[str, torch.Tensor]]:
        mine = self._read[self._everyone.rank]
        device = self._loader.device if self._loader is not None else torch.device("cpu")
        return arriving(self._everyone, self._groups, self._items, mine, device, self._limit)

    def _load(self, loader: Loader) -> None:
        stream, failed = _Stream(self._arriving()), None
        try:
            loader.load(stream)
            for _ in stream:  # a loader may leave the last ones
                pass
        except BaseException as error:
            if error is stream.failed:  # every rank raises
                raise
            failed = error
        self._end(failed)

    def _end(self, failed: BaseException | None) -> None:
        """End the sending on all ranks; where a loader has failed, in the phase in which other ranks are."""

        def work() -> None:
            if failed is not None:
                self._everyone.stop_sending()
                raise failed

        try:
            self._everyone.run("load", work)
        except BaseException:
            self._everyone.renew()
            raise


def arriving(
    everyone: Peers,
    groups: Iterable[tuple[list[tuple[View, Laid]], Moves]],
    items: Mapping[str, Item],
    mine: Container[str],
    device: torch.device,
    limit: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the tensors that this rank gets, in their full shapes. Collective: all ranks do it to the end.

    Args:
        everyone: the ranks.
        groups: what is gathered together, and what moves for it; equal on all ranks.
        items: this rank's tensors of the model.
        mine: the names of the tensors that this rank gets.
        device: where it gets them.
        limit: most bytes that a rank sends, and that it receives, at a time.
    """
    for group, moves in groups:
        here = [(view, laid) for view, laid in group if view.name in mine]
        full = {view.name: torch.empty(view.box.sizes, dtype=laid.dtype, device=device) for view, laid in here}
        give = partial(local_of, items)
        carry(everyone, "send", moves, give, full.__getitem__, bucket_bytes=min(limit, BUCKET))
        for view, _ in here:
            yield view.name, view.of(full.pop(view.name))


class _Stream:
    """An iterator that its reader cannot end, and that remembers its error."""

    def __init__(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self.failed: BaseException | None = None

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        try:
            return next(self._tensors)
        except StopIteration:
            raise
        except BaseException as error:
            self.failed = error
            raise
