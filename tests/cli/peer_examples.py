"""Try `shardlib migrate` on examples of ColossalAI: `python tests/cli/peer_examples.py FOLDER_OF_COLOSSALAI`.

It copies the examples of a checkout, rewrites them, and runs each with the plugins that it offers, on two ranks on a
CPU, with tiny models, made-up data and no network. It prints a table: what was run, whether it ended well, and how many
lines `shardlib migrate` left. No test runs it: it needs a checkout, and some minutes. Names after the folder choose
examples, as in `bert llama`.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
Edits = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Example:
    """A script below `examples`, and how it is run.

    Attributes:
        script: its path.
        cases: arguments of each run.
        always: arguments of all runs.
        by_hand: pattern and replacement of each line that `shardlib migrate` leaves to a person.
        tiny: the same of constants that make it small.
    """

    script: str
    cases: tuple[str, ...]
    always: str = ""
    by_hand: Edits = ()
    tiny: Edits = ()


_FINE_TUNING: Edits = (
    (r"NUM_EPOCHS = \d+", "NUM_EPOCHS = 1"),
    (r"BATCH_SIZE = \d+", "BATCH_SIZE = 4"),
    (r"microbatch_size=\d+", "microbatch_size=2"),
)
_NO_GRAPH: Edits = (
    (r"from \S+ import PipelineGraph", "from unittest.mock import MagicMock as PipelineGraph"),
    (r"\bscheduler_nodes=\w+,", ""),
)
_PLUGINS = ("torch_ddp", "torch_ddp_fp16", "gemini", "low_level_zero")
_HYBRID = (*_PLUGINS, "hybrid_parallel")

EXAMPLES = {
    "bert": Example("language/bert/finetune.py", tuple(f"--plugin {name}" for name in _HYBRID), tiny=_FINE_TUNING),
    "bert-fsdp": Example(
        "language/bert/finetune.py",
        ("--plugin torch_fsdp",),
        by_hand=((r"buffer_dtype=[\w.]+", ""),),
        tiny=_FINE_TUNING,
    ),
    "gpt": Example(
        "language/gpt/hybridparallelism/finetune.py",
        tuple(f"--plugin {name}" for name in _HYBRID),
        tiny=_FINE_TUNING,
    ),
    "gpt-pretrained": Example(
        "language/gpt/gemini/train_gpt_demo.py",
        tuple(f"--distplan CAI_{name}" for name in ("ZeRO1", "ZeRO2", "Gemini")),
        always="--batch_size 2 --train_step 4",
        by_hand=((r"\bcolossalai\.__version__", '"0.5"'),),
        tiny=((r"SEQ_LEN = \d+", "SEQ_LEN = 16"), (r"VOCAB_SIZE = \d+", "VOCAB_SIZE = 64")),
    ),
    "vit": Example(
        "images/vit/vit_train_demo.py",
        (
            *(f"--plugin {name}" for name in _PLUGINS),
            *(f"--plugin hybrid_parallel --{n} 2" for n in ("tp_size", "pp_size")),
        ),
        always="--num_epoch 1 --batch_size 4 --output_path vit-trained",
    ),
    "resnet": Example(
        "images/resnet/train.py",
        (*(f"--plugin {name}" for name in _PLUGINS), "--plugin gemini --resume 1"),
        always="--interval 1",
        tiny=((r"NUM_EPOCHS = \d+", "NUM_EPOCHS = 2"), (r"build_dataloader\(\d+", "build_dataloader(4")),
    ),
    "llama": Example(
        "language/llama/benchmark.py",
        (
            "--plugin gemini",
            "--plugin gemini -g --shard_param_frac 0.5 --offload_optim_frac 0.5",
            "--plugin gemini --tp 2 --prefetch_num 2 --disable-async-reduce",
            "--plugin gemini_auto",
            "--plugin 3d --tp 2 --zero 1",
            "--plugin 3d --sp 2 --sp_mode all_to_all",
            "--plugin 3d --tp 2 --sp 2 --sp_mode split_gather",
            "--plugin 3d --pp 2 --no_cache",
            "--plugin 3d --pp 2 --pp_style interleaved --n_chunks 2",
            "--plugin 3d --pp 2 --pp_style zbv --n_chunks 2",
            "--plugin 3d_cpu --tp 2 --zero 1",
        ),
        always="--config llama --batch_size 4 --num_steps 3 --ignore_steps 1 --max_length 16",
        by_hand=_NO_GRAPH,
    ),
    "llama-fsdp": Example(
        "language/llama/benchmark.py",
        ("--plugin fsdp", "--plugin fsdp_cpu"),
        always="--config llama --batch_size 4 --num_steps 3 --ignore_steps 1 --max_length 16",
        by_hand=(
            *_NO_GRAPH,
            (r"buffer_dtype=[\w.]+,", ""),
            (r"\btorch_dtype=torch\.bfloat16", "torch_dtype=torch.float32"),
        ),
    ),
}


# --- the run of all ---------------------------------------------------------------------------------------------------


def try_all(checkout: Path, names: list[str]) -> int:
    """Rewrite and run examples, print the table, and return how many runs failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_models(work)
        print("| example | arguments | ran | left by `shardlib migrate` |\n|---|---|---|---|", flush=True)
        for name in names:
            examples = work / "scripts" / name  # beside the models, which are called alike
            shutil.copytree(checkout / "examples", examples)
            example, left = EXAMPLES[name], rewritten(examples, EXAMPLES[name])
            for case in example.cases:
                said = run(work, examples / example.script, f"{case} {example.always}".split())
                failed += bool(said)
                print(f"| {example.script} | {case} | {said or 'yes'} | {left} |", flush=True)
    return failed


def rewritten(examples: Path, example: Example) -> int:
    """Rewrite the folder of a script by `shardlib migrate`, then edit it; return how many lines were left."""
    script = examples / example.script
    command = [sys.executable, "-m", "shardlib.cli", "migrate", str(script.parent), "--write"]
    told = subprocess.run(command, capture_output=True, text=True, env=_environment())
    assert told.returncode in (0, 1), told.stderr
    text = script.read_text()
    for pattern, replacement in (*example.by_hand, *example.tiny):
        text, count = re.subn(pattern, replacement, text)
        assert count, f"{example.script} has nothing like {pattern}"
    script.write_text(text)
    return len(re.findall(rf"^{re.escape(str(script))}:\d+: (?!note: )", told.stderr, re.MULTILINE))


def run(work: Path, script: Path, options: list[str]) -> str:
    """Run a script on two ranks; return nothing, or the last error that it printed."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        __file__,
        "--as-main",
    ]
    done = subprocess.run(
        [*command, str(script), *options], cwd=work, capture_output=True, text=True, env=_environment()
    )
    errors = [line for line in done.stderr.splitlines() if re.match(r"(\[rank\d\]: )?[\w.]*(Error|Exception)\b", line)]
    return "" if done.returncode == 0 else (errors or ["it ended without an error"])[0][:300]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def make_models(work: Path) -> None:
    """Save tiny models and tokenizers in folders that are called as those on the hub."""
    _import_transformers()
    import transformers as hf

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnop"]
    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
    models: dict[str, Any] = {
        "bert-base-uncased": hf.BertForSequenceClassification(hf.BertConfig(vocab_size=len(words), **shape)),
        "gpt2": hf.GPT2ForSequenceClassification(
            hf.GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=128, vocab_size=len(words), pad_token_id=0)
        ),
        "google/vit-base-patch16-224": hf.ViTForImageClassification(hf.ViTConfig(image_size=32, patch_size=8, **shape)),
    }
    for name, model in models.items():
        model.save_pretrained(work / name)
    hf.LlamaConfig(vocab_size=64, max_position_embeddings=64, **shape).save_pretrained(work / "llama")
    hf.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(work / "google/vit-base-patch16-224")
    (work / "vocab.txt").write_text("\n".join(words))
    for name in ("bert-base-uncased", "gpt2"):
        hf.BertTokenizerFast(str(work / "vocab.txt"), pad_token="[PAD]").save_pretrained(work / name)


# --- a rank: what is not installed, needs a network, or a GPU ---------------------------------------------------------


class Columns(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A data set of `datasets`, as far as scripts use it."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def map(self, function: Any, batched: bool, remove_columns: list[str]) -> Columns:
        mapped = self.columns | dict(function(self.columns))
        return Columns({name: value for name, value in mapped.items() if name not in remove_columns})

    def set_format(self, type: str, columns: list[str]) -> None:
        self.columns = {name: self.columns[name] for name in columns}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(value[index]) for name, value in self.columns.items()}


class Images(list):  # type: ignore[type-arg]
    """Pictures of one colour, with the number of the colour."""

    def __init__(self, count: int) -> None:
        from PIL import Image

        self.features = {"labels": SimpleNamespace(names=["dark", "middle", "bright"])}

        pictures = (Image.new("RGB", (32, 32), (70 * (i % 3),) * 3) for i in range(count))
        super().__init__({"image": picture, "labels": i % 3} for i, picture in enumerate(pictures))


def load_dataset(name: str, task: str | None = None) -> dict[str, Any]:
    if name == "beans":
        return {"train": Images(16), "validation": Images(8)}
    sentences = [" ".join("abcdefgh" if i % 2 else "ijklmnop") for i in range(16)]
    columns = {"sentence1": sentences, "sentence2": sentences, "label": [i % 2 for i in range(16)]}
    return {split: Columns(dict(columns)) for split in ("train", "validation", "test")}


class Metric:
    """The share of right predictions, in the place of a metric of `evaluate`."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.right: list[bool] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.right += (predictions == references).tolist()

    def compute(self) -> dict[str, float]:
        return {"accuracy": sum(self.right) / len(self.right), "f1": 1.0}


def _import_transformers() -> Any:
    from tests.torchvision_on_cpu import import_torchvision

    torchvision = import_torchvision()
    import transformers

    return torchvision, transformers


def as_main(script: str) -> None:
    """Run a script in this process as torchrun would, with stand-ins for what is not there."""
    torch.Tensor.cuda = lambda self, *args, **options: self  # type: ignore[method-assign, assignment]
    torch.nn.Module.cuda = lambda self, *args: self  # type: ignore[method-assign]
    torch.cuda.synchronize = lambda *args: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cpu.max_memory_allocated = lambda *args: 0  # type: ignore[attr-defined]
    torch.cpu.reset_peak_memory_stats = lambda *args: None  # type: ignore[attr-defined]
    torchvision, transformers = _import_transformers()
    for name, offered in (("evaluate", {"load": Metric}), ("datasets", {"load_dataset": load_dataset})):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(offered, __spec__=ModuleSpec(name, None))
    torchvision.datasets.CIFAR10 = lambda train, transform, **options: [
        (transform(each["image"]), each["labels"]) for each in Images(16)
    ]
    base, config = transformers.PreTrainedTokenizerBase, transformers.GPT2Config
    if not hasattr(base, "batch_encode_plus"):  # of earlier versions of transformers
        base.batch_encode_plus = lambda self, pairs, **options: self(*map(list, zip(*pairs, strict=True)), **options)
    small = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 16, "n_ctx": 16, "vocab_size": 64}
    transformers.GPT2Config = lambda **given: config(**given | small)
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-main"]:
        sys.argv = sys.argv[2:]
        as_main(sys.argv[0])
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("checkout", type=Path)
        parser.add_argument("names", nargs="*", choices=[*EXAMPLES, []], default=[])
        given = parser.parse_args()
        sys.exit(try_all(given.checkout, given.names or list(EXAMPLES)) > 0)
