"""The checks of a training step and of a whole training: a row each, the gravest first."""

from __future__ import annotations

from pytest_modelhealth.checks.check import Catalogue, Check
from pytest_modelhealth.settings import Count, Factor, Ratio, Share

STEP = Catalogue(
    "training.catalogue:STEP",
    run="training.contract:findings",
    part="stepped",
    occasion="A training step: inspector(model).run_step(...)",
    judges_steps=True,
    role="parameters",
)


STEP.add(
    "trained_parameters",
    rank=60,
    summary="The optimizer holds every trainable parameter that gets a gradient.",
)
STEP.add(
    "parameter_updates",
    rank=61,
    summary="A training step moves the parameters that the optimizer holds.",
)
STEP.add(
    "gradient_factor",
    rank=62,
    summary="The gradient that the optimizer steps on is the slope of the loss that is returned.",
    role="parameter_gradients",
    settings=(
        Factor(
            "max_gradient_factor",
            default=1000.0,
            help="largest gradient at the optimizer's step by the slope of the loss that the step "
            "returns, and the inverse of the least",
            per_layer=False,
        ),
    ),
)
STEP.add(
    "left_over_gradients",
    rank=63,
    summary="No optimizer steps twice on the same gradient.",
    role="parameter_gradients",
)
STEP.add(
    "batch_influence",
    rank=64,
    summary="Each half of the batch changes the gradient that the optimizer steps on.",
    role="inputs",
)
STEP.add(
    "training_mode",
    rank=65,
    summary="A training step runs dropouts and trainable batch normalisations in training mode.",
    role="activations",
)
STEP.add(
    "gradient_path",
    rank=66,
    summary="Parameters on which the returned loss depends get a gradient, and keep it.",
    role="parameter_gradients",
)
STEP.add(
    "update_direction",
    rank=67,
    summary="An optimizer descends the gradient that it steps on.",
)
STEP.add(
    "update_size",
    rank=68,
    summary="A step changes weights by a fraction of their size, as its gradient asks for.",
    settings=(
        Ratio(
            "max_step_ratio",
            default=1.0,
            help="largest update of a training step by the weights that it changes, both L2 norms, "
            "the median over matrices",
            per_layer=False,
        ),
        Ratio(
            "max_decay",
            default=0.02,
            help="largest share of the weights that weight decay takes in one step (0.02 halves "
            "them in 34)",
            per_layer=False,
        ),
    ),
)
STEP.add(
    "update_precision",
    rank=69,
    summary="Updates are large enough for the precision of the weights.",
    settings=(
        Share(
            "max_swallowed",
            default=0.9,
            help="largest share of the weights with a gradient that no call of a training step "
            "changes",
            per_layer=False,
        ),
    ),
)
STEP.add(
    "later_calls",
    rank=70,
    summary="A step can be called again, keeps no graph of the call before, and does not diverge.",
    role="activations",
    settings=(
        Factor(
            "max_loss_growth",
            default=100.0,
            help="largest loss of a later call of a training step on one batch, by that of the "
            "first",
            per_layer=False,
        ),
    ),
)
STEP.add(
    "optimizer_settings",
    rank=71,
    summary="Options of an optimizer and of a step are ones that a recipe has.",
)
STEP.add(
    "running_statistics",
    rank=72,
    summary="Running statistics of a batch normalisation that learns move in training.",
    role="buffers",
)
STEP.add(
    "weight_ties",
    rank=73,
    summary="Weights that a configuration ties are one tensor in the model.",
)
STEP.add(
    "overfitting",
    rank=75,
    summary="Called again and again on one batch, a step lowers its loss.",
    role="activations",
    settings=(
        Share(
            "min_loss_fall",
            default=0.02,
            help="least fall of the loss when a step is called on one batch again and again, by "
            "the first loss",
            per_layer=False,
        ),
    ),
)
STEP.add(
    "resumption",
    rank=76,
    summary="After loading the saved state, the next step is the same, bit for bit.",
)

TRAINING = Catalogue(
    "training.catalogue:TRAINING",
    run="training.monitoring.rules:findings",
    part="course",
    occasion="A whole training: inspector(model).monitor()",
    judges_steps=True,
)

TRAINING.add(
    "nonfinite_steps",
    rank=80,
    summary="In no step is there a NaN or infinity that the optimizer learns from.",
    settings=(
        Count(
            "max_skipped_steps",
            default=20,
            help="skipped steps in a row, as gradients are not finite",
            per_layer=False,
        ),
    ),
)
TRAINING.add(
    "loss_divergence",
    rank=81,
    summary="The loss does not rise far above its best level and stay there.",
    role="loss",
    settings=(
        Ratio(
            "max_loss_rise",
            default=1000.0,
            help="rise of the loss above its best by its own scale, whatever goes with it",
            per_layer=False,
        ),
        Ratio(
            "max_lost_progress",
            default=0.8,
            help="part of the loss's gain that is lost again as updates or gradients leap",
            per_layer=False,
        ),
    ),
)
TRAINING.add(
    "exploding_signals",
    rank=82,
    summary="No gradient or activation grows by orders of magnitude over what is usual, to stay.",
    settings=(
        Factor("max_gradient_rise", default=1000.0, help="growth of a gradient norm, for good"),
        Factor("max_activation_rise", default=1000.0, help="growth of activations, for good"),
    ),
)
TRAINING.add(
    "dying_layers",
    rank=83,
    summary="No layer loses nearly all its units, or the spread of its output.",
    settings=(
        Share("max_dying_fraction", default=0.9, help="part of a layer's units that may die"),
        Ratio("min_spread_kept", default=1e-3, help="least of its deviation that an output keeps"),
    ),
)
TRAINING.add(
    "fading_gradients",
    rank=84,
    summary="No gradient falls to nothing while the loss is neither low nor near its best.",
    settings=(
        Ratio(
            "min_gradient_kept", default=1e-4, help="least of its usual size that a gradient keeps"
        ),
        Count(
            "max_steps_without_gradient",
            default=30,
            help="watched steps in a row that a layer may go without a gradient",
        ),
    ),
)
TRAINING.add(
    "update_ratio",
    rank=85,
    summary="No optimizer goes on changing a weight matrix by a large part of its size.",
    role="parameters",
    settings=(
        Ratio("max_update_ratio", default=0.1, help="update of a weight matrix by its size (L2)"),
    ),
)
TRAINING.add(
    "stopped_updates",
    rank=86,
    summary="No layer that moved stands still while it has gradients and others move.",
    role="parameters",
    settings=(
        Count(
            "max_still_steps", default=30, help="watched steps in a row that leave a layer still"
        ),
    ),
)
TRAINING.add(
    "weight_drift",
    rank=87,
    summary="No layer's weights grow without end, or shrink towards zero.",
    role="parameters",
    settings=(
        Factor("max_weight_growth", default=100.0, help="growth of a layer's parameters"),
        Ratio("min_weight_kept", default=1e-2, help="least of its size that a layer keeps"),
    ),
)
TRAINING.add(
    "standstill",
    rank=88,
    summary="Over a training gradients come, weights change, and the loss moves.",
    role="parameters",
    settings=(
        Count(
            "max_steps_standing",
            default=20,
            help="watched steps without a gradient or a change",
            per_layer=False,
        ),
    ),
)
TRAINING.add(
    "input_shift",
    rank=89,
    summary="The inputs of the model do not become constant, nor change their scale for good.",
    role="inputs",
    settings=(
        Factor(
            "max_input_shift",
            default=100.0,
            help="change of the inputs' scale for good, up or down",
            per_layer=False,
        ),
    ),
)
TRAINING.add(
    "mode_switch",
    rank=90,
    summary="A model that trains in training mode does not go on in evaluation mode.",
    settings=(
        Count(
            "max_steps_in_evaluation",
            default=20,
            help="watched steps in evaluation mode after training mode",
            per_layer=False,
        ),
    ),
)
TRAINING.add(
    "growing_hooks",
    rank=91,
    summary="No layer gets more forward hooks in every step.",
    settings=(
        Count("max_rising_steps", default=20, help="watched steps in a row with one more hook"),
    ),
)
TRAINING.add(
    "statistics_drift",
    rank=92,
    summary="The running variance of a batch norm stays near that of its usual batches.",
    role="buffers",
    settings=(
        Factor("max_running_drift", default=100.0, help="running deviation by that of a batch"),
    ),
)
TRAINING.add(
    "saturating_layers",
    rank=93,
    summary="No softmax, sigmoid or tanh comes to give nothing but the ends of its range.",
    settings=(
        Share(
            "max_saturating", default=0.995, help="how near to its ends a bounded output may come"
        ),
    ),
)
TRAINING.add(
    "outside_changes",
    rank=94,
    summary="Between two steps nothing but an optimizer changes weights by much.",
    role="parameters",
)


def all_checks() -> tuple[Check, ...]:
    """Return one of each check of a step and of a training."""
    return (*STEP.values(), *TRAINING.values())
