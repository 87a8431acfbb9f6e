"""The command line: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shardlib import layouts
from shardlib._plan import Cluster, Plan, make_plan
from shardlib.cli import main
from shardlib.testing import census
from shardlib.transforms import accumulate, offload, zero
from tests.cli.models_for_cli import MLP, tiny
from tests.house.source import ROOT
from tests.torchvision_on_cpu import let_torchvision_in

HERE = "tests.cli.models_for_cli"
GPT = f"{HERE}:tiny"
MLP_LAYOUT = '[params]\n"up" = "colwise"\n"down" = "rowwise"\n'
FORMS = (
    "module:factory, file.py:factory or package.module.Class (called without arguments), a Hugging Face folder or "
    "config.json, a .safetensors file, its .index.json, or a folder that holds one, or a name such as llama-3-70b"
)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("plan", ...)` gives the exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def mlp_layout(tmp_path: Path) -> Path:
    path = tmp_path / "mlp.toml"
    path.write_text(MLP_LAYOUT)
    return path


def test_plan_prints_what_print_plan_prints(run: Run):
    code, out, err = run("plan", GPT, "--mesh", "dp=2,tp=2", "--layout", "example_gpt")
    expected = str(make_plan(tiny(), "dp=2,tp=2", layouts.load("example_gpt")))
    assert (code, err) == (0, "")
    assert out == f"{expected}\n"


def test_the_layout_for_the_model_s_class_is_found(run: Run):
    _, out, _ = run("plan", GPT, "--mesh", "tp=2", "--json")
    assert out == make_plan(tiny(), "tp=2", layouts.load("example_gpt")).to_json()


def test_a_plan_as_json_comes_back_equal_with_its_dry_run(run: Run):
    code, out, _ = run("plan", GPT, "--mesh", "dp=2,tp=2", "--example", "2x16", "--json")
    made = Plan.from_json(out)
    assert code == 0
    assert made.report is not None
    assert made.report.count(axis="tp", phase="forward") == 2 * 2 + 2
    assert made.to_json() == out


def test_inputs_may_be_named_and_typed(run: Run):
    _, by_name, _ = run("plan", GPT, "--mesh", "tp=2", "--example", "ids=2x16:int32", "--json")
    _, by_place, _ = run("plan", GPT, "--mesh", "tp=2", "--example", "2x16", "--json")
    named, placed = Plan.from_json(by_name).report, Plan.from_json(by_place).report
    assert named is not None
    assert placed is not None
    assert named.collectives == placed.collectives


def test_plan_shows_what_changes_from_a_plan_that_was_kept(run: Run, tmp_path: Path):
    _, kept, _ = run("plan", GPT, "--mesh", "tp=2", "--json")
    (tmp_path / "kept.json").write_text(kept)
    code, out, _ = run("plan", GPT, "--mesh", "tp=4", "--diff", tmp_path / "kept.json")
    assert (code, out.splitlines()[0]) == (0, "~ mesh: tp=2 -> tp=4")
    _, out, _ = run("plan", GPT, "--mesh", "tp=2", "--diff", tmp_path / "kept.json")
    assert out == f'Nothing changes from "{tmp_path / "kept.json"}".\n'
    _, out, _ = run("plan", GPT, "--mesh", "tp=4", "--diff", tmp_path / "kept.json", "--json")
    assert json.loads(out)["changes"][0] == "~ mesh: tp=2 -> tp=4"


def test_plan_writes_a_page(run: Run, tmp_path: Path):
    code, _, _ = run("plan", GPT, "--mesh", "tp=2", "--html", tmp_path / "plan.html")
    assert code == 0
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")


def test_every_tensor_has_a_line_with_all(run: Run):
    _, folded, _ = run("plan", GPT, "--mesh", "tp=2")
    _, unfolded, _ = run("plan", GPT, "--mesh", "tp=2", "--all")
    assert folded.count("blocks.1.attn.qkv.weight") == 0
    assert unfolded.count(" blocks.1.attn.qkv.weight ") == 1


def test_check_says_that_a_layout_fits(run: Run):
    code, out, _ = run("check", GPT, "--layout", "example_gpt")
    assert code == 0
    assert out.splitlines()[-2] == f"The layout fits {GPT} on tp=2."
    assert out.splitlines()[-1] == "97% of its bytes are sharded over model axes; of the others, most are in position."
    code, out, _ = run("check", GPT, "--layout", "example_gpt", "--json")
    said = json.loads(out)
    assert (code, said["ok"], said["problems"]) == (0, True, [])
    assert [row["rule"] for row in said["coverage"]] == list(layouts.load("example_gpt").rules)


def test_check_fails_with_the_problem(run: Run, tmp_path: Path):
    (tmp_path / "bad.toml").write_text('[params]\n"up" = "colwise"\n"dwon" = "rowwise"\n')
    code, out, _ = run("check", f"{HERE}.MLP", "--layout", tmp_path / "bad.toml")
    assert code == 1
    assert 'problem: Rule "dwon"' in out
    assert 'Did you mean "down"?' in out
    assert out.splitlines()[-2] == f"The layout does not fit {HERE}.MLP on tp=2."
    code, out, _ = run("check", f"{HERE}.MLP", "--layout", tmp_path / "bad.toml", "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)


def test_check_remarks_on_uneven_pieces_and_on_parameters_without_a_rule(run: Run, tmp_path: Path):
    (tmp_path / "part.toml").write_text('unmatched = "replicate"\n[params]\n"up" = "colwise"\n')
    code, out, _ = run("check", f"{HERE}:MLP", "--layout", tmp_path / "part.toml", "--json")
    assert code == 0
    assert json.loads(out)["remarks"] == [
        "sharded unevenly: 2 of 4 tensors, such as up.weight.",
        "replicated, since no rule matches: 2 of 4 tensors, such as down.weight; 2,176 bytes on each rank.",
    ]


def test_check_compares_with_a_plan_that_was_kept(run: Run, tmp_path: Path, mlp_layout: Path):
    kept = tmp_path / "kept.json"
    kept.write_text(run("plan", f"{HERE}:MLP", "--mesh", "tp=2", "--layout", mlp_layout, "--json")[1])
    arguments = ("check", f"{HERE}:MLP", "--layout", mlp_layout, "--expect", kept, "--json")
    assert run(*arguments)[0] == 0
    mlp_layout.write_text(MLP_LAYOUT.replace("colwise", "replicate"))
    code, out, _ = run(*arguments)
    assert code == 1
    assert "~ up.weight: stored, compute, grad, state out@tp in -> replicated" in json.loads(out)["problems"][0]


def test_explain_names_the_rule_and_what_follows(run: Run):
    code, out, _ = run("explain", GPT, "blocks.0.attn.qkv.weight", "--mesh", "tp=2")
    assert code == 0
    assert out.rstrip() == layouts.load("example_gpt").explain("blocks.0.attn.qkv.weight", tiny(), "tp=2")
    code, out, _ = run("explain", GPT, "blocks.0.attn.qkv.weight", "--mesh", "tp=2", "--json")
    said = json.loads(out)
    assert said["name"] == "blocks.0.attn.qkv.weight"
    assert '  rule     "attn.qkv": "(qkv heads head)"' in said["explanation"]


def test_explain_does_not_know_a_name_that_is_none(run: Run):
    code, out, err = run("explain", GPT, "blocks.0.attn.kqv.weight")
    assert (code, out) == (1, "")
    assert 'Did you mean "blocks.0.attn.qkv.weight"?' in err


def test_init_writes_a_layout_that_fits_and_marks_its_guesses(run: Run, tmp_path: Path):
    file = tmp_path / "first.toml"
    code, out, _ = run("init", GPT, "-o", file)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == f"Wrote {file}. Read the lines marked as guesses, then run:"
    assert [line.split()[:2] for line in lines[1:]] == [["shardlib", command] for command in ("check", "plan", "prove")]
    text = file.read_text()
    assert text.count("# guess") == 1 and text.count("\n# ") >= 4
    assert "(qkv heads head)" in text
    assert run("check", GPT, "--layout", file)[0] == 0
    assert run("init", GPT)[1] == text
    said = json.loads(run("init", GPT, "--json")[1])
    assert (said["file"], said["toml"]) == (None, text)
    assert said["notes"]
    assert all(f"# {note}\n" in text for note in said["notes"].values())


def test_init_keeps_a_file_that_is_there(run: Run, tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text("# mine\n")
    code, _, err = run("init", GPT, "-o", file)
    said = f'shardlib: "{file}" is there already. Name another file, or give --force to replace it.\n'
    assert (code, err) == (2, said)
    assert file.read_text() == "# mine\n"
    assert run("init", GPT, "-o", file, "--force")[0] == 0
    assert file.read_text() != "# mine\n"


def _saved_mlp(folder: Path) -> dict[str, torch.Tensor]:
    state = dict(MLP().state_dict())
    save_file({k: v for k, v in state.items() if k.startswith("up")}, folder / "a.safetensors")
    save_file({k: v for k, v in state.items() if k.startswith("down")}, folder / "b.safetensors")
    files = {name: "a.safetensors" if name.startswith("up") else "b.safetensors" for name in state}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return state


@pytest.mark.parametrize("given", ["model.safetensors.index.json", "."])
def test_a_safetensors_index_is_a_model_of_names_and_shapes(run: Run, tmp_path: Path, given: str):
    state = _saved_mlp(tmp_path)
    layout = tmp_path / "names.toml"
    layout.write_text('[params]\n"up.weight" = "out@tp in"\n"up.bias" = "out@tp"\n"down.*" = "replicate"\n')
    code, out, _ = run("plan", tmp_path / given, "--mesh", "tp=3", "--layout", layout, "--json")
    assert code == 0
    rows = {row.name: (row.global_shape, row.dtype) for row in Plan.from_json(out).rows}
    assert rows == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def test_a_single_safetensors_file_keeps_its_dtypes(run: Run, tmp_path: Path):
    save_file(
        {"a.w": torch.zeros(4, 2, dtype=torch.bfloat16), "ids": torch.zeros(3, dtype=torch.int64)},
        tmp_path / "x.safetensors",
    )
    (tmp_path / "l.toml").write_text('[params]\n"**" = "replicate"\n')
    code, out, _ = run("plan", tmp_path / "x.safetensors", "--mesh", "tp=2", "--layout", tmp_path / "l.toml", "--json")
    assert code == 0
    rows = {row.name: (row.dtype, row.requires_grad) for row in Plan.from_json(out).rows}
    assert rows == {"a.w": (torch.bfloat16, True), "ids": (torch.int64, False)}


@pytest.mark.parametrize("given", ["", "config.json"])
def test_a_hugging_face_folder_is_built_on_meta(run: Run, tmp_path: Path, torchvision: Any, given: str):
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 128}
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=2, architectures=["LlamaForCausalLM"], **sizes)
    config.save_pretrained(tmp_path)
    code, out, _ = run("plan", tmp_path / given, "--mesh", "dp=2,tp=4", "--json")
    made = Plan.from_json(out)
    assert code == 0
    assert made["lm_head.weight"].global_shape == (128, 64)
    assert made["model.layers.2.self_attn.q_proj.weight"].local_shape(made.mesh) == (16, 64)


def test_a_model_that_needs_values_to_be_built_is_built_with_them(run: Run, tmp_path: Path):
    (tmp_path / "l.toml").write_text('[params]\nlayer = "replicate"\n')
    code, out, err = run("plan", f"{HERE}:ReadsValues", "--mesh", "dp=2", "--layout", tmp_path / "l.toml", "--json")
    assert code == 0
    assert "cannot be built on meta" in err
    assert Plan.from_json(out)["layer.weight"].global_shape == (8, 4)


WRONG: list[tuple[str, int, str]] = [
    (
        "no_such_module:f --mesh tp=2",
        2,
        f'"no_such_module:f": there is no module "no_such_module" and no such file. A model is {FORMS}.',
    ),
    (
        f"{HERE}:tinny --mesh tp=2",
        2,
        f'"{HERE}:tinny": module "{HERE}" has no "tinny". Did you mean "tiny"? A model is {FORMS}.',
    ),
    (
        f"{HERE}:nothing --mesh tp=2",
        2,
        f'"{HERE}:nothing" is of type int; give a class or a function without arguments.',
    ),
    (
        f"{HERE}:number --mesh tp=2",
        2,
        f'"{HERE}:number" returned int; give something that returns a torch.nn.Module.',
    ),
    (
        "gpt:GPT --mesh tp=2",
        2,
        '"gpt:GPT" cannot be called without arguments: GPT.__init__() missing 1 required positional argument: '
        "'config'. Write a function that returns the model, in a file of your own, and give its module:function.",
    ),
    (
        "no/such/model.safetensors --mesh tp=2",
        2,
        f'There is no file or folder "no/such/model.safetensors". A model is {FORMS}.',
    ),
    (
        "no/such/model.py:build --mesh tp=2",
        2,
        f'"no/such/model.py:build": there is no file "no/such/model.py". A model is {FORMS}.',
    ),
    (
        f"{GPT} --mesh tp=x",
        2,
        'Mesh "tp=x": cannot read "tp=x"; write axis=size, separated by commas, as in "dp=2,tp=4".',
    ),
    (
        f"{GPT} --mesh tp=3 --layout example_gpt",
        1,
        'Rule "attn.qkv": "(qkv heads head)", for "blocks.0.attn.qkv.weight"',
    ),
    (
        f"{GPT} --mesh tp=2 --layout no.toml",
        2,
        'There is no layout file "no.toml".',
    ),
    (
        f"{GPT} --mesh tp=2 --layout example_gtp",
        2,
        'There is no layout called "example_gtp"; there are ',
    ),
    (
        f"{GPT} --mesh tp=2 --example 2by3",
        2,
        '--example "2by3" cannot be read; write a shape, and a name or dtype if needed, as in 2x128 or '
        "pixels=2x3x224x224:float32.",
    ),
    (
        f"{GPT} --mesh tp=2 --example 2x3:bfloat61",
        2,
        '--example "2x3:bfloat61": "bfloat61" is not a dtype, as "int64" or "bfloat16" are. Did you mean "bfloat16"?',
    ),
    (
        f"{GPT} --mesh tp=2 --example 2x3 --example ids=2x3",
        2,
        "--example 2x3, ids=2x3: give a different name to every input, or a name to none.",
    ),
    (
        f"{GPT} --mesh tp=2 --diff no.json",
        2,
        'The plan "no.json" cannot be read: No such file or directory.',
    ),
]


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG)
def test_what_cannot_be_done_is_said_without_a_traceback(run: Run, arguments: str, code: int, message: str):
    ended, out, err = run("plan", *arguments.split())
    assert (ended, out) == (code, "")
    assert "Traceback" not in err
    assert err.startswith(f"shardlib: {message}")
    if message.endswith((".", "?")):
        assert err == f"shardlib: {message}\n"


def test_census_prints_a_line_for_each_architecture_and_keeps_it(run: Run, ranks, tmp_path: Path):
    let_torchvision_in()
    ranks(2).run(let_torchvision_in)  # transformers imports it by the way
    file = tmp_path / "census.jsonl"
    arguments = ("census", "--only", "gptj", "--mesh", "tp=2", "--seconds", 60, "-o", file)
    code, out, err = run(*arguments)
    first, last = out.splitlines()
    assert (code, err, last) == (0, "", "1 models: 1 proved")
    assert first.startswith("transformers gptj (GPTJForCausalLM): proved, proposed, 99% of blocks sharded [")
    assert json.loads(file.read_text())["proved"] == {"tp=2": True}
    assert run(*arguments) == (0, "0 models: none new\n", "")


def test_census_takes_the_engine(run: Run, monkeypatch: pytest.MonkeyPatch):
    let_torchvision_in()
    asked: dict[str, Any] = {}
    monkeypatch.setattr(census, "run", lambda chosen, output, **options: asked.update(options) or [])
    assert run("census", "--only", "gptj", "--engine", "jax") == (0, "0 models: none new\n", "")
    assert (asked["engine"], asked["meshes"], asked["seconds"]) == ("jax", ["tp=1", "tp=2", "dp=2,tp=2"], 120.0)


def test_census_says_which_architectures_there_are(run: Run):
    let_torchvision_in()
    assert run("census", "--only", "lama")[::2] == (
        2,
        'shardlib: transformers has no architecture "lama". Did you mean "llama"?\n',
    )
    assert run("census", "nonsense")[::2] == (
        2,
        'shardlib: The census was given library "nonsense"; it knows transformers, timm, torchvision, diffusers.\n',
    )


def test_prove_compares_training_with_one_device(run: Run, mlp_layout: Path):
    code, out, err = run(
        "prove", GPT, "--mesh", "tp=2", "--example", "2x16", "--transform", "accumulate(2)", "--steps", 1
    )
    assert (code, err) == (0, "")
    assert out.startswith("equivalent to a single device: mesh tp=2, 1 steps, float64, ")
    wrong = ("prove", f"{HERE}.Wrong", "--layout", mlp_layout, "--mesh", "tp=2", "--example", "x=2x16:float64")
    code, out, err = run(*wrong)
    assert (code, err) == (1, "")
    assert out.startswith("NOT equivalent") and "First difference, step 0: the ou" in out
    said = json.loads(run(*wrong, "--json")[1])
    assert not said["equivalent"] and said["worst"]["output"]["error"] > 0.4
    code, out, err = run(*wrong[:-1], "x=2x3:float64")
    assert (code, out) == (2, "")
    assert err.startswith("shardlib: The model fails on this example before anything is sharded (")
    assert re.search(
        "RuntimeError: (addmm: )?mat1 and mat2 shapes cannot be multiplied", err
    )  # torch 2.15 names the op


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (GPT, "GPT does not say what it takes. Give an --example of one data rank"),
        ("weights.safetensors", '"weights.safetensors" names tensors without a forward to run'),
    ],
)
def test_prove_says_what_it_needs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, message: str):
    monkeypatch.chdir(tmp_path)
    save_file({"weight": torch.zeros(2)}, tmp_path / "weights.safetensors")
    code, out, err = run("prove", model, "--mesh", "tp=2")
    assert (code, out) == (2, "")
    assert err.startswith(f"shardlib: {message}")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_can_complete_commands_and_options(capsys: pytest.CaptureFixture[str], shell: str):
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    script = capsys.readouterr().out
    assert ended.value.code == 0 and all(word in script for word in ("prove", "doctor", "--transform"))


def test_errors_are_json_too_when_asked(run: Run):
    code, out, err = run("plan", GPT, "--mesh", "tp=x", "--json")
    assert (code, err) == (2, "")
    assert json.loads(out)["error"]["kind"] == "MeshError"


def test_a_model_may_be_named_by_its_file(run: Run, tmp_path: Path):
    (tmp_path / "my_own_net.py").write_text("from torch import nn\n\ndef net():\n    return nn.Linear(4, 8)\n")
    (tmp_path / "l.toml").write_text('[params]\n"**" = "replicate"\n')
    code, out, err = run("plan", f"{tmp_path}/my_own_net.py:net", "--mesh", "dp=2", "--layout", tmp_path / "l.toml")
    assert (code, err) == (0, "")
    assert "Plan on dp=2 (2 ranks): 2 tensors, 40 parameters, 160 B" in out


def test_a_layout_that_had_to_be_guessed_is_said_aloud(run: Run):
    code, _, err = run("plan", f"{HERE}:MLP", "--mesh", "tp=2")
    assert code == 0
    assert err.startswith("shardlib: There is no layout file for tests.cli.models_for_cli.MLP")


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), ([], 2), (["plan", GPT], 2), (["paln"], 2)])
def test_usage_is_explained(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code
    out, err = capsys.readouterr()
    assert (out + err).startswith("usage: shardlib ")


@pytest.mark.parametrize("typed", ["--help", "--version", "plan --help", "--print-completion bash"])
def test_what_says_only_how_to_type_does_not_wait_for_torch(typed: str):
    probe = (
        "import sys\nfrom shardlib.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n"
        "    assert not {'torch', 'numpy', 'rich'} & set(sys.modules), sorted(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", probe, *typed.split()], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout, run.stderr


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"shardlib {version('shardlib')}, torch {version('torch')}\n"


def test_it_runs_as_a_program_in_a_folder_with_the_user_s_own_model(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\ndef model():\n    return nn.Sequential(nn.Linear(4, 8))\n"
    )
    (tmp_path / "mine.toml").write_text('[params]\n"0" = "colwise"\n')
    program = [sys.executable, "-m", "shardlib.cli", "check", "mine:model", "--layout", "mine.toml", "--mesh", "tp=4"]
    ended = subprocess.run(program, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[-2] == "The layout fits mine:model on tp=4."


def test_plan_takes_transforms_as_they_print(run: Run):
    code, out, err = run(
        "plan",
        GPT,
        "--mesh",
        "dp=2,tp=2",
        "--transform",
        "zero(2) | offload()",
        "--transform",
        "accumulate(4)",
        "--json",
    )
    expected = make_plan(tiny(), "dp=2,tp=2", layouts.load("example_gpt")) | zero(2) | offload() | accumulate(4)
    assert (code, err) == (0, "")
    assert out == expected.to_json()


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("zero(4)", 2, "shardlib: --transform: zero(4): the stages are 1"),
        ("__import__('os')", 2, "shardlib: --transform: Transform \"__import__('os')\" cannot be read"),
        ("zero(1, axis='tp')", 1, 'shardlib: zero(1, axis="tp"): "tp" is a model axis'),
    ],
)
def test_a_transform_that_cannot_be_is_refused(run: Run, text: str, code: int, said: str):
    ended, out, err = run("plan", GPT, "--mesh", "dp=2,tp=2", "--transform", text)
    assert (ended, out) == (code, "")
    assert err.startswith(said)


def test_check_types_a_layout_for_jax_on_devices_that_are_not_there(run: Run, tmp_path: Path):
    code, out, _ = run("check", GPT, "--mesh", "dp=512,tp=4", "--jax", "--example", "1x16")
    assert code == 0
    assert "On JAX, nothing ambiguous: " in out and "on 2,048 devices (dp=512,tp=4)" in out
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('unmatched = "replicate"\n[params]\n"mlp.up" = "colwise"\n"mlp.down" = "colwise"\n')
    code, out, _ = run("check", GPT, "--mesh", "tp=4", "--layout", wrong, "--jax", "--example", "1x16", "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["problems"]) == (1, False, [])
    assert found["jax"]["findings"][0]["module"] == "blocks.0.mlp.down"
    code, _, err = run("check", GPT, "--jax")
    assert code == 2
    assert "GPT does not say what it takes. Give an --example" in err
    assert run("check", GPT, "--example", "1x16")[0] == 2


FUNCTION = """
import jax
import jax.numpy as jnp


def init():
    return {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}


def loss(params, batch):
    h = jax.nn.relu(batch["x"] @ params["up"])
    return jnp.square(h @ params["down"] - batch["y"]).mean()


number = 3
"""


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a function of JAX, and two layouts."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "function_for_cli.py").write_text(FUNCTION)
    (tmp_path / "right.toml").write_text('[params]\n"up" = "in out@tp"\n"down" = "in@tp out"\n')
    (tmp_path / "wrong.toml").write_text('[params]\n"*" = "in out@tp"\n')
    return tmp_path


def _function(folder: Path, layout: str = "right.toml", *more: object) -> list[object]:
    file = folder / "function_for_cli.py"
    shapes = ["--example", "x=2x64:float32", "--example", "y=2x64:float32"]
    return ["check", f"{file}:loss", "--params", f"{file}:init", "--mesh", "dp=4,tp=8", *shapes,
            "--layout", folder / layout, *more]  # fmt: skip


def test_check_types_a_function_of_jax(run: Run, function: Path):
    code, out, err = run(*_function(function))
    assert (code, err) == (0, "")
    assert "On JAX, nothing ambiguous: " in out and "a call: 2 sums" in out
    assert "The layout fits" in out
    code, out, _ = run(*_function(function, "wrong.toml", "--json"))
    found = json.loads(out)["jax"]["findings"]
    assert (code, len(found), found[0]["code"]) == (1, 1, FUNCTION.splitlines()[-4].strip())
    assert found[0]["line"] == "function_for_cli.py:12 in loss"


def test_check_compares_with_a_golden_file(run: Run, function: Path):
    golden = function / "golden.json"
    code, out, err = run(*_function(function, "right.toml", "--golden", golden))
    assert (code, out) == (2, "")
    assert err == f'shardlib: There is no golden file "{golden}"; --update writes it.\n'
    assert run(*_function(function, "right.toml", "--golden", golden, "--update"))[0] == 0
    assert run(*_function(function, "right.toml", "--golden", golden))[0] == 0
    (function / "other.toml").write_text('[params]\n"*" = "in out"\n')
    code, out, _ = run(*_function(function, "other.toml", "--golden", golden))
    assert code == 1  # although it is clear
    assert '\n-  "moved": {"sum": 2},\n+  "moved": {"sum": 1},\n' in out
    assert "--update writes it" in out and "The layout does not fit" in out
    code, out, _ = run(*_function(function, "other.toml", "--golden", golden, "--json"))
    assert (code, json.loads(out)["ok"]) == (1, False)
    assert json.loads(golden.read_text())["moved"] == {"sum": 2}


def test_a_model_of_torch_has_a_golden_file(run: Run, tmp_path: Path):
    given = "check", GPT, "--mesh", "dp=2,tp=4", "--jax", "--example", "1x16", "--golden", tmp_path / "gpt.json"
    assert run(*given, "--update")[0] == 0
    assert run(*given)[0] == 0
    (tmp_path / "gpt.json").write_text((tmp_path / "gpt.json").read_text().replace("@dp", "@pp"))
    assert run(*given)[0] == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["MODULE:loss", "--params", "MODULE:init"], "is checked as a function of JAX, since --params is given; give"),
        (["MODULE:number", "--params", "MODULE:init", "--layout", "LAYOUT"], "is of type int; give a function of JAX"),
        (["MODULE:los", "--params", "MODULE:init", "--layout", "LAYOUT"], 'has no "los". Did you mean "loss"?'),
        (["MODULE:loss", "--params", "MODULE:loss", "--layout", "LAYOUT"], "makes no tree of arrays: loss() missing 2"),
        (
            ["MODULE:loss", "--params", "MODULE:init", "--layout", "LAYOUT", "--example", "2x64:flot32"],
            '"flot32" is not a dtype, as "int64" or "bfloat16" are. Did you mean "float32"?',
        ),
        ([GPT, "--golden", "golden.json"], "`shardlib check --golden` compares what --jax finds; add --jax."),
        ([GPT, "--jax", "--update"], "`shardlib check --update` writes the file of --golden; add --golden FILE."),
    ],
)
def test_a_function_that_cannot_be_checked_is_refused(run: Run, function: Path, given: list[str], said: str):
    names = {"MODULE": f"{function}/function_for_cli.py", "LAYOUT": f"{function}/right.toml"}
    code, out, err = run("check", *(re.sub("MODULE|LAYOUT", lambda m: names[m[0]], each) for each in given))
    assert (code, out) == (2, "")
    assert said in err


def test_a_plan_with_a_cluster_says_how_long_a_step_is_or_what_would_make_it_fit(run, tmp_path):
    given = ["plan", "torch.nn:Identity", "--mesh", "dp=2", "--cluster", "h100"]
    code, _, err = run(*given)
    assert code == 2 and "give --example" in err
    code, out, _ = run("plan", GPT, "--mesh", "dp=2", "--example", "2x16:int64", "--cluster", "h100")
    assert code == 0 and "MFU" in out and "memory at the peak" in out
    small = tmp_path / "small.toml"
    small.write_text(Cluster.preset("h100").replace(name="small", memory=100_000).to_toml())
    code, _, err = run("plan", GPT, "--mesh", "dp=2", "--example", "2x16:int64", "--cluster", small)
    assert code == 1 and "it lacks" in err


def test_tune_prints_the_best_plans_and_writes_what_is_asked_for(run, tmp_path):
    asked = ["tune", GPT, "--cluster", "cpu", "--world", "2", "--batch", "8", "--example", "1x16:int64"]
    page, script = tmp_path / "plans.html", tmp_path / "train_it.py"
    code, out, _ = run(*asked, "--axes", "tp=1,pp=1", "--html", page, "--script", script)
    assert code == 0 and "To use the best one" in out and "<svg" in page.read_text()
    assert "sl.shard_model(model" in script.read_text()
    compile(script.read_text(), "train_it.py", "exec")
    code, _, err = run(*asked, "--axes", "tp=1,pp=1", "--script", script)
    assert code == 2 and "is there already" in err
    code, out, _ = run(*asked, "--axes", "tp=1,pp=1", "--json")
    assert json.loads(out)["plans"][0]["mesh"] == "dp=2"
    code, _, err = run("tune", GPT, "--cluster", "h1", "--world", "2", "--batch", "8", "--example", "1x16:int64")
    assert code == 1 and "No cluster is called" in err


def test_files_that_cannot_be_written_are_named_before_the_search(run, tmp_path):
    asked = ["tune", GPT, "--cluster", "cpu", "--world", "2", "--batch", "8", "--example", "1x16:int64"]
    page, script = tmp_path / "none" / "plans.html", tmp_path / "train_it.py"
    code, out, err = run(*asked, "--axes", "tp=1,pp=1", "--html", page, "--script", script)
    assert code == 2 and f'"{page}" cannot be written' in err and not out and not script.exists()
    code, out, err = run("plan", GPT, "--mesh", "dp=2", "--html", page)
    assert code == 2 and f'"{page}" cannot be written' in err and not out
