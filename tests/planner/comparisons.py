"""Published measurements beside predictions, as rows of tables, with what is known to differ and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import shardlib as sl
from tests.planner.predictions import plan_of, predicted, predicted_llama, record
from tests.planner.publications import evaluate, load, models, runs, symbols

__all__ = [
    "Compared",
    "gather_rates",
    "layer_memory",
    "layer_times",
    "stage_memory",
    "step_times",
    "stored_memory",
    "throughput",
    "titan_runs",
    "tokens",
]

MIB, GIB = 2**20, 2**30
M2022 = "megatron_2205_05198"
M2021 = "megatron_2104_04473"
TITAN = "torchtitan"
FIGURE_1 = "figure 1, by its formulas"  # it has bars without numbers


@dataclass(frozen=True)
class Compared:
    """A published number and a predicted one.

    Attributes:
        where: table, figure or equation of the publication.
        what: the model and its settings.
        published, predicted: the numbers.
        derived: what the prediction has more by design, computed from sizes and not from the prediction.
        why: what that is.
    """

    where: str
    what: str
    published: float
    predicted: float
    derived: float = 0.0
    why: str = ""

    @property
    def error(self) -> float:
        """The relative error as it is."""
        return self.predicted / self.published - 1

    @property
    def unexplained(self) -> float:
        """The relative error that is left when what is derived is added to the published number."""
        return self.predicted / (self.published + self.derived) - 1


# --- memory of activations: arXiv 2205.05198 --------------------------------------------------------------------------

# Of each technique: whether with sequence parallelism, and what is recomputed.
TECHNIQUES = {
    "tensor_parallel": (False, "none"),
    "tensor_and_sequence_parallel": (True, "none"),
    "tensor_parallel_selective": (False, "selective"),
    "tensor_and_sequence_parallel_selective": (True, "selective"),
    "full_recomputation": (False, "full"),
}


def _values(name: str) -> dict[str, Any]:
    """Return the symbols of a model in its row of table 5."""
    run = runs(M2022, model=name, where="table 5")[0]
    stages = dict(sl.MeshShape(run["mesh"]).items())["pp"]
    return symbols(models(M2022)[name], b=run["microbatch"], t=8, p=stages, m=run["interleaving"])


def _differences(technique: str, v: dict[str, Any]) -> dict[str, float]:
    """Return the bytes that a layer keeps by design and the paper does not count, by what they are."""
    sequence, recompute = TECHNIQUES[technique]
    s, b, h, t = (v[key] for key in "sbht")
    if recompute == "full":
        return {}
    # Mean and deviation of two layer norms, in 2 bytes. Section 4 leaves them out.
    found = {"statistics of layer norms": 2 * 2 * 2 * s * b / (t if sequence else 1)}
    if sequence:
        # Megatron keeps the outputs of both layer norms sharded, and gathers them again in backward (section 4.2.2).
        # The engine keeps them as they were gathered.
        found["outputs of layer norms, gathered"] = 2 * 2 * s * b * h * (1 - 1 / t)
    if recompute == "none":
        found["the causal mask"] = s * s
        if b == 1:
            # Keys and values are views of the fused projection's output, so that its queries live beside their scaled
            # copy. With more rows the product of matrices makes copies of them.
            found["queries before they are scaled"] = 2 * s * b * h / t
    return found


def _why(differences: dict[str, float]) -> str:
    return ", ".join(differences)


def layer_memory(names: Sequence[str], techniques: Sequence[str] = tuple(TECHNIQUES)) -> Iterator[Compared]:
    """Iterate over bytes of activations of a layer: table 2, which figure 7 shows in percent."""
    formulas = load(M2022)["formulas"]["per_layer"]
    for name in names:
        v = _values(name)
        for technique in techniques:
            sequence, recompute = TECHNIQUES[technique]
            work, _ = record(M2022, name, 8, sequence=sequence, recompute=recompute, rows=v["b"])
            (kind,) = work.kinds
            differ = _differences(technique, v)
            yield Compared(
                "table 2", f"{name}, {technique.replace('_', ' ')}", evaluate(formulas[technique], v),
                kind.forward.left, sum(differ.values()), _why(differ),
            )  # fmt: skip


def stage_memory(names: Sequence[str], cluster: sl.Cluster) -> Iterator[Compared]:
    """Iterate over bytes of activations of the first stage: figure 1, and section 4.3 for what is outside of layers."""
    formulas = load(M2022)["formulas"]
    for name in names:
        v = _values(name)
        run = runs(M2022, model=name, where="table 5")[0]
        for technique in ("tensor_parallel", "tensor_and_sequence_parallel_selective"):
            sequence, recompute = TECHNIQUES[technique]
            used = {**run, "sequence_parallel": sequence, "recompute": recompute}
            more = evaluate(formulas["first_stage"]["interleaving_factor"], v) if v["m"] > 1 else 1.0
            layers = v["L"] * more  # of which the first stage keeps activations
            published = evaluate(formulas["per_layer"][technique], v) * layers
            time = predicted(M2022, used, cluster)
            differ = {what: each * layers for what, each in _differences(technique, v).items()}
            differ |= _outside(v, v["p"] * more, sequence=sequence) | _borrowed(v)
            yield Compared(
                FIGURE_1, f"{name}, {technique.replace('_', ' ')}", published, time.memory.activations,
                sum(differ.values()), _why(differ),
            )  # fmt: skip


def _outside(v: dict[str, Any], flying: float, *, sequence: bool) -> dict[str, float]:
    """Return the bytes outside of layers: section 4.3, and what appendix B saves."""
    s, b, h, t = (v[key] for key in "sbht")
    part = s * b * h / (t if sequence else 1)
    found = {
        "the mask of the embedding's dropout": part * flying,
        # Megatron frees the output of a stage once it is sent (appendix B). Here it stays, as one more layer's input.
        "outputs of the stage": 2 * part * flying,
    }
    if v["p"] == 1:
        found["the last layer norm and logits"] = 4 * s * b * h / t * (1 + v["v"] / h)
    return found


def _borrowed(v: dict[str, Any]) -> dict[str, float]:
    """Return the bytes that the backward pass of a layer makes beside the gradients of earlier microbatches."""
    return {"gradients of a layer, before they are added": 4 * 12 * v["h"] ** 2 / v["t"]} if v["p"] > 1 else {}


def stored_memory(names: Sequence[str]) -> Iterator[Compared]:
    """Iterate over bytes of parameters, gradients and state of the first stage, of 18 bytes a parameter."""
    for row in load(M2022)["memory"]:
        if row["model"] in names:
            v = _values(row["model"])
            h, t, layers = v["h"], v["t"], v["L"] // v["p"]
            outside = v["v"] * h / t + v["s"] * h + (2 * h if v["p"] == 1 else 0)
            # Biases and both layer norms: of 3h/t, h, 4h/t, h, and 4h.
            small = layers * (7 * h / t + 6 * h)
            held = plan_of(M2022, runs(M2022, model=row["model"], where="table 5")[0]).memory()
            yield Compared(
                FIGURE_1, row["model"], row["derived_state_gib"] * GIB, held.total, 18 * (outside + small),
                "embeddings, biases and layer norms, of 18 bytes",
            )  # fmt: skip


# --- times: arXiv 2205.05198 ------------------------------------------------------------------------------------------


def layer_times(cluster: sl.Cluster, *, own: bool = True) -> Iterator[Compared]:
    """Iterate over milliseconds of a layer of the 22B model: table 4, on which the cluster is calibrated.

    Args:
        cluster: the machines.
        own: whether ranks draw the dropout masks of their shards only, as Megatron does.
    """
    for row in load(M2022)["layer_times"]:
        same = {key: row[key] for key in ("sequence_parallel", "recompute")}
        run = {**same, "model": row["model"], "mesh": "tp=8", "global_batch": 4, "microbatch": 4}
        spans = {span.name: span.end - span.start for span in predicted(M2022, run, cluster, own=own).spans}
        for phase in ("forward", "backward"):
            yield Compared("table 4", f"{row['name']}, {phase}", row[f"{phase}_ms"], 1e3 * spans[f"{phase} block"])


def step_times(cluster: sl.Cluster, **having: Any) -> Iterator[Compared]:
    """Iterate over seconds of a step: table 5, and section 6.3."""
    for run in runs(M2022, **having):
        how = "recomputed in full" if run["recompute"] == "full" else "selective, sequence parallel"
        time = predicted(M2022, run, cluster).seconds
        yield Compared(run["where"], f"{run['model']} on {run['gpus']}, {how}", run["iteration_seconds"], time)


# --- throughput: arXiv 2104.04473 -------------------------------------------------------------------------------------


def throughput(cluster: sl.Cluster, **having: Any) -> Iterator[Compared]:
    """Iterate over TFLOP/s of a GPU, by equation 3: tables 1 and 2."""
    formula = load(M2021)["formulas"]["flops"]
    for run in runs(M2021, **having):
        flops = evaluate(formula, symbols(models(M2021)[run["model"]], B=run["global_batch"]))
        time = predicted(M2021, run, cluster).seconds
        what = f"{run['model']} on {run['gpus']}, {run.get('scheme', run['mesh'])}"
        yield Compared(run["where"], what, run["tflops_per_gpu"], flops / time / run["gpus"] / 1e12)


def gather_rates() -> Iterator[tuple[str, int, float]]:
    """Iterate over what ZeRO-3 of table 2 sent: the model, rows of a microbatch, and bytes a second of a GPU.

    A step gathers parameters for forward and for backward, and reduce-scatters gradients, of 2 bytes each.
    """
    formula = load(M2021)["formulas"]
    for run in runs(M2021, where="table 2", scheme="zero3"):
        values = symbols(models(M2021)[run["model"]], B=run["global_batch"])
        seconds = evaluate(formula["flops"], values) / run["gpus"] / run["tflops_per_gpu"] / 1e12
        yield run["model"], run["microbatch"], 3 * 2 * evaluate(formula["parameters"], values) / seconds


# --- Llama 3 in torchtitan --------------------------------------------------------------------------------------------


# What products reach on torchtitan's H100, calibrated on 6667 tokens/s of 8B, compiled, on 8 GPUs
# (llama3_h100_202412_torchtitan.md, table 1). These cards have 500 W instead of 700 W, and their own peak is not known:
# how much of the difference to the preset's 0.803 is due to that is not known either.
_REACHED_BY_TITAN = 0.54


def titan_cluster(gpu: str, *, calibrated: bool = True) -> sl.Cluster:
    """Return the machines of torchtitan's tables: an H100 with slower memory and less power, or an A100 80GB."""
    if gpu.startswith("A100"):
        return sl.Cluster.preset("a100-80")
    hardware, h100 = load(TITAN)["hardware"], sl.Cluster.preset("h100")
    memory = replace(h100.memory_bandwidth, peak=1e12 * hardware["memory_bandwidth_tbs"])
    rates = dict(h100.products)
    if calibrated:
        rates["bfloat16"] = replace(rates["bfloat16"], reached=_REACHED_BY_TITAN)
    return h100.replace(memory=96 * 10**9, memory_bandwidth=memory, products=tuple(rates.items()))


def titan_runs() -> list[dict[str, Any]]:
    """Return the runs that a plan can express: in bfloat16, on data and tensor parallel ranks, without async TP."""
    return [
        run
        for run in runs(TITAN, float8=False)
        if set(sl.MeshShape(run["mesh"]).names) <= {"dp", "tp"}
        and run["recompute"] in ("none", "full", "selective op")
        and not run.get("async_tp")
    ]


def tokens(chosen: Sequence[dict[str, Any]], *, calibrated: bool = True) -> Iterator[tuple[Compared, Compared | None]]:
    """Iterate over tokens a second of a GPU, and GiB of memory where they are published."""
    for run in chosen:
        time = predicted_llama(TITAN, run, titan_cluster(run["gpu"], calibrated=calibrated))
        compiled = ", compiled" if run.get("compile") else ""
        what = f"{run['model']} on {run['gpus']} {run['gpu']}, {run['mesh']}, {run['recompute']}{compiled}"
        rate = time.tokens_per_second / run["gpus"]
        where = run["where"].removeprefix("benchmarks/")
        memory = None
        if "memory_gib" in run:
            memory = Compared(where, what, run["memory_gib"], time.memory.total / GIB)
        yield Compared(where, what, run["tokens_per_second_per_gpu"], rate), memory
