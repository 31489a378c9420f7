import math

import pytest
import torch

from benchmarks import contenders, monitor, probes, scale, speed, timing


@pytest.fixture(autouse=True)
def _same_number_of_threads():
    """Give torch its threads back, which the commands set."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Clock:
    """Stands in for `time`: a second passes only where a contender says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter

    def spend(self, seconds: float):
        def run() -> None:
            self.now += seconds

        return run


def cells(line: str) -> list[str]:
    """Return the cells of a row of a Markdown table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_ratio_is_that_of_contender_to_base(monkeypatch):
    """A contender that takes 1.4 times as long as the base is reported as 1.40, in every round."""
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    timings = timing.time_in_turns(
        clock.spend(2.0), {"other": clock.spend(2.8)}, rounds=2, before=clock.spend(7.0)
    )
    assert timings["other"].ratio() == timings["other"].ratio("cpu") == "1.40 (1.40-1.40)"
    assert len(timings["other"].runs) == 2


def test_dear_contender_runs_in_fewer_rounds(monkeypatch):
    """One that takes 100 times as long runs in every fifth round only, and its ratio is right."""
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    timings = timing.time_in_turns(clock.spend(1.0), {"dear": clock.spend(100.0)}, rounds=6)
    assert timings["dear"].ratios() == [100.0] * 2


def test_contender_that_raises_is_named_and_leaves_the_others(capsys):
    """A tool that cannot run a step costs its own cell, not the table."""

    def fails() -> None:
        raise NotImplementedError("no such operator")

    timings = timing.time_in_turns(lambda: None, {"broken": fails, "fine": lambda: None}, rounds=1)
    assert timings["broken"].ratio() == "raises NotImplementedError"
    assert timings["fine"].runs
    assert "no such operator" in capsys.readouterr().err


def test_speed_prints_a_ratio_for_every_contender(monkeypatch, capsys):
    """The command runs each contender that is installed, and names one that is not."""
    absent = contenders.Contender(lambda step: None, "nothing", needs="no_such_package")
    present = {k: c for k, c in contenders.CONTENDERS.items() if not c.needs}
    monkeypatch.setattr(speed, "CONTENDERS", present | {"absent": absent})
    speed.main(["example CNN", "--rounds", "2", "--threads", "1"])
    output = capsys.readouterr().out
    assert "- absent (not installed, left out): nothing" in output
    wall, cpu = (cells(line) for line in output.splitlines() if line.startswith("| example CNN"))
    assert all(float(cell.split()[0]) > 0 for cell in [*wall[3:], *cpu[1:]])
    assert len(wall[3:]) == len(cpu[1:]) == len(present)


def test_monitor_prints_a_ratio_for_every_copy(capsys):
    """Both tables have the step watched, every tenth, unwatched and inspected, and the contract."""
    monitor.main(["example CNN", "--rounds", "2"])
    printed = capsys.readouterr().out
    ways = "watched | every tenth | not watched | inspected | run_step"
    assert printed.count(f"| step | bare ms | {ways} |") == 2
    rows = [line for line in printed.splitlines() if line.startswith("| example CNN |")]
    assert [row.count(" | ") for row in rows] == [6, 6]
    with pytest.raises(SystemExit):
        monitor.main(["BERT"])


def test_probes_prints_costs_and_where_a_twin_leaks(capsys):
    """Each probe has a cost and its number of forwards, and the twin's leak is in its own code."""
    probes.main(["example CNN", "--rounds", "1"])
    header, _, line = (cells(r) for r in capsys.readouterr().out.splitlines() if r.startswith("|"))
    found = dict(zip(header, line, strict=True))
    assert found["sample_independence"].endswith(" (4)")
    assert found["padding"].endswith(" (0)")
    assert int(found["all"].partition("(")[2][:-1]) > 6
    assert float(found["default / False"]) > 0
    assert found[header[-1]].endswith(" (7), at the model")


def test_probes_refuses_an_unknown_step(capsys):
    """A misspelt step ends the command and lists those there are."""
    with pytest.raises(SystemExit):
        probes.main(["BERT"])
    assert "unknown step 'BERT'; there are: BERT-like, " in capsys.readouterr().err


def test_inspected_step_has_the_gradients_of_the_bare_one():
    """What is timed as modelhealth is the same step: each parameter's gradient norm is equal."""
    step = speed.STEPS["example CNN"]()
    step.model.eval()  # no dropout, so that two runs can be equal
    step.run()
    report = contenders.modelhealth(step)
    for name, parameter in step.model.named_parameters():
        layer, _, own = name.rpartition(".")
        norm = report[layer].parameter_gradients[own].norm
        assert norm == pytest.approx(float(parameter.grad.norm()), rel=1e-5)


@pytest.mark.parametrize(
    ("table", "width"),
    [
        (lambda: scale.layers(sizes=(10, 100, 120), most_runs=3), 5),
        (lambda: scale.elements(exponents=(3, 4)), 6),
        (lambda: scale.help_(runs=1), 5),
    ],
    ids=["layers", "elements", "help"],
)
def test_scale_tables_are_whole(table, width):
    """Each row has a cell for each column, and what was measured is a number."""
    header, *rows = table()
    columns = cells(header.splitlines()[0])
    assert len(columns) == width
    for row in map(cells, rows):
        assert len(row) == width
        assert all(math.isfinite(float(cell.replace(",", ""))) for cell in row if cell)


def test_first_inspection_is_timed_in_a_process_of_its_own(monkeypatch):
    """The table has what the fresh process printed: here 0.9 s at first and 0.2 s later."""
    monkeypatch.setattr(scale, "_run_apart", lambda name: (0.9, 0.2))
    *_, row = scale.first(steps=["example CNN"], processes=3)
    assert cells(row) == ["example CNN", "0.900", "0.200", "0.700", "0.5", "3"]
