"""One line says how far a long call is: late, seldom, on terminals only, and gone in the end."""

from __future__ import annotations

import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from pytest_modelhealth import Inspector, compare, progress
from tests.terminals import LEFT_OUT, Screen, run_on_terminal


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all tasks."""
    monkeypatch.setattr(progress, "clock", found := Clock())
    return found


@pytest.fixture
def screen() -> Iterator[Screen]:
    """The terminal on which tasks are shown, in the middle of a line of dots."""
    before = progress._screen.line
    screen = Screen()
    screen.write("test_it.py ..")
    progress.show_on(progress.Line(screen.write))
    yield screen
    progress.show_on(before)


DOTS = "test_it.py .."


def test_a_line_is_shown_after_two_seconds_and_then_ten_times_a_second(
    clock: Clock, screen: Screen
) -> None:
    """Nothing before, no more often, and with the time that is left: 8 s went for 4 of 12."""
    seen = []
    for number in progress.track(range(12), "inspecting batches"):
        seen.append(screen.text)
        clock.now += {0: 1.9, 1: 0.2, 2: 0.05}.get(number, 5.85)
    assert seen[:2] == [DOTS, DOTS]
    assert seen[2] == f"{DOTS}\nmodelhealth: inspecting batches 2/12, about 11 s left"
    assert seen[3] == seen[2]  # 0.05 s later
    assert seen[4] == f"{DOTS}\nmodelhealth: inspecting batches 4/12, about 16 s left"
    assert screen.text == DOTS


def test_nested_tasks_share_the_line_and_the_delay_of_the_outermost(
    clock: Clock, screen: Screen
) -> None:
    """The inner one is shown at once where the outer one has lasted, and counted from deep down."""
    with progress.task("comparing"):
        clock.now += 3
        with progress.task("running the candidate"):
            clock.now += 1
            progress.advance()
            running = screen.text
        clock.now += 1
        with progress.task("measuring noise", 4, shown=False) as advance:
            clock.now += 1
            advance()
            measuring = screen.text
    row = f"{DOTS}\nmodelhealth: comparing > "
    assert running == f"{row}running the candidate 1, 1 s so far"
    assert measuring == f"{row}measuring noise 1/4, about 3 s left"
    assert screen.text == DOTS


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_erases_the_line(
    clock: Clock, screen: Screen, error: type[BaseException]
) -> None:
    """However the work ends; the next task begins anew, with a delay of its own."""

    def work() -> None:
        kept = progress.track(range(3), "inspecting")  # as a debugger keeps it
        with progress.task("outermost"):
            for _ in kept:
                clock.now += 3
                if screen.shown:
                    raise error

    with pytest.raises(error) as caught:
        work()
    assert caught.tb
    assert screen.shown
    assert screen.text == DOTS
    screen.shown.clear()
    with progress.task("another") as advance:
        advance()
    assert not screen.shown


def test_it_can_be_shown_at_once_or_never(clock: Clock, screen: Screen) -> None:
    """True needs no delay, False outlasts any, for inner tasks too."""
    with progress.task("quiet", shown=False):
        clock.now += 100
        list(progress.track("ab", "inner", shown=True))
    assert not screen.shown
    assert list(progress.track("abc", "eager", most=2, shown=True)) == ["a", "b"]
    assert screen.shown == ["modelhealth: eager 0/2"]


def test_a_length_is_asked_for_only_where_it_is_shown(clock: Clock, screen: Screen) -> None:
    """A loader whose length raises is taken all the same."""

    class Loader:
        asked = 0

        def __len__(self) -> int:
            self.asked += 1
            raise RuntimeError

        def __iter__(self) -> Iterator[int]:
            yield from range(3)

    loader = Loader()
    assert list(progress.track(loader, "loading")) == [0, 1, 2]
    assert not loader.asked
    for _ in progress.track(loader, "loading"):
        clock.now += 3
    assert screen.shown[-1] == "modelhealth: loading 3, 9 s so far"


def test_words_cannot_write_to_the_terminal(screen: Screen) -> None:
    """Names come from users: no escape, no second line, nothing beyond the edge."""
    with progress.task(f"\x1b[2J\n\u202e{'x' * 200}", shown=True):
        assert screen.text == f"{DOTS}\nmodelhealth: ?[2J??{'x' * 60}"


def test_another_thread_is_not_shown(clock: Clock, screen: Screen) -> None:
    """Two threads do not share a line: that which came first has it."""
    with progress.task("first", shown=True):

        def second() -> None:
            with progress.task("second", shown=True) as advance:
                clock.now += 10
                advance()
                progress.advance()

        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        clock.now += 10
        progress._screen.come_by()
    assert set(screen.shown) == {"modelhealth: first"}


def test_a_terminal_that_is_gone_ends_nothing(screen: Screen) -> None:
    """The work goes on, as after a lost connection."""

    def write(text: str) -> None:
        raise OSError(5, "Input/output error")

    progress.show_on(progress.Line(write))
    assert list(progress.track(range(3), "inspecting", shown=True)) == [0, 1, 2]


# ---- standard error -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "is_shown"),
    [
        ({}, True),
        ({"CI": "true"}, False),
        ({"BUILD_NUMBER": "7"}, False),
        ({"TERM": "dumb"}, False),
        ({"PYTEST_VERSION": "9.0"}, False),
    ],
)
def test_standard_error_shows_it_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_shown: bool
) -> None:
    """Not where a log is kept, nor where pytest has the terminal."""
    for name in LEFT_OUT:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    progress.show_on(None)
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    with os.fdopen(theirs, "w") as stream, redirect_stderr(stream):
        list(progress.track(range(3), "inspecting", shown=True))
        written = b""
        with suppress(BlockingIOError):
            written = os.read(ours, 4096)
    os.close(ours)
    assert bool(written) == is_shown


PRINTS = """
import sys
from pytest_modelhealth import progress
progress.PAUSE = 0.0
before = sys.stdout, sys.stderr
print("begun: ", end="")
for number in progress.track(range(3), "inspecting", shown=True):
    print(number)
    print("a line", file=sys.stderr)
assert (sys.stdout, sys.stderr) == before
print("ended", "rich" in sys.modules, "torch" in sys.modules)
"""


@pytest.mark.parametrize("rows", [3, 20])
def test_a_script_may_print_meanwhile(tmp_path: Path, rows: int) -> None:
    """What it prints stands as without us, scrolled or not; the line was there between."""
    command = [sys.executable, "-u", "-c", PRINTS]
    screen = run_on_terminal(command, tmp_path, {"PYTHONPATH": str(Path.cwd())}, rows)
    lines = ["begun: 0", "a line", "1", "a line", "2", "a line", "ended False False"]
    assert screen.text.splitlines() == lines
    assert any(row.startswith("modelhealth: inspecting 2/3") for row in screen.shown)


# ---- who says how far it is ---------------------------------------------------------------------


class Net(nn.Module):
    """A model that takes a second by the clock of the test."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.clock = nn.Linear(4, 2), [clock]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Clock.now += 1
        return self.first(x)


@pytest.fixture
def net(clock: Clock, screen: Screen) -> Iterator[Net]:
    """Such a model, on the screen."""
    before = Clock.now
    yield Net(clock)
    Clock.now = before


BATCH = torch.linspace(-1, 1, 64).reshape(16, 4)


def said(screen: Screen) -> str:
    """Every line that was shown, without numbers of seconds."""
    assert screen.text == DOTS
    return "\n".join(dict.fromkeys(row.partition(": ")[2] for row in screen.shown))


@pytest.mark.parametrize(("shown", "first"), [(None, 2), (True, 0), (False, None)])
def test_batches_say_how_many_are_done(
    net: Net, screen: Screen, shown: bool | None, first: int | None
) -> None:
    """From the third second on, at once, or never."""
    Inspector(net).run_batches([BATCH] * 9, max_batches=5, progress=shown)
    counts = [int(row[0]) for row in said(screen).replace("inspecting batches ", "").splitlines()]
    assert counts == ([] if first is None else list(range(first, 6)))


def test_noise_is_measured_between(net: Net, screen: Screen) -> None:
    """A task within: three perturbed copies, and one in float64, for each batch."""
    Inspector(net, calibrate=True).run_batches([BATCH] * 3)
    assert re.search(
        r"inspecting batches 1/3, about \d+ s left > measuring noise 1/3", said(screen)
    )


def test_a_step_counts_its_calls(net: Net, screen: Screen) -> None:
    """Those to overfit on one batch by themselves."""
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    loss, target = nn.functional.mse_loss, BATCH[:, :2]
    inspector = Inspector(net)
    inspector.run_step(optimizer=sgd, inputs=BATCH, target=target, loss=loss, overfit=9)
    assert "training step > calls 3, " in said(screen)
    assert " > overfitting 8/9" in said(screen)


def test_probes_count_their_runs(net: Net, screen: Screen) -> None:
    """By name, each with its runs."""
    Inspector(net).run_inspection(BATCH, probes=["repeatability", "sample_independence"])
    assert "inspecting > probing 0/2 > sample_independence 2, " in said(screen)
    assert re.search("inspecting > probing 1/2, about . s left > repeatability 2", said(screen))


def test_a_comparison_says_which_side_runs(net: Net, screen: Screen) -> None:
    """And why the reference runs again."""
    other = Net(Clock())
    with torch.no_grad():
        other.first.weight[0, 0] += 1e-3
    compare(net, other, BATCH)
    for phrase in ("running the reference in float64", "running the reference perturbed 0/3"):
        assert f"comparing > {phrase}" in said(screen)
