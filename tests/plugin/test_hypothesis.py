"""Tests with hypothesis: each example's unread reports are checked when that example ends."""

from __future__ import annotations

import pytest

SUITE = """
import nets
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings, strategies as st
from torch import nn

each = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
    deadline=None, max_examples=10, database=None, derandomize=True,
    phases=[Phase.generate, Phase.shrink],  # explaining runs as many again
)
biases = st.integers(0, 20)


def net(bias, width=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
    with torch.no_grad():
        model[0].bias.fill_(-bias)
    return model


@each
@given(width=st.integers(4, 8), bias=biases)
def test_shrinks(inspector, width, bias):
    inspector(net(bias, width)).run_inspection(nets.BATCH)  # line: shrinks


class TestMethod:
    @each
    @given(bias=biases)
    @pytest.mark.parametrize("width", [4])
    def test_parametrized(self, inspector, width, bias):
        inspector(net(bias, width)).run_inspection(nets.BATCH)


@pytest.mark.anyio
@each
@given(bias=biases)
async def test_async(inspector, bias):
    inspector(net(bias)).run_inspection(nets.BATCH)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@each
@given(bias=biases)
def test_own_exception(inspector, bias):
    inspector(net(bias)).run_inspection(nets.BATCH)
    assert bias < 3, "my own"


@pytest.fixture
def sick(inspector):
    inspector(net(100)).run_inspection(nets.BATCH)


@each
@given(bias=st.just(0))
def test_fixture(sick, inspector, bias):
    inspector(net(bias)).run_inspection(nets.BATCH)


@each
@given(bias=biases)
def test_rejected_examples(inspector, bias):
    inspector(net(bias)).run_inspection(nets.BATCH)
    assume(bias < 1)


@each
@given(bias=biases)
def test_asks(inspector, bias):
    assert inspector(net(bias)).run_inspection(nets.BATCH).verdict


def test_plain(inspector):
    inspector(net(0)).run_inspection(nets.BATCH)
"""


def test_the_smallest_example_fails_with_our_text(nets: pytest.Pytester) -> None:
    """Hypothesis shrinks what nobody looked at; what it rejects, or the test reads, fails nothing.

    A fixture's report is checked when all examples have passed, and a test's own exception stands.
    """
    nets.makepyfile(SUITE)
    result = nets.runpytest("-W", "error", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, failed=5)
    text = result.stdout.str()
    shrinks = text.partition("_ test_shrinks _")[2].partition("\n_____")[0]
    assert ">   inspector(net(bias, width)).run_inspection(nets.BATCH)  # line: shrinks" in shrinks
    assert "E   unhealthy: 1 (dead_units): 4 of 4 units are dead" in shrinks
    assert "E       width=4," in shrinks
    assert "E       bias=1,\n" in shrinks
    assert "more inspections" not in text
    result.stdout.fnmatch_lines(
        [
            "FAILED *::test_shrinks - unhealthy: 1*",
            "FAILED *::TestMethod::test_parametrized[[]4] - unhealthy: 1*",
            "FAILED *::test_async - unhealthy: 1*",
            "FAILED *::test_own_exception - ExceptionGroup: Hypothesis found*",
            "FAILED *::test_fixture - unhealthy: 1*",
        ]
    )
