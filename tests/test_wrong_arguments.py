"""Wrong arguments to what users call: a clear error before anything runs, never a puzzle."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_modelhealth import (
    Check,
    HealthReport,
    InspectionError,
    Inspector,
    LayerNotFoundError,
    ModelHealthWarning,
    Setting,
    SettingsError,
    compare,
)
from pytest_modelhealth.errors import suggest_layer
from pytest_modelhealth.settings import Settings
from tests.capture.oracle import changes, fingerprint

BATCH = torch.linspace(-1, 1, 256).reshape(64, 4)


def model() -> nn.Sequential:
    """A small healthy model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def inspector(**settings: Any) -> Inspector:
    """An inspector of it."""
    return Inspector(model(), **settings)


def run(**arguments: Any) -> HealthReport:
    """One inspection of it."""
    return inspector().run_inspection(BATCH, **arguments)


def run_with(batch: Any, **arguments: Any) -> HealthReport:
    """One inspection of it on another batch."""
    return inspector().run_inspection(batch, **arguments)


@pytest.fixture(scope="module")
def report() -> HealthReport:
    """The report of one inspection."""
    return run()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Inspector(nn.Linear), "Pass an instance"),
        (lambda: Inspector(None), "cannot inspect an object of type NoneType"),
        (lambda: Inspector(model().state_dict()), "must be a torch.nn.Module"),
        (lambda: inspector(on_report=3), "on_report must be a function that takes the report"),
        (lambda: Inspector(BATCH), r"goes into the next call: inspector\(model\)\.run_inspection"),
        (lambda: Inspector(iter([BATCH])), "A batch goes into the next call"),
        (lambda: Inspector(model(), BATCH), "takes the model alone; the batch goes into the next"),
        (lambda: inspector()(BATCH), "an inspector is not called itself; the batch goes into"),
        (lambda: inspector().run(BATCH), "did you mean 'run_batches' or 'run_inspection'"),
        (lambda: inspector().statistic("0"), "did you mean 'get_statistics'"),
        (lambda: inspector().frobnicate, r"Inspector has no 'frobnicate'\. It has get_statis"),
    ],
)
def test_what_is_no_model_is_refused(make: Callable[[], object], message: str) -> None:
    """The message says what a model is, and what else was asked for."""
    with pytest.raises(InspectionError, match=message):
        make()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_grad_nrom": 3}, "did you mean 'max_grad_norm'"),
        ({"max_grad_norm": "3"}, r"must be a number.*not '3' \(str\)"),
        ({"checks": "dead_unit"}, "did you mean 'dead_units'"),
        ({"skip_checks": 3}, "must be names of checks"),
        ({"layers": 3}, r"must be names or shell wildcards of layers.*not 3 \(int\)"),
        ({"layers": ["0", 3]}, "must be names or shell wildcards of layers"),
        ({"layers": []}, "names no layer"),
        ({"planned_dtype": torch.int8}, "one of float16, .* or none, not 'int8'"),
        ({"planned_dtype": 16}, "one of float16, .* not 16"),
        ({"loss": F.mse_loss}, r"no setting 'loss'; run_inspection takes it: .*, loss=\.\.\.\)$"),
        ({"optimizer": 3}, r"run_step takes it: run_step\(step, optimizer, batch\)$"),
        ({"every": 3}, r"monitor takes it: monitor\(every\)$"),
        ({"waive": "0"}, r"a call of its own: inspector\(model\)\.waive\(\.\.\.\)$"),
        ({"own_checks": Check}, "list of subclasses of Check"),
        ({"own_checks": [3]}, "no subclass of pytest_modelhealth.Check"),
        ({"settings": {"max_grad_norm": 3}}, "arguments of their own"),
    ],
)
def test_a_wrong_setting_is_refused_at_once(settings: dict[str, Any], message: str) -> None:
    """An unknown name gets the nearest one, a wrong value what was expected."""
    with pytest.raises(SettingsError, match=message):
        inspector(**settings)


@pytest.mark.parametrize(
    ("layers", "arguments", "message"),
    [
        (("0",), {"reason": " "}, "reason='...' is missing"),
        (("0",), {"check": "dead_units"}, r"missing.* as in \('0', check='dead_units', reason='"),
        ((), {"reason": "known"}, "name the layers first"),
        ((3,), {"reason": "known"}, "layers as strings"),
        (("0",), {"reason": "known", "check": "dead_unit"}, "did you mean 'dead_units'"),
        (("0",), {"reason": "known", "check": 3}, "the name of one check"),
    ],
)
def test_a_wrong_waiver_is_refused(layers: Any, arguments: Any, message: str) -> None:
    """A waiver says where, what and why."""
    with pytest.raises(SettingsError, match=f"argument of waive: .*{message}"):
        inspector().waive(*layers, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"what": "gradient"}, "did you mean 'gradients'"),
        ({"what": 3}, "unknown role 3"),
        ({"what": ["inputs", 3]}, "unknown role 3"),
        ({"what": []}, "names no role"),
        ({"what": None}, "unknown role None"),
        ({"pattern": 3}, "a shell wildcard"),
        ({"pattern": ["0", "2"]}, r"call watch\(\) once for each"),
        ({"pattern": "encoder.*"}, "matches no layer of Sequential"),
        ({"types": "Linear"}, "classes of modules"),
        ({"types": [nn.Linear, 3]}, "classes of modules, such as nn.Linear: 3"),
        ({"types": nn.Conv2d}, "matches no layer of Sequential"),
    ],
)
def test_a_wrong_watch_is_refused(arguments: dict[str, Any], message: str) -> None:
    """Watching nothing by mistake would make every check pass."""
    with pytest.raises(InspectionError, match=message):
        inspector().watch(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": 3}, "cannot be called"),
        ({"loss": "mse"}, "cannot be called"),
        ({"loss": nn.MSELoss, "target": BATCH}, r"give an instance, MSELoss\(\)"),
        ({"loss": {}}, "names no loss"),
        ({"loss": {"a": 3}}, "the loss of task 'a' is of type int"),
        ({"loss": lambda output: None}, "returned NoneType"),
        ({"loss": lambda output: output}, r"has shape \(64, 2\), not a scalar"),
        ({"loss": lambda output: output.sum().item()}, "without .item"),
        ({"loss": lambda output: output.sum().detach()}, "has no graph"),
        ({"loss": lambda output: output.sum() * 1j}, "the loss is complex"),
        ({"target": BATCH}, "a target was given without a loss"),
        ({"backward": "yes"}, "backward must be True, False, None or a function"),
        ({"scaler": 3}, "pass the torch.amp.GradScaler itself"),
    ],
)
def test_a_wrong_loss_is_refused(arguments: dict[str, Any], message: str) -> None:
    """The message says what a loss is, and what to write instead; the model is as it was."""
    net = model().train()
    before = fingerprint(net, BATCH)
    with pytest.raises(InspectionError, match=message):
        Inspector(net).run_inspection(BATCH, **arguments)
    assert changes(before, fingerprint(net, BATCH)) == []


@pytest.mark.parametrize(
    ("batches", "arguments", "message"),
    [
        (3, {}, "batches to iterate over"),
        ([], {}, "there was no batch"),
        ([BATCH], {"max_batches": 0}, "there was no batch"),
        ([BATCH], {"max_batches": -1}, "a whole number"),
        ([BATCH], {"max_batches": "2"}, "a whole number"),
        ([BATCH], {"max_batches": True}, "a whole number"),
        (
            [BATCH],
            {"loss": F.mse_loss},
            r"not a pair.*run_inspection\(inputs, target=\.\.\., loss=",
        ),
        ({"input": BATCH}, {}, "not a dict; one batch goes into run_inspection"),
        (TensorDataset(BATCH), {}, r"DataLoader\(dataset, batch_size=64\), not a TensorDataset"),
    ],
)
def test_wrong_batches_are_refused(batches: Any, arguments: Any, message: str) -> None:
    """No batch, no pair, no number: each is said."""
    with pytest.raises(InspectionError, match=message):
        inspector().run_batches(batches, **arguments)


def test_rows_of_a_tensor_are_taken_for_batches_with_a_warning() -> None:
    """A tensor may well be a stack of batches, and says so by `unbind`."""
    with pytest.warns(ModelHealthWarning, match="each row of the tensor 64x4 for a batch") as told:
        inspector().run_batches(BATCH)
    assert [warning.filename for warning in told] == [__file__]
    assert inspector().run_batches(BATCH.reshape(8, 8, 4).unbind()).observation.samples == 64


LOSS = F.cross_entropy
CLASSES = (BATCH[:, 0] > 0).long()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda i: i.run_inspection(BATCH, CLASSES, LOSS),
            r"takes no more by position: run_inspection\(inputs, target, loss=\.\.\.\)",
        ),
        (lambda i: i.run_batches([(BATCH, CLASSES)], LOSS), r"run_batches\(batches, loss=\.\.\.\)"),
        (lambda i: i.removable([(BATCH, CLASSES)], LOSS), r"removable\(batches, loss=\.\.\.\)"),
        (
            lambda i: compare(model(), model(), BATCH, CLASSES, LOSS),
            r"compare\(reference, candidate, inputs, target, loss=\.\.\.\)",
        ),
        (lambda i: i.monitor(3, "health.csv"), r"monitor\(every\); its arguments: every, csv"),
        (
            lambda i: i.run_inspection(BATCH, optimizer=3),
            r"run_inspection has no argument 'optimizer'; run_step takes it: run_step\(step, opt",
        ),
        (lambda i: i.run_inspection(BATCH, los=LOSS), "did you mean 'loss'"),
        (lambda i: i.run_inspection(BATCH, max_grad_norm=3), r"a setting: Inspector\(model, max_"),
        (lambda i: i.run_inspection(BATCH, max_grad_nrom=3), "the setting 'max_grad_norm'"),
        (lambda i: i.run_inspection(target=CLASSES), r"'inputs': run_inspection\(inputs, target\)"),
        (lambda i: i.run_inspection(BATCH, inputs=BATCH), "multiple values for argument 'inputs'"),
        (lambda i: i.run_batches([BATCH], target=CLASSES), "run_inspection takes it"),
        (lambda i: i.run_step(None, optim=3), "did you mean 'optimizer'"),
        (lambda i: i.monitor(evry=3), "did you mean 'every'"),
        (lambda i: i.monitor(optimizer=3), "run_step takes it"),
        (lambda i: compare(model(), model(), BATCH, rtol=3), r"'rtol'\. Its arguments: reference"),
        (lambda i: compare(model(), BATCH), "missing a required argument: 'inputs'"),
        (lambda i: i.summary(BATCH, loss=LOSS), "run_inspection takes it"),
        (lambda i: i.waive("0", chek="finite", reason="known"), "did you mean 'check'"),
        (
            lambda i: i.watch("0", roles="gradients"),
            r"'roles'\. Its arguments: pattern, what, types",
        ),
        (lambda _: Inspector(), r"missing a required argument: 'model': Inspector\(model\)"),
    ],
)
def test_a_wrong_call_names_the_right_one(
    call: Callable[[Inspector], object], message: str
) -> None:
    """What has no place in one call may have it in another."""
    with pytest.raises(InspectionError, match=message):
        call(inspector())


@pytest.mark.parametrize(
    ("call", "switch", "expected"),
    [
        (Inspector, "calibrate", "True, False or None"),
        (Inspector, "ranks", "True, False or None"),
        (Inspector.run_inspection, "causal", "True, False or None"),
        (Inspector.run_inspection, "costs", "True or False"),
        (Inspector.run_batches, "training", "True, False or None"),
        (Inspector.run_batches, "progress", "True, False or None"),
        (Inspector.removable, "progress", "True, False or None"),
        (Inspector.run_step, "resume", "True or False"),
    ],
)
@pytest.mark.parametrize("wrong", [1, "no"])
def test_a_switch_is_no_number_and_no_text(
    call: Any, switch: str, expected: str, wrong: object
) -> None:
    """It is refused before anything runs."""
    first = [model()] if call is Inspector else [inspector(), [BATCH]]
    with pytest.raises(InspectionError, match=f"^{switch} must be {expected}, not {wrong!r}$"):
        call(*first, **{switch: wrong})


def step_with(target: Any, loss: Any) -> None:
    """Two calls of the usual step of it."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    Inspector(net).run_step(optimizer=optimizer, inputs=BATCH, target=target, loss=loss, calls=2)


ONE_HOT = F.one_hot(CLASSES, 2)


@pytest.mark.parametrize(
    ("target", "loss", "instead"),
    [
        (CLASSES.float(), LOSS, r"torch\.float32.* class indices: target\.long\(\)"),
        (CLASSES.double(), nn.CrossEntropyLoss(), r"target\.long\(\)"),
        (CLASSES.int(), LOSS, r"torch\.int32.*target\.long\(\)"),
        ({"a": CLASSES.float()}, {"a": LOSS}, r"target\.long\(\)"),
        (ONE_HOT, nn.BCEWithLogitsLoss(), r"torch\.int64.* numbers: target\.float\(\)"),
        (ONE_HOT.bool(), nn.BCEWithLogitsLoss(), r"torch\.bool.*target\.float\(\)"),
        (ONE_HOT, F.huber_loss, r"target\.float\(\)"),  # raised in the backward pass
    ],
)
def test_a_target_of_another_dtype_gets_a_hint(target: Any, loss: Any, instead: str) -> None:
    """The loss's own exception passes, with one note on what to pass instead."""
    for call in (
        lambda: run(target=target, loss=loss),
        lambda: inspector().run_batches([(BATCH, target)], loss=loss),
        lambda: step_with(target, loss),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        notes = [note for note in caught.value.__notes__ if "The target is of" in note]
        assert len(notes) == 1
        assert re.search(instead, notes[0])


@pytest.mark.parametrize(
    ("net", "batch"), [(nn.Embedding(4, 2), BATCH[:, 0]), (model().half(), BATCH)]
)
def test_a_dtype_that_the_model_refuses_is_not_laid_to_the_target(net: Any, batch: Any) -> None:
    """Here the batch is of the same dtype, and its error names it."""
    with pytest.raises(RuntimeError, match="Float") as caught:
        Inspector(net).run_inspection(batch, batch, loss=LOSS)
    assert not hasattr(caught.value, "__notes__")


class TakesArrays(nn.Module):
    """Makes the tensors itself, of whatever it is given an iterator of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, arrays: Any) -> Tensor:
        return torch.cat([self.linear(torch.as_tensor(array)) for array in arrays])


LOADER = DataLoader(TensorDataset(BATCH, BATCH[:, :2]), batch_size=32)


@pytest.mark.parametrize(
    ("batch", "target", "hint"),
    [
        (BATCH.numpy(), None, r"a NumPy array \(float32, 64x4\); torch.from_numpy\(batch\) makes"),
        ({"input": BATCH.double().numpy()}, None, r"torch.from_numpy\(batch\).float\(\) makes a t"),
        (LOADER, None, r"is a DataLoader: run_batches\(loader, loss=\.\.\.\) runs its batches"),
        (LOADER.dataset, None, r"data set of samples: run_batches\(DataLoader\(dataset"),
        (iter(LOADER), None, r"is an iterator.*run_inspection and compare take one: next\(batches"),
        ((row for row in BATCH), None, r"is an iterator \(generator\)"),
        (next(iter(LOADER)), None, r"run_inspection\(inputs, target=target, loss=\.\.\.\)"),
        (
            BATCH,
            BATCH[:, :2].numpy(),
            r"The target holds a NumPy array.*torch.from_numpy\(target\)",
        ),
    ],
)
def test_what_the_model_cannot_take_gets_a_hint(batch: Any, target: Any, hint: str) -> None:
    """The model's own exception passes, with one note on what to pass instead."""
    loss = None if target is None else F.mse_loss
    with pytest.raises(TypeError) as caught:
        run_with(batch, target=target, loss=loss)
    (note,) = caught.value.__notes__
    assert re.search(hint, note)
    with pytest.raises(TypeError) as caught:
        compare(model(), model(), batch, target=target, loss=loss)
    assert note in caught.value.__notes__


@pytest.mark.parametrize("batch", [[[BATCH.numpy()]], iter([BATCH, BATCH])])
def test_what_the_model_can_take_is_never_refused(batch: Any) -> None:
    """Lists of arrays and iterators go in as they are."""
    assert Inspector(TakesArrays()).run_inspection(batch).healthy


@pytest.mark.parametrize("error", [ValueError("no such word"), TypeError("of its own")])
def test_an_exception_for_another_reason_gets_no_hint(error: Exception) -> None:
    """A model that takes arrays may raise because of something else."""

    class Raises(TakesArrays):
        def forward(self, arrays: Any) -> Tensor:
            raise error

    with pytest.raises(type(error)):
        Inspector(Raises()).run_inspection(BATCH.numpy())
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": 3}, "the name of a setting must be a string, not 3"),
        ({"type": "float"}, "the type of limit must be the class float.*not 'float'"),
        ({"minimum": "0"}, "minimum and maximum of limit must be numbers or None"),
    ],
)
def test_a_wrong_declaration_of_a_setting_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    """Where it is written, not where a value is first read."""
    with pytest.raises(SettingsError, match=message):
        Setting(**{"name": "limit", "type": float, "default": 1.0, "help": "it"} | arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": "encoder.*"}, r"Sequential\. Its layers are '0', '1', '2'\."),
        ({"thresholds": {"encoder.*": {"max_grad_norm": 1}}}, "Its layers are '0', '1', '2'"),
        ({"layers": "00"}, "did you mean '0'"),
        ({"layers": ["0", "5", "2"]}, r"layers='5' \(argument of inspector\) matches no layer"),
    ],
)
def test_a_pattern_that_matches_nothing_names_what_there_is(
    settings: dict[str, Any], message: str
) -> None:
    """The nearest layer, or else the outermost ones."""
    with pytest.raises(LayerNotFoundError, match=message):
        inspector(**settings).run_inspection(BATCH).assert_healthy()


def test_of_many_layers_the_outermost_are_named() -> None:
    """A list of all would hide them; a model of one layer says that it is one."""
    names = [
        "",
        *(f"{block}.{i}" for block in ("stem", "body") for i in range(9)),
        "body",
        "classifier",
    ]
    assert suggest_layer("xyz*", names) == (
        ". Its layers are 'body', 'classifier', 'stem.0' and 17 more."
    )
    assert suggest_layer("xyz*", [""]) == (
        "; it has no layers inside: '*' matches the model itself."
    )


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda r: r["00"], LayerNotFoundError, "has no layer '00'"),
        (lambda r: r[3], LayerNotFoundError, "has no layer 3"),
        (lambda r: r[None], LayerNotFoundError, "has no layer None"),
        (lambda r: r[[]], LayerNotFoundError, r"has no layer \[\]"),
        (
            lambda r: r["0"].activations.merge(3),
            InspectionError,
            r"TensorStatistics.*not 3 \(int\)",
        ),
        (lambda r: r["0"].merge(r), InspectionError, "takes another LayerRecord"),
        (lambda r: r.observation.merge(None), InspectionError, "takes another Observation"),
        (lambda r: r["0"].statistics("grads"), LayerNotFoundError, "did you mean 'gradients'"),
        (lambda r: r["0"].tensors(3), LayerNotFoundError, "unknown role 3"),
        (lambda r: r.render("jsn"), InspectionError, "did you mean 'json'"),
        (lambda r: r.render("figure"), InspectionError, "unknown format 'figure'"),
        (lambda r: r.render(3), InspectionError, "unknown format 3"),
        (lambda r: r.plot_histogram("5"), LayerNotFoundError, "has no layer '5'"),
        (lambda r: r.plot_histogram("0", "buffers"), InspectionError, "no buffers were seen"),
        (lambda r: r.plot_histograms("encoder*"), LayerNotFoundError, "layers are '0', '1', '2'"),
        (lambda r: r.plot_histograms(3), InspectionError, "must be a shell wildcard"),
        (
            lambda r: r._settings.override(3, "here"),
            SettingsError,
            "here: values must be a mapping",
        ),
        (lambda r: r.assert_healthy(max_dead=0.1), SettingsError, "did you mean"),
        (lambda r: r.to_csv("/no/such/folder/x.csv"), FileNotFoundError, "x.csv"),
        (lambda r: r.to_csv(3), InspectionError, r"such as 'health.csv', not 3 \(int\)"),
        (lambda r: r.to_json([]), InspectionError, r"report.render\('json'\) is its text"),
        (lambda r: r._settings.waive(3), SettingsError, r"each of type Waiver, not 3 \(int\)"),
        (lambda _: Settings(3), SettingsError, r"each of type Setting, not 3 \(int\)"),
    ],
)
def test_a_wrong_question_to_a_report_is_refused(
    report: HealthReport, ask: Callable[[HealthReport], object], error: Any, message: str
) -> None:
    """A name that is not there gets the nearest one that is."""
    with pytest.raises(error, match=message):
        ask(report)


def test_asking_before_an_inspection_says_what_to_do() -> None:
    """There are no statistics yet."""
    with pytest.raises(InspectionError, match=r"call run_inspection\(batch\) first"):
        inspector().get_statistics("0")
