"""Real images that come with the examples: 1797 digits that people wrote by hand, 8 by 8 pixels each.

digits.csv.gz is the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, 1998 (https://doi.org/10.24432/C50P49, CC BY 4.0), as scikit-learn distributes it: a line for each
image, 64 numbers from 0 to 16 and the digit.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from train_gpt import over_ranks

FILE = Path(__file__).with_name("digits.csv.gz")
TEST_EVERY = 5  # one image in five is never trained on


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images of 1437 digits to train on and of 360 kept apart, `(1, 8, 8)` from 0 to 1, each with its digit.

    >>> train, test = digits()
    >>> len(train), len(test), tuple(train[0][0].shape), int(train[0][1])
    (1437, 360, (1, 8, 8), 1)
    """
    with gzip.open(FILE, "rt") as lines:
        table = torch.tensor([[float(number) for number in line.split(",")] for line in lines])
    images, labels = table[:, :64].reshape(-1, 1, 8, 8) / 16, table[:, 64].long()
    kept = torch.arange(len(table)) % TEST_EVERY == 0
    return TensorDataset(images[~kept], labels[~kept]), TensorDataset(images[kept], labels[kept])


@torch.no_grad()
def accuracy(
    model: nn.Module,
    loader: Iterable[Any],
    device: torch.device,
    logits_of: Callable[[Any], Tensor] = lambda output: output,
) -> float:
    """The part of all ranks' images of which the model says the digit right; it is in eval mode then."""
    model.eval()
    right, seen = torch.zeros((), device=device), torch.zeros((), device=device)
    for pictures, labels in loader:
        right += (logits_of(model(pictures.to(device))).argmax(1) == labels.to(device)).sum()
        seen += len(labels)
    return over_ranks(right) / over_ranks(seen)
