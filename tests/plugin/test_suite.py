"""`ModelHealthSuite` and `--modelhealth-model`: what passes, fails and is skipped, and why."""

from __future__ import annotations

import json

import pytest

from pytest_modelhealth.plugin.suite.suite import TESTS

FILE = """
import pytest, torch, torch.nn.functional as F
from torch import nn
from pytest_modelhealth import ModelHealthSuite, modelhealth_suite

BATCH, LABELS = torch.linspace(-2, 2, 384).sin().mul(2).reshape(32, 12), torch.arange(32) % 3

def net(activation=nn.GELU):
    return nn.Sequential(nn.Linear(12, 32), activation(), nn.Linear(32, 3))
"""
QUICK = ("-p", "no:cacheprovider", "-k", "not compiled")


def _outcomes(result: pytest.RunResult) -> dict[str, str]:
    """Return what became of each test of a verbose run, by its name."""
    lines = (line.split() for line in result.outlines if "::test_" in line and "%]" in line)
    return {words[0].rpartition("::")[2]: words[1] for words in lines}


def _suite(pytester: pytest.Pytester, body: str, *arguments: str) -> pytest.RunResult:
    """Run a class whose body is given, in a file of its own."""
    text = "".join(f"    {line}\n" for line in body.strip().splitlines())
    pytester.makepyfile(test_net=f"{FILE}\nclass TestNet(ModelHealthSuite):\n{text}")
    return pytester.runpytest("-v", "-rs", *QUICK, *arguments)


MAKE = "def make(self): return net(), BATCH, LABELS, F.cross_entropy\n"


def test_one_line_gives_every_test(pytester: pytest.Pytester) -> None:
    """Each has its name and order; what does not apply is skipped with the reason, in the file."""
    result = _suite(pytester, MAKE)
    found = _outcomes(result)
    assert [*found] == [name for name in TESTS if "compiled" not in name]
    skipped = {name for name, outcome in found.items() if outcome == "SKIPPED"}
    assert skipped == {"test_padding_ignored", "test_causal", "test_snapshot"}
    result.assert_outcomes(passed=9, skipped=3, deselected=1)
    result.stdout.fnmatch_lines_random(
        [
            "SKIPPED [[]1[]] test_net.py:11: does not apply: the target is no input one step*",
            "SKIPPED [[]1[]] test_net.py:11: nothing is recorded yet: pytest --snapshot-update*",
        ]
    )
    result.stdout.no_fnmatch_line("* <- *")


def test_a_model_with_nan_fails_once(pytester: pytest.Pytester) -> None:
    """The culprit is named by one test, and the others say in a line that they cannot judge."""
    result = _suite(
        pytester,
        "def make(self):\n    model = net()\n    model[2].bias.data[0] = float('nan')\n"
        "    return model, BATCH, LABELS, F.cross_entropy\n",
    )
    result.assert_outcomes(failed=1, skipped=11, deselected=1)
    result.stdout.fnmatch_lines(
        [
            "E   unhealthy: 2 (finite): 1 NaN of 3 values in its parameter 'bias'*",
            "SKIPPED * is not healthy in training (2: *); see test_healthy_in_training",
        ]
    )


DEAD = """
@pytest.mark.modelhealth_waive("*", check="collapse", reason="constant on purpose")
@pytest.mark.modelhealth_waive("1", check="dead_units", reason="a sparse code")
@pytest.mark.modelhealth(max_dead_fraction=1.0)
class TestWaived(ModelHealthSuite):
    def make(self):
        model = net(nn.ReLU)
        nn.init.constant_(model[0].bias, -20.0)
        return model, BATCH, LABELS, F.cross_entropy
    limits = {"test_healthy_in_training": {"skip_checks": ["missing_gradients", "grad_norm"]}}

class TestDead(ModelHealthSuite):
    make = TestWaived.make
    skip = {"test_deterministic": "too slow"}
"""


def test_skips_limits_and_markers(pytester: pytest.Pytester) -> None:
    """A skip is by name and has its reason; what holds for all tests is a marker of the class."""
    pytester.makepyfile(test_net=FILE + DEAD)
    result = pytester.runpytest("-v", "-rs", *QUICK)
    lines = [line.split()[:2] for line in result.outlines if "::test_" in line and "%]" in line]
    found = {name.partition("::")[2]: outcome for name, outcome in lines}
    assert found["TestWaived::test_healthy_in_training"] == "PASSED"
    assert found["TestDead::test_healthy_in_training"] == "FAILED"
    assert found["TestDead::test_deterministic"] == "SKIPPED"
    assert found["TestDead::test_every_parameter_learns"] == "SKIPPED"  # decay moves the rest
    result.stdout.fnmatch_lines_random(["*SKIPPED (too slow)*"])


UNREAD = """
def make(self):
    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.fc = net(), nn.Linear(3, 3)
            self.pos, self.tied = nn.Parameter(torch.zeros(12)), nn.Linear(3, 3)
            self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
            self.tied.weight = self.experts[0].weight
            self.frozen = nn.Parameter(torch.zeros(1), False)
        def forward(self, x):
            return self.experts[0](self.body(x))
    return Net(), BATCH, LABELS, F.cross_entropy
"""


def test_every_parameter_learns_names_what_nothing_reads(pytester: pytest.Pytester) -> None:
    """Members that a list did not call, frozen and tied parameters are left in peace; strict."""
    result = _suite(pytester, UNREAD, "-W", "default")
    assert {n for n, o in _outcomes(result).items() if o == "FAILED"} == {
        "test_every_parameter_learns"
    }
    result.stdout.fnmatch_lines(
        ["E*no operation reads 'pos', 'fc.weight', 'fc.bias', 'tied.bias'*"]
    )
    found = _outcomes(_suite(pytester, f"{UNREAD}strict = True"))
    assert found["test_healthy_in_training"] == "FAILED"


WRONG = {
    "skip = {'test_casual': 'r'}": "{}.skip: there is no test 'test_casual'; did you*",
    "skip = {'test_causal': ''}": "{}.skip['test_causal']: say the reason in words*",
    "limits = {'test_causal': {'max_future': 1}}": "{}.limits['test_causal']: unknown se*",
    "skipp = {}": "*no such attribute; did you mean 'skip'?",
    "seed = 'a'": "{}.seed must be a whole number, not 'a'",
}


def test_wrong_attributes_are_one_error_each(pytester: pytest.Pytester) -> None:
    """Before a model is made, with what is meant; so are no make(), and the fixture elsewhere."""
    said = []
    for number, (body, message) in enumerate(WRONG.items()):
        suite = f"class TestNet(ModelHealthSuite):\n    {MAKE}    {body}\n"
        pytester.makepyfile(**{f"test_{number}": FILE + suite})
        said.append(message.format("TestNet").replace("[", "[[]").replace("[[]]", "[]]"))
    pytester.makepyfile(
        test_5=FILE + "class TestNet(ModelHealthSuite):\n    seed = 1\n",
        test_6="def test_it(modelhealth_case): pass",
    )
    result = pytester.runpytest(*QUICK, "--continue-on-collection-errors")
    result.assert_outcomes(errors=7)
    result.stdout.fnmatch_lines(
        [
            *said,
            "TestNet has no make(), which makes the model to test: *",
            "modelhealth_case is for the tests of a ModelHealthSuite*",
        ]
    )


MAKERS = (
    FILE
    + """
def raises():
    return {}["width"]
def nothing():
    pass
def misfit():
    return net(), torch.randn(16, 9)
def needs(width):
    return net()
def rest():
    return net(), BATCH, LABELS, 3
def alone():
    return net()
TestRaises, TestNothing, TestMisfit, TestNeeds, TestRest, TestAlone = map(
    modelhealth_suite, (raises, nothing, misfit, needs, rest, alone)
)
class TestUnwritten(ModelHealthSuite):
    def make(self):
        # TODO: a batch of yours
        inputs = ...
        return net(), inputs
class TestEllipsis(ModelHealthSuite):
    def make(self): return net(), BATCH[...]
    skip = dict.fromkeys(SKIPPED, "not of this")
"""
).replace("SKIPPED", repr([name for name in TESTS if name != "test_deterministic"]))


def test_what_make_does_wrong_is_shown_once(pytester: pytest.Pytester) -> None:
    """One test fails with the user's traceback or what to write; twelve say where to look.

    A batch that is still to be written, as `init` leaves it, is one sentence; an Ellipsis of the
    user's own is none of it.
    """
    pytester.makepyfile(MAKERS)
    result = pytester.runpytest("-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=7, skipped=96, passed=1)
    result.stdout.fnmatch_lines(
        [
            "E * KeyError: 'width'",
            "nothing() returned None: return (model, inputs), *",
            "E * shapes cannot be multiplied (16x9 and 12x32)",
            "E * raised in training mode, where misfit() gave float32 (16, 9)",
            "needs() needs arguments (width), and is called without any: *",
            "rest() returned something of type int as the loss, *",
            "alone() makes a model alone, and no batch to run it on: return (model, inputs), or *",
            "        model = Sequential()",
            "TestUnwritten.make() has no batch yet: write it below 'TODO: a batch of yours', *",
        ]
    )
    result.stdout.fnmatch_lines(
        ["SKIPPED * raises() failed, KeyError: 'width': see test_healthy_in_training"]
    )
    result.stdout.no_fnmatch_line("*pytest_modelhealth*.py:*")
    result.stdout.no_fnmatch_line("During handling of the above exception*")


def test_a_snapshot_is_recorded_and_held(pytester: pytest.Pytester) -> None:
    """Nothing is held against it before; then another activation drifts, with the command."""
    body = MAKE.replace("net()", "net({})")
    only = ("-k", "snapshot or evaluation")
    _suite(pytester, body.format("nn.Tanh"), "--snapshot-update", *only)
    assert (pytester.path / "__snapshots__/test_net/TestNet.test_snapshot.health").exists()
    _suite(pytester, body.format("nn.Tanh"), *only).assert_outcomes(passed=2, deselected=11)
    result = _suite(pytester, body.format("nn.ReLU"), *only)
    result.assert_outcomes(failed=1, passed=1, deselected=11)
    result.stdout.fnmatch_lines(
        [
            ">   def make(self): return net(nn.ReLU)*",
            "E * drift in *",
            "*pytest --snapshot-update test_net.py::TestNet::test_snapshot",
        ]
    )


def _module(pytester: pytest.Pytester) -> list[str]:
    pytester.mkpydir("models")
    (pytester.path / "models" / "nets.py").write_text(
        FILE
        + """
class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()
    def forward(self, x):
        return self.body(x - x.mean(0))

def fine():
    return net(), BATCH, LABELS, F.cross_entropy

def leaky():
    return Leaky(), BATCH, LABELS, F.cross_entropy

model = net()
"""
    )
    return [f"--modelhealth-model=models.nets:{name}" for name in ("fine", "leaky")]


def test_no_line_at_all(pytester: pytest.Pytester) -> None:
    """Factories are tested without a file, by their names, and as data too."""
    pytester.makepyfile("def test_of_a_file(): pass")
    options = [*_module(pytester), *QUICK, "-n", "0", "--modelhealth-json=run.json"]
    result = pytester.runpytest("-v", *options)
    result.assert_outcomes(failed=1, passed=17, skipped=6)
    result.stdout.fnmatch_lines(
        [
            "E   accept it:    --modelhealth-set ?waive=* sample_independence: ...?",
            "FAILED models.nets:leaky::test_samples_independent - unhealthy: Leaky *",
        ]
    )
    result.stdout.no_fnmatch_line("*test_of_a_file*")
    run = json.loads((pytester.path / "run.json").read_text())
    failed = [test["id"] for test in run["tests"] if test["outcome"] == "failed"]
    assert failed == ["models.nets:leaky::test_samples_independent"]


def test_paths_and_the_last_failed(pytester: pytest.Pytester) -> None:
    """With paths both run; --lf runs what failed; --collect-only lists the tests."""
    path = pytester.makepyfile("def test_of_a_file(): pass").name
    options = _module(pytester)
    listed = pytester.runpytest(path, *options, "--collect-only", "-q")
    listed.stdout.fnmatch_lines(
        [f"{path}::test_of_a_file", "models.nets:fine::test_causal", "27 tests collected*"]
    )
    some = ("-k", "samples or of_a_file")
    pytester.runpytest(path, *options, *some).assert_outcomes(passed=2, failed=1, deselected=24)
    again = pytester.runpytest(*options, "--lf", "-v")
    again.assert_outcomes(failed=1, deselected=25)


def test_names_that_are_no_factory(pytester: pytest.Pytester) -> None:
    """Each is one error, which says what to write."""
    _module(pytester)
    (pytester.path / "models" / "broken.py").write_text("import nowhere_to_be_found")
    names = ("nets:fne", "net:fine", "nets:model", "nets:BATCH", "broken:make", "nets:Leaky")
    options = [f"--modelhealth-model=models.{name}" for name in names]
    result = pytester.runpytest(*options)
    result.assert_outcomes(errors=6)
    result.stdout.fnmatch_lines(
        [
            "*models.nets has no 'fne'; did you mean 'fine'?",
            "*there is no module 'models.net' in *: name it as import does*",
            "*model is a model itself*write a function that returns*",
            "*BATCH is a Tensor and makes no model*",
            "*importing models.broken raises",
            "ModuleNotFoundError: No module named 'nowhere_to_be_found'",
            "*the class Leaky makes a model alone, and no batch to run it on: return *",
            "    def make():",
            "        model = Leaky()",
        ]
    )
    nameless = pytester.runpytest("--modelhealth-model=models.nets")
    nameless.stdout.fnmatch_lines(["*name a module and what in it makes the model*"])
