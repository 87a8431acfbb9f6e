"""Optimizers and learning rate schedulers under the names that ColossalAI's users know, on torch's own machinery.

Plain `torch.optim` classes: they need no ranks and no sharded model. Those that need full tensors are registered with
the engine, which steps them on full tensors on any mesh.
"""

from __future__ import annotations

from shardlib.optim import lr_scheduler
from shardlib.optim._adafactor import Adafactor, DistributedAdaFactor
from shardlib.optim._adam import CPUAdam, FusedAdam, HybridAdam
from shardlib.optim._came import CAME, DistributedCAME
from shardlib.optim._galore import GaLoreAdamW, get_galore_param_groups
from shardlib.optim._lamb import DistributedLamb, FusedLAMB, Lamb
from shardlib.optim._lars import Lars
from shardlib.optim._muon import Muon
from shardlib.optim._sgd import FusedSGD

__all__ = [
    "CAME",
    "Adafactor",
    "CPUAdam",
    "DistributedAdaFactor",
    "DistributedCAME",
    "DistributedLamb",
    "FusedAdam",
    "FusedLAMB",
    "FusedSGD",
    "GaLoreAdamW",
    "HybridAdam",
    "Lamb",
    "Lars",
    "Muon",
    "get_galore_param_groups",
    "lr_scheduler",
]
