"""`ModelHealthSuite`: a class whose subclasses test a model, and a function that makes them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_modelhealth.errors import SettingsError, suggest

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


# stands in a file that ``python -m pytest_modelhealth init`` wrote until it has a batch
TODO = "TODO: a batch of yours"


class ModelHealthSuite:
    """Every test of a model that this package has: inherit from it, and say how one is made.

    ::

        class TestEncoder(ModelHealthSuite):
            def make(self):
                return Encoder(), torch.randn(16, 8), torch.randint(3, (16,)), F.cross_entropy

    One model is made for a class, under the fixed seed, and what several tests read is computed
    once. A test judges what it is named for and nothing else; what does not apply, or cannot be
    judged, is skipped with the reason.
    """

    __test__: ClassVar[bool] = False
    _maker: ClassVar[str] = ""

    seed: ClassVar[int] = 0
    """Under which `make` is called and everything runs."""

    limits: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """Settings for some tests: ``{"test_healthy_in_training": {"max_grad_norm": 10}}``; those for
    all tests are the marker ``modelhealth`` on the class."""

    skip: ClassVar[Mapping[str, str]] = {}
    """Tests that are not run, each with the reason."""

    strict: ClassVar[bool | None] = None
    """Whether what only warns fails, too; ``None`` is as the setting ``strict`` says."""

    backend: ClassVar[str] = "aot_eager"
    """What `test_compiled_equals_eager` compiles with: aot_eager is quick and makes no machine
    code, ``"inductor"`` makes what a compiled model runs."""

    causal: ClassVar[bool | None] = None
    """Whether no output may depend on later inputs; ``None`` reads that off the target."""

    batch_dim: ClassVar[int | None] = None
    """The dimension of samples, where it is not the first."""

    time_dim: ClassVar[int | None] = None
    """The dimension of a sequence's steps, where sizes do not tell."""

    padding: ClassVar[Tensor | None] = None
    """True where there is padding, of shape (samples, length); ``None`` reads it off the batch."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A base for others has no make(), and pytest shall not take it for a test.
        if "__test__" not in vars(cls):
            cls.__test__ = hasattr(cls, "make") or cls.__name__.startswith("Test")

    if TYPE_CHECKING:

        def make(self) -> Any:
            """Return (model, inputs), or (model, inputs, target, loss)."""

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of the training step: AdamW at a rate of 1e-3."""
        import torch

        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


TESTS = {  # in their order; `verdicts` has what each runs, by its name
    "test_healthy_in_training": "One batch forward and backward in training mode breaks no rule.",
    "test_healthy_in_evaluation": "The same in evaluation mode, but for what fails in training.",
    "test_every_parameter_learns": "Every parameter gets a gradient, is trained, and moves.",
    "test_deterministic": "In evaluation mode the same batch gives the same output.",
    "test_samples_independent": "No sample has an effect on the output of another one.",
    "test_inputs_used": "Every input has an effect, at the start or after a few steps.",
    "test_padding_ignored": "What stands in padding has no effect.",
    "test_causal": "No output of a model that predicts the next step depends on later steps.",
    "test_training_step": "A step descends the loss, on all of the batch, and can be called again.",
    "test_state_survives_saving": "A new model that loads the saved state gives the same outputs.",
    "test_headroom": "The planned dtype holds the values of the model.",
    "test_compiled_equals_eager": "What `torch.compile` makes of the model computes the same.",
    "test_snapshot": "The statistics of every layer are those that were recorded.",
}


def _test_of(name: str, summary: str) -> Callable[..., None]:
    def test(self: ModelHealthSuite, modelhealth_case: Callable[[], None]) -> None:
        __tracebackhide__ = True
        modelhealth_case()

    test.__name__, test.__doc__ = name, summary
    test.__qualname__ = f"ModelHealthSuite.{name}"
    return test


for _name, _summary in TESTS.items():
    setattr(ModelHealthSuite, _name, _test_of(_name, _summary))

ATTRIBUTES = (  # what a subclass may set
    "seed", "limits", "skip", "strict", "backend", "causal", "batch_dim", "time_dim", "padding",
    "make_optimizer",
)  # fmt: skip


def parameters_of(thing: Any) -> list[inspect.Parameter]:
    """Return what a class or function is called with; none where Python cannot tell."""
    try:
        return list(inspect.signature(thing).parameters.values())
    except (TypeError, ValueError):  # of a class written in C
        return []


def required(thing: Any) -> list[inspect.Parameter]:
    """Return what a class or function must be called with."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in parameters_of(thing) if p.default is p.empty and p.kind not in several]


def arguments_of(thing: Any) -> str:
    """Return the arguments that a call needs, with ``...`` for each value: ``width=...``."""
    return ", ".join(
        "..." if p.kind is p.POSITIONAL_ONLY else f"{p.name}=..." for p in required(thing)
    )


def modelhealth_suite(factory: Callable[[], Any], **attributes: Any) -> type[ModelHealthSuite]:
    """Return a suite of the model that `factory` makes: ``TestNet = modelhealth_suite(make_net)``.

    Args:
        factory: called without arguments; returns what `ModelHealthSuite.make` may return.
        **attributes: those of `ModelHealthSuite`; `make_optimizer` takes the suite and the model.

    Raises:
        SettingsError: there is no such attribute, or the factory cannot be called.
    """
    if not callable(factory):
        raise SettingsError(
            f"modelhealth_suite takes a function that makes a model, not {factory!r}: "
            "modelhealth_suite(make_encoder)"
        )
    unknown = [name for name in attributes if name not in ATTRIBUTES]
    if unknown:
        raise SettingsError(
            f"modelhealth_suite: there is no attribute {unknown[0]!r}"
            f"{suggest(unknown[0], ATTRIBUTES)} Attributes: {', '.join(ATTRIBUTES)}."
        )
    name = getattr(factory, "__name__", type(factory).__name__)
    body = {
        "make": staticmethod(factory),
        "__doc__": f"The suite of what {name} makes.",
        "__module__": sys._getframe(1).f_globals.get("__name__", __name__),
        "_maker": name,
    }
    return type(f"Test_{name}", (ModelHealthSuite,), {**attributes, **body})
