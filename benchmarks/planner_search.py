"""Plans that Galvatron's search finds from its own profiles, priced by shardlib's planner on the same profiles.

    python benchmarks/planner_search.py

Nothing runs on devices. Galvatron's plans, with its seconds and memory, are in results/galvatron_search.json, which
`planner_beside.py --galvatron` makes, with the measurements of its authors from which it computes them. A cluster is
made of these: the rate of products, so that a row takes what it takes in forward of a layer; the launch of a kernel, so
that their count takes what a layer takes beside its rows; the bandwidths of all-reduces; the part of communication that
hides. Then shardlib searches too, with as much memory, and each program's best plan has shardlib's price.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from _report import parser, write
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import shardlib as sl
from shardlib.errors import ShardlibError
from shardlib.transforms import parse

FOUND = Path(__file__).parent / "results" / "galvatron_search.json"
PLAN = re.compile(r"\d+ x pp(\d+) tp(\d+) dp(\d+) (zero[23])( ckpt)?; (\d+) microbatches")


def built(search: dict[str, Any]) -> nn.Module:
    """Return the model of a search, on meta, as transformers has it; attention is one kernel, without dropout."""
    import transformers as hf

    sizes: dict[str, Any] = {"hidden_size": search["hidden"], "num_hidden_layers": search["layers"]}
    heads = int(search["profile"].split("head")[1][:2])
    wide = {"intermediate_size": 4 * search["hidden"], "num_attention_heads": heads}
    gpt = {"n_embd": search["hidden"], "n_layer": search["layers"], "n_head": heads, "n_positions": search["seq"]}
    with torch.device("meta"):
        match search["folder"]:
            case "vit_hf":
                return hf.ViTForImageClassification(hf.ViTConfig(**sizes, **wide))
            case "bert_hf":
                return hf.BertForMaskedLM(hf.BertConfig(attention_probs_dropout_prob=0.0, **sizes, **wide))
            case "gpt_hf":
                return hf.GPT2LMHeadModel(hf.GPT2Config(attn_pdrop=0.0, use_cache=False, **gpt))
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, intermediate_size=11008, use_cache=False))


def rows_of(search: dict[str, Any], rows: int) -> dict[str, Tensor]:
    """Return inputs of so many rows."""
    if search["folder"] == "vit_hf":
        pixels = torch.empty(rows, 3, 224, 224, device="meta", dtype=torch.bfloat16)
        return {"pixel_values": pixels, "labels": torch.empty(rows, device="meta", dtype=torch.long)}
    ids = torch.empty(rows, search["seq"], device="meta", dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def cluster_of(one: dict[str, Any], model: nn.Module) -> sl.Cluster:
    """Return Galvatron's measurements as a cluster."""
    search, inputs = one["search"], one["inputs"]
    row, rest = (inputs["forward_ms_of_a_layer_for_a_row"][0], 0.0)
    if isinstance(row, list):  # milliseconds of a row, and of a layer beside its rows
        row, rest = row
    plan = sl.plan(model, "dp=1", transforms=[sl.precision("bf16")])
    assert plan.source is not None
    work, _ = plan.source(plan, rows_of(search, 1))
    layer = work.kinds[work.order[1]].forward
    buses = {name: rate for name, rate in inputs["allreduce_gb_a_second"].items() if rate}
    lines = [
        f'name = "{search["nodes"]} x {search["gpus"]}"',
        f'source = "profiles of Galvatron {one["search"]["profile"]}"',
        f"devices = {search['gpus']}",
        f'memory = "{search["memory"]}GiB"',
        f"launch = {rest / 1e3 / len(layer.kernels)}",
        'memory_bandwidth = "1000TB/s"',  # products take all of the time, as in the profiles
        'host_bandwidth = "25GB/s"',  # not measured there
        f"overlap = {2 - inputs['overlap_coefficient']:.3f}",
        f"products = {{ bfloat16 = {layer.flops / (row / 1e3)} }}",
    ]
    node = next(rate for name in ("8_1", "8", "4") if (rate := buses.get(name)))
    lines += _link("node", search["gpus"] if search["nodes"] > 1 else 0, node)
    lines += _link("network", 0, buses["2_0"]) if search["nodes"] > 1 else []
    return sl.Cluster.from_toml("\n".join(lines))


def _link(name: str, ranks: int, gigabytes: float) -> list[str]:
    return ["[[links]]", f'name = "{name}"', f"ranks = {ranks}", "latency = 0.0", f'bandwidth = "{gigabytes}GB/s"']


def priced(model: nn.Module, one: dict[str, Any], cluster: sl.Cluster, text: str) -> Any:
    """Return shardlib's time of a plan in Galvatron's words."""
    search = one["search"]
    match = PLAN.match(text)
    assert match is not None, text
    pp, tp, dp, chunks = (int(match[group]) for group in (1, 2, 3, 6))
    texts = ['precision("bf16")']
    texts += [f"zero({match[4][-1]})"] if dp > 1 else []
    texts += ["checkpoint_activations()"] if match[5] else []
    rules = sl.layouts.for_model(model, "sequence" if tp > 1 and "--sequence_parallel" in search["options"] else None)
    rows = search["batch"] // dp
    if pp > 1:
        rules = rules.with_stages(sl.rules.Balanced(by="params"))
        texts.append(f'pipeline("1f1b", microbatches={min(chunks, rows)})')
    elif chunks > 1:
        texts.append(f"accumulate({chunks})")
        rows //= chunks
    mesh = ",".join(f"{axis}={size}" for axis, size in (("pp", pp), ("dp", dp), ("tp", tp)) if size > 1)
    plan = sl.plan(model, mesh, rules, transforms=[parse(each) for each in texts])
    return plan.time(cluster, example=rows_of(search, rows))


def compare(one: dict[str, Any], console: Console) -> dict[str, Any]:
    """Price the plans of one of Galvatron's searches, and search."""
    search = one["search"]
    model = built(search)
    cluster = cluster_of(one, model)
    machines = f"{search['nodes']} x {search['gpus']} GPUs of {search['memory']} GB"
    title = f"{search['model']}, {machines}, batch {search['batch']}"
    table = Table(title=title)
    for name in ("plan", "Galvatron, s", "shardlib, s", "", "Galvatron, GiB", "shardlib, GiB", ""):
        table.add_column(name, justify="left" if name == "plan" else "right")
    plans: dict[str, dict[str, Any]] = {}
    for theirs in one["found"].values():
        text = theirs.get("plan")
        if text is None or text in plans:
            continue
        mib = max(theirs["memory_mb"])
        plans[text] = {"galvatron_seconds": theirs["seconds"], "galvatron_gib": mib / 1024}
        try:
            time = priced(model, one, cluster, text)
        except ShardlibError as error:
            plans[text]["refused"] = str(error)
            table.add_row(text, f"{theirs['seconds']:.2f}", str(error)[:60])
            continue
        gib = time.memory.total / 2**30
        plans[text] |= {"seconds": time.seconds, "gib": gib}
        table.add_row(
            text, f"{theirs['seconds']:.2f}", f"{time.seconds:.2f}", f"{time.seconds / theirs['seconds'] - 1:+.0%}",
            f"{mib / 1024:.1f}", f"{gib:.1f}", f"{gib * 1024 / mib - 1:+.0%}",
        )  # fmt: skip
    console.print(table)
    made = {"search": title, "plans": plans}
    world = search["nodes"] * search["gpus"]
    try:
        best = sl.best_plans(
            model, cluster, world=world, batch=search["batch"], example=rows_of(search, 1), margin=0.0, top=1,
            transforms=sl.precision("bf16"),
        )[0]  # fmt: skip
    except ShardlibError as error:
        console.print(f"shardlib's search: {error}\n", markup=False)
        return made | {"best": None, "reason": str(error)}
    mesh = f"{best.mesh} {best.mode}" if best.mode else str(best.mesh)
    own = f"{mesh}: {best.transforms}, {best.rows} rows x {best.microbatches}"
    theirs = plans[one["found"]["full"]["plan"]].get("seconds")
    ratio = None if theirs is None else theirs / best.time.seconds
    console.print(
        f"shardlib's best: {own}; {best.time.seconds:.2f} s, {best.time.memory.total / 2**30:.1f} GiB"
        + ("" if ratio is None else f"; Galvatron's best takes {ratio:.2f} of it by shardlib's price")
        + "\n"
    )
    return made | {"best": own, "seconds": best.time.seconds, "gib": best.time.memory.total / 2**30, "ratio": ratio}


def main() -> None:
    args = parser(__doc__).parse_args()
    found = json.loads(FOUND.read_text())["results"]["galvatron"]
    console = Console(width=140)
    results = [compare(one, console) for one in (found[:1] if args.quick else found)]
    if args.json:
        write(args.json, results)


if __name__ == "__main__":
    main()
