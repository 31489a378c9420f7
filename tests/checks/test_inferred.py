"""The flow that is inferred where none was recorded: it says too much rather than too little."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.report.flow.inferred import NOTE, with_flow


def inferred(model, inputs, **options):
    """The flow by the numbers alone, and the one that was recorded."""
    seen = Inspector(model).run_inspection(inputs, **options).observation
    return with_flow(replace(seen, flow=None)).flow, seen.flow


def truly_reached(model, inputs, layer):
    """By brute force: the layers whose output changes when that of `layer` does."""
    seen = []

    def run(offset):
        outputs = {}
        hooks = [
            module.register_forward_hook(
                lambda module, args, out, name=name: outputs.setdefault(name, out.detach().clone())
            )
            for name, module in model.named_modules()
        ]
        culprit = model.get_submodule(layer)
        hooks.append(culprit.register_forward_hook(lambda module, args, out: out + offset))
        model(inputs)
        for hook in hooks:
            hook.remove()
        seen.append(outputs)

    run(0.0)
    run(1.0)
    before, after = seen
    return {name for name in before if not torch.equal(before[name], after[name])} - {layer}


class Towers(nn.Module):
    """Two towers on one input, a residual block behind the first, and a head on their sum."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 8), nn.Linear(16, 8)
        self.block = Residual()
        self.deep, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        a = self.block(self.left(x))
        return self.head(a + self.deep(self.right(x)))


class Residual(nn.Module):
    """A branch beside a shortcut."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.act = nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()

    def forward(self, x):
        return x + self.act(self.fc(self.norm(x)))


def test_what_a_nudge_changes_is_reached(batch):
    """From every layer of a branching model; what follows by its numbers is no other's."""
    flow, _ = inferred(Towers(), batch)
    assert flow.notes == (NOTE,)
    for name, _ in Towers().named_modules():
        if name:
            reached = {r for r in flow.reach(name) if not r.startswith(f"{name}.")}
            assert reached >= truly_reached(Towers(), batch, name), name
    assert {"left", "right"}.isdisjoint(flow.producers("block.act"))


class Loop(nn.Module):
    """A cell that is called three times, with a norm after it."""

    def __init__(self):
        super().__init__()
        self.cell, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        for _ in range(3):
            x = self.norm(x + self.cell(x))
        return x


class Hidden(nn.Module):
    """What numbers show where autograd's graph does not; a layer aside from the output."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.aside = nn.Linear(16, 8), nn.Linear(4, 2), nn.Linear(16, 8)

    def forward(self, x):
        h = self.a(x)
        self.aside(x)
        return self.b(h.detach().reshape(-1, 4))


class Modulated(nn.Module):
    """A block whose scale, shift and gate all start at zero, so that it returns what it gets."""

    def __init__(self):
        super().__init__()
        self.norm, self.ada = nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 48)
        self.act, self.fc = nn.SiLU(), nn.Linear(16, 16)
        nn.init.zeros_(self.ada.weight)
        nn.init.zeros_(self.ada.bias)

    def forward(self, x, c):
        scale, shift, gate = self.ada(self.act(c)).chunk(3, dim=-1)
        return x + gate * self.fc(self.norm(x) * (1 + scale) + shift)


class Conditioned(nn.Module):
    """Modulated blocks on one condition, and a head."""

    def __init__(self):
        super().__init__()
        self.condition, self.stem = nn.Linear(16, 16), nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Modulated() for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        c, h = self.condition(x), self.stem(x)
        for block in self.blocks:
            h = block(h, c)
        return self.head(h)


class Scaled(nn.Module):
    """Branches that a parameter of zero scales away."""

    def __init__(self):
        super().__init__()
        self.fc, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.zeros(16))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        h = self.fc(x)
        return self.head(h + self.scale * self.other(h))


class Shuffled(nn.Module):
    """Slices, a concatenation, a product, a cross-over between two streams."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.c, self.d = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x):
        a, b = self.a(x[:, :8]), self.b(x[:, 8:])
        return self.d(self.c(torch.cat([b, a * b], dim=1)) + a)


MODELS = {
    "towers": Towers,
    "loop": Loop,
    "hidden": Hidden,
    "modulated": Conditioned,
    "scaled": Scaled,
    "shuffled": Shuffled,
    "transformer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2
    ),
    "recurrent": lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)),
    "normed": lambda: nn.Sequential(
        nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), Residual(), nn.Linear(8, 2)
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backward", [True, False])
def test_what_is_inferred_holds_all_that_was_recorded(name, backward, batch):
    """Every layer that another's values get to, and by gradient where there was a backward pass."""
    inputs = batch.reshape(8, 8, 16) if name == "transformer" else batch
    guess, recorded = inferred(MODELS[name](), inputs, backward=backward)
    for layer in recorded.layers:
        for by in ("value", "gradient") if backward else ("value",):
            assert recorded.reach(layer, by=by) <= guess.reach(layer, by=by), (layer, by)
            assert set(guess.layers) & recorded.feeding(layer, by=by) <= guess.feeding(
                layer, by=by
            ), (layer, by)


def test_a_recorded_flow_is_kept(batch):
    """Inferred is only what nobody saw."""
    seen = Inspector(Towers()).run_inspection(batch).observation
    assert with_flow(seen) is seen


class ThroughPython(nn.Module):
    """Hands values on through NumPy or a list; a table of constants is beside them."""

    def __init__(self, way):
        super().__init__()
        self.a, self.b, self.position = nn.Linear(16, 8), nn.Linear(8, 4), nn.Embedding(8, 8)
        self.way = way

    def forward(self, x):
        places = self.position(torch.tensor([3] * len(x)))
        return self.b(self.way(self.a(x)).reshape(len(x), -1)), places


@pytest.mark.parametrize(
    ("way", "is_followed"),
    [
        (lambda h: torch.from_numpy(h.detach().numpy() * 1.0), True),
        (lambda h: torch.tensor(h.tolist()), True),
        (lambda h: h * 1.0, True),
        (lambda h: torch.tensor(torch.ones_like(h).tolist()), False),
    ],
    ids=["numpy", "list", "torch", "ones"],
)
def test_what_goes_through_python_needs_no_inference(way, is_followed, batch):
    """A recorded flow is taken as it is; a constant is nobody's."""
    seen = Inspector(ThroughPython(way)).run_inspection(batch).observation
    assert with_flow(seen) is seen
    assert ("b" in seen.flow.reach("a")) == is_followed
    assert "position" not in seen.flow.reach("a")
