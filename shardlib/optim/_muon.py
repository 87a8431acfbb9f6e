"""Muon, which is torch's own (Jordan et al. 2024), for matrices; the engine steps on full tensors for it."""

from __future__ import annotations

from torch.optim import Muon

__all__ = ["Muon"]
