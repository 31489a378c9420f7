"""Puts a model, its gradients and all random generators back as they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.apart import Inspection
from pytest_modelhealth.capture.step.memory import Memory


@contextmanager
def untouched(inspection: Inspection, batch: Any) -> Iterator[None]:
    """Leave no trace on the model of what happens inside, however it ends.

    Attributes get their objects and values back, buffers among them, parameters and the batch's
    leaf tensors their ``.grad``, modules their training mode and hooks, and random generators their
    state: those of Python, NumPy and torch, and those that the model holds. Hooks that run an
    optimizer inside backward are set aside meanwhile, since they would train the model. Values of
    parameters are not copied, which would double the model's memory; `Versions` tells of a forward
    that writes to one.
    """
    state = inspection.state
    if inspection.random_state is None:
        inspection.random_state = random_state()
    leaves = [*state.leaves, *(t for t in find_tensors(batch) if t.is_leaf and t.requires_grad)]
    with ExitStack() as stack:
        stack.callback(restore_random_state, inspection.random_state)
        for generator in state.generators:
            stack.callback(generator_restorer(generator))
        stack.callback(state.restore_containers)
        stack.callback(Memory(state.tensors).restore)
        stack.enter_context(gradients_set_aside(leaves))
        yield


@contextmanager
def gradients_set_aside(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Start from no gradient on `leaves`, and put theirs back: the same objects, untouched."""
    leaves = list({id(leaf): leaf for leaf in leaves}.values())
    gradients = [leaf.grad for leaf in leaves]
    required = [leaf.requires_grad for leaf in leaves]
    hooks = [(h, h.copy()) for leaf in leaves if (h := leaf._post_accumulate_grad_hooks)]
    try:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                leaf.grad = None
        for registered, _ in hooks:
            # in place: autograd holds this dictionary, and runs what is in it even after the
            # attribute was set to None
            registered.clear()
        yield
    finally:
        for registered, copies in hooks:
            registered.update(copies)
        for leaf, gradient, requires_grad in zip(leaves, gradients, required, strict=True):
            if leaf.requires_grad != requires_grad:
                leaf.requires_grad = requires_grad
            leaf.grad = gradient


def random_state() -> dict[str, Any]:
    """Return the state of all random generators that are not the model's own."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put all random generators back to a state of `random_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state:
        torch.mps.set_rng_state(state["mps"])


def generator_restorer(generator: Any) -> Callable[[], Any]:
    """Return a function that puts a generator back where it stands now."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    generator = getattr(generator, "bit_generator", generator)  # of a numpy.random.Generator
    if hasattr(generator, "set_state"):  # numpy.random.RandomState
        return partial(generator.set_state, generator.get_state())
    return partial(setattr, generator, "state", generator.state)
