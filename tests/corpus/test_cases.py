"""The cases: each fault changes what it says, each control runs, each refactor computes the same.

Of each file the first cases are built in every run, and all of them by ``scripts/test -m corpus``.
"""

import copy
import math
import re
from collections import defaultdict
from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from corpus import Sides, Subject, Training, loss_of, run, shelves
from corpus.cards import KINDS
from corpus.models.small import mlp
from corpus.pair import as_module
from corpus.subject import trained

FIRST = 1


def sampled(*roles):
    """Return the cases of these roles, of which all but the first of each file are marked."""
    found = []
    for shelf in shelves(*KINDS):
        seen = defaultdict(int)
        for case in shelf.cases:
            if case.role in roles:
                seen[case.role] += 1
                marks = [pytest.mark.corpus] if seen[case.role] > FIRST else []
                found.append(pytest.param(case, id=f"{case.kind}-{case.name}", marks=marks))
    return found


def build(case, seed=0):
    """Return what a case makes under a seed."""
    torch.manual_seed(seed)
    return case.build()


def step(subject: Subject):
    """Run one step and return all that a fault could change: numbers by name, and an error."""
    torch.manual_seed(1)
    model, seen = subject.model, {}
    seen |= {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
    seen |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    for name, module in model.named_modules():
        seen[f"mode of {name}"] = torch.tensor(module.training)
        plain = {k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}
        seen |= {f"plain tensor {name}.{own}": t.detach().clone() for own, t in plain.items()}
    try:
        output = run(model, subject.inputs)
        loss = total(subject, output)
        seen["loss"] = loss.detach()
        loss.backward()
    except Exception as error:  # noqa: BLE001 - a fault may raise whatever it does
        seen[f"{type(error).__name__}: {error}"] = torch.tensor(0)
    gradients = ((name, p.grad) for name, p in model.named_parameters())
    return seen | {f"gradient {name}": g for name, g in gradients if g is not None}


def later(subject: Subject):
    """Return what comes after the step: two evaluations, and one sample alone."""
    model, seen = subject.model.eval(), {}
    alone = subject.draw(1)[0] if subject.draw else subject.inputs
    with torch.no_grad():
        for name, inputs in (("1", subject.inputs), ("2", subject.inputs), ("alone", alone)):
            try:
                output = run(model, inputs)
            except Exception as error:  # noqa: BLE001 - of one sample some models make nothing
                output = {f"{type(error).__name__}: {error}": torch.tensor(0)}
            made = tree_flatten_with_path(output)[0]
            seen |= {f"evaluation {name}{keystr(path)}": tensor for path, tensor in made}
    return seen


def total(subject, output):
    """Return the loss, or where there is none a sum of the output that a change would move."""
    if subject.loss is not None or not isinstance(output, torch.Tensor) or not output.ndim:
        return loss_of(subject, output, subject.target)
    return (output * torch.linspace(0.5, 1.5, output.numel()).view_as(output)).sum()


CALLS = 4


def looks(training: Training):
    """Yield what is there before each step of a training, and what the step returned."""
    model, returned = training.model, None
    for number in count():
        seen = {f"parameter {name}": p.detach() for name, p in model.named_parameters()}
        seen |= {f"buffer {name}": b for name, b in model.named_buffers()}
        flags = {name: (m.training, len(vars(m))) for name, m in model.named_modules()}
        flags |= {name: (p.requires_grad, p.grad is None) for name, p in model.named_parameters()}
        drawn = training.batches(number) if training.batches else copy.deepcopy(training.batch)
        seen |= dict(enumerate(leaf for leaf in tree_leaves(drawn) if isinstance(leaf, Tensor)))
        optimizers = tree_leaves(training.optimizer)
        groups = [[group_of(g) for g in o.param_groups] for o in optimizers]
        shapes = [(o.__class__.__name__, len(o.state)) for o in optimizers]
        rest = tree_leaves([one.state_dict() for one in training.restore])
        tensors = [leaf for leaf in rest if isinstance(leaf, Tensor)]
        seen |= {f"restored {n}": tensor for n, tensor in enumerate(tensors)}
        rest = [repr(leaf) for leaf in rest if not isinstance(leaf, Tensor | Callable)]
        plain = (flags, groups, shapes, rest, returned, torch.get_rng_state().tolist())
        yield {name: value.clone() for name, value in seen.items()}, plain
        torch.manual_seed(number)
        try:
            made = training.step(model, training.optimizer, drawn)
            returned = repr(tree_leaves(made))
        except Exception as error:  # noqa: BLE001 - a fault may raise whatever it does
            returned = repr(error)


def group_of(group):
    """Return the settings of a group, and the shapes of what it holds."""
    settings = {k: repr(v) for k, v in group.items() if k != "params"}
    return settings, [tuple(p.shape) for p in group["params"]]


def differ(a: Training, b: Training):
    """Whether two trainings part within a few steps, or anywhere of those that have a number."""
    most = max(CALLS, a.steps)
    for _, (ours, plain), (theirs, other) in zip(range(most), looks(a), looks(b), strict=False):
        if plain != other or ours.keys() != theirs.keys():
            return True
        if any(not torch.equal(ours[name], theirs[name]) for name in ours):
            return True
    return False


@pytest.mark.filterwarnings("ignore")  # what torch warns of is part of some cases
@pytest.mark.parametrize("case", sampled("fault"))
def test_fault_changes_the_step(case):
    """Under the same seed a step of the sick subject differs from one of the healthy subject.

    A place that the fault accepts, but the loss and functions, is a layer of the model. A leak may
    show only after it: in evaluation, in a second call, or in one sample alone; of a training, in
    what it does within a few steps, or a whole one anywhere.
    """
    torch.manual_seed(0)
    healthy, sick = case.healthy(), build(case)
    assert any(case.is_at(layer) for layer, _ in sick.model.named_modules())
    if isinstance(sick, Training):
        assert differ(healthy, sick)
        return
    before, after = step(healthy), step(sick)
    if case.kind == "leak":
        before |= later(healthy)
        after |= later(sick)
    same = before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    assert not same


@pytest.mark.filterwarnings("ignore")  # what torch warns of is part of some cases
@pytest.mark.parametrize("case", sampled("control"))
def test_control_runs(case):
    """A healthy subject does one step, its loss is a finite number, and its weights are, too.

    A training does three.
    """
    subject = build(case)
    if isinstance(subject, Training):
        for number in range(3):
            batch = subject.batches(number) if subject.batches else copy.deepcopy(subject.batch)
            made = tree_leaves(subject.step(subject.model, subject.optimizer, batch))
            numbers = [float(torch.as_tensor(one).double().mean().detach()) for one in made]
            assert all(map(math.isfinite, numbers))
        assert all(parameter.isfinite().all() for parameter in subject.model.parameters())
        return
    assert all(parameter.isfinite().all() for parameter in subject.model.parameters())
    output = run(subject.model, subject.inputs)
    if subject.loss is not None:
        assert loss_of(subject, output, subject.target).isfinite().all()


COMPILED = ("compiled by inductor", "compiled for autograd", "decoder compiled for autograd")


@pytest.mark.filterwarnings("ignore")  # what torch warns of is part of some cases
@pytest.mark.parametrize("case", sampled("refactor"))
def test_refactor_gives_the_same_outputs(case):
    """By torch.testing, with a tolerance far above rounding and far below any harmful change.

    Of integers in place of floats only a tenth of the output's length is left out of account.
    """
    if case.name in COMPILED:
        pytest.skip("takes seconds, and a compiler")
    made = build(case)
    ours, theirs = (output_of(model, made) for model in (made.reference.model, as_module(made)))
    if re.search(r"int4|int8|float8", case.name):
        assert relative(theirs, ours) < 0.1
        return
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def relative(theirs: Tensor, ours: Tensor) -> float:
    """Return how far one output is from the other, in lengths of the other."""
    return ((theirs - ours).norm() / ours.norm()).item()


def output_of(model: nn.Module, made: Sides):
    """Return what a model makes of the batch of its pair, under a seed of its own."""
    torch.manual_seed(1)
    with torch.no_grad():
        output = run(model, copy.deepcopy(made.reference.inputs))
    while not isinstance(output, Tensor):
        output = output.logits if hasattr(output, "logits") else output[0]
    return output


@pytest.mark.filterwarnings("ignore")  # exporters warn
@pytest.mark.parametrize("case", sampled("change"))
def test_first_wrong_layer_is_a_layer(case):
    """Each harmful change accepts a layer of the reference, or the reference itself.

    What is wrong with a deployed model shows in what it returns, if only by a little.
    """
    made = build(case)
    assert any(case.is_at(layer) for layer, _ in made.reference.model.named_modules())
    if case.kind == "deployed":
        ours, theirs = (output_of(m, made) for m in (made.reference.model, as_module(made)))
        assert relative(theirs, ours) > 1e-5


def test_trained_subject_has_learnt_once_for_each_seed():
    """Its loss fell by half, each seed has its own, and what is returned is a copy."""
    made = []

    def healthy() -> Subject:
        made.append(None)
        return mlp()

    def loss(subject: Subject) -> float:
        return loss_of(subject, run(subject.model, subject.inputs), subject.target).item()

    torch.manual_seed(0)
    fresh, first = healthy(), trained(healthy)
    drawn, again = torch.rand(()), trained(healthy)
    assert loss(first) == loss(again) < loss(fresh) / 2
    assert torch.rand(()) == drawn  # as if it had just been trained
    nn.init.zeros_(first.model.head.weight)
    assert again.model.head.weight.any()
    torch.manual_seed(1)
    assert loss(trained(healthy)) != loss(again)
    assert len(made) == 3
