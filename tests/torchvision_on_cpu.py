"""Import torchvision beside a torch that its C++ part was not built for (the CPU build of the same version).

Its Python models need none of the C++ operators, but importing it registers fake kernels for two of them and fails
where they do not exist. Naming them first is enough. Importable on ranks of the pool, in a test, and, through
`tests/at_start`, by scripts that know nothing of it. Run as a script, it lets torchvision in at every start of this
environment's Python: `make` does so where it needs it.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

_SCHEMAS = "nms", "qnms"
_KEPT: list[Any] = []  # definitions live as long as the Library object


class _NamesOperators:
    """Finds no module. It names the operators when the one that registers the fake kernels is looked for."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision._meta_registrations":
            _name_operators()


def _name_operators() -> None:
    import torch

    for name in _SCHEMAS:
        if not hasattr(torch.ops.torchvision, name):
            _KEPT.append(torch.library.Library("torchvision", "FRAGMENT"))
            _KEPT[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def let_torchvision_in() -> None:
    """Let `import torchvision` succeed in this process."""
    if _NamesOperators not in sys.meta_path:
        sys.meta_path.insert(0, _NamesOperators)  # type: ignore[arg-type]


def import_torchvision() -> ModuleType:
    """The torchvision module."""
    let_torchvision_in()
    import torchvision

    return torchvision


def install(folder: Path) -> None:
    """Let torchvision in at every start of a Python that reads this folder for packages."""
    shutil.copyfile(__file__, folder / Path(__file__).name)
    (folder / "torchvision_on_cpu.pth").write_text(
        "import torchvision_on_cpu; torchvision_on_cpu.let_torchvision_in()\n"
    )


if __name__ == "__main__":
    install(Path(sysconfig.get_path("purelib")))
