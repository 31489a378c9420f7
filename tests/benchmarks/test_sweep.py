"""The sweep over other libraries' models: what it counts, notices and survives."""

import dataclasses
import json
import os
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import sweep
from benchmarks.sweep import SETTINGS, Result, Setting, examine
from benchmarks.zoo import decided
from benchmarks.zoo.architecture import Architecture
from benchmarks.zoo.decided import Decision
from corpus.subject import Subject
from pytest_modelhealth import Inspector

TRAIN = [Setting("train")]


def net() -> Subject:
    """Return a small healthy classifier with a batch norm and a dropout."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1))
    model.append(nn.Linear(16, 3))
    return Subject(model, torch.randn(64, 8), torch.randint(0, 3, (64,)), F.cross_entropy)


def named(name: str, build=net) -> Architecture:
    """Return an architecture of one family."""
    return Architecture("family", name, build)


def test_healthy_model_is_healthy_in_every_setting():
    """Each setting gives a verdict; nothing differs from the step without the inspector."""
    results = list(examine(named("net")))
    assert [one.setting for one in results] == [str(setting) for setting in SETTINGS]
    for one in results:
        assert [one.not_run, one.crash, one.interference] == ["", "", []]
        assert one.verdict in ("healthy", "inconclusive"), one.findings
        assert one.parameters == 8 * 16 + 16 + 2 * 16 + 16 * 3 + 3


def test_model_that_does_not_run_is_told_apart_from_a_crash():
    """What the library or the model raises is theirs, in building or in the bare step."""

    def unbuilt() -> Subject:
        raise ValueError("no such size")

    def wrong() -> Subject:
        return Subject(nn.Linear(8, 2), torch.randn(4, 7))

    assert [one.not_run for one in examine(named("a", unbuilt), TRAIN)] == [
        "not built: ValueError: no such size"
    ]
    (result,) = examine(named("b", wrong), TRAIN)
    assert re.match("RuntimeError: .*mat1 and mat2", result.not_run)
    assert not result.crash


def test_exception_of_the_inspector_is_a_crash(monkeypatch):
    """What the inspector raises where the bare step did not is counted against it."""

    def breaks(*args, **kwargs):
        raise IndexError("of ours")

    monkeypatch.setattr(Inspector, "run_inspection", breaks)
    (result,) = examine(named("net"), TRAIN)
    assert result.crash.startswith("IndexError: of ours")
    assert not result.verdict


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda model: model[0].weight.data.add_(1e-6), "0.weight"),
        (lambda model: model[1].running_mean.add_(1e-6), "1.running_mean"),
        (lambda model: setattr(model[0].weight, "grad", model[0].weight * 0), "0.weight"),
        (lambda model: model[2].eval(), "2.training"),
        (lambda model: model[0].register_forward_hook(print), "0.hooks"),
        (lambda model: torch.rand(1), "the state of random numbers"),
    ],
    ids=["parameter", "buffer", "gradient", "mode", "hook", "random"],
)
def test_what_an_inspection_leaves_behind_is_noticed(harm, told, monkeypatch):
    """A model that is not as it was, in any of its parts, is told of by name."""
    run = Inspector.run_inspection

    def harmful(self, *args, **kwargs):
        report = run(self, *args, **kwargs)
        with torch.no_grad():
            harm(self._model)
        return report

    monkeypatch.setattr(Inspector, "run_inspection", harmful)
    (result,) = examine(named("net"), TRAIN)
    assert told in result.interference


def test_other_gradients_than_those_of_the_bare_step_are_noticed(monkeypatch):
    """The loss and gradients of an inspected step are held against those of a bare one."""
    run = Inspector.run_inspection

    def twice(self, inputs, target, *, loss, **options):
        return run(self, inputs, target, loss=lambda *pair: 2 * loss(*pair), **options)

    monkeypatch.setattr(Inspector, "run_inspection", twice)
    (result,) = examine(named("net"), TRAIN)
    assert {"loss", "gradient of 0.weight", "gradient of 4.bias"} <= set(result.interference)
    assert not any(name.startswith("buffer") for name in result.interference)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_process_that_dies_or_takes_too_long_costs_one_model(monkeypatch):
    """A model that ends its process is told of, and the next ones are examined in another."""
    monkeypatch.setattr(sweep, "SECONDS", 0.5)

    def endless() -> Subject:
        while True:
            pass

    builds = [net, lambda: os._exit(1), endless, net]
    architectures = [named(name, build) for name, build in zip("abcd", builds, strict=True)]
    both = [Setting("train"), Setting("eval")]
    found = list(sweep.sweep(architectures, both))
    assert [(one.name, one.setting, one.verdict or one.not_run) for one in found] == [
        ("a", "train, float32", "healthy"),
        ("a", "eval, float32", "healthy"),
        ("b", "train, float32", "the process died"),
        ("c", "train, float32", "over 0.5 s"),
        ("d", "train, float32", "healthy"),
        ("d", "eval, float32", "healthy"),
    ]


def test_table_counts_models_inspections_and_outcomes(monkeypatch, tmp_path):
    """A row a family and one for all, read back from a file; each alarm with its decision."""
    high = Decision(("a",), "loss", "right", "its loss is high", "eval*")
    monkeypatch.setattr(decided, "DECISIONS", (high,))
    results = [
        Result("x", "a", "train", crash="of an earlier run"),
        Result("x", "a", "train", verdict="healthy", warned=["loss at head: high"]),
        Result("x", "a", "eval", verdict="unhealthy", findings=["loss at head: | high"]),
        Result("x", "b", "train", verdict="inconclusive", interference=["0.weight"]),
        Result("x", "c", "train", not_run="ValueError: 3"),
        Result("y", "d", "train", crash="IndexError: 3"),
        Result("y", "d", "eval", verdict="unhealthy", findings=["loss at |: a", "loss at b: c"]),
    ]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(dataclasses.asdict(one)) + "\n" for one in results))
    lines = list(sweep.table(sweep.read([file])))
    assert lines[1:4] == [
        "| x | 2 | 3 | 1 | 1 | 1 | 1 | 0 | 0 | 0 | 1 | 1 |",
        "| y | 1 | 2 | 0 | 0 | 0 | 0 | 0 | 1 | 1 | 0 | 0 |",
        "| all | 3 | 5 | 1 | 1 | 1 | 1 | 0 | 1 | 1 | 1 | 1 |",
    ]
    assert lines[5:9] == [
        "| loss | a | eval | right: its loss is high |",
        "| differs: 0.weight | b | train | undecided |",
        "| crash: IndexError: 3 | d | train | undecided |",
        "| loss: loss at \\|: a | d | eval | undecided |",
    ]
    assert lines[-1] == "| ValueError | 1: c |"
