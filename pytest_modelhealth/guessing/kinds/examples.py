"""Models that hold an example of what they take, and loaders of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from pytest_modelhealth.guessing.drawing import Candidate, Drawn, taken
from pytest_modelhealth.guessing.kinds.kind import Kind
from pytest_modelhealth.guessing.trying import Trial
from pytest_modelhealth.training.libraries import is_of

_NAMES = ("example_input_array", "example_inputs", "example_input", "example_batch", "dummy_input")
_LIGHTNING = ("lightning", "pytorch_lightning")


class ExampleModel(Kind):
    """A model with an example of its inputs as an attribute, as Lightning has them."""

    precedence = 30

    def recognises(self, model: nn.Module) -> bool:
        """Whether an attribute holds an example."""
        return any(_held(model, name) for name in _NAMES)

    def candidates(self, model: nn.Module, trial: Trial) -> Iterator[Candidate]:
        """Yield what the attribute holds."""
        for name in _NAMES:
            if _held(model, name):
                value = getattr(model, name)
                yield _spread(value, f"model.{name}", f"{type(model).__name__}.{name}")


class LoadingModel(Kind):
    """A `LightningModule` with a `train_dataloader`; its batch is inputs, and perhaps a target."""

    precedence = 20

    def recognises(self, model: nn.Module) -> bool:
        """Whether it is one, and overrides `train_dataloader`."""
        own = getattr(type(model), "train_dataloader", None)
        return is_of(model, *_LIGHTNING) and not (own and own.__module__.startswith(_LIGHTNING))

    def candidates(self, model: nn.Module, trial: Trial) -> Iterator[Candidate]:
        """Yield the first batch: the first of it, then all of it."""
        how = f"the first batch of {type(model).__name__}.train_dataloader()"
        source = "next(iter(model.train_dataloader()))"

        def batch() -> Any:
            return next(iter(model.train_dataloader()))  # type: ignore[operator]

        yield Candidate((taken(f"{source}[0]", lambda: batch()[0]),), how=how)
        yield Candidate((taken(source, batch),), how=how)


def _held(model: nn.Module, name: str) -> bool:
    value = getattr(model, name, None)
    return isinstance(value, Tensor | Mapping) or (isinstance(value, tuple | list) and bool(value))


def _spread(value: Any, source: str, how: str) -> Candidate:
    if isinstance(value, Mapping):
        named: dict[str, Drawn] = {
            str(k): taken(f"{source}[{k!r}]", lambda k=k: value[k])  # type: ignore[misc]
            for k in value
        }
        return Candidate(kwargs=named, how=how)
    if isinstance(value, tuple | list):
        each = [taken(f"{source}[{i}]", lambda one=one: one) for i, one in enumerate(value)]  # type: ignore[misc]
        return Candidate((*each,), how=how)
    return Candidate((taken(source, lambda: value),), how=how)
