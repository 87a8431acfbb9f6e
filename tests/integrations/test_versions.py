"""An adapter warns when it is imported beside a version of its host that it was not tested with."""

from __future__ import annotations

import re
import warnings
from importlib.metadata import version

import pytest

from shardlib.integrations._versions import warn_if_untested
from tests.house.source import ROOT


@pytest.mark.parametrize("host", ["accelerate", "transformers", "lightning"])
def test_an_untested_version_warns_and_the_installed_one_is_tested(host: str):
    source = (ROOT / f"shardlib/integrations/{host}.py").read_text()
    (tested,) = re.findall(rf'^warn_if_untested\("{host}", {host}.__version__, "([\d.]+)"\)$', source, re.MULTILINE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested(host, version(host), tested)
    for other in (f"{tested}1", "99.1.0"):
        with pytest.warns(UserWarning, match=rf"was tested with {host} {tested}, and {other} is installed\.$"):
            warn_if_untested(host, other, tested)
