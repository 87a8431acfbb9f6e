"""Muon of torch (Jordan et al. 2024), for matrices; the engine gives it full tensors."""

from __future__ import annotations

from torch.optim import Muon

__all__ = ["Muon"]
