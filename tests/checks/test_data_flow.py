"""`DataFlow`: what a layer's output reaches, held against models whose graph is known."""

import itertools

import pytest
import torch
from torch import nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.checks.data_flow import DataFlow, Port


def reached(model, inputs, layer, *, output=True):
    """The names of the layers whose output depends on `layer`, by the numbers alone."""
    flow = DataFlow(Inspector(model).run_inspection(inputs).observation)
    return {port.layer for port in flow.reached(Port(layer, output)) if port.output}


def truly_reached(model, inputs, layer):
    """The same by brute force: the layers whose output changes when that of `layer` does."""
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
    return {layer} | {name for name in before if not torch.equal(before[name], after[name])}


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


def test_flow_is_that_of_the_model(batch):
    """From every layer of a branching model, exactly what a nudge changes is reached."""
    model = Towers()
    for name, _ in model.named_modules():
        if name:
            assert reached(model, batch, name) == truly_reached(model, batch, name), name


def test_input_reaches_everything(batch):
    """What goes into the model goes everywhere."""
    model = Towers()
    names = {name for name, _ in model.named_modules()}
    assert reached(model, batch, "", output=False) == names


def test_detach_and_reshape_hide_no_flow(batch):
    """The numbers tell where the graph of autograd does not."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.aside = nn.Linear(16, 8), nn.Linear(4, 2), nn.Linear(16, 8)

        def forward(self, x):
            h = self.a(x)
            self.aside(x)
            return self.b(h.detach().reshape(-1, 4))

    assert reached(Model(), batch, "a") == {"a", "b", ""}
    assert reached(Model(), batch, "aside") == {"aside", ""}  # the model's own output may use it


class Loop(nn.Module):
    """A cell that is called three times, with a norm after it."""

    def __init__(self):
        super().__init__()
        self.cell, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        for _ in range(3):
            x = self.norm(x + self.cell(x))
        return x


def test_layer_that_runs_in_a_loop_reaches_what_ran_before_it(batch):
    """A cell called again takes what came after its first call."""
    assert reached(Loop(), batch, "norm") == {"norm", "cell", ""}


@pytest.mark.parametrize("kind", [Towers, Loop])
def test_what_reaches_a_port_is_found_backwards_too(kind, batch):
    """`reaching` of one port or several holds exactly the ports that reach one of them."""
    flow = DataFlow(Inspector(kind()).run_inspection(batch).observation)
    ports = [Port(name, output) for name, _ in kind().named_modules() for output in (False, True)]
    for target in ports:
        assert flow.reaching([target]) == {p for p in ports if target in flow.reached(p)}, target
    for pair in itertools.combinations(ports, 2):
        assert flow.reaching(pair) == flow.reaching(pair[:1]) | flow.reaching(pair[1:]), pair
