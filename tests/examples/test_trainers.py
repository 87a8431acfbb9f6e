"""The examples for trainers of other libraries: a few lines differ from the host's own script, and no weight does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.house.source import ROOT
from tests.main_on_ranks import run_script

# In float32 sums in another order differ by roundings of 6e-8, which AdamW makes larger where a gradient is small: a
# step of 1e-2 may be off in the third digit. A weight that is wrong, swapped or stale is off by several steps.
TOLERANCE = 1e-4
# What makes a script short, and where it writes.
SHORT = {
    "hf_trainer": {
        "num_train_epochs=5": "max_steps=6",
        "digits_run/trained": "{}",
        "test)": "[test[k] for k in range(32)])",
    },
    "accelerate_loop": {"EPOCHS = 3": "EPOCHS = 1", "digits_run": "{}"},
    "lightning_digits": {"max_epochs=3": "max_epochs=1, limit_train_batches=20", "digits_run.ckpt": "{}"},
}


def hosts_own(script: str) -> tuple[str, int]:
    """Return the script as it was before the lines that it says are changed, and their number."""
    lines = []
    changed = 0
    for line in script.splitlines():
        code, mark, was = line.partition("  # was: ")
        if mark:
            lines.append(code[: len(code) - len(code.lstrip())] + was)
        elif not line.endswith("  # new"):
            lines.append(line)
            continue
        changed += 1
    return "\n".join(lines) + "\n", changed


def weights(saved: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a script has saved in a file, or in a folder, but not the biases of keys.

    A bias of all keys changes no attention: its gradient is zero but for roundings, and AdamW makes steps of them.
    """
    found = load_file(saved / "model.safetensors") if saved.is_dir() else torch.load(saved)["state_dict"]
    return {name: weight for name, weight in found.items() if not name.endswith("key.bias")}


def _run(script: str, text: str, processes: int, folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    saved = folder / f"saved on {processes}"
    for long, short in SHORT[script].items():
        assert long in text
        text = text.replace(long, short.format(saved))
    for name in ("digits.py", "digits.csv.gz", "train_gpt.py", "data.py", "gpt.py"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / "examples" / name)
    file = folder / f"on_{processes}.py"
    file.write_text(text)
    printed = run_script(file, processes=processes).out
    return weights(saved), printed


@pytest.mark.parametrize("script", SHORT)
def test_three_lines_shard_a_trainer_and_its_weights_are_those_of_the_host_alone(tmp_path: Path, script: str):
    text = (ROOT / "examples" / f"{script}.py").read_text()
    own, changed = hosts_own(text)
    assert 0 < changed <= 3 and "shardlib" not in own.partition('"""\n\nfrom')[2]
    exact, _ = _run(script, own, 1, tmp_path)
    if script == "lightning_digits":  # a batch is that of a data rank
        text = text.replace("batch_size=16", "batch_size=8").replace("batch_size=20", "batch_size=10")
    found, printed = _run(script, text, 4, tmp_path)
    torch.testing.assert_close(found, exact, rtol=TOLERANCE, atol=TOLERANCE)
    assert "accuracy" in printed
