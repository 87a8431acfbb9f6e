"""Each optimizer steps as its paper says, and as torch's where torch has it. References follow definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardlib import optim
from shardlib.errors import InputError
from shardlib.optim._galore import _directions

# A step is some tens of roundings of 1.1e-16 each, and a norm or mean adds up 24 numbers.
CLOSE = {"rtol": 1e-13, "atol": 1e-15}
SHAPE = (6, 4)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


GRADS = [draw(*SHAPE, seed=i) for i in range(1, 6)]


def stepped(
    make: Callable[[Any], torch.optim.Optimizer], grads: list[torch.Tensor] = GRADS, **step: Any
) -> torch.Tensor:
    param = torch.nn.Parameter(draw(*grads[0].shape))
    optimizer = make([param])
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step(**step)
        torch.testing.assert_close(param.grad, grad, rtol=0, atol=0)
    return param.detach()


# --- torch's own ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [optim.HybridAdam, optim.CPUAdam, optim.FusedAdam])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs(kind, decoupled):
    options = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}
    of_torch = torch.optim.AdamW if decoupled else torch.optim.Adam
    ours = stepped(lambda params: kind(params, adamw_mode=decoupled, **options))
    torch.testing.assert_close(ours, stepped(lambda params: of_torch(params, **options)), **CLOSE)


def test_adam_takes_a_kernel_for_what_has_one_and_steps_the_rest_too(monkeypatch):
    fused = []
    kernel = torch._fused_adamw_
    monkeypatch.setattr(
        torch, "_fused_adamw_", lambda *args, **kw: (fused.append(len(args[0])), kernel(*args, **kw))[1]
    )

    def train(make: Any) -> list[torch.Tensor]:
        params = [torch.nn.Parameter(draw(*SHAPE)), torch.nn.Parameter(draw(*SHAPE).mT)]
        optimizer = make(params)
        for grad in GRADS:
            params[0].grad, params[1].grad = grad.clone(), grad.mT.contiguous()
            optimizer.step()
        return [param.detach() for param in params]

    ours = train(optim.HybridAdam)
    assert fused == [1] * len(GRADS)
    plain = train(lambda params: torch.optim.AdamW(params, weight_decay=0))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_adam_with_amsgrad_and_in_groups():
    def groups(params: Any) -> Any:
        return [{"params": params, "lr": 0.05, "betas": (0.5, 0.5)}]

    ours = stepped(lambda params: optim.FusedAdam(groups(params), amsgrad=True))
    plain = stepped(lambda params: torch.optim.AdamW(groups(params), weight_decay=0, amsgrad=True))
    torch.testing.assert_close(ours, plain, **CLOSE)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_without_correction_steps_along_the_averages_as_they_are(decoupled):
    ours = stepped(lambda params: optim.HybridAdam(params, 0.1, False, (0.8, 0.9), 1e-3, 0.2, decoupled))
    w, m, v = draw(*SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE)
    for g in GRADS:
        g = g if decoupled else g + 0.2 * w
        w = w - 0.1 * 0.2 * w if decoupled else w
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        w = w - 0.1 * m / (v.sqrt() + 1e-3)
    torch.testing.assert_close(ours, w, **CLOSE)


@pytest.mark.parametrize("correct", [True, False])
def test_gradients_may_be_divided_in_the_step_and_stay_as_they_are(correct):
    options = {"lr": 0.1, "eps": 0.1, "bias_correction": correct}
    scaled = stepped(lambda params: optim.HybridAdam(params, **options), [8 * g for g in GRADS], div_scale=8.0)
    torch.testing.assert_close(scaled, stepped(lambda params: optim.HybridAdam(params, **options)), **CLOSE)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True}])
def test_sgd_is_torchs(options):
    ours = stepped(lambda params: optim.FusedSGD(params, 0.1, weight_decay=0.2, **options))
    torch.testing.assert_close(
        ours, stepped(lambda params: torch.optim.SGD(params, 0.1, weight_decay=0.2, **options)), **CLOSE
    )


def test_sgd_of_parameters_that_join_later():
    def train(make: Any) -> list[torch.Tensor]:
        params = [torch.nn.Parameter(draw(*SHAPE)) for _ in range(2)]
        optimizer = make(params)
        for i, grad in enumerate(GRADS):
            params[0].grad, params[1].grad = grad.clone(), grad.clone() if i > 1 else None
            optimizer.step()
        return [param.detach() for param in params]

    ours = train(lambda params: optim.FusedSGD(params, 0.1, momentum=0.9))
    for one, other in zip(ours, train(lambda params: torch.optim.SGD(params, 0.1, momentum=0.9)), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_sgd_with_decay_after_momentum():
    ours = stepped(lambda params: optim.FusedSGD(params, 0.1, 0.9, weight_decay=0.2, wd_after_momentum=True))
    w, v = draw(*SHAPE), torch.zeros(SHAPE)
    for g in GRADS:
        v = 0.9 * v + g
        w = w - 0.1 * (v + 0.2 * w)
    torch.testing.assert_close(ours, w, **CLOSE)


def test_adafactor_is_torchs_under_other_words():
    ours = stepped(lambda params: optim.Adafactor(params, eps=(1e-8, 1e-2), clip_threshold=1.5, decay_rate=-0.7))
    plain = stepped(lambda params: torch.optim.Adafactor(params, 1e-2, -0.7, (1e-4, 1e-2), 1.5))
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)


# --- from papers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("corrected", [True, False])
def test_lamb(corrected):
    options = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}
    ours = stepped(lambda params: optim.Lamb(params, bias_correction=corrected, **options))
    w, m, v = draw(*SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE)
    for t, g in enumerate(GRADS, 1):
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        mean, square = (m / (1 - 0.8**t), v / (1 - 0.9**t)) if corrected else (m, v)
        r = mean / (square.sqrt() + 1e-3) + 0.2 * w
        w = w - 0.1 * w.norm() / r.norm() * r
    torch.testing.assert_close(ours, w, **CLOSE)
    same = stepped(lambda params: optim.DistributedLamb(params, bias_correction=corrected, **options))
    torch.testing.assert_close(ours, same, rtol=0, atol=0)


def test_lamb_without_its_ratio_is_adam():
    ours = stepped(lambda params: optim.Lamb(params, 0.1, adam=True, bias_correction=True))
    torch.testing.assert_close(ours, stepped(lambda params: torch.optim.Adam(params, 0.1, eps=1e-6)), **CLOSE)


def test_a_tensor_of_zeros_leaves_zero_by_lamb_and_lars():
    for kind in (optim.Lamb, optim.Lars):
        param = torch.nn.Parameter(torch.zeros(3))
        param.grad = torch.ones(3)
        kind([param], lr=0.5).step()
        assert (param < -0.4).all()


def test_fused_lamb_clips_all_gradients_and_adapts_what_decays():
    params = [torch.nn.Parameter(draw(*SHAPE, seed=i)) for i in range(2)]
    clipped = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours = optim.FusedLAMB(
        [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}], 0.1, max_grad_norm=0.5
    )
    decaying, plain = (
        optim.DistributedLamb(clipped[:1], 0.1, weight_decay=0.01),
        torch.optim.Adam(clipped[1:], 0.1, eps=1e-6),
    )
    for grad in GRADS:
        for param, other in zip(params, clipped, strict=True):
            param.grad, other.grad = grad.clone(), grad.clone()
        torch.nn.utils.clip_grad_norm_(clipped, 0.5)
        for optimizer in (ours, decaying, plain):
            optimizer.step()
    for param, other in zip(params, clipped, strict=True):
        torch.testing.assert_close(param, other, **CLOSE)


def test_lars():
    ours = stepped(lambda params: optim.Lars(params, 0.5, 0.9, eeta=0.02, weight_decay=0.1, epsilon=1e-3))
    w, v = draw(*SHAPE), torch.zeros(SHAPE)
    for g in GRADS:
        local = 0.02 * w.norm() / (g.norm() + 0.1 * w.norm() + 1e-3)
        v = 0.9 * v + 0.5 * local * (g + 0.1 * w)
        w = w - v
    torch.testing.assert_close(ours, w, **CLOSE)


def test_lars_spares_the_groups_that_say_so():
    ours = stepped(lambda params: optim.Lars([{"params": params, "lars": False}], 0.1, 0.9, weight_decay=0.2))
    plain = stepped(lambda params: torch.optim.SGD(params, 0.1, 0.9, weight_decay=0.2))
    torch.testing.assert_close(ours, plain, **CLOSE)


def _came(w: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    """Algorithm 2 of the paper, entry by entry, with averages of rows and columns where there are some."""
    lr, decay, threshold, (b1, b2, b3), (e1, e2) = 0.1, 0.2, 0.5, (0.8, 0.9, 0.7), (1e-30, 1e-16)
    m = torch.zeros_like(w)
    kept: dict[str, Any] = {"r": 0.0, "c": 0.0, "R": 0.0, "C": 0.0, "v": 0.0}
    matrix = w.ndim >= 2

    def over(x: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        square = torch.einsum("...i,...j->...ij", row, column) / row.mean(-1)[..., None, None]
        return x / square.sqrt()

    for g in grads:
        if matrix:
            kept["r"] = b2 * kept["r"] + (1 - b2) * (g**2 + e1).mean(-1)
            kept["c"] = b2 * kept["c"] + (1 - b2) * (g**2 + e1).mean(-2)
            u = over(g, kept["r"], kept["c"])
        else:
            kept["v"] = b2 * kept["v"] + (1 - b2) * (g**2 + e1)
            u = g / torch.sqrt(kept["v"])
        u = u / max(1.0, (u**2).mean().sqrt().item() / threshold)
        m = b1 * m + (1 - b1) * u
        step = m
        if matrix:
            kept["R"] = b3 * kept["R"] + (1 - b3) * ((u - m) ** 2 + e2).mean(-1)
            kept["C"] = b3 * kept["C"] + (1 - b3) * ((u - m) ** 2 + e2).mean(-2)
            step = over(m, kept["R"], kept["C"])
        w = w - lr * decay * w - lr * step
    return w


@pytest.mark.parametrize("shape", [SHAPE, (5,), (2, 3, 4)])
def test_came(shape):
    grads = [draw(*shape, seed=i) for i in range(1, 6)]
    options = {"clip_threshold": 0.5, "betas": (0.8, 0.9, 0.7), "weight_decay": 0.2}
    ours = stepped(lambda params: optim.CAME(params, 0.1, **options), grads)
    torch.testing.assert_close(ours, _came(draw(*shape), grads), **CLOSE)


@pytest.mark.parametrize("kind", ["std", "reverse_std"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (4, 4)])
def test_galore(kind, shape):
    grads = [draw(*shape, seed=i) for i in range(1, 6)]
    group = {"rank": 2, "update_proj_gap": 3, "scale": 0.5, "proj_type": kind}
    ours = stepped(lambda params: optim.GaLoreAdamW([{"params": params, **group}], 0.1, (0.8, 0.9), 1e-3, 0.2), grads)
    w, m, v = draw(*shape), 0.0, 0.0
    left = (shape[0] < shape[1]) == (kind == "std")
    for t, g in enumerate(grads, 1):
        if t in (1, 4):
            u, _, vh = torch.linalg.svd(g)
            p = u[:, :2] if left else vh[:2].T
            p = p * torch.stack([column[column.abs().argmax()].sign() for column in p.T])
        r = p.T @ g if left else g @ p
        m, v = 0.8 * m + 0.2 * r, 0.9 * v + 0.1 * r**2
        n = m / (1 - 0.8**t) / ((v / (1 - 0.9**t)).sqrt() + 1e-3)
        w = w - 0.1 * 0.2 * w - 0.1 * 0.5 * (p @ n if left else n @ p.T)
    torch.testing.assert_close(ours, w, rtol=1e-12, atol=1e-14)  # a singular vector is good to 1e-16 over a gap of 0.1


def test_galore_without_a_rank_is_adamw():
    ours = stepped(lambda params: optim.GaLoreAdamW(params, 0.1))
    torch.testing.assert_close(ours, stepped(lambda params: torch.optim.AdamW(params, 0.1)), **CLOSE)


def test_a_projection_depends_on_the_gradient_alone():
    grad = draw(5, 7)
    for left in (True, False):
        torch.testing.assert_close(_directions(grad, 3, left), _directions(-grad, 3, left), **CLOSE)
    once = torch.outer(draw(5), draw(7, seed=1))  # of rank one: rounding chooses all other directions
    found = _directions(once, 3, True)
    assert (found[:, 1:] == 0).all() and found[:, 0].norm().item() == pytest.approx(1.0)


def test_a_gradient_of_zero_projects_nothing_for_later():
    grads = [torch.zeros(SHAPE, dtype=torch.float64), *GRADS]
    moved = stepped(lambda params: optim.GaLoreAdamW([{"params": params, "rank": 2}], 0.1, weight_decay=0.0), grads)
    assert (moved - draw(*SHAPE)).abs().max() > 0.01


def test_groups_for_galore_say_what_is_projected_and_what_decays():
    model = torch.nn.Sequential(
        torch.nn.Embedding(5, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3), torch.nn.Conv1d(3, 3, 1)
    )
    groups = optim.get_galore_param_groups(model, 0.1, rank=2)
    told = [(len(group["params"]), group.get("rank"), group["weight_decay"]) for group in groups]
    assert told == [(2, 2, 0.1), (1, None, 0.1), (4, None, 0.0)]
    assert optim.GaLoreAdamW(groups).param_groups[0]["scale"] == 0.25


# --- refusals -------------------------------------------------------------------------------------------------------

P = torch.nn.Parameter(torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: optim.HybridAdam([P], nvme_offload_fraction=0.5),
            ["HybridAdam(nvme_offload_fraction=0.5)", "sl.offload"],
        ),
        (lambda: optim.CPUAdam([P], nvme_offload_dir="/tmp"), ["CPUAdam", "nvme_offload_dir", "not on disk"]),
        (lambda: optim.FusedAdam([P], set_grad_none=False), ["zero_grad(set_to_none=False)"]),
        (lambda: optim.FusedLAMB([P], adam_w_mode=False), ["FusedLAMB(adam_w_mode=False)", "paper"]),
        (lambda: optim.Lamb([P], betas=(0.9, 1.0)), ["beta2=1.0", "below 1"]),
        (lambda: optim.Lars([P], lr=-1.0), ["lr=-1.0", "from 0 up"]),
        (lambda: optim.CAME([P]), ["no lr", "lr=2e-4"]),
        (lambda: optim.Adafactor([P], beta1=0.9), ["beta1=0.9", "CAME"]),
        (lambda: optim.Adafactor([P], warmup_init=True), ["LinearWarmupLR"]),
        (lambda: optim.GaLoreAdamW([{"params": [P], "rank": 1, "proj_type": "sdt"}]), ["Did you mean"]),
        (lambda: optim.GaLoreAdamW([{"params": [P], "rank": 0}]), ["rank=0"]),
    ],
)
def test_what_means_nothing_is_refused_with_the_reason(make, words):
    with pytest.raises(InputError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)
