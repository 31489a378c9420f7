"""What scripts/failing_checks.py cannot find out by running something: repairs and captions."""

from __future__ import annotations

from typing import NamedTuple


class Picture(NamedTuple):
    """A picture of the gallery.

    Args:
        check: whose model it is of, or empty.
        title: what went wrong.
        call: what draws it, from what the test made.
        caption: two sentences.
        file: the example, where there is no check.
    """

    check: str
    title: str
    call: str
    caption: str
    file: str = ""

    @property
    def name(self) -> str:
        """The name of the file, without its ending."""
        return self.check or "comparison"


GALLERY = [
    Picture(
        "dead_units",
        "A dead ReLU",
        'report.plot_histogram("act1")',
        "Everything that the layer gives is zero, for every sample. A bias holds what goes in below "
        "zero, so that nothing behind it ever learns.",
    ),
    Picture(
        "saturation",
        "A saturated sigmoid",
        'report.plot_histogram("open")',
        "The gate is 0 or 1 and next to nothing between. There the sigmoid is flat, so that the gate "
        "never learns when to open.",
    ),
    Picture(
        "grad_norm",
        "Vanishing gradients",
        "report.plot_gradient_flow()",
        "Sixteen sigmoids in a row, each with a slope of a quarter at best. From the last layer to "
        "the first the gradient falls by many orders of magnitude.",
    ),
    Picture(
        "missing_gradients",
        "A branch that never learns",
        "report.plot_flow()",
        "The two encoders meet before the head. Behind the `detach()` nothing gets a gradient, and "
        "the picture shows where the way back ends.",
    ),
    Picture(
        "dying_layers",
        "A layer that dies",
        "monitor.plot()",
        "All is well for sixty steps, then every unit of a layer falls silent at once. The loss "
        "jumps back to that of a guess and stays there.",
    ),
    Picture(
        "loss_divergence",
        "A learning rate that jumps",
        "monitor.plot()",
        "A schedule raises the rate a hundredfold at step 80. Updates as large as the weights undo "
        "in two steps what eighty have learnt.",
    ),
    Picture(
        "",
        "A refactor that changes the numbers",
        "comparison.plot_errors()",
        "A fused attention divides by the wrong width. Errors are within rounding up to the first "
        "attention, and far beyond it from there on.",
        "examples/broken/test_refactored_attention.py",
    ),
]

REPAIRS = {
    "finite": "Mask with a large negative number, or give rows without anything to attend to something harmless, such as their first place.",
    "inputs": "Scale and centre the batch as it was in training: `images / 255`, then the mean and deviation of the data set.",
    "initial_weights": "Draw weights by the width of the layer: `nn.init.kaiming_normal_` or `xavier_uniform_`, or leave torch's default.",
    "loss": "Return logits and take the softmax only where probabilities are shown; or take the logarithm and use `nll_loss`.",
    "normalization": "Use the default momentum of 0.1, or `momentum=None` for a plain average; then train for some steps, so that the statistics become those of the data.",
    "unregistered_parameters": "Use `nn.ModuleList` or `nn.ModuleDict` for layers, `nn.Parameter` for tensors.",
    "wiring": "Call each layer in its own place: `for block in self.blocks: x = x + block(x)`. Where weights are to be shared, make one block and say so.",
    "dead_units": "Start biases at zero; if units died in training, lower the rate or use an activation with a slope on both sides.",
    "saturation": "Bring what goes into the activation near zero: smaller weights, a normalisation, a temperature of one.",
    "collapse": "Take the mean over the dimension that was meant, here `mean(dim=1)`, and keep the one of samples.",
    "alike_samples": "Find where samples stop to differ: here, divide by the number of words once.",
    "missing_gradients": "Take the `detach()` out; where the part is not to learn, freeze it by `requires_grad_(False)`, and the check is content.",
    "causality": "Mask every later step: `triu(diagonal=1)`, or `is_causal=True`.",
    "padding": "Leave padded places out: multiply by the mask and divide by the number of real ones.",
    "sample_independence": "Never compute along the dimension of samples in a forward: here, `mean(1)`. A batch norm is the exception, and in evaluation mode it does not either.",
    "position_effect": "Give what has the positions to the block.",
    "repeatability": "Use `nn.Dropout`, or pass `training=self.training`.",
    "activation_scale": "Normalise before or after each block, or take the factor out.",
    "task_balance": "Measure each target in units of its own spread, or weigh the losses.",
    "grad_norm": "Use ReLU or GELU, residual connections, or a normalisation in each block.",
    "custom_backward": "Derive it again, and hold it against `torch.autograd.gradcheck` in float64.",
    "input_effect": "Follow the input through the forward: something that does not depend on it stands in its way. The probe only notes it, as inputs without effect may be meant; a test that minds asks for the notes.",
    "headroom": "Take the largest out before dividing, keep this part in float32, or plan for bfloat16, which has the range.",
    "removable_units": "Cut them out, as [removable units](../how-to/removable.md#cut-them-out) shows.",
    "same_weights": "Do on all ranks what is done after the wrapper was made, or load before wrapping.",
    "distinct_data": "`DataLoader(..., sampler=DistributedSampler(data))`, and `sampler.set_epoch(epoch)` in each epoch.",
    "replicas_agree": "Give the ranks of one tensor-parallel group the same seed, and only data-parallel ranks different ones.",
    "averaged_gradients": "Wrap the whole model: `DistributedDataParallel(Net())`.",
    "same_path": "Run both ways on each rank, decide sample by sample, or say `find_unused_parameters=True`.",
    "unused_parameters": "Take the layer out, or say `find_unused_parameters=True`.",
    "even_weights": "Sum the losses, and divide by the number of targets of all ranks times one by the number of ranks.",
    "synced_norm": "`nn.SyncBatchNorm.convert_sync_batchnorm(model)` before wrapping, larger batches, or a group norm.",
    "distinct_dropout": "`torch.manual_seed(seed + rank)` once the model is made.",
    "trained_parameters": "`torch.optim.SGD(model.parameters(), ...)`; what is not to learn is frozen by `requires_grad_(False)`.",
    "parameter_updates": "Clear before the backward pass: `zero_grad()`, `backward()`, `step()`.",
    "gradient_factor": "`(loss / 4).backward()`, by the number of micro-batches.",
    "left_over_gradients": "`optimizer.zero_grad()` at the beginning of each step.",
    "batch_influence": "Use what the loop goes through: `inputs[part : part + 32]`.",
    "training_mode": "`model.train()` at the beginning of each step, or at the end of each validation.",
    "gradient_path": "Add all terms before `backward()`.",
    "update_direction": "`(-likelihood).backward()`, or a loss of torch.",
    "update_size": "A rate of 1e-3 for Adam, to begin with.",
    "update_precision": "Keep weights in float32 and compute under `torch.autocast`; or a larger rate, or an optimizer that rounds by chance.",
    "later_calls": "`.detach()` what is carried from step to step.",
    "optimizer_settings": "`betas=(0.9, 0.999)`, in this order.",
    "running_statistics": "The default momentum of 0.1.",
    "weight_ties": "`model.tie_weights()` after weights were replaced; or `config.tie_word_embeddings = False` where they are to be two.",
    "overfitting": "A larger rate. Where that does not help: does the model see what tells the samples apart, and do the labels belong to them?",
    "resumption": "`persistent=True`, the default, for every buffer that a step depends on; and save schedules, scalers and counters.",
    "nonfinite_steps": 'Add an epsilon to what is divided by, and look at the batches: `monitor(on_violation="raise")` stops at the step.',
    "loss_divergence": "A smaller peak of the schedule, a warm-up, clipped gradients.",
    "exploding_signals": "Take the growth out, or bound it; normalise what the layer makes.",
    "dying_layers": "A smaller rate or a warm-up, clipped gradients, an activation with a slope on both sides.",
    "fading_gradients": "Take the `detach()` out; where the layer is to be frozen, say so by `requires_grad_(False)`.",
    "update_ratio": "A smaller rate, and a decay of 0.01 to 0.1.",
    "stopped_updates": "Give the new optimizer all parameters, or freeze by `requires_grad_(False)` those that it is not to have.",
    "weight_drift": "A smaller rate for these weights, or some decay, which a normalisation behind them makes necessary.",
    "standstill": "A rate above zero: here a schedule or a configuration gave none.",
    "input_shift": "One unit for all data; scale at the door, in the data set.",
    "mode_switch": "`model.train()` after each validation.",
    "growing_hooks": "Register once, before the loop; or keep the handle and `remove()` it.",
    "statistics_drift": "Run in evaluation mode whatever is not for training.",
    "saturating_layers": "A floor for the temperature, such as `max(temperature, 0.1)`; a decay where weights grow.",
    "outside_changes": "Find what writes: initialisation, loading, averaging, clipping of weights. Where it is meant, waive it with the reason.",
}
