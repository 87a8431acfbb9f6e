"""Carry out moves: send boxes of local tensors from rank to rank, bucket by bucket."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardlib._plan.moves import Move, Moves
from shardlib.checkpoint._peers import Lost, Peers

__all__ = ["BUCKET", "carry"]

BUCKET = 25 * 2**20  # bytes, where the caller does not choose

Local = Callable[[str], torch.Tensor]


def carry(
    everyone: Peers,
    phase: str,
    moves: Moves,
    source: Local,
    target: Local,
    *,
    bucket_bytes: int,
    gone: Callable[[str], None] = lambda _: None,
) -> None:
    """Fill this rank's local tensors of the target with values of the source. Collective over the job.

    Boxes are cast to the dtype that is sent before they are sent, and to the target's after. No rank sends or receives
    more than `bucket_bytes` at a time, apart from single elements that are larger.

    Args:
        everyone: the ranks.
        phase: what is done, for messages.
        moves: what goes where; equal on all ranks.
        source: from a name in the source plan to this rank's local tensor.
        target: from a name in the target plan to this rank's local tensor. A tensor is asked for when its first box
            comes.
        bucket_bytes: most bytes that a rank sends, and that it receives, at a time.
        gone: called with a name in the source plan when the last box that this rank gives of it has gone.

    Raises:
        CheckpointError: a rank has raised or is lost; on all ranks.
    """

    def work() -> None:
        try:
            _carry(everyone, moves, source, target, bucket_bytes, gone)
        except BaseException:
            everyone.stop_sending()  # others wait for this rank's tensors
            raise

    try:
        everyone.run(phase, work)
    except BaseException:
        everyone.renew()
        raise


@torch.no_grad()
def _carry(
    everyone: Peers, moves: Moves, source: Local, target: Local, bucket_bytes: int, gone: Callable[[str], None]
) -> None:
    left = Counter[str]()
    for move in moves.all:
        if move.source == everyone.rank:
            left[move.source_name] += move.box.numel
    for bucket in moves.buckets(bucket_bytes):
        _exchange(everyone, bucket, source, target)
        for move in bucket:
            if move.source == everyone.rank:
                left[move.source_name] -= move.box.numel
                if not left[move.source_name]:
                    gone(move.source_name)


def _exchange(everyone: Peers, bucket: Iterable[Move], source: Local, target: Local) -> None:
    """Send and receive the moves of a bucket, one message for each rank; copy those of this rank to itself."""
    rank = everyone.rank
    outgoing, incoming = defaultdict[int, list[Move]](list), defaultdict[int, list[Move]](list)
    for move in bucket:
        if move.source == move.target == rank:
            _box(target, move)[...] = _given(source, move)
        elif move.source == rank:
            outgoing[move.target].append(move)
        elif move.target == rank:
            incoming[move.source].append(move)
    received = {peer: _buffer(part, target) for peer, part in incoming.items()}
    sent = {peer: torch.cat([_bytes(_given(source, move)) for move in part]) for peer, part in outgoing.items()}
    _send(everyone, sent, received)
    for peer, buffer in received.items():
        _unpack(buffer, incoming[peer], target)


def _send(everyone: Peers, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
    operations: list[tuple[Any, torch.Tensor, int]] = [(dist.irecv, buffer, peer) for peer, buffer in received.items()]
    operations += [(dist.isend, buffer, peer) for peer, buffer in sent.items()]
    if not operations:
        return
    group = everyone.group_for(operations[0][1].device)
    requests = [dist.P2POp(kind, buffer, peer, group) for kind, buffer, peer in operations]
    try:
        for work in dist.batch_isend_irecv(requests):
            work.wait()
    except RuntimeError as error:
        raise Lost(f"another rank's tensors did not come ({error})") from None


def _given(source: Local, move: Move) -> torch.Tensor:
    return source(move.source_name)[move.source_local.slices].to(move.dtype)


def _box(target: Local, move: Move) -> torch.Tensor:
    return target(move.name)[move.target_local.slices]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _buffer(moves: Iterable[Move], target: Local) -> torch.Tensor:
    every = list(moves)
    size = sum(move.bytes for move in every)
    return torch.empty(size, dtype=torch.uint8, device=target(every[0].name).device)


def _unpack(buffer: torch.Tensor, moves: Iterable[Move], target: Local) -> None:
    at = 0
    for move in moves:
        piece = buffer[at : at + move.bytes]
        # A view of another dtype has to begin at a multiple of its size; behind a smaller dtype a piece may not.
        whole = piece if at % move.dtype.itemsize == 0 else piece.clone()
        _box(target, move)[...] = whole.view(move.dtype).reshape(move.box.sizes)
        at += move.bytes
