"""The ground that the other tests stand on."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist


def _sum_of_ranks(scale: float) -> float:
    total = torch.tensor(scale * dist.get_rank())
    dist.all_reduce(total)
    return total.item()


def test_functions_of_a_test_module_run_on_ranks(ranks):
    assert ranks(3).run(_sum_of_ranks, 2.0) == [6.0, 6.0, 6.0]


def test_torchvision_models_run_beside_the_cpu_build_of_torch(torchvision: ModuleType):
    assert torchvision.models.resnet18(num_classes=10)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
