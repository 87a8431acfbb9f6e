"""How well the planner knows a step: predicted and measured times and memory, of plans of models that train here.

    python benchmarks/planner.py                # some 60 plans on 2 and 4 ranks; half an hour on two quiet cores
    python benchmarks/planner.py --quick

The cluster is calibrated first, on as many ranks. Then each plan is predicted, without running anything, and measured:
the median of its steps, each as long as its slowest rank; rounds go through all plans, so that what slows the machine
for a while slows all of them. Memory is the most bytes of live tensors at one time on any rank, with optimizer state.
Of each model on each number of ranks, all plans take the same global batch, so that one of them is the best: "choice"
is what the plan that is predicted to be the fastest takes, as measured, over the one that is. AdamW is fused, which
shardlib takes on CPU.
"""

from __future__ import annotations

import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _report import parser, write
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import shardlib as sl
from shardlib.cli.measure import Effort, measure_job
from shardlib.engine import record_collectives
from shardlib.testing import shared_pool
from shardlib.transforms import Transform, parse

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, GPTConfig

STEPS, QUICK_STEPS, ROUNDS = 3, 1, 2


class TrainedGPT(GPT):
    """The GPT of the examples, with its loss."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": F.cross_entropy(super().forward(ids).flatten(0, 1), labels.flatten())}


def gpt(layers: int, embed: int, heads: int) -> nn.Module:
    return TrainedGPT(GPTConfig(8192, context=256, n_layer=layers, n_head=heads, d_model=embed, tied=False))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=8192, num_key_value_heads=4, use_cache=False, **sizes))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "num_labels": 100}
    return ViTForImageClassification(ViTConfig(intermediate_size=1536, image_size=160, patch_size=16, **sizes))


def token_rows(seq: int, name: str, rows: int) -> dict[str, Tensor]:
    ids = torch.randint(8192, (rows, seq))
    return {name: ids, "labels": ids}


def image_rows(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 160, 160), "labels": torch.randint(100, (rows,))}


@dataclass(frozen=True)
class Model:
    """A model, the rows of its global batch, and a function of rows to inputs."""

    build: Callable[[], nn.Module]
    batch: int
    inputs: Callable[[int], dict[str, Tensor]]
    layout: str


MODELS = {
    "gpt 8x512": Model(partial(gpt, 8, 512, 8), 8, partial(token_rows, 256, "ids"), "example_gpt"),
    "gpt 4x768": Model(partial(gpt, 4, 768, 12), 8, partial(token_rows, 256, "ids"), "example_gpt"),
    "llama 6x512": Model(llama, 8, partial(token_rows, 256, "input_ids"), "llama"),
    "vit 6x384": Model(vit, 16, image_rows, "vit"),
}

AGAIN = "checkpoint_activations()"


@dataclass(frozen=True)
class Config:
    """A plan, as text. `passes` of a data rank's rows in a step; a pipeline takes them at once."""

    mesh: str
    transforms: str = ""
    mode: str | None = None
    passes: int = 1
    per_rank: int = 1

    @property
    def name(self) -> str:
        return " ".join(filter(None, [self.mesh, self.mode, self.transforms.replace(" ", ""), f"x{self.passes}"]))

    def chosen(self) -> list[Transform]:
        more = [f"accumulate({self.passes})"] if self.passes > 1 and "pipeline" not in self.transforms else []
        return [parse(text) for text in (*filter(None, [self.transforms]), *more)]


def pipe(schedule: str, microbatches: int, *more: str) -> str:
    return " | ".join([*more, f'pipeline("{schedule}", microbatches={microbatches})'])


ON_2 = (
    *(Config("dp=2", text) for text in ("", "zero(1)", "zero(2)", "zero(3)", "fsdp()", AGAIN, f"zero(3) | {AGAIN}")),
    *(Config("dp=2", text, passes=2) for text in ("zero(1)", "zero(2)", "zero(3)", f"zero(2) | {AGAIN}")),
    *(Config("tp=2", text, mode) for text in ("", AGAIN) for mode in (None, "sequence")),
    Config("tp=2", passes=2),
    *(Config("pp=2", pipe(name, count)) for name in ("1f1b", "gpipe") for count in (2, 4)),
    Config("pp=2", pipe("1f1b", 4, AGAIN)),
    Config("pp=2", pipe("interleaved", 4), per_rank=2),
)
ON_4 = (
    *(Config("dp=4", text) for text in ("", "zero(1)", "zero(2)", "zero(3)", f"zero(3) | {AGAIN}")),
    Config("dp=4", "zero(2)", passes=2),
    *(Config("dp=2,tp=2", text) for text in ("", "zero(1)", "zero(3)", AGAIN)),
    Config("dp=2,tp=2", "zero(1)", "sequence"),
    *(Config("tp=4", text) for text in ("", AGAIN)),
    *(Config("pp=2,dp=2", pipe("1f1b", 4, text) if text else pipe("1f1b", 4)) for text in ("", "zero(1)", AGAIN)),
    Config("pp=4", pipe("1f1b", 8)),
    Config("pp=2,tp=2", pipe("1f1b", 4)),
)
FEW = (
    *(Config("dp=2", text) for text in ("", "zero(3)", f"zero(2) | {AGAIN}")),
    Config("tp=2"),
    Config("dp=2", "zero(2)", passes=2),
)
RUNS: dict[tuple[str, int], Sequence[Config]] = {
    ("gpt 8x512", 2): ON_2,
    ("gpt 4x768", 4): ON_4,
    ("llama 6x512", 2): (*FEW, Config("pp=2", pipe("1f1b", 4)), Config("tp=2", "", "sequence")),
    ("llama 6x512", 4): (Config("dp=4"), Config("dp=4", "zero(3)"), Config("dp=2,tp=2", "zero(1)")),
    ("vit 6x384", 2): FEW,
}


def made(model: Model, config: Config, *, on_meta: bool) -> tuple[nn.Module, sl.Rules, Any]:
    """Return the model, its rules, and the inputs of one data rank in one call."""
    rules = sl.layouts.load(model.layout, config.mode)
    if "pp" in config.mesh:
        rules = rules.with_stages(sl.rules.Balanced(by="params", per_rank=config.per_rank))
    shape = sl.MeshShape(config.mesh)
    with torch.device("meta" if on_meta else "cpu"):
        built = model.build()
    rows = model.batch // shape.data_ranks // (1 if "pp" in config.mesh else config.passes)
    return built, rules, model.inputs(rows)


def predict(model: Model, config: Config, cluster: sl.Cluster) -> dict[str, float]:
    """Return seconds and bytes of a step, without running it."""
    built, rules, batch = made(model, config, on_meta=True)
    plan = sl.plan(built, config.mesh, rules, transforms=config.chosen())
    found = plan.time(cluster, example=batch)
    return {"seconds": found.seconds, "bytes": found.memory.total, "compute": found.compute,
            "communication": found.communication, "bubble": found.bubble}  # fmt: skip


def measure(name: str, config: Config, steps: int, *, memory: bool) -> tuple[int, list[float]]:
    """On each rank: build, shard and train; return the most bytes of live tensors, and the seconds of steps."""
    torch.manual_seed(0)
    built, rules, batch = made(MODELS[name], config, on_meta=False)
    sharded = sl.shard_model(built, config.mesh, rules, transforms=config.chosen())
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4)

    def step() -> None:
        if "pp" in config.mesh:
            sl.pipeline_step(sharded, batch)
        else:
            for _ in range(config.passes):
                sharded(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    taken = torch.zeros(1 + steps, dtype=torch.float64)
    step()
    if memory:
        gc.collect()
        with record_collectives(sharded) as log:
            for tensor in gc.get_objects():
                if type(tensor) is Tensor:  # of DTensors, the local ones
                    log.live.add(tensor)
            step()
        taken[0] = log.peak_bytes
    for number in range(steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        taken[1 + number] = time.perf_counter() - start
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    most, *seconds = taken.tolist()
    return int(most), seconds


@functools.cache
def calibrated(ranks: int, *, quick: bool) -> sl.Cluster:
    """Return this machine, as so many ranks find it."""
    effort = Effort.of(accelerator=False, quick=quick)
    figures = shared_pool(ranks, timeout=1800.0).run(measure_job, torch.device("cpu"), effort, ranks)[0]
    return sl.Cluster(f"this machine, {ranks} ranks", ranks, 2**40, source="calibrated", **figures)


def run(name: str, ranks: int, configs: Sequence[Config], *, steps: int, quick: bool) -> list[dict[str, Any]]:
    """Predict and measure the plans of one model on some ranks."""
    cluster, pool = calibrated(ranks, quick=quick), shared_pool(ranks, timeout=1800.0)
    found = [
        {"model": name, "ranks": ranks, "plan": each.name, "predicted": predict(MODELS[name], each, cluster)}
        for each in configs
    ]
    taken: list[list[float]] = [[] for _ in configs]
    for again in range(1 if quick else ROUNDS):
        for number, config in enumerate(configs):
            most, seconds = pool.run(measure, name, config, steps, memory=not again)[0]
            found[number].setdefault("bytes", most)
            taken[number] += seconds
    for each, seconds in zip(found, taken, strict=True):
        each["seconds"] = statistics.median(seconds)
    return found


def rank_correlation(some: Sequence[float], others: Sequence[float]) -> float:
    """Return Spearman's rank correlation."""
    from scipy.stats import spearmanr

    return float(spearmanr(some, others).statistic)


def summary(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return how well one model on some ranks was predicted."""
    predicted, measured = [each["predicted"]["seconds"] for each in found], [each["seconds"] for each in found]
    chosen = measured[predicted.index(min(predicted))]
    errors = sorted(abs(each["predicted"]["bytes"] / each["bytes"] - 1) for each in found)
    return {
        "correlation": rank_correlation(predicted, measured),
        "choice": chosen / min(measured),
        "time_error": statistics.median(abs(a / b - 1) for a, b in zip(predicted, measured, strict=True)),
        "bytes_error": errors[-1],
    }


def main() -> None:
    args = parser(__doc__).parse_args()
    runs = {("gpt 4x768", 2): FEW[:3]} if args.quick else RUNS
    results: list[dict[str, Any]] = []
    console = Console(width=150)
    for (name, ranks), configs in runs.items():
        found = run(name, ranks, configs, steps=QUICK_STEPS if args.quick else STEPS, quick=args.quick)
        table = Table(title=f"{name} on {ranks} ranks")
        for title in (
            "plan",
            "predicted ms",
            "measured ms",
            "error",
            "compute",
            "sends",
            "bubble",
            "predicted MiB",
            "measured MiB",
            "error",
        ):
            table.add_column(title, justify="left" if title == "plan" else "right")
        for each in sorted(found, key=lambda each: each["seconds"]):
            guess = each["predicted"]
            table.add_row(
                each["plan"], f"{1e3 * guess['seconds']:.0f}", f"{1e3 * each['seconds']:.0f}",
                f"{guess['seconds'] / each['seconds'] - 1:+.0%}",
                *(f"{1e3 * guess[part]:.0f}" for part in ("compute", "communication", "bubble")),
                f"{guess['bytes'] / 2**20:.0f}", f"{each['bytes'] / 2**20:.0f}",
                f"{guess['bytes'] / each['bytes'] - 1:+.0%}",
            )  # fmt: skip
        console.print(table)
        one = summary(found)
        console.print(
            f"rank correlation {one['correlation']:.3f}; the choice takes {one['choice']:.3f} of the best; "
            f"median error of time {one['time_error']:.1%}; largest error of memory {one['bytes_error']:.1%}"
        )
        cluster = calibrated(ranks, quick=args.quick).to_toml()
        results.append({"model": name, "ranks": ranks, "cluster": cluster, "plans": found, **one})
        if args.json:
            write(args.json, results)
    for ranks in sorted({ranks for _, ranks in runs}):
        plans = [plan for each in results if each["ranks"] == ranks for plan in each["plans"]]
        console.print(
            f"all plans on {ranks} ranks: rank correlation {summary(plans)['correlation']:.3f} of {len(plans)}"
        )


if __name__ == "__main__":
    main()
