"""Import torchvision beside a torch that its C++ part was not built for (the CPU build of the same version).

Its Python models need none of the C++ operators, but importing it registers fake kernels for two of them and fails
where they do not exist. Naming them first is enough. Importable on ranks of the pool as well as in a test.
"""

from __future__ import annotations

from types import ModuleType

import torch

_SCHEMAS = "nms", "qnms"
_KEPT: list[torch.library.Library] = []  # definitions live as long as the Library object


def import_torchvision() -> ModuleType:
    """The torchvision module."""
    try:
        import torchvision
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        _KEPT.append(torch.library.Library("torchvision", "DEF"))
        for name in _SCHEMAS:
            _KEPT[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision
    return torchvision
