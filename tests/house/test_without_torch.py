"""Layouts, rules, plans and rules on trees of JAX work in an environment in which torch is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_OF_TORCH = ("torch", "functorch", "torchgen", "nvidia", "triton")

_SCRIPT = """
import importlib.util, json, sys

assert importlib.util.find_spec("torch") is None
import jax
import shardlib as sl
import shardlib.jax as sj
from shardlib.jax import rules as tree_rules

tree = {"layers": [{"up": {"kernel": jax.ShapeDtypeStruct((8, 32), "bfloat16")}} for _ in range(2)]}
rules = sl.Rules({"up": "colwise"})
plan = tree_rules.plan(tree, "dp=2,tp=2", rules, transforms=[sl.zero(3)])
mesh = sj.make_mesh("dp=2,tp=2")
specs = sj.shardings(tree, mesh, plan)
checked = sj.check_layouts(
    lambda params, x: x @ params["layers"][0]["up"]["kernel"], "dp=2,tp=2", rules,
    example=(tree, jax.ShapeDtypeStruct((4, 8), "bfloat16")),
)
config = {"mesh_axes": ["fsdp", "tensor"], "logical_axis_rules": [["embed", "fsdp"], ["mlp", ["tensor"]]]}
print(json.dumps({
    "maxtext": str(sl.Rules.from_maxtext(config, {"wi": ("embed", "mlp")}, "fsdp=2")),
    "checked": (checked.ok, checked.lines[-1].values),
    "read": str(sl.Rules.from_partition_specs({"up.kernel": jax.P("dp", "tp")}).to_partition_specs(tree, "dp=2,tp=2")),
    "layout": str(sl.Layout.parse("batch@dp embed : bfloat16 host").resolve((8, 4), "dp=2")),
    "stored": str(plan["layers.0.up.kernel"].stored),
    "bytes": plan.memory().parameters,
    "table": "layers.{0-1}.up.kernel" in str(plan),
    "same": sl.Plan.from_json(plan.to_json()) == plan,
    "page": "<html" in open(plan.html(sys.argv[1]) or sys.argv[1]).read(),
    "diff": str(plan.diff(tree_rules.plan(tree, "dp=2,tp=2", rules))) != "",
    "coverage": rules.coverage(tree).unmatched_bytes,
    "explained": "spec     P(None, 'tp')" in rules.explain("layers.0.up.kernel", tree, "dp=2,tp=2"),
    "spec": str(specs["layers"][0]["up"]["kernel"].spec),
    "placement": str(sl.Rules({"up.kernel": "Shard(1)"}).resolve(tree, "tp=2").tensors["layers.1.up.kernel"].layout),
    "mesh": str(sl.MeshShape.of(mesh)),
}))
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All installed packages but torch's."""
    folder = tmp_path_factory.mktemp("packages")
    for package in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not package.name.startswith(_OF_TORCH) and package.suffix != ".pth":
            (folder / package.name).symlink_to(package)
    return folder


def _run(packages: Path, *arguments: str) -> str:
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(packages)!r}]; "
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code + arguments[0], *arguments[1:]],
        capture_output=True,
        text=True,
        env={key: value for key, value in environment.items() if key != "PYTHONPATH"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_tree_is_planned_and_sharded(packages: Path, tmp_path: Path):
    assert json.loads(_run(packages, f"exec({_SCRIPT!r})", str(tmp_path / "plan.html"))) == {
        "maxtext": 'Rules({"^wi": "embed@fsdp mlp"})',
        "checked": [True, ["(4@dp 32@tp)"]],
        "read": "{'layers': [" + ", ".join(["{'up': {'kernel': P('dp', 'tp')}}"] * 2) + "]}",
        "layout": "batch@dp embed : bfloat16 host",
        "stored": "in@dp out@tp",
        "bytes": 256,
        "table": True,
        "same": True,
        "page": True,
        "diff": True,
        "coverage": 0,
        "explained": True,
        "spec": "P('dp', 'tp')",
        "placement": "_ _@tp",
        "mesh": "dp=2,tp=2",
    }


@pytest.mark.parametrize(("package", "name"), [("shardlib", "shard_model"), ("shardlib.jax", "compile_model")])
def test_what_needs_torch_says_so(packages: Path, package: str, name: str):
    code = f"""
import importlib
from shardlib.errors import VersionError
try:
    getattr(importlib.import_module({package!r}), {name!r})
except VersionError as error:
    print(error)
"""
    said = _run(packages, f"exec({code!r})")
    assert said.startswith(f"{package}.{name} needs PyTorch, which is not installed. Run `pip install torch`")


def test_the_command_line_shows_its_help(packages: Path):
    code = "from shardlib.cli import main; sys.argv = ['shardlib', '--help']; main(['--help'])"
    assert "prove" in _run(packages, code)


def test_the_command_line_checks_a_function_of_jax(packages: Path, tmp_path: Path):
    (tmp_path / "model.py").write_text(
        "import jax.numpy as jnp\n\n\ndef init():\n    return {'up': jnp.ones((8, 8))}\n\n\n"
        "def apply(params, x):\n    return x @ params['up']\n"
    )
    (tmp_path / "rules.toml").write_text('[params]\n"up" = "in@tp out"\n')
    options = ["--params", f"{tmp_path}/model.py:init", "--layout", f"{tmp_path}/rules.toml", "--mesh", "dp=4,tp=8"]
    code = "from shardlib.cli import main; sys.exit(main(sys.argv[1:]))"
    said = _run(packages, code, "check", f"{tmp_path}/model.py:apply", *options, "--example", "2x8:float32")
    assert "On JAX, nothing ambiguous: " in said and "a call: 1 sum" in said


def test_where_torch_is_installed_it_is_not_imported_either():
    modules = ["layout", "rules", "layouts", "transforms", "_plan", "jax.rules", "cli"]
    code = f"""
import importlib, sys
for module in {modules}:
    importlib.import_module("shardlib." + module)
    assert "torch" not in sys.modules, module
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
