"""Normalisations and dropouts that do not do their work, and those that do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Applies, Net, batch, holding

CHECK = "normalization"


def trained(**values):
    """Return a network whose normalisations saw its data, in evaluation mode, holding these."""
    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32),
        nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        model(torch.randn(32, 16)).square().mean().backward()
        optimizer.step()
    return holding(model.eval(), **values)


def never_updated():
    """Return a network that learnt while its statistics did not."""
    model = trained()
    model[4].reset_running_stats()
    return model


def dead_channel():
    """Return a network of which a channel is constant, as its output is."""
    model = trained()
    with torch.no_grad():
        model[3].weight[0] = model[4].running_var[0] = 0.0
        model[4].running_mean[0] = model[3].bias[0]
    return model


def frozen(scale, **values):
    """Return a batch norm whose tensors are all buffers, as detectors have them."""

    def forward(m, x):
        factor = m.weight * (m.running_var + 1e-5).rsqrt()
        return x * factor + m.bias - m.running_mean * factor

    model = trained()
    tensors = {n: v.clone() for n, v in model[4].state_dict().items() if "num" not in n}
    tensors["weight"] *= scale
    tensors["bias"] *= scale
    model[4] = holding(Net(forward, **tensors), **values).eval()
    return model


def modes(*names, rate=0.5):
    """Return it with a dropout and a head, in evaluation mode but for these parts, in turn."""
    model = nn.Sequential(trained(), nn.Dropout(rate), nn.Linear(4, 2)).eval()
    for name in names:
        part = model.get_submodule(name)
        part.train(not part.training)
    return model


def counted(batches):
    """Return a normalisation that counted these batches and did not move, and other data."""
    norm = holding(nn.BatchNorm1d(16, momentum=0.0), num_batches_tracked=batches)
    return nn.Sequential(norm, nn.Linear(16, 4)).eval(), 300.0 + 40.0 * batch()


def few():
    """Return a normalisation that saw three batches."""
    model, seen = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 4)), batch()
    for _ in range(3):
        model(seen)
    return model.eval(), 1000 + seen


def fresh(**values):
    """Return a normalisation that saw nothing."""
    norm = holding(nn.BatchNorm1d(8), **values)
    return nn.Sequential(nn.Linear(16, 8), norm, nn.ReLU(), nn.Linear(8, 4)).eval()


def layer_norm(width, eps=1e-5):
    """Return a network with a layer normalisation."""
    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width, eps=eps), nn.Linear(width, 4))


def groups(number, size):
    """Return a network with a group normalisation, and images."""
    norm = nn.GroupNorm(number, 8)
    nn.init.normal_(norm.bias)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 4 if size == 1 else 1), norm, nn.SiLU(), nn.Flatten(),
        nn.Linear(8 * size**2, 4),
    )  # fmt: skip
    return model, batch(32, 3, 4, 4)


def residual(norm, past):
    """Return a branch of two normalisations, of which one starts at zero, and what goes past it."""
    layers = {"norm1": nn.BatchNorm1d(16), "norm2": nn.BatchNorm1d(16)}
    holding(layers[norm], weight=0.0)
    return Net(
        lambda m, x: m.head(past(x, m) + m.norm2(m.b(torch.tanh(m.norm1(m.a(x)))))), a=(16, 16),
        b=(16, 16), head=(16, 4), zeros=torch.zeros(16), **layers,
    )  # fmt: skip


def drop_path(rate):
    """Return what drops the branch of a sample with a probability of `rate`."""

    def forward(m, x):
        kept = x.new_empty(len(x), 1).bernoulli_(1.0 - rate)
        return x * kept / max(1.0 - rate, 1e-6) if m.training else x

    return Net(forward)


def branch(drop):
    """Return a block that adds what a dropout, a layer or a function, leaves of its branch."""

    def forward(m, x):
        h = m.inner(x)
        return m.head(h + m.drop(m.branch(h)))

    drop = drop if isinstance(drop, nn.Module) else Applies(drop)
    return Net(forward, inner=(16, 32), branch=(32, 32), head=(32, 4), drop=drop)


def fused(rate):
    """Return fused attention with a dropout of its own, in evaluation mode."""
    model = Net(
        lambda m, x: F.scaled_dot_product_attention(*m.qkv(x).chunk(3, -1), dropout_p=rate),
        qkv=(16, 48),
    )
    return model.eval(), batch(8, 6, 16)


RATE, FAR = "its rate is 1", "running statistics"


def helped(restores):
    """Return a model whose forward asks itself in evaluation mode, and may put that back."""

    def forward(m, x):
        mode = m.training
        guess = m.eval().norm(x).detach()
        m.train(mode and restores)
        return m.head(m.norm(x) + guess)

    return Net(forward, norm=nn.BatchNorm1d(16), head=(16, 4)).train()


FAULTS = {
    "a helper that leaves it in evaluation": (
        lambda: helped(False), "warn", "", "called in training mode", "left it in evaluation mode",
    ),
    "statistics that were never updated": (never_updated, "fail", "4", "never updated"),
    "a mean far off": (
        lambda: trained(**{"1.running_mean": lambda m: m.add_(30.0)}), "fail", "1", FAR,
    ),
    "a variance far off": (
        lambda: trained(**{"1.running_var": lambda v: v.mul_(1e4)}), "fail", "1", FAR,
    ),
    # a variance is positive; a single zero is a dead channel, all of them are a fault
    "a negative variance": (
        lambda: trained(**{"4.running_var": -1.0}), "fail", "4", "is negative", "running_var",
    ),
    "a variance of zero": (
        lambda: trained(**{"4.running_var": 0.0}), "fail", "4", "is zero in every channel",
    ),
    # in a model in evaluation mode; the other way round is a frozen normalisation
    "a normalisation that trains": (lambda: modes("0.1"), "fail", "0.1"),
    "a dropout that trains": (lambda: modes("1"), "fail", "1", "the output is random"),
    "small buffers, no variance": (lambda: frozen(0.01, running_var=1e-6), "fail", "4"),
    # statistics that are as they began after 80 batches never moved, whatever the weights say
    "a momentum of zero": (
        lambda: counted(80), "fail", "0", "momentum was zero for the 80 batches",
    ),
    # after three batches the running mean is still three quarters of its start
    "three batches": (few, "unsure", "0", "3 batches"),
    # a checkpoint without the count of batches is judged by its statistics
    "statistics that no batch made": (
        lambda: fresh(running_mean=50.0), "fail", "1", "far from the batch",
    ),
    # an eps of 10 beside a variance of 0.4 flattens
    "a large eps": (lambda: layer_norm(32, eps=10.0), "fail", "1"),
    "an eps above the variance": (
        lambda: holding(layer_norm(32, eps=0.05), **{"0.weight": lambda w: w.mul_(0.2)}), "fail",
        "1", "eps of 0.05",
    ),
    # each value is its own mean
    "a single value": (lambda: layer_norm(1), "fail", "1"),
    "a group of one value": (lambda: groups(8, 1), "fail", "1"),
    # the last normalisation of a branch may start at zero, if values go past it: no constant
    **{
        f"a scale of zero, {name}": (lambda n=norm, p=past: residual(n, p), "fail", norm)
        for name, norm, past in (
            ("inside", "norm1", lambda x, _: x),
            ("past it 0", "norm2", lambda *_: 0),
            ("past it zeros", "norm2", lambda x, _: torch.zeros_like(x)),
            ("past it a buffer", "norm2", lambda _, m: m.zeros),
        )
    },
    "a dropout of everything": (lambda: branch(nn.Dropout(1.0)), "fail", "drop", RATE),
    "a functional dropout of everything": (
        lambda: branch(lambda x: F.dropout(x, 1.0)), "fail", "drop", RATE,
    ),
    # Monte Carlo dropout looks the same; fused attention knows no mode
    "a functional dropout in evaluation": (
        lambda: branch(F.dropout).eval(), "warn", "drop", "Monte Carlo",
    ),
    "fused attention in evaluation": (
        lambda: fused(0.1), "fail", "scaled_dot_product_attention",
    ),
}  # fmt: skip
HEALTHY = {
    "a helper that puts the mode back": lambda: helped(True),
    "two samples": lambda: (trained(), batch(2, 16)),
    "64 samples": trained,
    "a dead channel": dead_channel,
    "a frozen normalisation": lambda: modes("", "0.1"),
    "a dropout that drops nothing": lambda: modes("1", rate=0.0),
    # what the scale and shift of a frozen norm do is no fault of its statistics
    "small buffers": lambda: frozen(0.01),
    "buffers of zero, no variance": lambda: frozen(0.0, running_var=1e-6),
    # before any training it normalises nothing, by design
    "a fresh model": lambda: (fresh(), 100 * batch()),
    "a momentum of zero, fresh": lambda: counted(0),
    # 1e-3 is what MobileNets use
    "an eps of MobileNets": lambda: layer_norm(32, eps=1e-3),
    "an eps below the variance": lambda: layer_norm(32, eps=0.05),
    "a group of two": lambda: groups(4, 1),
    "a group of pixels": lambda: groups(8, 4),
    **{
        f"a scale of zero, past it {name}": lambda p=past: residual("norm2", p)
        for name, past in (
            ("the input", lambda x, _: x),
            ("the input, detached", lambda x, _: x.detach()),
            ("noise", lambda x, _: torch.randn_like(x)),
        )
    },
    "nearly all dropped": lambda: branch(nn.Dropout(0.98)),
    "a path": lambda: branch(drop_path(0.2)),
    "most dropped by a function": lambda: branch(lambda x: F.dropout(x, 0.9)),
    "a functional dropout that is off": lambda: branch(
        lambda x: F.dropout(x, 1.0, training=False)
    ).eval(),
    "fused attention of rate 0": lambda: fused(0.0),
    "attention of torch in evaluation": lambda: (
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval(), batch(8, 6, 16),
    ),
}  # fmt: skip
