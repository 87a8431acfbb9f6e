"""vLLM: a sharded model's weights into a running engine, by vLLM's own interface for that.

vLLM finds `register` by itself in every process that has shardlib (it is a plugin of it), and then knows the transfer
backend "shardlib".
"""

from __future__ import annotations

import contextlib
import copy
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import (
    ParamMeta,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from shardlib._plan.moves import Moves, Names
from shardlib.checkpoint._peers import Peers, described, joined_peers, peers
from shardlib.engine.torn import torn
from shardlib.errors import CheckpointError, InputError, short_traceback
from shardlib.weights._feed import Feed
from shardlib.weights._lying import check_sizes
from shardlib.weights._names import adapters_merged, is_of_transformers, saved_names
from shardlib.weights._stream import stream_weights, streamed
from shardlib.weights._views import Read, reads_of

__all__ = ["Connection", "ModelWeights", "connect", "register"]

BACKEND = "shardlib"
_SETTLING = 10.0  # seconds for an engine to end a call after the ranks that it met have failed


def register() -> None:
    """Tell vLLM of the transfer backend "shardlib". vLLM calls it in each of its processes."""
    for factory, engine in (
        (WeightTransferEngineFactory, WorkerEngine),
        (WeightTransferTrainerFactory, Connection),
    ):
        with contextlib.suppress(ValueError):  # it is registered
            factory.register_engine(BACKEND, engine)


# --- the side of the engine -------------------------------------------------------------------------------------------


@dataclass
class WorkerInitInfo(WeightTransferInitInfo):
    """The place where ranks and workers meet, and what they agree on.

    Attributes:
        host, port: the store.
        trainers: the number of ranks of the training job; workers come after them.
        size: the number of all ranks.
        offset: the number of the first worker of this engine.
        timeout: seconds that ranks wait for each other.
        group_bytes: most bytes of tensors that are there at a time.
        node: the number of ranks that share a node.
        connection: what tells it from other connections of the engine.
    """

    host: str
    port: int
    trainers: int
    size: int
    offset: int
    timeout: float
    group_bytes: int
    node: int
    connection: str


@dataclass
class WorkerUpdateInfo(WeightTransferUpdateInfo):
    """The update: what is sent was agreed on.

    Attributes:
        connection: the connection by which it comes.
        number: counts the updates of a connection.
    """

    connection: str
    number: int


class WorkerEngine(WeightTransferEngine[WorkerInitInfo, WorkerUpdateInfo]):
    """Takes weights in a worker of vLLM: its model's own loader reads them, in vLLM's reload by layers."""

    init_info_cls = WorkerInitInfo
    update_info_cls = WorkerUpdateInfo
    supports_draft_weight_update = False

    partly: Sequence[str] = ()
    _everyone: Peers | None = None
    _feed: Feed

    def init_transfer_engine(self, init_info: WorkerInitInfo) -> None:
        """Meet the ranks of the training job, and agree on what they send."""
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = _store(init_info.host, init_info.port, init_info.timeout, serve=False)
        self._init_info, self._store = init_info, store
        self._meet("connect", rank)
        self._everyone = joined_peers("sending weights to vLLM", store, rank, init_info.size, init_info.timeout)
        self._feed = Feed(
            self._everyone,
            trainers=init_info.trainers,
            loader=self,
            group_bytes=init_info.group_bytes,
            node=init_info.node,
        )

    def _meet(self, what: str, rank: int) -> None:
        _meet(self._store, what, rank, self._init_info.size, self._init_info.timeout)

    def start_weight_update(self) -> None:
        if current_platform.is_cpu():
            _unpack_experts(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: WorkerUpdateInfo) -> None:
        if self._everyone is None:
            raise InputError("vLLM was to take weights before it was connected: shardlib.integrations.vllm.connect().")
        try:
            if update_info.connection != self._init_info.connection:
                raise InputError("this engine has been connected again since. Send by its last connection.")
            self._meet(f"update {update_info.number}", self._everyone.rank)
            self._torn = contextlib.ExitStack()
            self._torn.enter_context(torn(self.model, "send_weights"))
            self._feed.send()
        except BaseException:
            _end_reload(self.model)
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            _pack_tied(self.model)
        self._torn.close()

    def shutdown(self) -> None:
        if self._everyone is not None:
            self._everyone.close()
            self._everyone = None

    # --- as a `Loader` ------------------------------------------------------------------------------------------------

    def reads(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Read]:
        config = copy.copy(self.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}  # attention layers are known by name, once
        with set_current_vllm_config(config):
            with set_default_torch_dtype(self.model_config.dtype), torch.device("meta"):
                twin = initialize_model(config)
            loaded: list[set[str] | None] = []
            try:
                found, self.partly = reads_of(
                    lambda weights: loaded.append(twin.load_weights(weights)), tensors, dict(twin.named_parameters())
                )
            except Exception as error:
                raise InputError(
                    f"vLLM's {type(twin).__name__} does not load the model's tensors: {described(error)}. It has to "
                    "be of the class and size that vLLM has started with; names= maps names."
                ) from error
        if loaded[0] is not None:
            missing = sorted({name for name, _ in twin.named_parameters()} - loaded[0])
            if missing:
                raise InputError(
                    f"vLLM's {type(twin).__name__} has {len(missing)} parameters that no tensor of the model fills, "
                    f'such as "{missing[0]}". The tensors have names such as "{next(iter(tensors), "")}"; names= maps '
                    "them to those of a checkpoint that vLLM loads."
                )
        return found

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            self.model.load_weights(weights)


def _end_reload(model: nn.Module) -> None:
    """End a reload in the middle: layers that are not complete get the weights back that they had."""
    for layer in model.modules():
        if (info := get_layerwise_info(layer)).can_load():
            _place_kernel_tensors(layer, info)
            info.reset()


def _unpack_experts(model: nn.Module) -> None:
    """Let a reload pack the experts' weights again. On a CPU vLLM (0.32) does so in the first load alone, and takes
    weights that are not packed for packed ones after a reload."""
    for layer in model.modules():
        if isinstance(method := getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _pack_tied(model: nn.Module) -> None:
    """Pack the weight of a head that is tied with the embedding. On a CPU vLLM (0.32) keeps a packed copy of it, which
    its reload leaves as it was, since no tensor of a checkpoint has the head's name."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            layer.quant_method.process_weights_after_loading(layer)


# --- the side of the training job -------------------------------------------------------------------------------------


@dataclass
class ConnectionInitInfo(TrainerInitInfo):
    """The arguments of `connect`, as vLLM's factory of trainer engines is given them."""

    backend: ClassVar[str] = BACKEND

    model: nn.Module
    workers: int | None = None
    names: Names | None = None
    group_mb: float = 256.0
    node: int = 8
    host: str | None = None
    timeout: float | None = None


class Connection(TrainerWeightTransferEngine[ConnectionInitInfo]):
    """A training job's connection to engines of vLLM; `connect` makes it.

    Attributes:
        moves: what each group of tensors moves, as values that print. Equal on all ranks.
        unread: names of the model's tensors that the engines do not read, such as those that they tie.
        partly: names of vLLM's parameters that keep some of their values, such as padding.
    """

    init_info_cls = ConnectionInitInfo

    @classmethod
    def trainer_init(cls, init_info: ConnectionInitInfo, *, client: Any, source: Any = None) -> Connection:
        if source is not None:
            raise InputError('A source was given for the backend "shardlib"; give ConnectionInitInfo(model=...) alone.')
        return connect(
            init_info.model,
            client,
            workers=init_info.workers,
            names=init_info.names,
            group_mb=init_info.group_mb,
            node=init_info.node,
            host=init_info.host,
            timeout=init_info.timeout,
        )

    def __init__(
        self, model: nn.Module, feed: Feed, everyone: Peers, client: Any, name: str, store: dist.Store
    ) -> None:
        super().__init__(client=client, is_sender=client is not None)
        self._model, self._feed, self._everyone, self._name, self._store = model, feed, everyone, name, store
        self._calls = ThreadPoolExecutor(1, "weights to vLLM")
        self._sent = 0

    @property
    def moves(self) -> list[Moves]:
        return self._feed.moves

    @property
    def unread(self) -> list[str]:
        return self._feed.unread

    @property
    def partly(self) -> list[str]:
        return self._feed.partly

    @short_traceback
    def send_weights(self) -> None:
        """Send the weights that the model has now. Collective over the training job.

        Adapters of peft are merged for the time of sending; that takes a copy of this rank's shards of the weights that
        they adapt. Engines should have no requests under way. The prefix cache of an engine is of the old weights:
        reset it.

        Raises:
            ShardingError: a backward pass is running.
            CheckpointError: a rank or an engine is lost, or a loader of vLLM raised. An engine that has got a part of
                the weights refuses to serve.
        """
        job = peers("vllm.send_weights", "sending weights to vLLM", self._everyone.timeout, keeps_kinds=True)
        job.run("check arguments", self._feed.check)
        job.run("start", self.client.start_weight_update if self.client is not None else lambda: None)
        self._sent += 1
        update = {"connection": self._name, "number": self._sent}
        with (
            adapters_merged(self._model),
            _beside(self._calls, self.client and self.client.update_weights, update) as answer,
        ):
            job.run("meet the engine", lambda: self._meet(answer))
            self._feed.send()
        job.run("finish", self.client.finish_weight_update if self.client is not None else lambda: None)

    def _meet(self, answer: Future[None] | None) -> None:
        everyone = self._everyone
        _meet(self._store, f"update {self._sent}", everyone.rank, everyone.size, everyone.timeout, answer)

    def shutdown(self) -> None:
        """Close the connections; the engines go on to serve."""
        self._everyone.close()
        self._calls.shutdown()


@short_traceback
def connect(
    model: nn.Module,
    client: Any = None,
    *,
    workers: int | None = None,
    names: Names | None = None,
    group_mb: float = 256.0,
    node: int = 8,
    host: str | None = None,
    timeout: float | None = None,
) -> Connection:
    """Connect a training job to engines of vLLM that were started with `weight_transfer_config={"backend":
    "shardlib"}`. Collective over the job.

    Each worker of an engine is sent what its own loader of checkpoints reads, and no more: its heads of `qkv_proj`, its
    rows of the vocabulary, its experts. No rank and no worker has the full model.

    Args:
        model: the model that trains, sharded by `shard_model` or by others, or not at all.
        client: the engine, on one rank or on several, each with an engine of its own: an `LLM` in this process, or a
            client of vLLM's: `HTTPVLLMWeightSyncClient(url)`, `RayVLLMWeightSyncClient(actors)`. None on other ranks.
        workers: the number of the engine's workers (tensor times pipeline times data parallel); by default it is asked.
        names: names for the model's tensors that vLLM's loader knows: a mapping or a function. By default those of the
            checkpoint that a model of transformers saves, and else the model's own.
        group_mb: most megabytes of tensors that a loader is given at a time, or one tensor that is larger.
        node: the number of ranks that share a node.
        host: the address of this rank at which workers reach rank 0; by default the host of the job, MASTER_ADDR.
        timeout: seconds that ranks and workers wait for each other; by default those of the job's process group.

    Raises:
        InputError: no engine, or arguments that cannot be.
        CheckpointError: a worker did not come, or does not find the model's parameters.

    Example:
        ```python
        engine = LLM("folder", weight_transfer_config={"backend": "shardlib"}) if rank == 0 else None
        connection = connect(model, engine)
        for step in range(steps):
            train(model)
            connection.send_weights()
        ```
    """
    job = peers("vllm.connect", "connecting to vLLM", timeout, keeps_kinds=True)
    job.compare(group_mb=group_mb, node=node)
    job.run("check arguments", lambda: _check(model, workers, group_mb, node))
    speaking = None if client is None else _speaking(client)
    counts = job.gather("count workers", lambda: 0 if speaking is None else _workers(speaking, workers))
    if not sum(counts):
        raise InputError("connect(client=None) was given on every rank; give the engine on the rank that has it.")
    size = job.size + sum(counts)
    store = None

    def serve() -> list[Any]:
        nonlocal store
        store = _store(address, 0, job.timeout, serve=True)
        return [address, store.port, secrets.token_hex(8)]

    address = host or _host()
    host, port, name = job.first("open a store", serve)
    if store is None:
        store = _store(host, port, job.timeout, serve=False)
    information = {
        "host": host,
        "port": port,
        "trainers": job.size,
        "size": size,
        "offset": job.size + sum(counts[: job.rank]),
        "timeout": job.timeout,
        "group_bytes": int(group_mb * 2**20),
        "node": node,
        "connection": name,
    }
    with (
        ThreadPoolExecutor(1, "connecting to vLLM") as calls,
        _beside(calls, speaking and speaking.init_weight_transfer_engine, information) as answer,
    ):
        job.run("meet the engine", lambda: _meet(store, "connect", job.rank, size, job.timeout, answer))
        everyone = joined_peers("sending weights to vLLM", store, job.rank, size, job.timeout)
        feed = Feed(
            everyone,
            trainers=job.size,
            model=model,
            convert=saved_names(model, _names(model, names)),
            group_bytes=int(group_mb * 2**20),
            node=node,
        )
    return Connection(model, feed, everyone, speaking, name, store)


def _names(model: nn.Module, names: Names | None) -> Names | Literal["huggingface"] | None:
    return "huggingface" if names is None and is_of_transformers(model) else names


def _check(model: Any, workers: int | None, group_mb: float, node: int) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"connect() was given a {type(model).__name__}; give a module.")
    if workers is not None and workers < 1:
        raise InputError(f"connect(workers={workers}) was given; give the number of the engine's workers.")
    check_sizes("connect", node, group_mb=group_mb)


@contextlib.contextmanager
def _beside(calls: ThreadPoolExecutor, call: Any, argument: Any) -> Iterator[Future[None] | None]:
    """Call the engine while the block runs, which meets its workers there."""
    answer: Future[None] | None = calls.submit(call, argument) if call is not None else None
    try:
        yield answer
    except BaseException as error:
        theirs = None
        if answer is not None:  # the engine has the same error, and ends its call
            with contextlib.suppress(TimeoutError):
                theirs = answer.exception(_SETTLING)
        raise error from theirs
    if answer is not None:
        answer.result()


def _store(host: str, port: int, timeout: float, *, serve: bool) -> dist.TCPStore:
    return dist.TCPStore(
        host, port, is_master=serve, timeout=timedelta(seconds=timeout), wait_for_workers=False, use_libuv=True
    )


def _meet(
    store: dist.Store, what: str, rank: int, size: int, timeout: float, answer: Future[None] | None = None
) -> None:
    """Wait until all ranks have come to something in the store, or one tells that its engine refuses.

    Raises:
        InputError: an engine refused; on all ranks.
        CheckpointError: some did not come in time.
    """
    store.set(f"{what}/{rank}", "")
    until = time.monotonic() + timeout
    while not store.check([f"{what}/{each}" for each in range(size)]):
        if answer is not None and answer.done() and (error := answer.exception()) is not None:
            store.set(f"{what}/refused", f"{type(error).__name__}: {error}")
        if store.check([f"{what}/refused"]):
            said = store.get(f"{what}/refused").decode().removesuffix(".")
            raise InputError(
                f"vLLM did not {what}: {said}. An engine that takes weights runs, and was started with "
                'weight_transfer_config={"backend": "shardlib"}, where shardlib is installed.'
            )
        if time.monotonic() > until:
            missing = [each for each in range(size) if not store.check([f"{what}/{each}"])]
            raise CheckpointError(
                f"vLLM did not {what}: of {size} ranks and workers, {missing} did not come within {timeout:g} s."
            )
        time.sleep(0.005)


def _host() -> str:
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


class _Here:
    """The calls of a client for an `LLM` in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    @property
    def workers(self) -> int:
        parallel = self._llm.llm_engine.vllm_config.parallel_config
        return parallel.world_size_across_dp

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)


def _speaking(client: Any) -> Any:
    return _Here(client) if hasattr(client, "llm_engine") else client


def _workers(client: Any, given: int | None) -> int:
    if given is not None:
        return given
    if isinstance(client, _Here):
        return client.workers
    if url := getattr(client, "base_url", None):
        import requests

        answer = requests.get(f"{url}/get_world_size", timeout=client.timeout)
        answer.raise_for_status()
        return int(answer.json()["world_size"])
    raise InputError(f"connect(workers=None) was given with a {type(client).__name__}, which does not tell them.")


class ModelWeights(WeightSource):
    """A model's full tensors for vLLM's own backends, such as "nccl": group by group, in bounded memory.

    Making it is collective over the training job, and so is iterating over it.

    Args:
        model: as in `connect`.
        names: as in `connect`.
        dtype: what floating-point tensors are converted to; by default they keep theirs.
        group_mb: most megabytes of full tensors that are gathered together.

    Example:
        ```python
        engine = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=ModelWeights(model))
        engine.send_weights()
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        names: Names | None = None,
        dtype: torch.dtype | None = None,
        group_mb: float = 256.0,
    ) -> None:
        self._model, self._names, self._dtype, self._group_mb = model, _names(model, names), dtype, group_mb
        self._metadata = [
            ParamMeta(name, kept, shape) for name, shape, kept in streamed(model, names=self._names, dtype=dtype)
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return stream_weights(self._model, names=self._names, dtype=self._dtype, group_mb=self._group_mb)

    def metadata(self) -> list[ParamMeta]:
        return self._metadata


register()
