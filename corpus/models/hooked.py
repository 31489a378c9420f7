"""One small model for each thing that real models do and hooks stumble over.

Each is a `Case`; its docstring says what is hard about it. `ZOO` holds them all by name.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import UserDict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Case:
    """A model, a batch for it, and what an inspection should say.

    Args:
        build: makes the model.
        inputs: makes the batch.
        statuses: expected status of each layer that is not `observed`; ``None`` lets them end with
            any but `unsupported`.
        context: what the run happens in, such as autocast.
        reference: makes the same model in a form that plain hooks see, where `build` does not.
        gradients_by_eps: whether adding a tensor to a layer's output leaves the model the same.
        keeps_batch: whether the forward leaves the batch as it was.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    statuses: Mapping[str, str] | None = field(default_factory=dict)
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    reference: Callable[[], nn.Module] | None = None
    gradients_by_eps: bool = True
    keeps_batch: bool = True

    def expects(self, layer: str, status: str) -> bool:
        """Whether a layer may end like this."""
        if self.statuses is None:
            return status != UNSUPPORTED
        return status == self.statuses.get(layer, "observed")


ZOO: dict[str, Case] = {}


def x() -> Tensor:
    """Return four samples of six features."""
    return torch.randn(4, 6)


def image() -> Tensor:
    """Return two images of three channels."""
    return torch.randn(2, 3, 6, 6)


def sequence() -> Tensor:
    """Return two sequences of five steps and eight features."""
    return torch.randn(2, 5, 8)


def tokens() -> Tensor:
    """Return three sequences of five token ids."""
    return torch.randint(1, 11, (3, 5))


def case(name: str, inputs: Callable[[], Any] = x, **options: Any) -> Callable[[Any], Any]:
    """Put a model into the zoo."""

    def add(build: Any) -> Any:
        ZOO[name] = Case(build, inputs, **options)
        return build

    return add


ALIAS = "alias_of_input"
NOT_CALLED, READ = "not_called", "parameters_read"
NO_PATH = "no_grad_path"
UNUSED = "unused_in_loss"
UNSUPPORTED, OPAQUE = "unsupported", "opaque"


class Wrapped(nn.Module):
    """Two linear layers with `self.between` called on what passes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(self.first(x)))

    def between(self, x: Tensor) -> Tensor:
        return x


# ---- in-place operations and views -------------------------------------------------------------


@case("in-place relu", image)
class InPlaceRelu(nn.Sequential):
    """The same tensor object leaves a convolution and its in-place activation."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3), nn.ReLU(inplace=True)
        )


@case("in-place arithmetic")
class InPlaceArithmetic(Wrapped):
    """The output of a layer is written to after it was hooked."""

    def between(self, x: Tensor) -> Tensor:
        x += 1
        x[:, 0] = 0
        return x.mul_(2)


@case("views before in-place", image, statuses={"drop": ALIAS})
class ViewsBeforeInPlace(nn.Module):
    """A view that is written to never fires its own hook; the hook on its base does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.flatten, self.relu = nn.Conv2d(3, 2, 3), nn.Flatten(), nn.ReLU(inplace=True)
        self.drop, self.head = nn.Dropout(0.0).eval(), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.drop(self.flatten(self.conv(x)))))


class Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@case("transposed view before in-place", sequence)
class TransposedViewBeforeInPlace(nn.Sequential):
    """The base's gradient has other strides than its view."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 4), Transpose(), nn.ReLU(inplace=True), nn.Linear(5, 3))


class Select(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 1:3]


@case("sliced view before in-place", sequence)
class SlicedViewBeforeInPlace(nn.Sequential):
    """The view starts inside its base."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Linear(8, 4), Select(), nn.Linear(4, 4), Select(), nn.ReLU(inplace=True))
        )


class WritesThroughAlias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x).view(4, 2, 3)
        y[:, 0].mul_(2)
        return y


@case("unused view", statuses={"view": UNUSED})
class UnusedView(nn.Module):
    """The view does not reach the loss although the tensor that it is a view of does."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.view, self.head = nn.Linear(6, 6), nn.Unflatten(1, (2, 3)), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        self.view(x)
        return self.head(x)


@case("view written through an alias")
class ViewWrittenThroughAlias(nn.Sequential):
    """Hooking such an output crashes the interpreter (pytorch#196459)."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), WritesThroughAlias(), nn.Linear(3, 2))


@case("residual in place")
class ResidualInPlace(nn.Module):
    """A block adds to its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x += self.branch(torch.sigmoid(x))
        return self.head(x)


# ---- outputs that are somebody else's tensor ---------------------------------------------------


@case("aliases", statuses={"0": ALIAS, "2": ALIAS, "3": ALIAS})
class Aliases(nn.Sequential):
    """Layers that return their input object."""

    def __init__(self) -> None:
        super().__init__(
            nn.Identity(), nn.Linear(6, 6), nn.Dropout().eval(), nn.Flatten(), nn.Linear(6, 2)
        )


class Passthrough(nn.Module):
    """Returns its own result next to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.lin(x), x


@case("own output beside its input")
class OwnOutputBesideInput(nn.Module):
    """A layer that also passes its input on is no alias: its own output has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Passthrough(), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, skip = self.block(x)
        return self.head(y * skip)


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(6))

    def forward(self) -> Tensor:
        return self.value


@case("returns its parameter")
class ReturnsParameter(nn.Module):
    """A hook on a parameter stays on it after the run, unless it is removed."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.lin = Bias(), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x + self.bias())


@case("leaf input", lambda: x().requires_grad_(), statuses={"0": ALIAS})
class LeafInput(nn.Sequential):
    """The batch itself is a leaf that gets a gradient."""

    def __init__(self) -> None:
        super().__init__(nn.Identity(), nn.Linear(6, 2))


# ---- derivatives inside the model --------------------------------------------------------------


@case("gradient penalty", gradients_by_eps=False)
class GradientPenalty(nn.Module):
    """An inner gradient that is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = self.net(x)
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, gradient.square().sum(1)


@case("inner gradient without a graph")
class InnerGradient(nn.Module):
    """An inner gradient that is not the loss's: no graph is kept, so grad mode is off in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.net(x)
        (gradient,) = torch.autograd.grad(y.sum() * 100, x, retain_graph=True)
        return y + gradient.sum()


class Energy(nn.Module):
    """Takes a gradient of itself without keeping it, in a call that the loss never sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        position = x.detach().requires_grad_()
        return torch.autograd.grad(self.net(position).square().sum(), position)[0]


@case("forces", statuses={"energy": NO_PATH, "energy.net": UNUSED})
class Forces(nn.Module):
    """Layers whose only gradient is an inner one: none of it is the loss's."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.head = Energy(), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.energy(x))


@case("torch.func", gradients_by_eps=False, statuses={"inner": UNSUPPORTED})
class FunctionTransforms(nn.Module):
    """Layers called under vmap and grad, where tensors are wrapped and hooks see no values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.func.vmap(self.inner)(x)
        slope = torch.func.grad(lambda v: self.inner(v).square().sum())(x)
        return self.outer(rows + slope)


# ---- containers --------------------------------------------------------------------------------


@dataclass
class Pair:
    left: Any
    right: Any


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Tensor) -> None:
        self.held = held


Named = namedtuple("Named", "a b")


def cyclic(tensor: Tensor) -> list[Any]:
    """Return a list that holds itself."""
    inside: list[Any] = [tensor]
    inside.append(inside)
    return inside


def model_output(**values: Any) -> Any:
    """An output as transformers has it."""
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(**values)


CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda t: (t * 3, t * 2, None),
    "list": lambda t: [t * 3, [t * 2]],
    "dict": lambda t: {"a": t * 3, "b": {"c": t * 2}},
    "named tuple": lambda t: Named(t * 3, t * 2),
    "data class": lambda t: Pair(t * 3, Pair(t * 2, "text")),
    "UserDict": lambda t: UserDict(a=t * 3, b=t * 2),
    "slots": lambda t: Slotted(t * 2),
    "ModelOutput": lambda t: model_output(last_hidden_state=t * 3, hidden_states=(t * 2, t * 4)),
    "cycle": lambda t: cyclic(t * 2),
    "the same tensor twice": lambda t: (t, t),
}


class Packs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.lin = kind, nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return CONTAINERS[self.kind](self.lin(x))


for kind in CONTAINERS:
    # those that torch's own tree functions open, once
    by_eps = kind in ("tuple", "list", "dict", "named tuple", "ModelOutput")
    ZOO[f"returns {kind}"] = Case(lambda kind=kind: Packs(kind), x, gradients_by_eps=by_eps)
    ZOO[f"passes {kind}"] = Case(lambda kind=kind: Relays(kind), x, gradients_by_eps=by_eps)


class Unpacks(nn.Module):
    """Takes a container apart again; its only tensor is found among the attributes if need be."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, packed: Any) -> Tensor:
        if isinstance(packed, Pair | Slotted):
            packed = [getattr(packed, name) for name in ("left", "held") if hasattr(packed, name)]
        parts = list(packed.values()) if isinstance(packed, Mapping) else list(packed)
        return self.head(parts[0])


class Relays(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.packs, self.unpacks = Packs(kind), Unpacks()

    def forward(self, x: Tensor) -> Tensor:
        return self.unpacks(self.packs(x))


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> None:
        return None


@case("returns None", statuses={"nothing": UNSUPPORTED})
class ReturnsNone(Wrapped):
    """A layer without any output tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = Nothing()

    def between(self, x: Tensor) -> Tensor:
        assert self.nothing(x) is None
        return x


class Argmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1)


@case("integer output", statuses={"argmax": UNSUPPORTED})
class IntegerOutput(nn.Module):
    """A layer whose output holds no number to take statistics of."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.argmax, self.embed = nn.Linear(6, 4), Argmax(), nn.Embedding(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        return y.sum() + self.embed(self.argmax(y))


@case("packed sequence", sequence)
class PackedLstm(nn.Module):
    """The input and output of an LSTM are packed, and its weights are used without calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Linear(8, 4), nn.LSTM(4, 3, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        packed = pack_padded_sequence(self.embed(x), torch.tensor([5, 3]), batch_first=True)
        return self.lstm(packed)[0]


@case("gru", sequence)
class Gru(nn.GRU):
    def __init__(self) -> None:
        super().__init__(8, 3, batch_first=True, bidirectional=True)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
        heads = x.view(2, 5, 2, 4).transpose(1, 2)
        k, v = cache.update(self.k(x).view_as(heads), self.v(x).view_as(heads), 0)
        y = F.scaled_dot_product_attention(heads, k.view_as(heads), v.view_as(heads))
        return y.transpose(1, 2).reshape(2, 5, 8), cache


@case("cache in and out", sequence, gradients_by_eps=False)
class CacheInAndOut(nn.Module):
    """A key-value cache keeps its tensors in attributes of attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.head = Attends(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        from transformers import DynamicCache

        y, _ = self.attend(x, cache=DynamicCache())
        return self.head(y)


# ---- how modules are owned and called ----------------------------------------------------------


@case("shared module")
class SharedModule(nn.Module):
    """One module called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.lin(x))
        return x


@case("two names")
class TwoNames(nn.Module):
    """One module under two names, and a weight tied between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6)
        self.decoder, self.tied = self.encoder, nn.Linear(6, 6)
        self.tied.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.decoder(self.encoder(x)))


@case("module list", statuses={"blocks": NOT_CALLED, "heads": NOT_CALLED})
class Lists(nn.Module):
    """Containers that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 2), "b": nn.Linear(6, 2)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.heads["a"](x) - self.heads["b"](x)


@case("forward called directly", statuses={"lin": READ})
class ForwardCalledDirectly(nn.Module):
    """`.forward()` runs no hook, yet its parameters get gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lin.forward(x))


@case("multi-head attention", sequence, statuses={"attention.out_proj": READ})
class Attention(nn.Module):
    """The output projection is used through its weight, never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class KeywordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 2)

    def forward(self, *, hidden: Tensor, scale: float) -> Tensor:
        return self.lin(hidden) * scale


@case("keywords only", lambda: {"hidden": x()})
class KeywordsOnly(nn.Module):
    """A plain pre-hook sees no arguments of such a call."""

    def __init__(self) -> None:
        super().__init__()
        self.block = KeywordBlock()

    def forward(self, *, hidden: Tensor) -> Tensor:
        return self.block(hidden=hidden, scale=0.5)


@case("keywords of a positional", lambda: {"x": x(), "scale": torch.tensor(2.0)})
class PositionalsAndKeywords(Wrapped):
    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


@case("plain list", gradients_by_eps=False)
class PlainList(nn.Module):
    """Modules that are not registered; their buffers and gradients change all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.blocks = [nn.BatchNorm1d(6), nn.Linear(6, 6)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        for block in self.blocks:
            x = block(x)
        return x


@case("unused head", statuses={"unused": NOT_CALLED, "aside": UNUSED})
class UnusedHead(nn.Module):
    """A head that is never called, and one whose output goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.aside = (nn.Linear(6, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.aside(x)
        return self.used(x)


@case("frozen", statuses={"frozen": NO_PATH})
class Frozen(nn.Module):
    """Frozen below and above a trained layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained, self.passed = (nn.Linear(6, 6) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.passed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.passed(self.trained(self.frozen(x)))


@case("detached trunk", statuses={"trunk": UNUSED})
class DetachedTrunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x).detach())


@case("nothing to train", statuses={"": NO_PATH, "0": NO_PATH})
class NothingToTrain(nn.Sequential):
    """No parameter at all: there is no gradient path, and that is no error."""

    def __init__(self) -> None:
        super().__init__(nn.Tanh())


# ---- checkpointing, compilation, tracing -------------------------------------------------------


class Checkpointed(nn.Module):
    """The forward runs again inside backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.head, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 2), reentrant
        self.block = nn.Sequential(
            nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, self.stem(x), use_reentrant=self.reentrant))


case("checkpoint")(lambda: Checkpointed(reentrant=False))
case("reentrant checkpoint")(lambda: Checkpointed(reentrant=True))


class Small(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))


def warm(model: nn.Module) -> nn.Module:
    """Return the model after a compiled run, with its state as it was."""
    state = copy.deepcopy(model.state_dict())
    model(x())
    model.load_state_dict(state)
    return model


def compiled_in_place() -> nn.Module:
    """`module.compile()` keeps the class of the model."""
    model = Small()
    model.compile(backend="eager")
    return warm(model)


case("compiled, cold", reference=Small)(lambda: torch.compile(Small(), backend="eager"))
case("compiled, warm", reference=Small)(lambda: warm(torch.compile(Small(), backend="aot_eager")))
case("compiled in place", reference=Small)(compiled_in_place)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(6, 6), Small()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(torch.tanh(self.stem(x)))


@case("fx", reference=Nested, statuses={"block": OPAQUE})
def traced() -> nn.Module:
    """A graph in which containers are inlined."""
    return torch.fx.symbolic_trace(Nested())


case("script", reference=Nested)(lambda: torch.jit.script(Nested()))
case("jit trace", reference=lambda: Nested().eval())(
    lambda: torch.jit.trace(Nested().eval(), torch.ones(4, 6))
)


@case("script inside", statuses={f"block.{i}": OPAQUE for i in range(4)})
def script_inside() -> nn.Module:
    """A plain model with a scripted part."""
    model = Nested()
    model.block = torch.jit.script(model.block)
    return model


@case(
    "script in an attribute",
    statuses={"block": OPAQUE} | {f"block.{i}": OPAQUE for i in range(4)},
)
class ScriptInAttribute(Nested):
    """A script that is no layer runs the layers that it was made of."""

    def __init__(self) -> None:
        super().__init__()
        vars(self)["traced"] = torch.jit.trace(self.block, torch.ones(4, 6), check_trace=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.traced(torch.tanh(self.stem(x)))


@case(
    "traces itself",
    statuses={"block": OPAQUE} | {f"block.{i}": OPAQUE for i in range(4)},
)
class TracesItself(Nested):
    """Its forward makes a script of a part of itself and runs that."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        return torch.jit.trace(self.block.eval(), x, check_trace=False)(x)


# ---- attention encoders ------------------------------------------------------------------------


def padded() -> dict[str, Tensor]:
    """Return two sequences, the second of them padded."""
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return {"src": sequence(), "src_key_padding_mask": mask}


@case(
    "padded encoder",
    padded,
    context=torch.no_grad,
    statuses={
        "layers": NOT_CALLED,
        "layers.0.self_attn.out_proj": NOT_CALLED,  # functions are not watched in there
    },
)
def padded_encoder() -> nn.Module:
    """Its fused path drops the padding, and gives NestedTensors to its layers."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 1).eval()


@case(
    "encoder layer, evaluated",
    sequence,
    context=torch.no_grad,
    statuses={
        "self_attn.out_proj": NOT_CALLED,  # functions are not watched in there
        "dropout": ALIAS,
        "dropout1": ALIAS,
        "dropout2": ALIAS,
    },
)
def evaluated_encoder_layer() -> nn.Module:
    """Its fused path differs in the last bits from the one that a function mode sees."""
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


@case("encoder layer", sequence, statuses={"self_attn.out_proj": READ})
class EncoderLayer(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(8, 2, 16, batch_first=True)


# ---- dtypes and layouts ------------------------------------------------------------------------


@case("autocast", context=lambda: torch.autocast("cpu", torch.bfloat16))
class Autocast(nn.Sequential):
    """Forward hooks run inside autocast, tensor hooks outside."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))


@case("inference mode", context=torch.inference_mode)
class Inference(Small):
    """Its tensors have no version and no graph."""


@case("double", lambda: x().double())
class Double(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.double()


@case("bfloat16", lambda: x().bfloat16())
class BFloat16(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()


@case("sparse embedding", tokens)
class SparseEmbedding(nn.Module):
    """Its gradient is a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4, sparse=True, padding_idx=0), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


@case("complex")
class Complex(Wrapped):
    """Complex activations and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6, dtype=torch.complex64)

    def between(self, x: Tensor) -> Tensor:
        return self.mix(torch.complex(x, -x)).abs()


@case("empty tensors", lambda: torch.randn(0, 6))
class Empty(Wrapped):
    pass


class Quantizes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)


class Float8(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float8_e4m3fn)


class Sparsifies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach().relu().to_sparse()


class Meta(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach().to("meta")


@case(
    "exotic dtypes",
    gradients_by_eps=False,
    statuses={
        "quantized": NO_PATH,
        "meta": UNSUPPORTED,
        "sparse": NO_PATH,
        "sparse.relu": NO_PATH,
        "float8": UNUSED,
    },
)
class ExoticDtypes(Wrapped):
    """Outputs that most torch functions refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.quantized, self.float8 = Quantizes(), Float8()
        self.sparse, self.meta = Sparsifies(), Meta()

    def between(self, x: Tensor) -> Tensor:
        for layer in (self.quantized, self.float8, self.sparse, self.meta):
            layer(x)
        return x


# ---- state that a forward changes --------------------------------------------------------------


@case("batch norm")
class BatchNorm(nn.Sequential):
    """Running statistics change without a trace in their version counters."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None))


@case("changing buffers", gradients_by_eps=False)
class ChangingBuffers(Wrapped):
    """Buffers rebound, added, removed, resized and kept out of the state dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6), persistent=False)
        self.register_buffer("old", torch.ones(2))
        self.register_buffer("later", None)
        self.register_buffer("grown", torch.ones(2))

    def between(self, x: Tensor) -> Tensor:
        self.step = self.step + 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        if "old" in self._buffers:
            del self.old
        self.later = x.detach().clone()
        self.grown.resize_(4).fill_(2)
        self.register_buffer("fresh", torch.ones(3), persistent=False)
        return x + self.mean


@case("views of one memory", gradients_by_eps=False)
class ViewsOfOneMemory(Wrapped):
    """Buffers that repeat elements, overlap, and show a part of a parameter, all written to."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.arange(24.0)
        self.register_buffer("mask", torch.ones(1).expand(6))
        self.register_buffer("windows", table.unfold(0, 6, 2))
        self.register_buffer("column", table.view(6, 4)[:, 1])
        self.register_buffer("row", self.first.weight.detach()[1])
        self.held = [torch.zeros(()).expand(2, 3)]

    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mask[:1].add_(1)
            self.column.mul_(2)
            self.windows[2].add_(self.column)
            self.row.neg_()
            self.held[0][0, :1].sub_(1)
        return x * self.mask + self.windows[3] + self.held[0].sum()


@case("changing attributes")
class ChangingAttributes(Wrapped):
    """Plain attributes counted, cached, appended to."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.history, self.by_name = 0, [], {"a": 1}

    def between(self, x: Tensor) -> Tensor:
        self.step += 1
        self.history.append(float(x.sum()))
        self.by_name["b"] = self.step
        self.cached = x
        return x * (1 + self.step)


@case("moves between lists")
class MovesBetweenLists(Wrapped):
    """All together the lists hold the same as before, in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.done = [1.0, 2.0], [3.0]

    def between(self, x: Tensor) -> Tensor:
        self.done.insert(0, self.waiting.pop())
        return x * self.done[0]


@case("renames a key")
class RenamesKey(Wrapped):
    """The dictionary holds the same values as before, in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name = {"a": 2.0}

    def between(self, x: Tensor) -> Tensor:
        _, scale = self.by_name.popitem()
        self.by_name["b"] = scale
        return x * scale


@case("rebinds an equal object")
class RebindsEqualObject(Wrapped):
    """What the attribute holds afterwards equals what it held, and is another object."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Pair(2.0, None)

    def between(self, x: Tensor) -> Tensor:
        self.scale = copy.copy(self.scale)
        return x * self.scale.left


@case("changing mode")
class ChangingMode(Wrapped):
    """The forward switches modes and freezes a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def between(self, x: Tensor) -> Tensor:
        y = self.drop(x)
        self.drop.eval()
        self.first.bias.requires_grad_(False)
        return y


@case("replaces a module", gradients_by_eps=False)
class ReplacesModule(Wrapped):
    """A module registered in the forward; the next call would find it there."""

    def between(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Tanh()
            self.last = nn.Linear(6, 4)
        return self.late(x)


@case("mutates its input", gradients_by_eps=False, keeps_batch=False)
class MutatesInput(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        x.clamp_(-1, 1)
        return super().forward(x)


@case("random numbers")
class RandomNumbers(Wrapped):
    """Draws from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.generator = nn.Dropout(0.3), torch.Generator().manual_seed(3)
        self.random = np.random.default_rng(5)

    def between(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.generator) + self.random.normal()
        return self.drop(x) * random.random() + np.random.randn() + noise


@case(
    "layer drop",
    statuses={"blocks": NOT_CALLED, "blocks.2": NOT_CALLED},
)
class LayerDrop(nn.Module):
    """Which layers run depends on chance."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() < 0.5:
                x = x + block(x)
        return x


@case("lazy", reference=lambda: Lazy())
class Lazy(nn.Sequential):
    """Parameters without a shape before the first call."""

    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(5), nn.LazyBatchNorm1d(affine=False), nn.LazyLinear(2))


@case(
    "weight norm",
    gradients_by_eps=False,
    statuses={"first.parametrizations": NOT_CALLED, "last.parametrizations": NOT_CALLED},
)
class WeightNorm(Wrapped):
    """Reading `.weight` computes it, and in training changes the buffers of spectral_norm."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.first)
        parametrizations.spectral_norm(self.last)

    def between(self, x: Tensor) -> Tensor:
        return x.sin()


# ---- hooks of the user -------------------------------------------------------------------------


@case("user hooks")
class UserHooks(Wrapped):
    """Hooks that change inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(doubled)
        self.last.register_forward_pre_hook(halved)


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Double what a layer returned."""
    return output * 2


def halved(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Halve what a layer is called with."""
    return (args[0] / 2,)


@case("user backward hooks")
class UserBackwardHooks(Wrapped):
    """Full backward hooks wrap inputs and outputs of their module."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_full_backward_hook(gradients_doubled)
        self.last.register_full_backward_pre_hook(gradients_halved)


def gradients_doubled(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Double the gradients of the inputs."""
    return tuple(None if g is None else g * 2 for g in inputs)


def gradients_halved(module: nn.Module, outputs: Any) -> Any:
    """Halve the gradients of the outputs."""
    return tuple(g / 2 for g in outputs)


@case("legacy backward hooks")
class LegacyHooks(Wrapped):
    """`register_backward_hook` hangs on the last operation of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_backward_hook(ignored)


def ignored(module: nn.Module, inputs: Any, outputs: Any) -> None:
    """Change nothing."""
    return


@case("optimizer in backward")
class OptimizerInBackward(Wrapped):
    """Parameters that update themselves as soon as their gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(descend)


def descend(parameter: Tensor) -> None:
    """Take a step along the parameter's gradient, and drop it."""
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
    parameter.grad = None


# ---- the rest ----------------------------------------------------------------------------------


@case("copies itself", gradients_by_eps=False)
class CopiesItself(Wrapped):
    """A copy made during the run must not carry our hooks."""

    def between(self, x: Tensor) -> Tensor:
        twin = copy.deepcopy(self.first)
        return x + twin(x)


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.lin(x)
        raise ValueError("this path is not for this batch")


@case("catches an exception", statuses={"fails": UNSUPPORTED, "fails.lin": UNUSED})
class CatchesException(Wrapped):
    """A layer that raised did not return anything; what follows is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = Raises()

    def between(self, x: Tensor) -> Tensor:
        try:
            return self.fails(x)
        except ValueError:
            return torch.relu(x)


def seeded(seed: int) -> None:
    """Set the generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def make(case: Case) -> tuple[nn.Module, Any]:
    """Return a case's model and batch, the same at each call."""
    seeded(0)
    model = case.build()
    seeded(1)
    return model, case.inputs()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        F.relu_(x)
        return x


class Everything(nn.Module):
    """Tied and frozen weights, buffers of all sorts, dropout, batch norm, modes that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.4)
        self.still = nn.Dropout(0.4).eval()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(8), persistent=False)
        self.shift = torch.rand(8)
        self.noise = torch.Generator().manual_seed(random.randrange(10**6))
        self.other_noise = np.random.default_rng(random.randrange(10**6))

    def forward(self, ids: Tensor, weight: Tensor) -> Tensor:
        x = self.embedding(ids) * self.scale + self.shift
        x = x + torch.rand(x.shape, generator=self.noise) + self.other_noise.random()
        x = self.still(self.frozen(self.dropout(self.norm(x)))) * weight[:, None]
        return self.head(x * float(np.random.rand()) * random.random())


class Grows(nn.Module):
    """A buffer that the first forward fills."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = x.detach().mean(0)
        return self.linear(x) + self.cache


class SharedByName(nn.Module):
    """An embedding kept for its weight alone, as T5 and BART do, and one that is read directly."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.embed, self.read = (nn.Embedding(11, 4) for _ in range(3))
        self.embed.weight = self.shared.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x) @ self.read.weight.T


class Codebook(nn.Module):
    """A module without forward that is no container."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(3, 6))

    def encode(self, x: Tensor) -> Tensor:
        return x @ self.codes.T


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codebook, self.head = Codebook(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.codebook.encode(x))


class Normalises(nn.Linear):
    """Writes to its weight."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm())
        return super().forward(x)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.tanh = nn.Linear(6, 6), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.lin(x))
        x = x.relu() + torch.sigmoid(x)
        return F.softmax(self.tanh(F.gelu(x)), dim=1)


class Sourced(nn.Module):
    """A layer whose calls stand in this file."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x))  # the line that is sought


class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, gain: float = 1.0) -> tuple[Tensor, Tensor]:
        return F.gelu(self.lin(x) * self.scale) * gain, x + 1


class Containers(nn.Module):
    """Containers that nest, repeat, return tuples and write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.body = Paired(), nn.Sequential(nn.Linear(6, 6), InPlace())
        self.head = nn.Linear(6, 2)

    def forward(self, x, gain=2.0):  # torch.fx cannot pickle annotations that are strings
        y, z = self.block(x)
        y, u = self.block(y, gain=gain)
        return self.head(torch.tanh(self.body(y) + z + u))
