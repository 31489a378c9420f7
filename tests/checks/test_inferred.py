"""The flow that is inferred where none was recorded: it says too much rather than too little."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from corpus.models.branching import (
    Conditioned,
    Hidden,
    Loop,
    Residual,
    Scaled,
    Shuffled,
    ThroughPython,
    Towers,
)
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


def test_what_a_nudge_changes_is_reached(batch):
    """From every layer of a branching model."""
    flow, _ = inferred(Towers(), batch)
    assert flow.notes == (NOTE,)
    for name, _ in Towers().named_modules():
        if name:
            reached = {r for r in flow.reach(name) if not r.startswith(f"{name}.")}
            assert reached >= truly_reached(Towers(), batch, name), name


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
