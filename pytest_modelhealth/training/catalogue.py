"""The checks of a training step and of a whole training: a row each, the gravest first."""

from __future__ import annotations

from pytest_modelhealth.checks.check import Catalogue, Check
from pytest_modelhealth.settings import Count, Factor, Ratio, Share
from pytest_modelhealth.settings.setting import ModelCount, ModelFactor, ModelRatio, ModelShare

STEP = Catalogue(
    "training.catalogue:STEP",
    run="training.contract:findings",
    first=60,
    part="stepped",
    occasion="A training step: inspector(model).run_step(...)",
    judges_steps=True,
    role="parameters",
)

STEP.add(
    "trained_parameters", "The optimizer holds every trainable parameter that gets a gradient."
)
STEP.add("parameter_updates", "A training step moves the parameters that the optimizer holds.")
STEP.add(
    "gradient_factor",
    "The gradient that the optimizer steps on is the slope of the loss that is returned.",
    ModelFactor(
        "max_gradient_factor",
        default=1000.0,
        help="largest gradient at the optimizer's step by the slope of the loss, and the inverse",
    ),
    role="parameter_gradients",
)
STEP.add(
    "left_over_gradients",
    "No optimizer steps twice on the same gradient.",
    role="parameter_gradients",
)
STEP.add(
    "batch_influence",
    "Each half of the batch changes the gradient that the optimizer steps on.",
    role="inputs",
)
STEP.add(
    "training_mode",
    "A training step runs dropouts and trainable batch normalisations in training mode.",
    role="activations",
)
STEP.add(
    "gradient_path",
    "Parameters on which the returned loss depends get a gradient, and keep it.",
    role="parameter_gradients",
)
STEP.add("update_direction", "An optimizer descends the gradient that it steps on.")
STEP.add(
    "update_size",
    "A step changes weights by a fraction of their size, as its gradient asks for.",
    ModelRatio(
        "max_step_ratio",
        default=1.0,
        help="largest update of a training step by the weights that it changes, over matrices",
    ),
    ModelRatio(
        "max_decay",
        default=0.02,
        help="largest share of the weights that weight decay takes in one step",
    ),
)
STEP.add(
    "update_precision",
    "Updates are large enough for the precision of the weights.",
    ModelShare(
        "max_swallowed",
        default=0.9,
        help="largest share of the weights with a gradient that no call of a training step changes",
    ),
)
STEP.add(
    "later_calls",
    "A step can be called again, keeps no graph of the call before, and does not diverge.",
    ModelFactor(
        "max_loss_growth",
        default=100.0,
        help="largest loss of a later call of a training step on one batch, by that of the first",
    ),
    role="activations",
)
STEP.add("optimizer_settings", "Options of an optimizer and of a step are ones that a recipe has.")
STEP.add(
    "running_statistics",
    "Running statistics of a batch normalisation that learns move in training.",
    role="buffers",
)
STEP.add("weight_ties", "Weights that a configuration ties are one tensor in the model.")
STEP.add(
    "overfitting",
    "Called again and again on one batch, a step lowers its loss.",
    ModelShare(
        "min_loss_fall",
        default=0.02,
        help="least fall of the loss by the first when a step is called again on one batch",
    ),
    role="activations",
)
STEP.add("resumption", "After loading the saved state, the next step is the same, bit for bit.")

TRAINING = Catalogue(
    "training.catalogue:TRAINING",
    run="training.monitoring.judging:findings",
    first=80,
    part="course",
    occasion="A whole training: inspector(model).monitor()",
    judges_steps=True,
)

TRAINING.add(
    "nonfinite_steps",
    "In no step is there a NaN or infinity that the optimizer learns from.",
    ModelCount(
        "max_skipped_steps", default=20, help="skipped steps in a row, as gradients are not finite"
    ),
)
TRAINING.add(
    "loss_divergence",
    "The loss does not rise far above its best level and stay there.",
    ModelRatio(
        "max_loss_rise",
        default=1000.0,
        help="rise of the loss above its best by its own scale, whatever goes with it",
    ),
    ModelRatio(
        "max_lost_progress",
        default=0.8,
        help="part of the loss's gain that is lost again as updates or gradients leap",
    ),
    role="loss",
)
TRAINING.add(
    "exploding_signals",
    "No gradient or activation grows by orders of magnitude over what is usual, to stay.",
    Factor("max_gradient_rise", default=1000.0, help="growth of a gradient norm, for good"),
    Factor("max_activation_rise", default=1000.0, help="growth of activations, for good"),
)
TRAINING.add(
    "dying_layers",
    "No layer loses nearly all its units, or the spread of its output.",
    Share("max_dying_fraction", default=0.9, help="part of a layer's units that may die"),
    Ratio("min_spread_kept", default=1e-3, help="least of its deviation that an output keeps"),
)
TRAINING.add(
    "fading_gradients",
    "No gradient falls to nothing while the loss is neither low nor near its best.",
    Ratio("min_gradient_kept", default=1e-4, help="least of its usual size that a gradient keeps"),
    Count(
        "max_steps_without_gradient",
        default=30,
        help="watched steps in a row that a layer may go without a gradient",
    ),
)
TRAINING.add(
    "update_ratio",
    "No optimizer goes on changing a weight matrix by a large part of its size.",
    Ratio("max_update_ratio", default=0.1, help="update of a weight matrix by its size (L2)"),
    role="parameters",
)
TRAINING.add(
    "stopped_updates",
    "No layer that moved stands still while it has gradients and others move.",
    Count("max_still_steps", default=30, help="watched steps in a row that leave a layer still"),
    role="parameters",
)
TRAINING.add(
    "weight_drift",
    "No layer's weights grow without end, or shrink towards zero.",
    Factor("max_weight_growth", default=100.0, help="growth of a layer's parameters"),
    Ratio("min_weight_kept", default=1e-2, help="least of its size that a layer keeps"),
    role="parameters",
)
TRAINING.add(
    "standstill",
    "Over a training gradients come, weights change, and the loss moves.",
    ModelCount(
        "max_steps_standing", default=20, help="watched steps without a gradient or a change"
    ),
    role="parameters",
)
TRAINING.add(
    "input_shift",
    "The inputs of the model do not become constant, nor change their scale for good.",
    ModelFactor(
        "max_input_shift", default=100.0, help="change of the inputs' scale for good, up or down"
    ),
    role="inputs",
)
TRAINING.add(
    "mode_switch",
    "A model that trains in training mode does not go on in evaluation mode.",
    ModelCount(
        "max_steps_in_evaluation",
        default=20,
        help="watched steps in evaluation mode after training mode",
    ),
)
TRAINING.add(
    "growing_hooks",
    "No layer gets more forward hooks in every step.",
    Count("max_rising_steps", default=20, help="watched steps in a row with one more hook"),
)
TRAINING.add(
    "statistics_drift",
    "The running variance of a batch norm stays near that of its usual batches.",
    Factor("max_running_drift", default=100.0, help="running deviation by that of a batch"),
    role="buffers",
)
TRAINING.add(
    "saturating_layers",
    "No softmax, sigmoid or tanh comes to give nothing but the ends of its range.",
    Share("max_saturating", default=0.995, help="how near to its ends a bounded output may come"),
)
TRAINING.add(
    "outside_changes",
    "Between two steps nothing but an optimizer changes weights by much.",
    role="parameters",
)


def all_checks() -> tuple[Check, ...]:
    """Return one of each check of a step and of a training."""
    return (*STEP.values(), *TRAINING.values())
