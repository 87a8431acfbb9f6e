"""Imports of every form, one by one: what stands in their place, and what is said of the rest."""

from __future__ import annotations

import textwrap

import pytest

from shardlib.cli.rewrite import Rewritten, look_up, rewrite

# A script, and the script that it becomes.
FORMS = {
    "a name": ("from colossalai.booster import Booster\n", "from shardlib.booster import Booster\n"),
    "from a deep module": (
        "from colossalai.booster.plugin.gemini_plugin import GeminiPlugin as G  # zero\n",
        "from shardlib.booster import GeminiPlugin as G  # zero\n",
    ),
    "several lines keep their form": (
        "from colossalai.nn.optimizer import (  # ours\n    HybridAdam,  # on both\n    Lamb as L,\n)\n",
        "from shardlib.optim import (  # ours\n    HybridAdam,  # on both\n    Lamb as L,\n)\n",
    ),
    "names of several modules": (
        """\
        def build():
            from colossalai.nn import (
                HybridAdam,  # the optimizer
                CosineAnnealingWarmupLR,
            )  # both
        """,
        """\
        def build():
            # the optimizer
            from shardlib.optim import HybridAdam
            from shardlib.optim.lr_scheduler import CosineAnnealingWarmupLR  # both
        """,
    ),
    "on a line with others": (
        "if fast: from colossalai.nn import Lamb, StepLR; x = 1\n",
        "if fast: from shardlib.optim import Lamb; from shardlib.optim.lr_scheduler import StepLR; x = 1\n",
    ),
    "many names": (
        "from colossalai import Booster, GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, Lamb\n",
        """\
        from shardlib.booster import (
            Booster,
            GeminiPlugin,
            HybridParallelPlugin,
            LowLevelZeroPlugin,
        )
        from shardlib.optim import Lamb
        """,
    ),
    "the package": (
        "import os, colossalai, sys\ncolossalai.launch_from_torch(seed=1)\n",
        "import os, shardlib.booster as colossalai, sys\ncolossalai.launch_from_torch(seed=1)\n",
    ),
    "the package, for a config and an engine": (
        "import colossalai\nfrom colossalai.core import global_context as gpc\ncolossalai.launch_from_torch(config)\n",
        """\
        import shardlib.trainer as colossalai
        from shardlib.trainer import global_context as gpc
        colossalai.launch_from_torch(config)
        """,
    ),
    "the package, and modules of it": (
        """\
        import colossalai
        colossalai.launch_from_torch()
        é = "é"; adam = colossalai.nn.optimizer.HybridAdam(p); b = colossalai.booster.Booster()
        """,
        """\
        import shardlib.booster as colossalai, shardlib.optim
        colossalai.launch_from_torch()
        é = "é"; adam = shardlib.optim.HybridAdam(p); b = colossalai.Booster()
        """,
    ),
    "a module": (
        "import colossalai.nn.optimizer as o\nfrom colossalai.booster import plugin\no.Lamb, plugin.GeminiPlugin\n",
        "import shardlib.optim as o\nfrom shardlib import booster as plugin\no.Lamb, plugin.GeminiPlugin\n",
    ),
    "a package that may be missing": (
        "try:\n    import colossalai\nexcept ImportError:\n    colossalai = None\nassert colossalai is not None\n",
        """\
        try:
            import shardlib.booster as colossalai
        except ImportError:
            colossalai = None
        assert colossalai is not None
        """,
    ),
    "another thing of the same name": (
        "def f(booster):\n    return booster.Lamb\ndef g():\n    from colossalai import booster\n    booster.Booster\n",
        "def f(booster):\n    return booster.Lamb\ndef g():\n    from shardlib import booster\n    booster.Booster\n",
    ),
    "fairscale's": (
        "from fairscale.nn.pipe import Pipe\nfrom fairscale.nn import Pipe as P\n",
        "from shardlib.booster import Pipe\nfrom shardlib.booster import Pipe as P\n",
    ),
}


def _checked(source: str) -> Rewritten:
    """What becomes of a script, where a second time changes nothing more and says the same."""
    after = rewrite(source)
    again = rewrite(after.text)
    assert again.text == after.text
    assert [(r.name, r.advice, r.left) for r in again.remarks] == [(r.name, r.advice, r.left) for r in after.remarks]
    compile(after.text, "script.py", "exec")
    return after


@pytest.mark.parametrize("form", FORMS)
def test_imports_are_rewritten_in_place(form: str):
    before, expected = map(textwrap.dedent, FORMS[form])
    after = _checked(before)
    assert after.text == expected and after.remarks == () and after.found


# A script of which something is left; the line of the remark, what it names, and how its advice begins.
LEFT = {
    "a name that is not here": (
        "from colossalai.booster import Booster, Accelerate\n",
        (1, "colossalai.booster.Accelerate", "shardlib has nothing of this name."),
    ),
    "a misspelt one": (
        "from colossalai import Boster\n",
        (1, "colossalai.Boster", 'shardlib has nothing of this name. Did you mean "Booster"?'),
    ),
    "a whole module": ("import colossalai.fx as fx\nfx.trace()\n", (2, "colossalai.fx.trace", "Models are not traced")),
    "a module imported by name": (
        "from colossalai import kernel\n",
        (1, "colossalai.kernel", "Call torch's own kernels"),
    ),
    "an attribute of the package": (
        "import colossalai\ncolossalai.launch()\ncolossalai.__version__\n",
        (3, "colossalai.__version__", "The version of ColossalAI says nothing"),
    ),
    "a star": ("from colossalai.booster import *\n", (1, "colossalai.booster.*", "A star says no names")),
    "a module that is passed on": (
        "import colossalai\ncolossalai.launch()\ngetattr(colossalai, name)\n",
        (3, "colossalai", "The module itself is used here"),
    ),
    "a module that is not used": (
        "import colossalai.kernel as k\n",
        (1, "colossalai.kernel", "The script uses nothing"),
    ),
    "an import by a call": (
        'import importlib\nimportlib.import_module("colossalai.booster")\n',
        (2, "colossalai.booster", "It is imported by a call"),
    ),
    "a keyword that is refused": (
        "from colossalai.booster.plugin import GeminiPlugin as G\nG(hidden_dim=64,\n    fp8_communication=True)\n",
        (3, "GeminiPlugin(fp8_communication=)", "gradients are sent"),
    ),
    "one that nobody has": (
        "import colossalai\ncolossalai.booster.GeminiPlugin(tp_siz=2)\n",
        (2, "GeminiPlugin(tp_siz=)", 'GeminiPlugin has no such keyword. Did you mean "tp_size"?'),
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_is_said_once_and_again_after_rewriting(case: str):
    source, (line, name, advice) = LEFT[case]
    (remark,) = _checked(source).remarks
    assert (remark.line, remark.name, remark.left) == (line, name, True)
    assert remark.advice.startswith(advice)


def test_a_keyword_whose_value_is_known_when_it_runs_is_only_noted():
    source = "from colossalai.booster.plugin import GeminiPlugin\nGeminiPlugin(fp8_communication=args.fp8)\n"
    (remark,) = _checked(source).remarks
    assert not remark.left and remark.advice.startswith("A value other than False is refused: ")


def test_other_scripts_are_left_alone():
    source = "import torch\nfrom .colossalai import x\nimport colossal\n"
    assert rewrite(source) == Rewritten(source, (), found=False)


def test_a_name_is_looked_up_in_the_longest_module():
    assert look_up("colossalai.nn.lr_scheduler.cosine", "CosineAnnealingLR") == (["shardlib.optim.lr_scheduler"], "")
    assert look_up("colossalai.inference", "launch")[0] == []  # `launch` is colossalai's, and nothing of its inference


FORMER = """import shardlib as sl
from shardlib import plan_of, register_elementwise, shard_model, fit as squeeze, register_dims  # names

@register_elementwise
class Own(torch.optim.SGD): ...
sl.register_per_tensor(Lamb)
register_dims(Own, weight="out in"); plan_of(model); squeeze("1GB")
model.plan_of, sl.Plan, sl.get_grad_norm(model), sl.fit("1GB")
"""
PRESENT = """import shardlib as sl
from shardlib import get_plan, register_optimizer, shard_model, fit_memory as squeeze
from shardlib.rules import register_dims  # names

@register_optimizer(needs="shard")
class Own(torch.optim.SGD): ...
sl.register_optimizer(needs="tensor")(Lamb)
register_dims(Own, weight="out in"); get_plan(model); squeeze("1GB")
model.plan_of, sl.Plan, sl.booster.get_grad_norm(model), sl.fit_memory("1GB")
"""


def test_former_names_of_shardlib_become_the_present_ones():
    made = rewrite(FORMER)
    assert (made.text, made.remarks, made.found) == (PRESENT, (), True)
    assert rewrite(PRESENT) == Rewritten(PRESENT, (), found=False)


def test_a_former_name_that_a_script_assigns_keeps_it():
    script = "from shardlib import {}, get_plan\nfit = fit('1GB')\nprint(fit)\n"
    assert rewrite(script.format("fit")).text == script.format("fit_memory as fit")
