"""64 random bits for every element of a tensor, from a key and the element's index alone.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) walks its state by a
constant gamma and hashes it. Element i of a stream is therefore `mix(start + i * gamma)`: it does not depend on earlier
draws, and a rank computes only its local elements. As in the paper's `split`, each key determines its own start and odd
gamma, so that two streams are not shifted copies of each other.

PyTorch has no unsigned arithmetic, but int64 wraps as uint64 does; only right shifts need a mask for the bits that
sign extension fills. Everything is integer arithmetic: all devices give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shardlib.engine.feature.exact._local_elements import LocalElements, blocks_of

__all__ = ["GOLDEN", "Stream", "bits"]

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, made odd
_CHUNK = 1 << 15  # elements: two buffers of 256 KiB stay in a core's cache (fastest of the sizes tried on CPU)
_CHUNK_ON_DEVICE = 1 << 24


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix(z: int) -> int:
    """Compute Stafford's variant 13 of the finaliser of MurmurHash3."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _mix_gamma(z: int) -> int:
    """Return an odd number with enough 01 and 10 bit pairs to change all bits of the state (the paper's `mixGamma`)."""
    z = ((z ^ (z >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
    z = ((z ^ (z >> 33)) * 0xC4CEB9FE1A85EC53) & _MASK
    z = (z ^ (z >> 33)) | 1
    return z ^ 0xAAAAAAAAAAAAAAAA if (z ^ (z >> 1)).bit_count() < 24 else z


@dataclass(frozen=True)
class Stream:
    """The start and the increment of a stream, both modulo 2**64.

    >>> torch.cat([chunk for _, chunk in bits(Stream(0), LocalElements.all_of((2,)), torch.device("cpu"))]).tolist()
    [-2152535657050944081, 7960286522194355700]
    """

    start: int
    gamma: int = GOLDEN

    @classmethod
    def of(cls, key: int) -> Stream:
        """Return the stream of a key: `split()` of a generator whose state is the key."""
        return cls(_mix(key + GOLDEN), _mix_gamma(key + 2 * GOLDEN))


def bits(stream: Stream, elements: LocalElements, device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield 64 bits for each local element, in chunks: a slice of the flat local tensor, and the bits as int64.

    The next chunk reuses the memory of the previous one.
    """
    chunk = _CHUNK if device.type == "cpu" else _CHUNK_ON_DEVICE
    outer, inner = blocks_of(elements)
    if not inner or not len(outer):
        return
    per = min(inner, chunk)
    steps = torch.arange(per, device=device).mul_(_signed(stream.gamma))
    if len(outer) == 1 and inner <= chunk:
        z = steps.add_(_signed(stream.start + (outer[0] + 1) * stream.gamma))
        yield slice(0, inner), _mixed(z, torch.empty_like(z))
        return
    first = torch.tensor(outer, device=device).mul_(_signed(stream.gamma))
    first.add_(_signed(stream.start + stream.gamma))
    rows = chunk // per
    memory = torch.empty(2, min(rows, len(first)) * per, dtype=torch.int64, device=device)
    for row in range(0, len(first), rows):
        count = min(rows, len(first) - row)
        for at in range(0, inner, per):
            width = min(per, inner - at)
            z, spare = memory[:, : count * width].unbind()
            start = first[row : row + count] + _signed(at * stream.gamma)
            torch.add(start.unsqueeze(1), steps[:width], out=z.view(count, width))
            begin = row * inner + at
            yield slice(begin, begin + count * width), _mixed(z, spare)


def _mixed(z: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Apply `_mix` to each element, in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        _xor_shifted(z, shift, spare)
        z.mul_(_signed(factor))
    return _xor_shifted(z, 31, spare)


def _xor_shifted(z: torch.Tensor, shift: int, spare: torch.Tensor) -> torch.Tensor:
    torch.bitwise_right_shift(z, shift, out=spare)
    spare.bitwise_and_((1 << (64 - shift)) - 1)
    return z.bitwise_xor_(spare)
