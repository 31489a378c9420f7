"""Pairs of models: refactors that change nothing, and changes that look as harmless and are not."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models import paired as models
from corpus.models.changed import Headless, Mixing, Odd, Shifted, Spoiled
from corpus.models.paired import (
    Attention,
    Block,
    Branches,
    Cnn,
    FusedAttention,
    Gpt,
    Mlp,
    Repeated,
    ResNet,
    Signs,
    batch,
    seeded,
)

Pair = tuple[nn.Module, Any]
BENIGN: dict[str, Callable[[], Pair]] = {}
HARMFUL: dict[str, tuple[Callable[[], Pair], str]] = {}


def benign(build: Callable[[], Pair]) -> Callable[[], Pair]:
    """Add a pair that computes the same."""
    BENIGN[build.__name__] = build
    return build


def harmful(layer: str) -> Callable[[Callable[[], Pair]], Callable[[], Pair]]:
    """Add a pair that parts at `layer`."""

    def add(build: Callable[[], Pair]) -> Callable[[], Pair]:
        HARMFUL[build.__name__] = (build, layer)
        return build

    return add


def twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return a model and a deep copy of it."""
    model = seeded(build)
    return model, copy.deepcopy(model)


def with_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give one module another forward, as an edit of its source would."""
    module.forward = types.MethodType(forward, module)


def load(target: nn.Module, source: nn.Module, rename: Callable[[str], str] = str) -> nn.Module:
    """Return `target` with the weights of `source`, whose keys are renamed."""
    target.load_state_dict({rename(key): value for key, value in source.state_dict().items()})
    return target


def split_projections(model: nn.Module, fused: nn.Module) -> nn.Module:
    """Return `model`, which has q, k and v, with the weights of one that has qkv."""
    state = {}
    for key, value in fused.state_dict().items():
        if ".qkv." in key:
            parts = zip("qkv", value.chunk(3), strict=True)
            state |= {key.replace(".qkv.", f".{name}."): part.clone() for name, part in parts}
        else:
            state[key] = value
    model.load_state_dict(state)
    return model


@benign
def the_same_object() -> Pair:
    model = seeded(Mlp)
    return model, model


@benign
def shared_modules() -> Pair:
    model = seeded(Mlp)
    layers = [model.fc1, model.act1, model.fc2, model.act2, model.norm, model.head]
    return model, nn.Sequential(*layers)


@benign
def sequential_to_attributes() -> Pair:
    model = seeded(Mlp)
    names = ("0", "1", "2", "3", "4", "5")
    layers = [model.fc1, model.act1, model.fc2, model.act2, model.norm, model.head]
    return nn.Sequential(OrderedDict(zip(names, copy.deepcopy(layers), strict=True))), model


@benign
def functional_relu() -> Pair:
    class Functional(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(F.relu(self.fc2(F.relu(self.fc1(x))))))

    model = seeded(Mlp)
    return model, load(Functional(), model)


@benign
def functional_relu_into_modules() -> Pair:
    candidate, reference = functional_relu()
    return reference, candidate


@benign
def one_shared_relu_into_two() -> Pair:
    candidate = seeded(Mlp)
    reference = copy.deepcopy(candidate)
    reference.act2 = reference.act1
    return reference, candidate


def with_functions(block: nn.Module, act: Callable[[Tensor], Tensor] = F.relu) -> None:
    """Have a residual block call functions where it called one module twice."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return act(self.bn2(self.conv2(y)) + self.skip * x)

    del block.relu
    with_forward(block, forward)


@benign
def a_module_called_twice_as_functions() -> Pair:
    reference, candidate = twins(ResNet)
    for block in candidate.blocks:
        with_functions(block)
    return reference, candidate


@benign
def functions_as_a_module_called_twice() -> Pair:
    candidate, reference = a_module_called_twice_as_functions()
    return reference, candidate


@benign
def one_activation_for_all_blocks() -> Pair:
    reference, candidate = twins(ResNet)
    for block in candidate.blocks:
        block.relu = candidate.blocks[0].relu
    return reference, candidate


@benign
def branches_in_another_order() -> Pair:
    reference = seeded(Branches)
    candidate = load(Branches("right", "left"), reference)
    for layer in (candidate.left, candidate.right):  # which rounds otherwise
        with_forward(layer, lambda self, x: (x[:, None] * self.weight).sum(-1) + self.bias)
    return reference, candidate


@benign
def calls_that_cannot_be_told_apart() -> Pair:
    reference = seeded(lambda: Signs(1, -1))
    return reference, load(Signs(-1, 1), reference)


def unrolled(*, tied: bool) -> Pair:
    """Return one layer called three times, and three of the same weights."""
    reference, candidate = seeded(Repeated), Repeated(3)
    state = reference.state_dict()
    for number in (1, 2):
        state |= {f"layers.{number}.{k}": state[f"layers.0.{k}"] for k in ("weight", "bias")}
    candidate.load_state_dict(state)
    for layer in candidate.layers if tied else ():
        layer.weight, layer.bias = candidate.layers[0].weight, candidate.layers[0].bias
    return reference, candidate


@benign
def a_layer_called_three_times_unrolled() -> Pair:
    return unrolled(tied=True)


@benign
def identity_inserted() -> Pair:
    reference, candidate = twins(Mlp)
    candidate.norm = nn.Sequential(nn.Identity(), candidate.norm)
    return reference, candidate


@benign
def dropout_of_nothing() -> Pair:
    reference, candidate = twins(Mlp)
    candidate.act1 = nn.Sequential(candidate.act1, nn.Dropout(0.0))
    return reference, candidate


@benign
def the_same_dropout() -> Pair:
    return twins(lambda: nn.Sequential(nn.Dropout(0.3), Mlp(), nn.Dropout(0.3)))


@benign
def wrapped() -> Pair:
    reference, candidate = twins(Mlp)
    return reference, nn.Sequential(OrderedDict(model=candidate))


@benign
def unwrapped() -> Pair:
    reference, candidate = twins(Mlp)
    return nn.Sequential(OrderedDict(model=reference)), candidate


@benign
def linear_as_einsum() -> Pair:
    reference, candidate = twins(Mlp)
    with_forward(
        candidate.fc2, lambda self, x: torch.einsum("ni,oi->no", x, self.weight) + self.bias
    )
    return reference, candidate


@benign
def linear_as_sum_of_products() -> Pair:
    reference, candidate = twins(Mlp)
    with_forward(candidate.fc2, lambda self, x: (x[:, None] * self.weight).sum(-1) + self.bias)
    return reference, candidate


@benign
def layer_norm_by_hand() -> Pair:
    def forward(self: nn.LayerNorm, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred / (variance + self.eps).sqrt() * self.weight + self.bias

    reference, candidate = twins(Gpt)
    for block in candidate.blocks:
        with_forward(block.ln1, forward)
    return reference, candidate


@benign
def scaled_dot_product_attention() -> Pair:
    reference = seeded(Gpt)
    return reference, load(Gpt(attention=FusedAttention), reference)


@benign
def projection_split() -> Pair:
    reference = seeded(Gpt)
    return reference, split_projections(Gpt(fused=False), reference)


@benign
def projections_fused() -> Pair:
    candidate, reference = projection_split()
    return reference, candidate


@benign
def blocks_renamed() -> Pair:
    class Renamed(Gpt):
        def __init__(self) -> None:
            super().__init__()
            self.h = self.blocks
            del self.blocks

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
            for block in self.h:
                x = block(x)
            return self.head(self.norm(x))

    reference = seeded(Gpt)
    return reference, load(Renamed(), reference, lambda key: key.replace("blocks.", "h."))


@benign
def gelu_module_as_function() -> Pair:
    class Functional(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            del self.act

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(self.ln1(x))
            return x + self.down(F.gelu(self.up(self.ln2(x))))

    reference = seeded(Gpt)
    return reference, load(Gpt(block=Functional), reference)


@benign
def attention_in_float64() -> Pair:
    class Wide(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.double() for part in self.project(x))
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = (q @ k.mT * self.scale).masked_fill(mask, float("-inf"))
            y = (scores.softmax(-1) @ v).to(x.dtype)
            return self.out(y.transpose(1, 2).flatten(2))

    reference = seeded(Gpt)
    return reference, load(Gpt(attention=Wide), reference)


@benign
def batch_norm_folded() -> Pair:
    reference = seeded(Cnn)
    for module in reference.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -1, 1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    candidate = copy.deepcopy(reference.eval())
    for conv, norm in (("conv1", "bn1"), ("conv2", "bn2")):
        folded = nn.utils.fuse_conv_bn_eval(getattr(candidate, conv), getattr(candidate, norm))
        setattr(candidate, conv, folded)
        setattr(candidate, norm, nn.Identity())
    return reference, candidate


@benign
def convolution_as_unfold() -> Pair:
    def forward(self: nn.Conv2d, x: Tensor) -> Tensor:
        columns = F.unfold(x, 3, padding=1)
        y = self.weight.flatten(1) @ columns + self.bias[:, None]
        return y.unflatten(-1, x.shape[2:])

    reference, candidate = twins(Cnn)
    with_forward(candidate.conv2, forward)
    return reference, candidate


@benign
def channels_last() -> Pair:
    reference, candidate = twins(ResNet)
    return reference, candidate.to(memory_format=torch.channels_last)


@benign
def relu_not_in_place() -> Pair:
    reference, candidate = twins(ResNet)
    for block in candidate.blocks:
        block.relu = nn.ReLU()
    return reference, candidate


@benign
def mean_as_pooling() -> Pair:
    class Pooled(ResNet):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    reference = seeded(ResNet)
    return reference, load(Pooled(), reference)


@benign
def checkpointed() -> Pair:
    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            from torch.utils.checkpoint import checkpoint

            return checkpoint(super().forward, x, use_reentrant=False)

    reference = seeded(Gpt)
    return reference, load(Gpt(block=Checkpointed), reference)


@benign
def bert_with_sdpa() -> Pair:
    reference = seeded(models.bert)
    candidate = copy.deepcopy(reference)
    reference.config._attn_implementation = "eager"
    return reference, candidate


@benign
def reloaded() -> Pair:
    reference = seeded(models.bert)
    return reference, {key: value.clone() for key, value in reference.state_dict().items()}


@benign
def traced() -> Pair:
    reference, candidate = twins(lambda: Cnn().eval())
    return reference, torch.jit.trace(candidate, models.batch(reference))


@benign
def scripted() -> Pair:
    reference, candidate = twins(Mlp)
    return reference, torch.jit.script(candidate)


@benign
def exported() -> Pair:
    reference, candidate = twins(lambda: Gpt(depth=1).eval())
    return reference, torch.export.export(candidate, (models.batch(reference),))


@benign
def compiled() -> Pair:
    reference, candidate = twins(lambda: Gpt(depth=1))
    return reference, torch.compile(candidate, backend="aot_eager")


def _cast(build: Callable[[], nn.Module], dtype: torch.dtype) -> Callable[[], Pair]:
    def pair() -> Pair:
        reference, candidate = twins(build)
        return reference, candidate.to(dtype)

    return pair


for _build in (Mlp, Cnn, ResNet, Gpt, models.bert):
    for _dtype in (torch.bfloat16, torch.float16, torch.float64):
        BENIGN[f"{_build.__name__.lower()}_in_{_dtype}"] = _cast(_build, _dtype)


@harmful("norm")
def other_epsilon() -> Pair:
    reference, candidate = twins(Mlp)
    candidate.norm.eps = 1e-6
    return reference, candidate


@harmful("blocks.1.ln2")
def other_epsilon_within() -> Pair:
    reference, candidate = twins(Gpt)
    candidate.blocks[1].ln2.eps = 1e-12
    return reference, candidate


@harmful("act1")
def other_activation() -> Pair:
    reference, candidate = twins(Mlp)
    candidate.act1 = nn.LeakyReLU(0.01)
    return reference, candidate


@harmful("act2")
def activation_lost() -> Pair:
    reference, candidate = twins(Mlp)
    candidate.act2 = nn.Identity()
    return reference, candidate


@harmful("blocks.1.act")
def tanh_gelu() -> Pair:
    reference, candidate = twins(Gpt)
    candidate.blocks[1].act = nn.GELU(approximate="tanh")
    return reference, candidate


@harmful("fc2")
def one_weight() -> Pair:
    reference, candidate = twins(Mlp)
    candidate.fc2.weight.data[3, 5] += 1e-3
    return reference, candidate


@harmful("fc2")
def weights_scaled_by_a_hundred_thousandth() -> Pair:
    reference, candidate = twins(Mlp)
    candidate.fc2.weight.data *= 1.00001
    return reference, candidate


@harmful("fc1")
def weights_swapped() -> Pair:
    reference = seeded(
        lambda: nn.Sequential(OrderedDict(fc1=nn.Linear(16, 16), fc2=nn.Linear(16, 16)))
    )
    candidate = copy.deepcopy(reference)
    candidate.fc1, candidate.fc2 = candidate.fc2, candidate.fc1
    return reference, candidate


@harmful("blocks.1")
def residual_scaled() -> Pair:
    def forward(self: Block, x: Tensor) -> Tensor:
        x = x + 1.0001 * self.attn(self.ln1(x))
        return x + self.down(self.act(self.up(self.ln2(x))))

    reference, candidate = twins(Gpt)
    with_forward(candidate.blocks[1], forward)
    return reference, candidate


@harmful("blocks.0")
def residual_lost() -> Pair:
    def forward(self: Block, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return self.down(self.act(self.up(self.ln2(x))))

    reference, candidate = twins(Gpt)
    with_forward(candidate.blocks[0], forward)
    return reference, candidate


@harmful("blocks.2.attn")
def mask_lost() -> Pair:
    reference, candidate = twins(Gpt)
    candidate.blocks[2].attn.causal = False
    return reference, candidate


@harmful("blocks.0.attn")
def scale_of_the_width() -> Pair:
    reference, candidate = twins(Gpt)
    candidate.blocks[0].attn.scale = 24**-0.5
    return reference, candidate


@harmful("blocks.1.attn.v")
def split_in_another_order() -> Pair:
    reference, candidate = projection_split()
    attention = candidate.blocks[1].attn
    attention.q, attention.k = attention.k, attention.q
    return reference, candidate


@harmful("bn1")
def other_running_mean() -> Pair:
    reference, candidate = twins(lambda: Cnn().eval())
    candidate.bn1.running_mean += 0.01
    return reference, candidate


@harmful("bn1")
def other_mode() -> Pair:
    reference, candidate = twins(lambda: Cnn().eval())
    candidate.bn1.train()
    return reference, candidate


@harmful("conv1")
def fold_without_epsilon() -> Pair:
    reference, candidate = batch_norm_folded()
    norm = copy.deepcopy(reference.bn1)
    norm.eps = 0.0
    candidate.conv1 = nn.utils.fuse_conv_bn_eval(reference.conv1, norm)
    return reference, candidate


@harmful("conv2")
def other_padding() -> Pair:
    reference, candidate = twins(Cnn)
    candidate.conv2.padding_mode = "circular"
    candidate.conv2._reversed_padding_repeated_twice = [1, 1, 1, 1]
    return reference, candidate


@harmful("blocks.1")
def skip_scaled() -> Pair:
    reference, candidate = twins(ResNet)
    candidate.blocks[1].skip = 0.999
    return reference, candidate


@harmful("scale")
def scale_inserted() -> Pair:
    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1.001

    class Scaled(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()

        def forward(self, x: Tensor) -> Tensor:
            x = self.act2(self.fc2(self.scale(self.act1(self.fc1(x)))))
            return self.head(self.norm(x))

    reference = seeded(Mlp)
    return reference, load(Scaled(), reference)


@harmful("norm")
def norm_removed() -> Pair:
    reference, candidate = twins(Mlp)

    def forward(self: Mlp, x: Tensor) -> Tensor:
        return self.head(self.act2(self.fc2(self.act1(self.fc1(x)))))

    with_forward(candidate, forward)
    return reference, candidate


@harmful("act2")
def norm_before_activation() -> Pair:
    reference, candidate = twins(Mlp)

    def forward(self: Mlp, x: Tensor) -> Tensor:
        return self.head(self.act2(self.norm(self.fc2(self.act1(self.fc1(x))))))

    with_forward(candidate, forward)
    return reference, candidate


@harmful("fc2")
def gradient_detached() -> Pair:
    reference, candidate = twins(Mlp)
    with_forward(candidate.fc2, lambda self, x: F.linear(x.detach(), self.weight, self.bias))
    return reference, candidate


@harmful("fc2")
def parameter_frozen() -> Pair:
    reference, candidate = twins(Mlp)
    candidate.fc2.weight.requires_grad_(False)
    return reference, candidate


@harmful("act2")
def straight_through() -> Pair:
    reference, candidate = twins(Mlp)
    with_forward(candidate.act2, lambda self, x: x + (F.relu(x) - x).detach())
    return reference, candidate


@harmful("tokens")
def embedding_untied() -> Pair:
    reference, candidate = twins(Gpt)
    candidate.head.weight = nn.Parameter(candidate.tokens.weight.detach().clone())
    return reference, candidate


@harmful("encoder.layer.1.output.LayerNorm")
def bert_epsilon() -> Pair:
    reference, candidate = twins(models.bert)
    candidate.encoder.layer[1].output.LayerNorm.eps = 1e-5
    return reference, candidate


@harmful("encoder.layer.0.attention.self.key")
def bert_key() -> Pair:
    reference = seeded(models.bert)
    state = {key: value.clone() for key, value in reference.state_dict().items()}
    state["encoder.layer.0.attention.self.key.weight"][0] *= 1.01
    return reference, state


@harmful("blocks.1.up")
def wrong_in_bfloat16() -> Pair:
    reference, candidate = twins(Gpt)
    candidate.blocks[1].up.weight.data[:8] = 0
    return reference, candidate.to(torch.bfloat16)


@harmful("fc1")
def nan_in_a_weight() -> Pair:
    reference, candidate = twins(Mlp)
    candidate.fc1.weight.data[2, 3] = float("nan")
    return reference, candidate


@harmful("blocks.1.relu")
def second_activation_lost() -> Pair:
    reference, candidate = twins(ResNet)
    for number, block in enumerate(candidate.blocks):
        with_functions(block, F.relu if number != 1 else lambda x: x)
    return reference, candidate


@harmful("blocks.2.bn2")
def epsilon_between_functions() -> Pair:
    reference, candidate = a_module_called_twice_as_functions()
    candidate.blocks[2].bn2.eps = 1e-4
    return reference, candidate


@harmful("norm")
def epsilon_of_branches_in_another_order() -> Pair:
    reference, candidate = branches_in_another_order()
    candidate.norm.eps = 1e-4
    return reference, candidate


@harmful("")
def gradient_of_one_call_detached() -> Pair:
    reference = seeded(lambda: Signs(1, -1))
    return reference, load(Signs(-1, 1, keep=False), reference)


@harmful("layers.0")
def a_layer_unrolled_into_copies() -> Pair:
    return unrolled(tied=False)


@harmful("layers.0")
def one_of_the_unrolled_with_another_forward() -> Pair:
    reference, candidate = unrolled(tied=True)
    with_forward(candidate.layers[1], lambda self, x: F.linear(x, self.weight, self.bias) * 1.001)
    return reference, candidate


X = torch.randn(8, 16, generator=torch.manual_seed(0))


CANCELLING = torch.cat([half := torch.randn(8, 8, 36, 36), -half])


CHANGES: dict[str, tuple[Callable[[], nn.Module], Any, str, Any, str | None, str, dict]] = {
    "a word that is not in the batch": (
        Headless, torch.zeros(2, 10, dtype=torch.int64),
        "tokens.weight", lambda w: w * torch.where(torch.arange(40) == 7, 1.001, 1.0)[:, None],
        "tokens", "weight differs in 24 of 960 values: weight[7, 0]", {},
    ),
    "a rounding of the weights": (
        Mlp, X, "fc2.weight", lambda w: w * (1 + 2.0**-23), None, "", {}
    ),
    "a buffer that training does not read": (
        lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)), X,
        "1.running_mean", lambda b: b + 1, None, "1: running_mean differs", {},
    ),
    "what a step leaves in the buffers": (
        Cnn, batch(Cnn()), "bn2.momentum", 0.01, "bn2",
        "running_mean and running_var are not the same", {"kind": "buffers"},
    ),
    "nothing is left in evaluation": (
        lambda: Cnn().eval(), batch(Cnn()), "bn2.momentum", 0.01, None, "", {}
    ),
    "an eighth of the epsilon of inputs that cancel": (
        lambda: nn.Sequential(Shifted(8)), CANCELLING, "0.shift", 2.0**-26, None, "", {}
    ),
    "far more than that": (
        lambda: nn.Sequential(Shifted(8)), CANCELLING, "0.shift", 2.0**-16, "0", "",
        {"result.key.tensor": "running_mean"},
    ),
    "code between the layers of a list": (
        Mixing, X, "loops", 0.0, "", "loops is 0.0, was 1.0", {}
    ),
    "one element among many": (
        lambda: nn.Sequential(Spoiled(64, 64), nn.Tanh()),
        torch.randn(512, 64), "0.error", 1e-4, "0", "",
        {"result.difference.at": (3, 5), "result.difference.unequal": 1},
    ),
    "a model that is another in float64": (Odd, X, "norm.eps", 1e-3, "norm", "", {}),
}  # fmt: skip
