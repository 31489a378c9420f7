"""Lists that keep the graph of every call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pytest_modelhealth.training.stepping.reaching import named_lists


class Lists:
    """The lists that a model and a step keep, looked at after each call.

    Args:
        model: the model; lists among the attributes of its modules are looked at.
        step: the user's function; lists that it closes over are, too.
    """

    def __init__(self, model: nn.Module, step: Any) -> None:
        self._lists = named_lists(step)
        for name, module in model.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, list) and not attribute.startswith("_"):
                    self._lists[f"{name}.{attribute}".lstrip(".")] = value
        self._lengths = {name: len(value) for name, value in self._lists.items()}
        self._calls = 0
        self._grown: dict[str, int] = dict.fromkeys(self._lists, 0)

    def look(self) -> None:
        """Take down which have grown by a tensor with a graph since the last look."""
        self._calls += 1
        for name, value in self._lists.items():
            new = value[self._lengths[name] :]
            self._grown[name] += any(isinstance(v, Tensor) and v.grad_fn is not None for v in new)
            self._lengths[name] = len(value)

    @property
    def growing(self) -> list[str]:
        """The names of those that grew in each call, of two or more."""
        return [name for name, times in self._grown.items() if times == self._calls > 1]
