"""Samples of a batch do not see each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.probes.endings import Found
from pytest_modelhealth.probes.probe import Kind, Probe
from pytest_modelhealth.settings import Ratio

if TYPE_CHECKING:
    from pytest_modelhealth.probes.intervening.running import Runs


_CAUSES = (
    (
        frozenset({"lstm", "gru", "rnn", "attention", "transformer"}),
        "it takes the first dimension of what it is given for time: batch_first=True, or transpose",
    ),
    (frozenset({"softmax"}), "a softmax over the batch: check its dim, 0 is that of samples"),
    (frozenset({"batchnorm"}), "batch statistics in evaluation mode: say track_running_stats=True"),
    (
        frozenset({"mean", "sum", "std", "var", "amax", "amin", "max", "min", "norm", "cumsum"}),
        "it reduces over the batch: check its dim, 0 is that of samples",
    ),
    (
        frozenset({"view", "reshape", "flatten", "unflatten"}),
        "a view that takes dimensions in another order than they have: transpose or permute first",
    ),
    (frozenset({"roll", "flip", "sort", "argsort"}), "it moves samples: check its dim"),
)
_SAID = (
    "{0} see each other: other {0} change an output by {{effect}} of its root mean square{{began}}"
)
_KINDS = {
    "choice": Kind(
        "it chooses among the values of all samples (topk, a capacity): experts that choose among "
        "all tokens do so on purpose, and nothing that was seen tells",
        may_be_meant=True,
    ),
    "order": Kind(
        "samples are put in another order before a layer takes them: negatives and replayed steps "
        "do so on purpose, and nothing that was seen tells; else check the dim",
        may_be_meant=True,
    ),
    "sequence": Kind(
        "it is given one sequence, whose steps are the samples: unsqueeze(1) makes samples of "
        "rows; attention between rows, and a batch that is one sequence, are meant so",
        may_be_meant=True,
    ),
    "lost dimension": Kind(
        "squeeze() without a dimension drops that of the samples when there is one: say which, "
        "squeeze(-1)",
        "of one sample alone it {detail}",
        is_limited=False,
    ),
    "groups": Kind(
        "it reduces over, or normalises by, the rows of all groups: hand on the vector that "
        "numbers them, and reduce by that (scatter, index_add)",
        _SAID.format("groups"),
    ),
}
_OTHERWISE = (
    "a view that mixes dimensions, a softmax or a mean over the batch, batch statistics in "
    "evaluation, or a layer that takes the batch for a sequence (batch_first)"
)


class SampleIndependence(Probe):
    """No sample of a batch has an effect on what the model returns for another one."""

    name = "sample_independence"
    summary = "What the model returns for a sample does not depend on the rest of the batch."
    rank = 33
    settings = (
        Ratio(
            "max_sample_effect",
            default=1e-4,
            help="largest change of a sample's output when other samples of its batch change, by "
            "the output's root mean square (healthy models: 0, but where routing changes the "
            "shapes of products)",
            per_layer=False,
        ),
    )

    said = _SAID.format("samples")
    kinds, causes, otherwise = _KINDS, _CAUSES, _OTHERWISE

    def probe(self, runs: Runs) -> Found:
        """Overwrite every second sample; then run one sample alone."""
        from pytest_modelhealth.probes.intervening.overwriting import what_samples_see

        return what_samples_see(runs)
