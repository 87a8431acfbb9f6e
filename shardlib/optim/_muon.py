"""Muon is torch's own (Jordan et al. 2024), for matrices; the engine knows that it needs whole ones."""

from __future__ import annotations

from torch.optim import Muon

__all__ = ["Muon"]
