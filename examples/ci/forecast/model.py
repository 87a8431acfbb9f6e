"""A transformer that forecasts time series. It knows of one device."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    """Every step sees those before it. Four heads ask two heads of keys and values, which one layer makes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, steps, width = x.shape
        q = self.q(x).view(batch, steps, 4, width // 4).transpose(1, 2)
        k, v = self.kv(x).view(batch, steps, 2, 2, width // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, steps, width))


class Gated(nn.Module):
    """Gate and value are made by one layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 6 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.dropout1 = nn.RMSNorm(width), Attention(width), nn.Dropout(0.1)
        self.norm2, self.gated, self.dropout2 = nn.RMSNorm(width), Gated(width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.gated(self.norm2(x)))


class Forecaster(nn.Module):
    """From `(batch, steps, 3)` measurements to as many forecasts of the step that follows each."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.entry = nn.Linear(3, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.exit = nn.RMSNorm(width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return self.exit(self.norm(x))
