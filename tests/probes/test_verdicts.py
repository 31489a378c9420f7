"""What probes say of small models that the corpus does not have: layouts, and what is not told."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import HealthReport
from pytest_modelhealth.report import Outcome
from tests.probes.models import Block, Net, Reader, Rows, Writer, language, probed, seeded, texts

ASSERTIONS = {
    "sample_independence": "assert_samples_independent",
    "causality": "assert_causal",
    "padding": "assert_padding_ignored",
    "repeatability": "assert_repeatable",
}
OUTCOMES = {"untold": Outcome.NOT_TOLD, "absent": Outcome.NOT_APPLICABLE}


class Case(NamedTuple):
    """A model and a batch, and what a probe says of them.

    Args:
        grade: ``"healthy"``, ``"fails"`` or ``"warns"`` where it is judged; else ``"untold"`` or
            ``"absent"``.
        model: makes the model.
        inputs: the batch.
        layer: where it begins; ``"*"`` is anywhere.
        word: stands in the message or the cause, or in the reason.
        target, loss: what the inspection is given as well.
        options: likewise, for the probe.
        note: stands in the notes of the probe.
    """

    grade: str
    model: Callable[[], nn.Module]
    inputs: Any
    layer: str = ""
    word: str = ""
    target: Any = None
    loss: Any = None
    options: dict[str, Any] = {}  # noqa: RUF012 - never written to
    note: str = ""

    def report(self, probe: str) -> HealthReport:
        """Inspect the model with one probe."""
        inputs, options = copy.deepcopy(self.inputs), {"probes": probe, **self.options}
        options |= {} if self.loss is None else {"loss": self.loss}
        return probed(self.model(), inputs, self.target, **options)


def fault_and_twin(
    made: Callable[[bool], nn.Module], inputs: Any, layer: str = "", word: str = "", **more: Any
) -> dict[str, Case]:
    """Return the rows of a model that leaks if it is told to."""
    return {
        "leaks": Case("fails", lambda: made(True), inputs, layer, word, **more),
        "healthy": Case("healthy", lambda: made(False), inputs, **more),
    }


X, Y = seeded(10, 12), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
SERIES, STATE = seeded(7, 6, 12), torch.zeros(1, 6, 16)


def finds(m: Any, x: Tensor) -> list[Tensor]:
    """Return another tensor where samples differ."""
    every = m.fc(x)
    return [every, *([every + 1] if bool((x[1] != x[0]).any()) else [])]


class Elsewhere(nn.Linear):
    """Keeps a count where nobody puts it back."""

    def __init__(self) -> None:
        super().__init__(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + next(CALLS)


CALLS = itertools.count(1)


def recurrent(returned: Callable[[Tensor], Any], leaks: bool) -> nn.Module:
    """Return a recurrence over a batch with time in front, or which it brings there."""

    def forward(m: Any, x: Tensor, state: Tensor | None = None) -> Any:
        h = m.head(m.rnn(x if x.shape[0] == 7 else x.transpose(0, 1), state)[0])
        return returned(h - h.mean(1, keepdim=True) if leaks else h)

    return Net(forward, rnn=nn.GRU(12, 16), head=nn.Linear(16, 3))


class Timed(nn.Linear):
    """The slope of an equation, which may be told the time."""

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        return super().forward(x) if time is None else super().forward(x).mul(time)


def solved(m: Any, x: Tensor) -> Tensor:
    """Go two steps, the second as far as the changes of all samples allow."""
    time = torch.ones(())
    for _ in range(2):
        change = m.slope(x, *([time] if m.is_told else []))
        time = 1.0 / (1.0 + change.square().mean())
        x = x + time * change
    return m.last(x)


def solver(is_told: bool) -> nn.Module:
    """Return a model that adapts its steps to its batch."""
    model = Net(solved, slope=Timed(12, 12), last=nn.Linear(12, 3))
    model.is_told = is_told
    return model


def attended(axis: int) -> Callable[[Any, Tensor], Tensor]:
    """Return attention of all rows to one another, as one sequence, or a softmax over them."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q = m.body(x).unsqueeze(0)
        scores = m.softmax(q @ q.mT) @ q if axis else m.softmax(q.squeeze(0)).unsqueeze(0)
        return m.last(scores.squeeze(0))

    return forward


LAYOUTS: dict[str, tuple[Any, Any, Callable[[Tensor], Any]]] = {
    "flattened": (SERIES.transpose(0, 1), None, lambda h: h.transpose(0, 1).flatten(0, 1)),
    "flattened, time in front": (SERIES.transpose(0, 1), None, lambda h: h.flatten(0, 1)),
    "a first state": ((SERIES, STATE), 1, lambda h: h),
    "a state that comes back": ((SERIES, STATE), 1, lambda h: (h.flatten(0, 1), h[-1:])),
    "moved": (SERIES, 1, lambda h: h.transpose(0, 1)),
}


NO_ROWS = Case(
    "absent",
    lambda: nn.Sequential(Rows(), nn.Flatten(0), nn.Linear(30, 5)),
    X,
    word="no output has a row",
)
TIME_IN_FRONT = Case("absent", lambda: nn.GRU(12, 16), SERIES, word="batch_dim=1")
ONE_SAMPLE = Case("absent", Rows, X[:1], word="one sample")
OF_SAMPLES = {
    "one sample": ONE_SAMPLE,
    "equal samples": Case("absent", Rows, torch.ones(8, 12), word="are equal"),
    "no dimension in common": Case(
        "absent",
        lambda: Net(lambda m, x, other: m.body(x) + other.mean(), body=Rows()),
        (X[:8], X[:3]),
        word="no first dimension in common",
    ),
    "no rows": NO_ROWS,
    "bound to its batch": Case(
        "absent",
        lambda: Net(lambda m, x: m.body(m.near @ x), body=Rows(), near=seeded(10, 10)),
        X,
        word="bound to the size of this batch",
    ),
    "time in front": TIME_IN_FRONT,
    "said": Case("healthy", lambda: nn.GRU(12, 16), SERIES, options={"batch_dim": 1}),
    "fewer tensors": Case("healthy", lambda: Net(finds, fc=nn.Linear(12, 8)), X[:5]),
    "nowhere finite": Case("untold", lambda: Rows(lambda h: h * torch.nan), X, word="no finite"),
    "kept outside of modules": Case("untold", Elsewhere, X, word="outside of its modules"),
    "weights made of the batch": Case(
        "absent",
        lambda: Net(
            lambda m, x: torch.func.functional_call(
                m.fc, {"weight": m.fc.weight + x.mean(0), "bias": m.fc.bias}, (x,)
            ),
            fc=nn.Linear(12, 3),
        ),
        X,
        word="are made of the batch",
    ),
    "beside a number": Case(
        "fails",
        lambda: Net(lambda m, x, scale: m.body(x) * scale, body=Rows(lambda h: h - h.mean(0))),
        (X, torch.tensor(2.0)),
        "body",
        word="samples see each other",
    ),
    "a solver's step": Case("warns", lambda: solver(True), X, word="on purpose"),
    "a factor of the batch": Case("fails", lambda: solver(False), X, word="over the batch"),
    **{
        f"softmax along {axis} over samples": Case(
            grade,
            lambda axis=axis: Net(  # type: ignore[misc]
                attended(axis), body=Rows(), softmax=nn.Softmax(axis), last=nn.Linear(3, 3)
            ),
            X,
            "softmax",
            word=word,
        )
        for axis, grade, word in ((2, "warns", "on purpose"), (0, "fails", "softmax over"))
    },
    "sparse": Case(
        "absent",
        lambda: Net(lambda m, x: m.body(x.to_dense()), body=Rows()),
        X.relu().to_sparse(),
        word="sparse",
    ),
} | {
    f"{name}, {twin}": case
    for name, (inputs, dimension, returned) in LAYOUTS.items()
    for twin, case in fault_and_twin(
        lambda leaks, returned=returned: recurrent(returned, leaks),  # type: ignore[misc]
        inputs,
        "*",
        options={"batch_dim": dimension},
    ).items()
}  # fmt: skip

NODES, OWNERS = seeded(20, 6), torch.arange(10).repeat_interleave(2)


def users(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Take the mean of all rows off, whose ids happen to ascend."""
    return m.last((h := m.first(x) + m.users(ids)) - h.mean(0))


def of_users() -> nn.Module:
    """Return a model of rows and their users."""
    return Net(users, users=nn.Embedding(10, 8), first=nn.Linear(6, 8), last=nn.Linear(8, 3))


OF_GROUPS = {
    "may be graphs": Case("absent", of_users, (NODES, OWNERS), word="say batch_dim=0"),
    "rows, by word": Case(
        "fails",
        of_users,
        (NODES, OWNERS),
        word="samples see each other",
        options={"batch_dim": 0},
    ),
}

IDS = torch.randint(0, 20, (6, 13), generator=torch.Generator().manual_seed(0))
NEXT: dict[str, Any] = {"target": IDS[:, 1:], "loss": language}


OF_TIME = {
    "masks": Case("healthy", lambda: Writer(True, True), IDS[:, :-1], **NEXT),
    "nobody claims it": Case("absent", Rows, X, word="say causal=True", target=Y),
    "it is denied": Case(
        "absent",
        lambda: nn.GRU(12, 8, batch_first=True),
        SERIES,
        word="causal=False",
        options={"causal": False},
    ),
    **{
        f"it is said, {twin}": case
        for twin, case in fault_and_twin(
            lambda leaks: nn.GRU(12, 8, batch_first=True, bidirectional=leaks),
            SERIES,
            options={"causal": True},
        ).items()
    },
    "equal steps": Case(
        "untold",
        lambda: Writer(True),
        torch.ones(4, 8, dtype=torch.long),
        word="all steps of the sequence are equal",
        target=torch.ones(4, 8, dtype=torch.long),
        loss=language,
    ),
    "kept outside of modules": Case(
        "untold", Elsewhere, SERIES, word="outside of its modules", options={"causal": True}
    ),
}

TEXTS = texts()
LEFT = {name: tensor.flip(1) for name, tensor in TEXTS.items()}
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])
MASK = TEXTS["mask"]


class Tagger(Reader):
    """Returns a row a step, of the width of words if it writes."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return F.linear(self.block(self.words(ids), mask), self.words.weight)


class Placed(Reader):
    """Counts positions by the ids that are no padding."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.places = nn.Embedding(16, 16)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        real = ids != 0
        x = self.words(ids) + self.places(real.long().cumsum(1) * real)
        x, shown = self.block(x, mask), mask.unsqueeze(-1).float()
        return self.head((x * shown).sum(1) / shown.sum(1) if self.pools else x.mean(1))


class Joined(Reader):
    """Joins words to patches; may return the first step of all beside them."""

    def forward(self, ids: Tensor, mask: Tensor, patches: Tensor) -> Any:
        x = torch.cat([self.words(ids), patches], 1)
        shown = torch.cat([mask, torch.ones(len(mask), 4)], 1)
        x = self.block(x, shown if self.attends else None)
        return x if self.pools else (x, x[:, 0])


def merging(coarse: nn.Module) -> nn.Module:
    """Return a model that gives two steps at a time what is made of their mean."""

    def forward(m: Any, ids: Tensor, mask: Tensor) -> Tensor:
        x = m.reader.block(m.reader.words(ids), mask)
        pairs = m.coarse(F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2))
        return pairs.repeat_interleave(2, dim=1)

    return Net(forward, reader=Reader(), coarse=coarse)


def stateful(layered: bool) -> nn.Module:
    """Return a recurrence over padding that returns its last state, of one layer or of each."""

    def forward(m: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        steps, last = m.rnn(m.words(ids))
        return steps, last.permute(1, 2, 0) if layered else last[0]

    return Net(forward, words=nn.Embedding(20, 16), rnn=nn.GRU(16, 16, batch_first=True))


def ahead(output: Tensor, target: Tensor) -> Tensor:
    """Read the logits of each next step."""
    return language(output[:, :-1], target[:, 1:])


OF_PADDING = {
    "a form of its own": Case(
        "absent",
        lambda: Net(lambda m, ids, bias: m.reader(ids, bias[:, 0, 0] == 0), reader=Reader()),
        {"ids": TEXTS["ids"], "bias": (MASK == 0).float()[:, None, None] * -1e9},
        word="say padding=",
        target=CLASSES,
    ),
    **{
        f"a form of its own, said, {twin}": case
        for twin, case in fault_and_twin(
            lambda leaks: Net(
                lambda m, ids, bias: m.reader(ids, bias[:, 0, 0] == 0),
                reader=Reader(pools=not leaks),
            ),
            {"ids": TEXTS["ids"], "bias": (MASK == 0).float()[:, None, None] * -1e9},
            "reader",
            target=CLASSES,
            options={"padding": MASK == 0},
        ).items()
    },
    "a table": Case("absent", Rows, X, word="no mask", target=Y),
    "said of another shape": Case("untold", Rows, X, options={"padding": torch.ones(8, 7).bool()}),
    "said of no place": Case("untold", Rows, X, options={"padding": torch.zeros(10, 12).bool()}),
    "positions by ids": Case("healthy", Placed, LEFT, target=CLASSES),
    "positions by ids, pooled": Case("fails", lambda: Placed(pools=False), LEFT, target=CLASSES),
    **{
        f"words before patches, {twin}": case
        for twin, case in fault_and_twin(
            lambda leaks: Joined(attends=not leaks),
            TEXTS | {"patches": seeded(6, 4, 16)},
            "block.softmax",
        ).items()
    },
    "a step beside the steps": Case(
        "healthy",
        lambda: Joined(pools=False),
        LEFT | {"patches": seeded(6, 4, 16)},
    ),
    "merged at the border": Case(
        "warns", lambda: merging(nn.Linear(16, 16)), texts(steps=10), word="one step of several"
    ),
    "merged, and seen from afar": Case(
        "warns", lambda: merging(Block(16, causal=False)), texts(steps=10)
    ),
    **{
        f"a state, {'of each layer' if layered else 'of one layer'}, {name}": Case(
            "fails" if name == "read" else "healthy",
            lambda layered=layered: stateful(layered),  # type: ignore[misc]
            TEXTS,
            "*",
            target=None if loss is None else CLASSES,
            loss=loss,
        )
        for layered in (False, True)
        for name, loss in {
            "beside": lambda out, _: (out[0] * MASK.unsqueeze(-1)).square().mean(),
            "read": lambda out, _: out[1].square().mean(),
            "without a loss": None,
        }.items()
    },
    "the step before the first is asked for it": Case(
        "healthy", Tagger, LEFT, target=LEFT["ids"].masked_fill(LEFT["mask"] == 0, -100), loss=ahead
    ),
    "kept outside of modules": Case(
        "untold",
        Elsewhere,
        SERIES,
        word="outside of its modules",
        options={"padding": torch.arange(6) >= torch.tensor([6, 5, 4, 2, 6, 6, 1])[:, None]},
    ),
}


class Kept(Rows):
    """Writes to a weight or to its batch, or keeps its first batch."""

    def __init__(self, what: str) -> None:
        super().__init__(lambda h: F.dropout(h, 0.5) if what == "first batch" else h)
        self.what, self.first_seen = what, None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.mul_(0.5) if self.what == "batch" else x)
        if self.what == "first batch":
            self.first_seen = h.detach() if self.first_seen is None else self.first_seen
            h = h + self.first_seen
        elif self.what == "weight":
            with torch.no_grad():
                self.last.weight.mul_(0.99)
        return self.last(self.between(h))


class Writes(nn.Linear):
    """Writes to the second of its arguments."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return super().forward(first + second.add_(1))


OF_CALLS = {
    "the second input": Case("fails", lambda: Writes(12, 3), (X, X + 1), word="input 'second'"),
    "kept outside of modules": Case("warns", Elsewhere, X, word="another batch"),
    "spectral norm": Case(
        "healthy", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(12, 3)), X
    ),
}

CASES = {
    f"{probe}: {name}": (probe, case)
    for probe, cases in (
        ("sample_independence", OF_SAMPLES),
        ("sample_independence", OF_GROUPS),
        ("causality", OF_TIME),
        ("padding", OF_PADDING),
        ("repeatability", OF_CALLS),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_probe_says_what_it_saw_and_where(name: str) -> None:
    """A fault fails, what may be meant warns, what cannot be told is inconclusive.

    A direct assertion takes all three for a no.
    """
    probe, case = CASES[name]
    report = case.report(probe)
    record, by_grade = report.probes[probe], {"fails": report.violations, "warns": report.warnings}
    told = {grade: [one for one in by_grade[grade] if one.check == probe] for grade in by_grade}
    if case.grade in OUTCOMES:
        assert record.outcome is OUTCOMES[case.grade]
        assert case.word in record.reason
        assert record.reason in " ".join(one.reason for one in report.inconclusive)
        assert report.verdict != "healthy"
    else:
        assert record.outcome is Outcome.JUDGED, record.reason
    assert [grade for grade in told if told[grade]] == [case.grade] * (case.grade in told)
    for one in told.get(case.grade, ()):
        assert case.layer in ("*", one.layer)
        assert case.word in one.message + one.cause
    assert case.note in " ".join(record.notes)
    if case.grade == "healthy":
        getattr(report, ASSERTIONS[probe])()
    else:
        with pytest.raises(AssertionError):
            getattr(report, ASSERTIONS[probe])()


@pytest.mark.parametrize("case", [NO_ROWS, TIME_IN_FRONT, ONE_SAMPLE])
def test_who_asks_for_all_gets_a_note(case: Case) -> None:
    """What does not apply touches the verdict only where it was asked for by name."""
    report = probed(case.model(), case.inputs)
    assert report.probes["sample_independence"].outcome is Outcome.NOT_APPLICABLE
    assert report.verdict == "healthy"
    assert "note: sample_independence does not apply" in str(report)


def test_the_effect_is_measured_as_by_hand() -> None:
    """It is that of the overwritten batch on the samples left alone."""
    model, few = Rows(lambda h: h - h.mean(0)), X[[0, 1, 3, 4, 6, 7, 9]]  # spread over it
    effects, index = list[float](), torch.arange(7)
    with torch.no_grad():
        before = model(few).double()
        for source in (index - index % 2, (index | 1).clamp(max=6)):
            moved = (before - model(few[source]).double()).abs()[source == index]
            effects.append(float(moved.max() / before.square().mean().sqrt()))
    report = probed(model, X, probes="sample_independence")
    (parting,) = report.probes["sample_independence"].partings
    assert parting.effect == pytest.approx(max(effects), rel=1e-4)
    assert any(violation.details for violation in report.violations)


@pytest.mark.parametrize("probes", ["repeatability", "applicable"])
@pytest.mark.parametrize("what", ["weight", "batch"])
def test_what_a_forward_writes_is_that_of_the_inspection_alone(what: str, probes: str) -> None:
    """No run of a probe writes to weights or batch."""
    model, x = Kept(what), X.clone()
    before = model.last.weight.detach().clone()
    report = probed(model, x, Y, probes=probes)
    assert probes == "applicable" or what in report.violations[0].message
    assert torch.equal(model.last.weight, before * 0.99 if what == "weight" else before)
    assert torch.equal(x, X * 0.5 if what == "batch" else X)


def test_what_is_drawn_shows_beside_what_is_kept() -> None:
    """Two findings of one model: the seed is tried in a run of its own, too."""
    model = Kept("first batch")
    report = probed(model, X, Y, probes="repeatability")
    assert "dropout is active" in report.violations[0].message
    assert "another batch" in report.warnings[0].message


def test_healthy_models_take_few_runs() -> None:
    """What is shared runs once, and what shows nothing is not looked into."""
    writer = OF_TIME["masks"].report("causality").probes["causality"]
    calls = OF_CALLS["spectral norm"].report("repeatability").probes["repeatability"]
    assert (writer.forwards, calls.forwards) == (1, 3)


class Conv(nn.Module):
    """Two convolutions over the last dimension, the second one padded on both sides if it leaks."""

    def __init__(self, channels: int, hidden: int, *, leaks: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(channels, hidden, 3), nn.Conv1d(hidden, channels, 3)
        self.sides = (1, 1) if leaks else (2, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.pad(F.relu(self.first(F.pad(x, (2, 0)))), self.sides))


class Folded(nn.Module):
    """Time and samples folded, with as many features as steps, before a recurrence."""

    def __init__(self, channels: int, hidden: int, *, leaks: bool) -> None:
        super().__init__()
        self.first = nn.Linear(channels, hidden)
        self.last = nn.GRU(hidden, channels, batch_first=True, bidirectional=leaks)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.flatten(0, 1)).unflatten(0, x.shape[:2]))[0]


@pytest.mark.parametrize("is_said", [False, True])
@pytest.mark.parametrize("leaks", [False, True])
@pytest.mark.parametrize(
    ("kind", "shape", "time"),
    [(Conv, (3, 4, 11), 2), (Conv, (3, 8, 8), 2), (Folded, (3, 8, 5), 1), (Folded, (3, 8, 8), 1)],
)
def test_time_may_be_any_dimension(
    kind: Any, shape: tuple[int, ...], time: int, leaks: bool, is_said: bool
) -> None:
    """It is read off the sizes, also where channels are as many as steps, or it is said."""
    model, said = kind(shape[3 - time], 8, leaks=leaks), time - 3 if time == 2 else time
    options = {"causal": True, "time_dim": said if is_said else None}
    report = probed(model, torch.randn(shape), probes="causality", **options)
    assert report.probes["causality"].outcome is Outcome.JUDGED
    assert f"time is dimension {time}" in report.probes["causality"].changed
    assert [one.layer for one in report.violations] == ["last"] * leaks
