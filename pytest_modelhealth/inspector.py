"""`Inspector`: the front door. It joins capture and checks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Never, NoReturn, Self

from torch import Tensor, nn

from pytest_modelhealth.capture import Request, find_engine, hinted
from pytest_modelhealth.capture.engine import Backward, Loss
from pytest_modelhealth.capture.step.company import may_have_company
from pytest_modelhealth.capture.step.guard import collected_rarely, exited_whole
from pytest_modelhealth.checks import Check, default_settings, with_own_checks
from pytest_modelhealth.checks.judging import judge
from pytest_modelhealth.errors import (
    InspectionError,
    NamesItsAttributes,
    SettingsError,
    checked_call,
    suggest,
    taking,
)
from pytest_modelhealth.layers import Pattern, Rule, Selection
from pytest_modelhealth.rendering import renderer
from pytest_modelhealth.report import ROLES, HealthReport, Judgement, Observation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import Waiver
from pytest_modelhealth.wings import MissingWingError, wing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.amp import GradScaler

    from pytest_modelhealth.probes.probing import Probing
    from pytest_modelhealth.ranks.joint import Joint
    from pytest_modelhealth.removal.result import RemovableUnits
    from pytest_modelhealth.report import ModelSummary
    from pytest_modelhealth.statistics import TensorStatistics
    from pytest_modelhealth.training.monitoring.judging import Reaction
    from pytest_modelhealth.training.monitoring.monitor import TrainingMonitor


_NEXT_CALL = "; the batch goes into the next call: inspector(model).run_inspection(batch)"

RECORDING: ContextVar[bool] = ContextVar("RECORDING", default=False)  # a test records a snapshot


class Inspector(NamesItsAttributes):
    """Looks inside one model.

    Args:
        model: a `torch.nn.Module`. It is left as it was, bit for bit; a compiled one runs
            uncompiled.
        settings: the settings to start from; ``None`` takes the defaults.
        on_report: called with each report made.
        own_checks: checks beside those of the settings: subclasses of `Check`.
        calibrate: whether to measure how far rounding alone moves each statistic, which a snapshot
            takes as its tolerance: four further runs of copies for each batch. ``None`` does so
            in a test that records a snapshot.
        ranks: whether the ranks of a process group inspect together, each on its share of the
            batch, and all get one report. ``None`` does so where something distributes the model:
            DDP, `fully_shard`, a `DTensor`. ``True`` does so for any
            model, on all ranks. ``False`` inspects what this rank has.
        **overrides: thresholds and other settings by name (`pytest --modelhealth-explain` lists
            them).

    Raises:
        InspectionError: `model` is nothing that can be inspected, or `on_report`, `calibrate` or
            `ranks` is of a wrong type.
        SettingsError: an override has an unknown name, a wrong type or an impossible value, or an
            own check is not sound.
    """

    @checked_call(default_settings)
    def __init__(
        self,
        model: nn.Module,
        *batch: Never,
        settings: Settings | None = None,
        on_report: Callable[[HealthReport], None] | None = None,
        own_checks: Iterable[type[Check]] = (),
        calibrate: bool | None = None,
        ranks: bool | None = None,
        **overrides: object,
    ) -> None:
        if batch:
            raise InspectionError(f"Inspector takes the model alone{_NEXT_CALL}")
        if not (on_report is None or callable(on_report)):
            raise InspectionError(
                f"on_report must be a function that takes the report, or None, not {on_report!r}"
            )
        self._engine = find_engine(model)
        self._model = self._engine.load(model)
        base = default_settings() if settings is None else settings
        if not isinstance(base, Settings):
            raise SettingsError(
                f"settings must be a Settings object, not {settings!r}; thresholds are arguments "
                "of their own: Inspector(model, max_grad_norm=10.0)"
            )
        base = with_own_checks(base, own_checks, "own_checks")
        for name in overrides:
            if name not in base and (where := taking(name)):
                raise SettingsError(f"argument of inspector: no setting {name!r}{where}")
        self._settings = base.override(overrides, "argument of inspector")
        self._on_report = on_report
        self._on_run: Callable[[], object] | None = None
        self._calibrate = RECORDING.get() if calibrate is None else calibrate
        self._calibration: Any = None
        self._ranks = ranks
        self._selection = Selection()
        self._report: HealthReport | None = None

    @checked_call(default_settings)
    def watch(
        self,
        pattern: Pattern = "*",
        what: str | Iterable[str] = ROLES,
        *,
        types: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
    ) -> Self:
        """Observe only what some call of `watch` names; without any, everything is observed.

        Args:
            pattern: a shell wildcard on layer names (``"encoder.*"``; ``*`` crosses dots), or a
                compiled regular expression, searched for.
            what: one role or several: ``inputs``, ``activations``, ``gradients``, ``parameters``,
                ``parameter_gradients``, ``buffers``.
            types: only modules of these types.

        Raises:
            LayerNotFoundError: no layer matches; the message names the nearest.
            InspectionError: `what` names no role, or `pattern` or `types` is of a wrong type.
        """
        if not isinstance(pattern, str | re.Pattern):
            raise InspectionError(
                "the pattern of layers must be a shell wildcard such as 'encoder.*' or a compiled "
                f"regular expression, not {pattern!r}; for several call watch() once for each"
            )
        rule = Rule(pattern, _roles(what), None if types is None else _module_types(types))
        self._selection = self._selection.add(rule, self._engine.module(self._model))
        return self

    @checked_call(default_settings)
    def waive(self, *layers: str, check: str | None = None, reason: str = "") -> Self:
        """Accept violations in the reports that follow; they are listed as waived.

        Args:
            layers: names or shell wildcards of the layers; ``"*"`` is all of them.
            check: the check waived, by name or shell wildcard; ``None`` waives all.
            reason: why they are accepted; it must not be left out.

        Raises:
            SettingsError: no layers, no reason, or an unknown check.
        """
        origin = "argument of waive"
        if not layers:
            raise SettingsError(f"{origin}: name the layers first; '*' is all of them")
        waivers = [Waiver(pattern, check, reason, origin) for pattern in layers]
        self._settings = self._settings.waive(*waivers)
        return self

    @checked_call(default_settings)
    def run_inspection(
        self,
        inputs: Any,
        target: Any = None,
        *,
        loss: Loss | None = None,
        backward: Backward = None,
        scaler: GradScaler | None = None,
        probes: bool | str | Iterable[str] | None = None,
        batch_dim: int | None = None,
        time_dim: int | None = None,
        causal: bool | None = None,
        padding: Tensor | None = None,
        costs: bool = False,
    ) -> HealthReport:
        """Run one batch forward and backward and report on every layer.

        Args:
            inputs: a mapping goes in as keywords, a tuple or list as positionals,
                `Inputs(x, mask=mask)` as both, anything else as the one argument.
            target: what `loss` compares the output with.
            loss: ``loss(output, target)`` with a target, else ``loss(output)``; a scalar tensor.
                Several by name, ``{"detect": f, "segment": g}``, are summed in their order, and
                what each asks of the layers is reported, at one more backward pass a task; a target
                that is a mapping of the same names is handed out by name.
                ``None`` takes ``output.loss``, a scalar output itself, or a fixed random projection
                of the floating outputs.
            backward: ``None`` runs it where gradients have a path, ``True`` demands it, ``False``
                leaves it out, a function runs it: ``backward(loss)``.
            scaler: the `torch.amp.GradScaler` of mixed-precision training. The backward pass runs
                on the scaled loss, `backward` gets that one, and gradients are reported unscaled,
                as ``scaler.unscale_`` would leave them. The scaler's own state does not change.
            probes: which probes to run: ``True`` is all of them, or names. They change something,
                run the model again in evaluation mode, and put everything back. ``None`` takes the
                setting ``probes``.
            batch_dim: for probes, the dimension of samples where it is not the first.
            time_dim: for probes, the dimension of a sequence's steps, such as 2 of a batch
                ``(N, C, T)``, where the sizes of inputs and outputs do not tell.
            causal: for probes, whether no output may depend on later inputs; ``None`` reads that
                off the target.
            padding: for probes, a boolean tensor of shape (samples, length), true where there is
                padding; ``None`` reads it off masks and lengths in the batch.
            costs: whether to run the same step once more and measure multiply-adds, what autograd
                saves for the backward pass and the peak of memory, for ``report.summary()``.

        Raises:
            InspectionError: the loss is no scalar or has no graph, the request fits no layer, or
                `batch_dim`, `time_dim`, `causal`, `padding` or `costs` is of a wrong type, or no
                probe is asked for that reads them.
            SettingsError: there is no such probe.
            Exception: whatever the model or the loss raises, untouched.
        """
        self._begin()
        request = self._request(inputs, target, loss, backward, scaler)
        conventions = (batch_dim, time_dim, causal, padding)
        settings, probing = self._probing(request, probes, conventions)
        further = None
        if costs:
            from pytest_modelhealth.capture.costing.measure import FurtherRun

            further = FurtherRun(self._engine, request)
        observation = self._observe(request)
        if probing is not None:
            observation = probing.after(observation)
        if further is not None:
            observation = further.after(observation)
        if observation.ranks is not None and (company := self._company()) is not None:
            observation = company.settled(observation)
        return self._reported(observation, settings)

    @checked_call(default_settings)
    def summary(
        self, inputs: Any, *, depth: int | None = None, max_rows: int | None = 200
    ) -> ModelSummary:
        """Run one forward and return what the model consists of and what it costs.

        Shapes, parameters, multiply-adds, what autograd would save for a backward pass, and the
        peak of memory. No value is read and no verdict made, so a model on the ``meta`` device,
        without any memory, has all of it too. `watch` does not limit it.

        Args:
            inputs: as in `run_inspection`.
            depth: show layers in at most so many others; 0 is the model alone, ``None`` all.
            max_rows: show at most so many lines, ``None`` for all.

        Raises:
            InspectionError: `depth` or `max_rows` is no such number.
            Exception: whatever the model raises, untouched.
        """
        from pytest_modelhealth.capture.costing.measure import measured_forward

        self._begin()
        request = Request(self._model, inputs)
        with hinted(request):
            observation = measured_forward(self._engine, request)
        return self._report_of(observation).summary(depth, max_rows)

    @checked_call(default_settings)
    def run_batches(
        self,
        batches: Iterable[Any],
        *,
        loss: Loss | None = None,
        backward: Backward = None,
        scaler: GradScaler | None = None,
        training: bool | None = None,
        max_batches: int | None = None,
        progress: bool | None = None,
    ) -> HealthReport:
        """Run several batches, such as a whole data set, and report on their merged statistics.

        A unit is dead only if it is dead over all of them. Of each layer it is known in which batch
        and sample its largest activation and gradient stood, and the first NaN:
        ``report["fc1"].largest["activations"]``, counted from 0.

        Each batch starts from the same model: no step is made, and buffers are put back after each.
        So in training mode a batch norm normalises by its own batch each time, and what one batch
        moves in the running statistics is not there in the next. Random generators are put back
        after each batch, too: a run moves them as iterating over `batches` does, and no further.
        What a loader draws goes on from batch to batch; where it draws nothing between two, dropout
        draws the same in both.

        Args:
            batches: with a `loss`, pairs of inputs and target, as a DataLoader of a labelled data
                set gives; without one, inputs. It is iterated over once, and its workers end with
                the run, unless they are persistent.
            loss: ``loss(output, target)``.
            backward: as in `run_inspection`.
            scaler: as in `run_inspection`.
            training: ``True`` runs the model in training mode, ``False`` in evaluation mode, and
                each module has its own mode again afterwards; ``None`` takes the model as it is.
            max_batches: stop after so many. ``report.observation.part`` says how many batches of
                how many were seen, and so does the verdict.
            progress: whether tqdm, where it is installed, shows how far it is: ``True`` does at
                once, ``False`` never, ``None`` after two seconds; on a terminal only.

        Raises:
            InspectionError: there was no batch, a batch is no pair although there is a loss, or
                an argument is of a wrong type.
            Exception: whatever the batches, the model or the loss raise, with a note on the batch.
        """
        wing("data_sets.running:require_batches")(batches, "run_batches", most=max_batches)
        self._begin()
        request = partial(self._request, loss=loss, backward=backward, scaler=scaler)
        run = partial(
            wing("data_sets.running:run_over"), batches, self._model, loss is not None,
            request, self._observe, lambda asked: self._probing(asked)[1],
            training=training, max_batches=max_batches, progress=progress,
        )  # fmt: skip
        company = self._company()
        observation = run() if company is None else company.over_batches(run)
        return self._reported(observation, self._settings)

    @checked_call(default_settings)
    def removable(
        self,
        batches: Iterable[Any],
        *,
        loss: Loss | None = None,
        progress: bool | None = None,
    ) -> RemovableUnits:
        """Find the units that can go: those that no output depends on, and duplicates of others.

        Units are the outputs of linear layers and convolutions. One batch in five, the first among
        them and eight at most, is not used to find them: there each output must be the same with
        the inactive ones masked. The model runs in evaluation mode and is left as it was, bit for
        bit. The report has what the other batches showed.

        Args:
            batches: with a `loss`, pairs of inputs and target, as a DataLoader of a labelled data
                set gives; without one, inputs.
            loss: ``loss(output, target)``. Units that it does not depend on look inactive; without
                one, those that no output depends on.
            progress: as in `run_batches`.

        Raises:
            InspectionError: there are fewer than two batches with samples, one is no pair although
                there is a loss, the model is none whose weights can be masked, or an argument is of
                a wrong type.
            Exception: whatever the model or the loss raises, with a note on the batch.
        """
        search = wing("removal.search:search")
        self._require_module("removable masks the weights of a torch.nn.Module")
        wing("data_sets.running:require_batches")(batches, "removable")
        self._begin()
        request = Request(self._model, None, loss=loss, selection=self._selection)
        observation, units = search(self._engine, request, self._observe, batches, progress)
        removable: RemovableUnits = units(self._reported(observation, self._settings), self._model)
        return removable

    @checked_call(default_settings)
    def monitor(
        self,
        every: int = 1,
        *,
        csv: str | os.PathLike[str] | None = None,
        to: Any = None,
        statistics: Iterable[str] | None = None,
        scaler: GradScaler | None = None,
        keep: int = 1024,
        on_violation: Reaction = None,
    ) -> TrainingMonitor:
        """Return a monitor of the user's own training loop.

        ``with inspector.monitor(every=10) as monitor:`` goes around the loop, which calls
        ``monitor.step_end(step, loss=loss)`` after each step. Nothing is run, and no number of the
        training changes; steps that are not watched cost nothing.

        Args:
            every: watch the first step, and those in which the number reaches a multiple of it.
            csv: a file that gets a row for each watched step, at once.
            to: what else gets the numbers, one or a list: a `SummaryWriter` of TensorBoard, or a
                function ``(step, {name: number})``. It stays the user's, to be closed too. One that
                fails does not end the training.
            statistics: which statistics of each layer go there; ``None`` takes five.
            scaler: the `torch.amp.GradScaler` of mixed-precision training: gradients are reported
                without its scale.
            keep: the most watched steps that ``monitor.history`` holds; of more, every second one,
                so that they stay spread over the whole training.
            on_violation: what `step_end` does as soon as a rule for trainings fails, once for each
                rule and layer: ``"raise"`` a `ModelHealthError`, ``"warn"``, or a function called
                with the violation. ``None`` leaves it to ``monitor.assert_healthy()``, or to the
                end of a test.

        Raises:
            InspectionError: an argument is of a wrong type, or the model is none that a loop can
                train.
        """
        kind = wing("training.monitoring.monitor:TrainingMonitor")
        self._require_module("a monitor watches a torch.nn.Module as the loop runs it")
        model_type = type(self._model).__name__
        scalars = wing("training.monitoring.writing:Scalars")(to, model_type, statistics)
        if self._on_run is not None:
            self._on_run()
        monitor: TrainingMonitor = kind(
            self._model,
            self._selection,
            self._report_of,
            every=every,
            csv=csv,
            scaler=scaler,
            keep=keep,
            renderer=renderer,
            settings=self._settings,
            on_report=self._note_report,
            on_violation=on_violation,
        )
        if scalars.writers:
            monitor.observers.append(scalars)
        return monitor

    def _note_report(self, report: HealthReport) -> None:
        self._report = report
        if self._on_report is not None:
            self._on_report(report)

    def _require_module(self, what: str) -> None:
        if not (self._engine.runs_in_torch and isinstance(self._model, nn.Module)):
            raise InspectionError(f"{what}: make the inspector of that module")

    def _report_of(self, observation: Observation) -> HealthReport:
        return HealthReport(observation, self._settings, _judged, renderer=renderer)

    @checked_call(default_settings)
    def run_step(
        self,
        step: Any = None,
        optimizer: Any = None,
        batch: Any = None,
        *,
        calls: int = 3,
        restore: Iterable[Any] = (),
        overfit: int | None = None,
        resume: bool = False,
        inputs: Any = None,
        target: Any = None,
        loss: Loss | None = None,
    ) -> HealthReport:
        """Run a training step a few times on one batch and report on what it does.

        Everything is put back in place: parameters, buffers, attributes, gradients, the optimizers'
        state, random numbers, and what the step leads to: variables, containers, tensors, arrays
        and attributes of objects. Not put back are iterators that it reads from, such as a data
        loader's, and what it writes to files.

        Args:
            step: the user's own, ``step(model, optimizer, batch)``, which does all that one step of
                the training does and returns the loss: a scalar tensor, a number, or a mapping
                with the key ``loss``. ``None`` makes the usual step of `inputs`, `target` and
                `loss`, and inspects that batch, too; of a `LightningModule` it takes the
                ``training_step``. A `transformers.Trainer` or one of Lightning steps as it trains.
            optimizer: the optimizer that it steps, or a tuple or mapping of several; a trainer and
                a `LightningModule` bring theirs. ``None`` where the step moves the weights itself.
            batch: what it is given; a copy for each call.
            calls: how often it is called from the beginning; six calls or more look at what follows
                from a change.
            restore: what else it changes, each with `state_dict` and `load_state_dict`: a scaler, a
                scheduler, a moving average.
            overfit: call it so often on the batch, and require the loss to fall.
            resume: save and load the state, and require the next step to be the same, bit for bit.
            inputs, target, loss: of the usual step, as in `run_inspection`.

        Raises:
            InspectionError: the step takes other arguments or returns no loss, or an argument is of
                a wrong type; the message says what is expected.
            Exception: whatever the first call raises, untouched.
        """
        run_contract = wing("training.stepping.contract:run_contract")
        step_of = wing("training.stepping.givers:step_of")
        self._require_module("run_step runs a torch.nn.Module as a loop does")
        self._begin()
        asked = (self._model, step, optimizer, batch, restore, inputs, target, loss)
        hints = hinted(self._request(inputs, target, loss, None, None))
        with step_of(wing("training.stepping.session:TrainingStep")(*asked)) as made, hints:
            observation = run_contract(
                made, self._selection, calls=calls, overfit=overfit, resume=resume
            )
        if isinstance(made.step, wing("training.stepping.givers:UsualStep")):
            whole = self._observe(self._request(inputs, target, loss, None, made.scaler))
            observation = replace(whole, stepped=observation.stepped)
        return self._reported(observation, self._settings)

    @property
    def report(self) -> HealthReport:
        """The latest report.

        Raises:
            InspectionError: nothing was inspected yet.
        """
        if self._report is None:
            raise InspectionError("nothing was inspected yet: call run_inspection(batch) first")
        return self._report

    def get_statistics(self, layer: str, what: str = "activations") -> TensorStatistics:
        """Return one layer's statistics from the latest report, merged over its tensors.

        Raises:
            LayerNotFoundError: no such layer.
            InspectionError: nothing was seen in this role, with the reason.
        """
        record = self.report[layer]
        statistics = record.statistics(what)
        if statistics is None:
            raise InspectionError(record.why_not_seen(what))
        return statistics

    def plot_histogram(self, layer: str, what: str = "activations") -> Figure:
        """Return a figure of one layer's histogram from the latest report."""
        return self.report.plot_histogram(layer, what)

    def plot_gradient_flow(self) -> Figure:
        """Return a figure of gradient norms through depth from the latest report."""
        return self.report.plot_gradient_flow()

    def __call__(self, *_: Never, **__: Never) -> NoReturn:
        """Refuse, as a model would take the batch here.

        Raises:
            InspectionError: always; the message says which method runs a batch.
        """
        raise InspectionError(f"an inspector is not called itself{_NEXT_CALL}")

    def _begin(self) -> None:
        self._calibration = wing("tolerance:Calibration")() if self._calibrate else None
        if self._on_run is not None:
            self._on_run()

    def _request(
        self,
        inputs: Any,
        target: Any,
        loss: Loss | None,
        backward: Backward,
        scaler: GradScaler | None,
    ) -> Request:
        return Request(self._model, inputs, target, loss, backward, scaler, self._selection)

    def _probing(
        self, request: Request, probes: object = None, conventions: Sequence[Any] = (None,) * 4
    ) -> tuple[Settings, Probing | None]:
        """Return the settings of a run, and what runs its probes; ``None`` without that wing."""
        settings = self._settings
        try:
            said = wing("probes.conventions:Conventions").of(*conventions)
        except MissingWingError:
            in_force = settings["probes"]
            is_set = in_force.value and in_force.origin != "default"
            if probes or is_set or any(each is not None for each in conventions):
                raise
            return settings, None
        if probes is not None:
            settings = settings.override({"probes": probes}, "argument of run_inspection")
        settings = said.asked(settings)
        return settings, wing("probes.probing:Probing")(self._engine, request, settings, said)

    def _observe(self, request: Request) -> Observation:
        company, run = self._company(), self._engine.run
        if company is not None:
            run = partial(company.observed, run=run)
        with hinted(request):
            seen = run(request)
        if self._calibration is not None:
            again = wing("tolerance:observed") if company is None else company.observed
            self._calibration.add(request, seen, again)
        return seen

    def _company(self) -> Joint | None:
        """Return the ranks that inspect together; ``None`` where this process does so alone."""
        if not may_have_company(self._model, self._ranks):
            return None
        joined: Callable[..., Joint] = wing("ranks.joint:joined")
        return joined(self._model, bool(self._ranks), self._settings["rank_timeout"].value)

    def _reported(self, observation: Observation, settings: Settings) -> HealthReport:
        noise = None if self._calibration is None else self._calibration.noise(observation)
        report = HealthReport(observation, settings, _judged, noise, renderer=renderer)
        self._note_report(report)
        return report


def _judged(observation: Observation, settings: Settings) -> Judgement:
    """Judge with few collections, which take a third of it for thousands of layers."""
    with exited_whole(collected_rarely()):
        return judge(observation, settings)


def _roles(what: object) -> frozenset[str]:
    """Return the roles that `what` names, one or several."""
    names = list(what) if isinstance(what, Iterable) and not isinstance(what, str) else [what]
    for name in names:
        if name not in ROLES:
            raise InspectionError(
                f"unknown role {name!r} in what={what!r}{suggest(name, ROLES)} "
                f"Roles: {', '.join(ROLES)}."
            )
    if not names:
        raise InspectionError(f"what={what!r} names no role. Roles: {', '.join(ROLES)}.")
    return frozenset(role for role in ROLES if role in names)


def _module_types(types: object) -> tuple[type[nn.Module], ...]:
    listed = tuple(types) if isinstance(types, list | tuple | set | frozenset) else (types,)
    for kind in listed:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise InspectionError(f"types must be classes of modules, such as nn.Linear: {kind!r}")
    return listed
