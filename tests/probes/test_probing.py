"""What holds for every probe: the model is as it was, runs are counted, errors are our own."""

from __future__ import annotations

import pickle
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth import InspectionError, Inspector, SettingsError
from pytest_modelhealth.probes import all_probes
from pytest_modelhealth.report import Outcome
from tests.capture.oracle import fingerprint
from tests.probes.models import Reader, Rows, Writer, language, probed, rows, texts


class Eventful(nn.Module):
    """Keeps, draws, writes and has modes: everything that has to be put back."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True)
        self.norm, self.drop, self.head = nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 20)
        self.seen: list[Tensor] = []
        self.register_buffer("total", torch.zeros(()))
        self.calls = 0
        self.raises: BaseException | None = None

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        if self.raises is not None and not self.training:
            raise self.raises
        x = self.norm(self.rnn(self.words(ids))[0].transpose(1, 2)).transpose(1, 2)
        self.seen.append(x.detach())
        with torch.no_grad():
            self.total += x.sum()
        return self.head(self.drop(x + 0.1 * torch.randn_like(x)))


IDS = torch.randint(0, 20, (6, 9))


@pytest.mark.parametrize("raises", [None, ValueError("no"), KeyboardInterrupt()])
def test_the_model_is_as_it_was_bit_for_bit(raises: BaseException | None) -> None:
    """After every probe, an exception of the model's and Ctrl-C."""
    model = Eventful()
    model.raises = raises
    batch = IDS[:, :-1]
    before = fingerprint(model, batch)
    try:
        report = probed(model, batch, IDS[:, 1:], loss=language)
    except KeyboardInterrupt:
        assert isinstance(raises, KeyboardInterrupt)
    else:
        record = report.observation.probes["repeatability"]
        assert (record.outcome is Outcome.NOT_TOLD) is (raises is not None)
        reasons = " ".join(record.reason for record in report.observation.probes.records)
        assert raises is None or "raises ValueError: no" in reasons
    assert fingerprint(model, batch) == before


def test_runs_are_counted_in_the_report() -> None:
    """Each forward that really ran is, and the report says how many; unasked, no more than one.

    A model in training has gradients of its own, and hooks, which stay.
    """
    counted: list[int] = []
    model, (x, y) = Rows(), rows()
    model.register_forward_hook(lambda *_: counted.append(1))
    assert Inspector(model).run_inspection(x).observation.probes.records == ()
    assert len(counted) == 1
    nn.functional.cross_entropy(model(x), y).backward()
    gradients, before = [p.grad for p in model.parameters()], fingerprint(model, x)
    counted.clear()
    report = probed(model, x, y, probes=("sample_independence", "repeatability", "causality"))
    assert fingerprint(model, x) == before
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert len(counted) == 1 + report.observation.probes.forwards
    assert "further forwards" in str(report)
    assert "causality" not in str(report).partition("judged")[0].rpartition("probes:")[2]
    assert report.to_dict()["probes"]["records"][0]["forwards"] >= 0
    assert pickle.loads(pickle.dumps(report.observation)).probes == report.observation.probes


def test_probes_are_a_setting_as_any_other(pytester: pytest.Pytester) -> None:
    """Marker, ini, option and call, the closest winning; waived and made to warn like checks."""
    pytester.makeini("[pytest]\nmodelhealth_probes = sample_independence")
    pytester.makepyfile(
        """
        import pytest, torch
        from torch import nn

        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(8, 3)
            def forward(self, x):
                return self.fc(x - x.mean(0))

        def run(inspector, **options):
            torch.manual_seed(0)
            x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
            return inspector(Mixed()).run_inspection(
                x, y, loss=nn.functional.cross_entropy, **options)

        def test_ini(inspector):
            assert [v.check for v in run(inspector).violations] == ["sample_independence"]

        def test_call(inspector):
            assert run(inspector, probes=False).healthy

        @pytest.mark.modelhealth(probes="repeatability")
        def test_marker(inspector):
            assert [r.probe for r in run(inspector).observation.probes.records] == ["repeatability"]

        @pytest.mark.modelhealth_waive("*", check="sample_independence", reason="meant so")
        def test_waiver(inspector):
            run(inspector).assert_healthy()

        def test_unasked(inspector):
            run(inspector)

        @pytest.mark.modelhealth(max_sample_effect=100.0)
        def test_limit(inspector):
            run(inspector).assert_samples_independent()
        """
    )
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["*samples see each other*", "*seen: *overwritten*"])


@pytest.mark.parametrize(
    ("said", "probes"),
    [("all", True), (["all"], True), ("none", False), ("auto", ["auto"]), ("padding", ["padding"])],
)
def test_all_and_none_are_words_wherever_they_stand(said: Any, probes: Any) -> None:
    """A call and a marker spell them as an ini file does."""
    settings = [Inspector(Rows(), probes=value)._settings for value in (said, probes)]
    assert settings[0]["probes"].value == settings[1]["probes"].value


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"probes": "causalty"}, SettingsError, "did you mean 'causality'"),
        ({"probes": 3}, SettingsError, "probes must be"),
        ({"batch_dim": "first"}, InspectionError, "batch_dim must be"),
        ({"batch_dim": 0, "probes": False}, InspectionError, "batch_dim= is for probes"),
        ({"time_dim": "last"}, InspectionError, "time_dim must be"),
        ({"causal": True, "probes": None}, InspectionError, "causal= is for probes"),
        ({"padding": torch.zeros(6, 9)}, InspectionError, "padding must be a boolean tensor"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """With what was expected, and the nearest name."""
    counted: list[int] = []
    model = Reader()
    model.register_forward_hook(lambda *_: counted.append(1))
    with pytest.raises(error, match=message):
        probed(model, texts(), **options)
    assert counted == []


def test_a_property_that_was_not_probed_cannot_be_asserted() -> None:
    """The error says how to ask for it."""
    report = Inspector(Rows()).run_inspection(rows()[0])
    for name in ("samples_independent", "causal", "padding_ignored", "repeatable"):
        with pytest.raises(InspectionError, match="was not probed: ask for it"):
            getattr(report, f"assert_{name}")()


def test_a_lazy_model_is_told_to_run_first() -> None:
    """A copy is inspected, and there are no parameters to put back."""
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))
    report = probed(model, *rows())
    reasons = {record.reason for record in report.observation.probes.records}
    assert all("the model is lazy" in reason for reason in reasons)


def test_batches_are_probed_once() -> None:
    """The first of several, under the setting."""
    batches = [rows(), rows()]
    report = Inspector(Rows(), probes="sample_independence").run_batches(
        batches, loss=nn.functional.cross_entropy
    )
    assert report.observation.batches == 2
    assert report.observation.probes["sample_independence"].outcome is Outcome.JUDGED


def test_each_probe_names_what_it_runs() -> None:
    """By text, since a run that sets a limit loads all probes, and none of what they run."""
    for probe in all_probes():
        module, _, function = probe.experiment.partition(":")
        package = import_module(f"pytest_modelhealth.probes.intervening.{module}")
        assert callable(getattr(package, function))


def test_an_evaluation_without_gradients_stays_so() -> None:
    """Probes run where the inspection runs: no_grad around it holds for them too."""
    with torch.no_grad():
        report = probed(Writer(True), IDS, probes="sample_independence")
    assert report.observation.probes["sample_independence"].outcome is Outcome.JUDGED
