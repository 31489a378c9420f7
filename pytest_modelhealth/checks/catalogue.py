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
from pytest_modelhealth.wings import has_wing, wing

CHECKS = Catalogue("checks.catalogue:CHECKS")

CHECKS.add(
    "finite",
    rank=10,
    summary="No NaN and no infinity in inputs, parameters, buffers, activations or gradients.",
)
CHECKS.add(
    "inputs",
    rank=12,
    summary="The batch is not constant, not raw, not scaled twice, and its ids are in use.",
    role="inputs",
    settings=(
        Ratio(
            "max_input_rms",
            default=30.0,
            help="largest root mean square of inputs that go into weights as they are (images in "
            "0-255 have about 100; a table of uncentred columns may have 100 times as much)",
            per_layer=False,
        ),
    ),
)
CHECKS.add(
    "initial_weights",
    rank=14,
    run="checks.scales:initial_weights",
    summary="No weights are all zero, all equal or far too large where a signal must pass.",
    role="parameters",
    settings=(
        Ratio(
            "max_weight_scale",
            default=4.5,
            help="largest standard deviation of initial weights times the root of their fan-in (He "
            "et al. start at 1.41, healthy routers of experts reach 4.4)",
        ),
    ),
)
CHECKS.add(
    "loss",
    rank=15,
    summary="The loss is given what it takes, is not negated, and depends on the output.",
    reads_scale=True,
    settings=(
        Factor(
            "max_initial_loss",
            default=10.0,
            help="largest loss of a fresh classifier by that of a uniform guess, ln(classes)",
        ),
    ),
)
CHECKS.add(
    "normalization",
    rank=16,
    summary="Running statistics are real and fit the batch, scales and modes let a signal pass.",
    settings=(
        Factor(
            "max_norm_mismatch",
            default=5.0,
            help="largest factor between a batch normalisation's output in evaluation mode and "
            "what its scale and shift make of normalised values (0.51 to 1.54 in trained models)",
        ),
    ),
)
CHECKS.add(
    "unregistered_parameters",
    rank=17,
    summary="Every leaf of the model that gets a gradient is one of its parameters.",
    run="checks.missing_gradients:unregistered",
    role="parameters",
)
CHECKS.add(
    "wiring",
    rank=18,
    summary="Layers are called where they belong, and fed with what they are for.",
)
CHECKS.add(
    "dead_units",
    rank=20,
    summary="Behind each activation that can die, enough units are active for some sample.",
    reads_scale=True,
    settings=(
        Share(
            "max_dead_fraction",
            default=0.8,
            help="largest part of a layer's units that may be inactive for every sample (healthy "
            "deep ReLU networks reach 0.5 to 0.7 when initialised)",
        ),
        Share(
            "max_held_fraction",
            default=0.5,
            help="largest part of the units that may be dead and lie further below zero than any "
            "unit of the layer rises above it (SageMaker Debugger: half)",
        ),
        Count(
            "min_samples",
            default=32,
            help="fewest samples (or tokens) that say anything about dead or saturated units; "
            "with fewer, what is over its limit is inconclusive",
        ),
    ),
)
CHECKS.add(
    "saturation",
    rank=25,
    run="checks.dead_units:saturation",
    summary="No bounded activation or attention sits where it is flat for most inputs.",
    reads_scale=True,
    settings=(
        Share(
            "max_saturated_fraction",
            default=0.75,
            help="largest part of the inputs of a bounded activation that may lie where it is flat "
            "(SageMaker Debugger: half; a trained hypernetwork reaches 0.57)",
        ),
        Share(
            "max_one_hot",
            default=0.9,
            help="largest mean sum of squares of the rows of a softmax with large scores (1 is "
            "one-hot; healthy attention stays under 0.6)",
        ),
    ),
)
CHECKS.add(
    "collapse",
    rank=27,
    summary="The output differs from sample to sample, and units from each other.",
    reads_scale=True,
    settings=(
        Setting(
            "min_collapse_samples",
            int,
            default=8,
            minimum=2,
            help="fewest samples that say anything about outputs that are equal for all of them",
            per_layer=False,
        ),
    ),
)
CHECKS.add(
    "missing_gradients",
    rank=30,
    summary="No trainable layer that feeds the output is cut off from the loss.",
    reads_scale=True,
    role="parameter_gradients",
    settings=(
        Share(
            "max_idle_rows",
            default=0.05,
            help="largest part of the rows or columns of a matrix of a fresh model that may be "
            "zero and get a gradient of exactly zero, from four on, while the rest learns (0 in "
            "healthy models; pruning leaves 5 %, training 6 %)",
        ),
    ),
)
CHECKS.add(
    "activation_scale",
    rank=36,
    run="checks.scales:activation_scale",
    summary="Activations do not grow beyond what depth explains.",
    reads_scale=True,
    settings=(
        Factor(
            "max_activation_growth",
            default=100.0,
            help="largest root mean square of activations relative to the inputs (11 is the most "
            "of healthy models, 40 residual blocks without a norm included)",
        ),
    ),
)
CHECKS.add(
    "task_balance",
    rank=38,
    summary="No task's gradient drowns that of another on a layer that they share.",
    run="checks.loss_terms:unbalanced",
    role="parameter_gradients",
    settings=(
        Factor(
            "max_task_ratio",
            default=100.0,
            help="largest ratio of the gradient norms of two tasks at the last layer they share",
        ),
    ),
)
CHECKS.add(
    "grad_norm",
    rank=40,
    summary="No layer's gradient norm vanishes or explodes.",
    reads_scale=True,
    role="parameter_gradients",
    settings=(
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
            help="smallest gradient of the first layers relative to their weights, as a part of "
            "the largest of a later layer (float32 resolves 1e-7: nothing is learnt)",
        ),
        Ratio(
            "exploding_ratio",
            default=1e4,
            help="largest root mean square of a layer's gradients relative to that of its weights "
            "(at 1e4, a step at a learning rate of 1e-4 is as large as the weights)",
        ),
    ),
)
CHECKS.add(
    "headroom",
    rank=46,
    run="checks.finite:headroom",
    summary="Values neither come near the largest of their dtype nor sink below its normal ones.",
    reads_scale=True,
    settings=(
        Share(
            "max_range_used",
            default=0.5,
            help="largest part of the dtype's range that a value may use (a factor of two is left)",
        ),
        Share(
            "max_subnormal_fraction",
            default=0.5,
            help="largest part of non-zero weights or gradients below the dtype's normal numbers",
        ),
        DtypeName(
            "planned_dtype",
            str,
            default=None,
            help="also judge the values against this dtype: float16 or bfloat16",
            one_of=("float16", "bfloat16"),
            per_layer=False,
        ),
    ),
)
CHECKS.add(
    "removable_units",
    rank=47,
    summary="No layer has more units that nothing would miss than it may have.",
    settings=(
        Share(
            "max_removable_fraction",
            default=None,
            help="largest part of a layer's units that may be removable, where "
            "`Inspector.removable` looked for them",
        ),
    ),
)

RANKS = Catalogue(
    "checks.catalogue:RANKS",
    run="checks.between_ranks:findings",
    part="ranks",
    occasion="An inspection on several ranks",
    minimum_evidence="one batch on two ranks that inspect together",
)

RANKS.add(
    "same_weights",
    rank=48,
    summary="Ranks that hold the same part of the model hold the same weights and buffers.",
    role="parameters",
)
RANKS.add(
    "distinct_data",
    rank=49,
    summary="Ranks that share the batch out are given different samples.",
    role="inputs",
)
RANKS.add(
    "replicas_agree",
    rank=50,
    summary="Layers that every rank of a tensor-parallel group computes return the same values.",
)
RANKS.add(
    "averaged_gradients",
    rank=51,
    summary="The gradients of all trainable parameters are averaged over data-parallel ranks.",
    role="parameter_gradients",
)
RANKS.add(
    "same_path",
    rank=52,
    summary="All ranks use the same parameters, where their wrapper waits for each of them.",
    role="parameter_gradients",
)
RANKS.add(
    "unused_parameters",
    rank=53,
    summary="No parameter that DDP waits for is unused on all ranks.",
    role="parameter_gradients",
)
RANKS.add(
    "even_weights",
    rank=54,
    summary="A sample or token weighs about the same, whichever rank it is on.",
    role="loss",
    settings=(
        Factor(
            "max_weight_ratio",
            default=1.5,
            help="largest weight of a target relative to one of another rank, where each rank's "
            "loss is a mean over its own (one sample fewer of 32: 1.03)",
        ),
    ),
)
RANKS.add(
    "synced_norm",
    rank=55,
    summary="Batch norms see enough samples on each rank, or are synchronised over ranks.",
    severity="warn",
    settings=(
        Count(
            "min_norm_samples",
            default=16,
            help="fewest samples of a rank that a batch norm may normalise by, where ranks share "
            "the batch out",
        ),
    ),
)
RANKS.add(
    "distinct_dropout",
    rank=56,
    summary="Data-parallel ranks draw their own random numbers where a dropout is at work.",
    severity="warn",
)


@cache
def every_check() -> tuple[Check, ...]:
    """Return one of each check, those of the wings that are there among them, the gravest first."""
    of_wings = (wing(home)() for home in _OF_WINGS if has_wing(home))
    return by_rank((*all_checks(), *chain.from_iterable(of_wings)))


_OF_WINGS = ("probes:all_probes", "training.catalogue:all_checks")


@cache
def default_settings() -> Settings:
    """Return every declared setting at its default, for all checks of this package."""
    return Settings(()).with_checks(every_check())


@cache
def all_checks() -> tuple[Check, ...]:
    """Return one of each check of one run and between ranks, the gravest first."""
    return by_rank((*CHECKS.values(), *RANKS.values()))
