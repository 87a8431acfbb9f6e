"""Run a script that imports transformers, and so torchvision, as a script: `with_torchvision.py SCRIPT ARGUMENT...`"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.torchvision_on_cpu import import_torchvision

if __name__ == "__main__":
    import_torchvision()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
