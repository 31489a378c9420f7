"""Courses of trainings: a loss and the numbers of two layers step by step, and what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np


def learning(step: int) -> float:
    """A loss that falls, with noise."""
    return 2.1 * math.exp(-step / 40) + 0.1 + 0.02 * math.sin(7.0 * step)


def lost(step: int) -> float:
    """A loss that is lost again."""
    return learning(step) if step < 120 else 2.2


def flat(step: int) -> float:
    """A loss that stays where it began."""
    return 2.3 + 0.1 * math.sin(step)


Loss = Callable[[int], float]


Numbers = Callable[[int], dict[str, float | list[float]]]


NAN = math.nan


FAILS, WARNS = "fail", "warn"


def grown(factor: float, last: int = 100) -> Numbers:
    """Gradients that are larger from a step on."""
    return lambda s: dict.fromkeys(
        ("total", "parameter_gradient_norm"), factor if s > last else 1.0
    )


def from_step(first: int, **numbers: float | list[float]) -> Numbers:
    """Other numbers from a step on."""
    return lambda s: numbers if s > first else {}


def skipped(until: int) -> Numbers:
    """Steps that a scaler skips, as gradients are not finite."""
    numbers = {"total": math.inf, "ratio": NAN, "parameter_gradient_nonfinite": 1.0}
    numbers |= {"weight_update_ratio": NAN, "update_norm": NAN, "optimizer_steps": 0}
    return lambda s: numbers if s < until else {}  # type: ignore[return-value]


def standing(last: int) -> Numbers:
    """Nothing moves after a step, at a rate of zero."""
    still = {"update_norm": 0.0, "weight_update_ratio": 0.0, "parameter_norm": 6.0 + last}
    return from_step(last, **still, learning_rate=0.0, ratio=0.0, gradient_norm=1.0)


def spiked(step: int) -> dict[str, float | list[float]]:
    """Everything leaps for eight steps."""
    names = {"total": 1e5, "parameter_gradient_norm": 1e5, "activation_rms": 1e6}
    return names if 100 <= step < 108 else {}  # type: ignore[return-value]


def opening(s: int) -> dict[str, float | list[float]]:
    """A layer that begins at zero, and grows."""
    return {
        "weight_update_ratio": [1.0 / (s + 1), 1e-3],
        "parameter_rms": [1e-6 * (s + 1) ** 2, 0.1],
        "activation_std": [1e-5 * (s + 1), 1.0],
        "activation_rms": [1e-5 * (s + 1), 1.0],
        "parameter_gradient_norm": [1e-4 * s, 1.0],
    }


REST: dict[str, float | list[float]] = {
    "update_norm": [0.0, 1e-2], "weight_update_ratio": [0.0, 1e-3]
}  # fmt: skip


FROZEN = REST | {"trainable_fraction": [0.0, 1.0], "parameter_gradient_norm": [NAN, 1.0]}


LEFT_OUT: dict[str, float | list[float]] = {
    "update_norm": [NAN, 1e-2], "weight_update_ratio": [NAN, 1e-3]
}  # fmt: skip


SAME = np.full(120, 0.001)


JUMPS = {"once": np.where(np.arange(120) == 60, 2.0, SAME), "each": SAME + 2.0}


CASES: dict[str, tuple[int, Loss, Numbers, dict[str, str]]] = {
    "what is usual": (200, learning, lambda s: {}, {}),
    "gradients vanish with the loss": (
        300, lambda s: 2.0 * 0.9**s,
        lambda s: {"total": 0.9**s, "parameter_gradient_norm": 0.9**s}, {},
    ),
    "gradients vanish while the loss is high": (
        150, flat, grown(1e-7, 59), {"fading_gradients": FAILS, "...": ""}
    ),
    "one layer without a gradient": (
        200, learning, from_step(100, parameter_gradient_norm=[0.0, 1.0]),
        {"fading_gradients": WARNS},
    ),
    "one layer without a gradient in most steps": (
        200, learning, lambda s: {"parameter_gradient_norm": [0.0 if s % 12 else 1.0, 1.0]}, {}
    ),
    "a spike that recovers": (
        200, lambda s: 50.0 if 100 <= s < 108 else learning(s), spiked, {}
    ),
    "a loss that is lost": (200, lost, lambda s: {}, {"loss_divergence": WARNS}),
    "a loss that is lost by large steps": (
        200, lost, from_step(119, ratio=0.2), {"loss_divergence": FAILS}
    ),
    "gradients explode": (200, lost, grown(1e4, 119), {"exploding_signals": FAILS, "...": ""}),
    "gradients grow a millionfold": (
        200, learning, grown(1e7, 99), {"exploding_signals": FAILS, "...": ""}
    ),
    "weights grow a thousandfold": (
        200, learning, lambda s: {"parameter_rms": 0.1 * 1.1**s}, {"weight_drift": FAILS}
    ),
    "a scaler that skips sixteen steps": (120, learning, skipped(16), {}),
    "a scaler that skips all": (
        120, learning, skipped(120), {"nonfinite_steps": FAILS, "...": ""}
    ),
    "updates at no rate from the start": (
        100, learning, from_step(-1, **REST, learning_rate=[0.0, 1e-3]), {"stopped_updates": WARNS}
    ),
    "a model that is no longer trained": (
        100, learning, from_step(50, passes=0, total=NAN, ratio=NAN), {"standstill": FAILS}
    ),
    "a model that rests for a while": (
        100, learning, lambda s: {"passes": 0} if 50 < s < 80 else {}, {}
    ),
    "a loss without bound": (100, lambda s: 1.0 - s**4, from_step(100), {"loss_divergence": FAILS}),
    "a loss below zero": (100, lambda s: 1.0 - s, from_step(100), {}),
    "updates that stop": (200, learning, from_step(80, **REST), {"stopped_updates": FAILS}),
    "updates that stop by their rate": (
        200, learning, from_step(80, **REST, learning_rate=[0.0, 1e-3]),
        {"stopped_updates": WARNS},
    ),
    "updates that stop as a layer is frozen": (
        200, learning, from_step(80, **FROZEN), {"stopped_updates": WARNS}
    ),
    "left out for most": (200, learning, from_step(80, **LEFT_OUT), {"stopped_updates": FAILS}),
    "left out for less": (200, learning, from_step(130, **LEFT_OUT), {"stopped_updates": WARNS}),
    "nothing moves early": (
        200, lambda s: learning(s) + 0.4, standing(60), {"standstill": FAILS, "...": ""}
    ),
    "nothing moves at the end": (200, lambda s: learning(s) + 0.4, standing(190), {}),
    **{
        f"weights that something else writes, {when}": (
            120, learning, lambda s, sizes=sizes: {"parameter_norm": 20.0 + sizes[: s + 1].sum()},
            {"outside_changes": WARNS} if when == "once" else {},
        )
        for when, sizes in JUMPS.items()
    },
    "activations grow exponentially": (
        150, learning, lambda s: {"activation_rms": 1.05**s},
        {"exploding_signals": FAILS, "...": ""},
    ),
    "activations grow slower and slower": (
        150, learning, lambda s: {"activation_rms": 1.0 + 3.0 * s}, {}
    ),
    **{
        f"running statistics far from batches, in mode {mode}": (
            120, learning,
            lambda s, mode=mode: {"running_std": 1e4 if s > 60 else 1.0, "training_mode": mode},
            {"statistics_drift": FAILS} if mode else {},
        )
        for mode in (1.0, 0.0)
    },
    **{
        f"activations at their ends, a loss of {level}": (
            150, lambda s, level=level: 2.3 if s < 20 else level + 0.01 * (s % 2),
            lambda s: {"saturation": min(1.0, 0.1 + s / 60)},
            {"saturating_layers": grade, "...": ""},
        )
        for level, grade in ((2.0, FAILS), (0.5, WARNS), (0.0, ""))
    },
    "weights that begin at zero": (200, learning, opening, {}),
    "updates that stay large": (
        100, flat, lambda s: {"weight_update_ratio": 0.2}, {"update_ratio": FAILS, "...": ""}
    ),
    "weights that shrink to nothing": (
        200, lambda s: learning(s) if s < 80 else 2.0,
        lambda s: {"parameter_rms": 0.1 * 0.93 ** max(0, s - 60)},
        {"weight_drift": FAILS, "...": ""},
    ),
}  # fmt: skip
