"""Configs: what a key is, what a file gives, which slips are refused."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from pathlib import Path

import pytest

from shardlib.booster.config import Config, Section
from shardlib.errors import LaunchError

PYTHON = """
from __future__ import annotations
import math
from fractions import Fraction
from beside import WIDTH

_hidden = 3

def helper():
    return 2 * WIDTH

BATCH_SIZE = helper()
half = Fraction(1, 2)
parallel = dict(pipeline=2, tensor=dict(size=4, mode="1d"))
gradient_handler = [dict(type="Mine")]
"""
TOML = 'BATCH_SIZE = 16\n[parallel]\npipeline = 2\n[parallel.tensor]\nsize = 4\nmode = "1d"\n'


def test_a_python_file_gives_its_names_but_neither_code_nor_what_is_hidden(tmp_path: Path):
    (tmp_path / "beside.py").write_text("WIDTH = 8\n")
    (tmp_path / "config.py").write_text(PYTHON)
    path = list(sys.path)
    config = Config.from_file(tmp_path / "config.py")
    assert set(config) == {"WIDTH", "BATCH_SIZE", "half", "parallel", "gradient_handler"}
    assert (config.BATCH_SIZE, config.parallel.tensor.size, config.gradient_handler[0].type) == (16, 4, "Mine")
    assert sys.path == path


def test_a_toml_file_gives_the_same_as_its_dict(tmp_path: Path):
    (tmp_path / "config.toml").write_text(TOML)
    expected = {"BATCH_SIZE": 16, "parallel": {"pipeline": 2, "tensor": {"size": 4, "mode": "1d"}}}
    assert Config.of(str(tmp_path / "config.toml")) == Config.of(expected) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "c.py",
            "a = 1\nb = a + nothing\n",
            "\"{}\": it does not run: NameError: name 'nothing' is not defined (line 2).",
        ),
        ("c.py", "a = (\n", "\"{}\": it does not run: SyntaxError: '(' was never closed (c.py, line 1) (line 1)."),
        ("c.toml", "a = \n", '"{}": it is not valid TOML: Invalid value (at line 1, column 5).'),
        (
            "c.toml",
            "paralel = 2\n",
            '"{}": The config has a key "paralel", which nothing reads. Did you mean "parallel"? If it is a key of '
            "your own, give it a name that cannot be taken for that one.",
        ),
        ("c.yaml", "a: 1\n", 'The config "{}" is neither a .py nor a .toml file; give one of these, or a dict.'),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, name: str, text: str, message: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(LaunchError) as caught:
        Config.from_file(tmp_path / name)
    assert str(caught.value) == message.format(tmp_path / name)


def test_a_missing_file_and_what_is_no_config_are_refused(tmp_path: Path):
    with pytest.raises(LaunchError) as caught:
        Config.of(tmp_path / "none.py")
    assert str(caught.value) == f'There is no config file "{tmp_path / "none.py"}" (looked for from {Path.cwd()}).'
    with pytest.raises(LaunchError, match="config was given as int; give a dict"):
        Config.of(3)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="has names as keys, and 3 is of type int"):
        Config({3: 4})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("paralel", "parallel"),
        ("paralell", "parallel"),
        ("Parallel", "parallel"),
        ("FP16", "fp16"),
        ("fp_16", "fp16"),
        ("ZERO", "zero"),
        ("gradient_acumulation", "gradient_accumulation"),
        ("clip_grad_norms", "clip_grad_norm"),
        ("gradient_handlers", "gradient_handler"),
        ("torch-ddp", "torch_ddp"),
        ("cudnn_deterministc", "cudnn_deterministic"),
        ("NUM_MICROBATCHES", "NUM_MICRO_BATCHES"),
    ],
)
def test_a_known_key_spelt_wrong_is_refused_however_it_is_set(key: str, meant: str):
    config = Config()
    for change in (lambda: Config({key: 1}), lambda: config.update({key: 1}), lambda: config.setdefault(key, 1)):
        with pytest.raises(LaunchError, match=f'has a key "{key}", which nothing reads. Did you mean "{meant}"'):
            change()
    with pytest.raises(LaunchError, match=meant):
        config |= {key: 1}
    with pytest.raises(LaunchError, match=meant):
        setattr(config, key, 1)
    assert not config


@pytest.mark.parametrize(
    "key",
    ["fp8", "bf16", "fp32", "zeros", "hero", "torch_fsdp", "hidden_size", "num_epochs", "batch_size", "SEQ_LEN"],
)
def test_a_user_s_own_key_is_kept(key: str):
    assert Config({key: 1})[key] == 1


@pytest.mark.parametrize("key", ["clip_grad_value", "clip_grad_norm_type", "gradient_clipping", "tensor_parallel"])
def test_a_long_one_of_the_user_s_own_too(key: str):
    assert Config({key: 1})[key] == 1


def test_keys_below_the_top_are_the_user_s_own():
    assert Config(model={"paralel": True}).model.paralel is True


def test_keys_are_attributes_at_every_depth():
    config = Config(a={"b": [{"c": 1}, ({"d": 2},)]})
    assert (config.a.b[0].c, config.a.b[1][0].d) == (1, 2)
    config.a.e = {"f": 3}
    assert config["a"]["e"].f == 3
    del config.a.e
    assert not hasattr(config.a, "e")
    assert isinstance(config.a, Section)
    assert not isinstance(config.a, Config)


def test_a_missing_key_names_the_nearest_and_a_method_is_no_key():
    config = Config(parallel={"tensor": 1}, items=[1])
    with pytest.raises(AttributeError) as caught:
        _ = config.parallel.tensr
    assert str(caught.value) == 'The config has no key "tensr"; it has "tensor". Did you mean "tensor"?'
    assert config["items"] == [1]
    with pytest.raises(LaunchError, match=r'"items" is what dicts call a method of theirs; write config\["items"\]'):
        config.items = 2  # type: ignore[assignment, method-assign]


def test_copies_are_equal_and_apart():
    config = Config(a={"b": 1})
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.copy()):
        assert other == config
        assert type(other) is Config
        other.a.b = 2
        assert config.a.b == 1
    assert json.loads(json.dumps(config)) == config
