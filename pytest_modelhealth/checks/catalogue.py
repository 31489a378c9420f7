"""The checks of one run and those between ranks: a row each, the gravest first.

It loads no check's implementation: a run that sets a limit loads this alone, and each check what
runs it when it first judges, ``findings`` of the file of its name. Long definitions stand in the
reference.
"""

from __future__ import annotations

from functools import cache
from itertools import chain

from pytest_modelhealth.checks.check import Catalogue, Check, by_rank
from pytest_modelhealth.settings import Count, DtypeName, Factor, Ratio, Setting, Settings, Share
from pytest_modelhealth.settings.setting import ModelRatio
from pytest_modelhealth.wings import has_wing, wing

CHECKS = Catalogue("checks.catalogue:CHECKS")

CHECKS.add(
    "finite",
    "No NaN and no infinity in inputs, parameters, buffers, activations or gradients.",
    rank=10,
)
CHECKS.add(
    "inputs",
    "The batch is not constant, not raw, not scaled twice, and its ids are in use.",
    ModelRatio(
        "max_input_rms",
        default=30.0,
        help="largest root mean square of inputs that go into weights as they are",
    ),
    rank=12,
    role="inputs",
)
CHECKS.add(
    "initial_weights",
    "No weights are all zero, all equal or far too large where a signal must pass.",
    Ratio(
        "max_weight_scale",
        default=4.5,
        help="largest standard deviation of initial weights times the root of their fan-in",
    ),
    rank=14,
    run="checks.scales:initial_weights",
    role="parameters",
)
CHECKS.add(
    "loss",
    "The loss is given what it takes, is not negated, and depends on the output.",
    Factor(
        "max_initial_loss",
        default=10.0,
        help="largest loss of a fresh classifier by that of a uniform guess, ln(classes)",
    ),
    rank=15,
    reads_scale=True,
)
CHECKS.add(
    "normalization",
    "Running statistics are real and fit the batch, scales and modes let a signal pass.",
    Factor(
        "max_norm_mismatch",
        default=5.0,
        help="largest factor of a batch normalisation's output by what its scale and shift tell",
    ),
    rank=16,
)
CHECKS.add(
    "unregistered_parameters",
    "Every leaf of the model that gets a gradient is one of its parameters.",
    rank=17,
    run="checks.missing_gradients:unregistered",
    role="parameters",
)
CHECKS.add(
    "wiring", "Layers are called where they belong, and fed with what they are for.", rank=18
)
CHECKS.add(
    "dead_units",
    "Behind each activation that can die, enough units are active for some sample.",
    Share(
        "max_dead_fraction",
        default=0.8,
        help="largest part of a layer's units that may be inactive for every sample",
    ),
    Share(
        "max_held_fraction",
        default=0.5,
        help="largest part of the units that may be dead and held far below zero",
    ),
    Count(
        "min_samples",
        default=32,
        help="fewest samples (or tokens) that say anything about dead or saturated units",
    ),
    rank=20,
    reads_scale=True,
)
CHECKS.add(
    "saturation",
    "No bounded activation or attention sits where it is flat for most inputs.",
    Share(
        "max_saturated_fraction",
        default=0.75,
        help="largest part of the inputs of a bounded activation that may lie where it is flat",
    ),
    Share(
        "max_one_hot",
        default=0.9,
        help="largest mean sum of squares of the rows of a softmax (1 is one-hot)",
    ),
    rank=25,
    run="checks.dead_units:saturation",
    reads_scale=True,
)
CHECKS.add(
    "collapse",
    "The output differs from sample to sample.",
    Setting(
        "min_collapse_samples",
        int,
        default=8,
        minimum=2,
        help="fewest samples that say anything about outputs that are equal for all of them",
        per_layer=False,
    ),
    rank=27,
    reads_scale=True,
)
CHECKS.add(
    "missing_gradients",
    "No trainable layer that feeds the output is cut off from the loss.",
    Share(
        "max_idle_rows",
        default=0.05,
        help="largest part of a fresh matrix's rows or columns that may be zero and never learn",
    ),
    rank=30,
    reads_scale=True,
    role="parameter_gradients",
)
CHECKS.add(
    "activation_scale",
    "Activations do not grow beyond what depth explains.",
    Factor(
        "max_activation_growth",
        default=100.0,
        help="largest root mean square of activations relative to the inputs",
    ),
    rank=36,
    run="checks.scales:activation_scale",
    reads_scale=True,
)
CHECKS.add(
    "task_balance",
    "No task's gradient drowns that of another on a layer that they share.",
    Factor(
        "max_task_ratio",
        default=100.0,
        help="largest ratio of the gradient norms of two tasks at the last layer they share",
    ),
    rank=38,
    run="checks.loss_terms:unbalanced",
    role="parameter_gradients",
)
CHECKS.add(
    "grad_norm",
    "No layer's gradient norm vanishes or explodes.",
    Ratio(
        "max_grad_norm",
        default=None,
        help="largest L2 norm of the gradients of one layer's parameters",
    ),
    Ratio(
        "min_grad_norm",
        default=None,
        help="smallest L2 norm of the gradients of one layer's parameters",
    ),
    Share(
        "vanishing_ratio",
        default=1e-7,
        help="smallest gradient by weights of the first layers, as a part of a later layer's",
    ),
    Ratio(
        "exploding_ratio",
        default=1e4,
        help="largest root mean square of a layer's gradients relative to that of its weights",
    ),
    rank=40,
    reads_scale=True,
    role="parameter_gradients",
)
CHECKS.add(
    "headroom",
    "Values do not come near the largest of their dtype.",
    Share(
        "max_range_used",
        default=0.5,
        help="largest part of the dtype's range that a value may use (a factor of two is left)",
    ),
    DtypeName(
        "planned_dtype",
        str,
        default=None,
        help="also judge the values against this dtype: float16 or bfloat16",
        one_of=("float16", "bfloat16"),
        per_layer=False,
    ),
    rank=46,
    run="checks.finite:headroom",
    reads_scale=True,
)
CHECKS.add(
    "removable_units",
    "No layer has more units that nothing would miss than it may have.",
    Share(
        "max_removable_fraction",
        default=None,
        help="largest part of a layer's units that `Inspector.removable` may find removable",
    ),
    rank=47,
    run="removal.judging:findings",
    part="removable",
)

RANKS = Catalogue(
    "checks.catalogue:RANKS",
    run="checks.between_ranks:findings",
    first=48,
    part="ranks",
    occasion="An inspection on several ranks",
    minimum_evidence="one batch on two ranks that inspect together",
)

RANKS.add(
    "same_weights",
    "Ranks that hold the same part of the model hold the same weights and buffers.",
    role="parameters",
)
RANKS.add(
    "distinct_data", "Ranks that share the batch out are given different samples.", role="inputs"
)
RANKS.add(
    "replicas_agree",
    "Layers that every rank of a tensor-parallel group computes return the same values.",
)
RANKS.add(
    "averaged_gradients",
    "The gradients of all trainable parameters are averaged over data-parallel ranks.",
    role="parameter_gradients",
)
RANKS.add(
    "same_path",
    "All ranks use the same parameters, where their wrapper waits for each of them.",
    role="parameter_gradients",
)
RANKS.add(
    "unused_parameters",
    "No parameter that DDP waits for is unused on all ranks.",
    role="parameter_gradients",
)
RANKS.add(
    "even_weights",
    "A sample or token weighs about the same, whichever rank it is on.",
    Factor(
        "max_weight_ratio",
        default=1.5,
        help="largest weight of a target relative to one of another rank",
    ),
    role="loss",
)
RANKS.add(
    "synced_norm",
    "Batch norms see enough samples on each rank, or are synchronised over ranks.",
    Count(
        "min_norm_samples",
        default=16,
        help="fewest samples of a rank that a batch norm may normalise by",
    ),
    severity="warn",
)
RANKS.add(
    "distinct_dropout",
    "Data-parallel ranks draw their own random numbers where a dropout is at work.",
    severity="warn",
)


@cache
def every_check() -> tuple[Check, ...]:
    """Return one of each check, those of the wings that are there among them, the gravest first."""
    homes = filter(has_wing, ("probes:all_probes", "training.catalogue:all_checks"))
    return by_rank((*all_checks(), *chain.from_iterable(wing(home)() for home in homes)))


@cache
def default_settings() -> Settings:
    """Return every declared setting at its default, for all checks of this package."""
    return Settings(()).with_checks(every_check())


@cache
def all_checks() -> tuple[Check, ...]:
    """Return one of each check of one run and between ranks, the gravest first."""
    return by_rank((*CHECKS.values(), *RANKS.values()))
