"""`Guess`: a batch that has run, and the Python text that makes it."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.guessing.drawing import Candidate, Drawn

if TYPE_CHECKING:
    from pytest_modelhealth.guessing.trying import Trial

WIDTH = 80
"""How many columns a statement may take: 88 where a method indents it."""


@dataclass(frozen=True)
class Guess:
    """A batch that the model's forward took.

    Args:
        inputs: as `Inspector.run_inspection` takes them.
        target: what the loss compares the output with; ``None`` where there is none.
        loss: the loss; ``None`` takes the model's own, or a random projection of its outputs.
        how: one sentence on how it was guessed.
        imports: the import lines that `statements` need.
        statements: Python text that assigns ``inputs`` and, where there are such, ``target`` and
            ``loss``. What comes from the model itself calls it ``model``.
        loss_source: the expression of the loss, ``""`` for none.
    """

    inputs: Any
    target: Any
    loss: Any
    how: str
    imports: tuple[str, ...]
    statements: tuple[str, ...]
    loss_source: str = ""

    @property
    def source(self) -> str:
        """The whole text: imports and statements."""
        loss = (f"loss = {self.loss_source}",) if self.loss_source else ()
        return "\n".join((*self.imports, "", *self.statements, *loss)) + "\n"


def guess_of(candidate: Candidate, trial: Trial) -> Guess:
    """Return what is to be known of a candidate that ran."""
    with trial.drawing():
        args, kwargs = candidate.made()
        target = None if candidate.target is None else candidate.target.make()
    loss = None if candidate.loss is None else candidate.loss.make()
    drawn = [*candidate.args, *candidate.kwargs.values(), candidate.target, candidate.loss]
    statements = _statements(candidate)
    imports = {line for one in drawn if one is not None for line in one.imports}
    if any("torch." in line for line in statements):
        imports.add("import torch")
    if any("Inputs(" in line for line in statements):
        imports.add("from pytest_modelhealth import Inputs")
    return Guess(
        _inputs(args, kwargs),
        target,
        loss,
        candidate.how,
        tuple(sorted(imports)),
        statements,
        "" if candidate.loss is None else candidate.loss.source,
    )


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and kwargs:
        return Inputs(*args, **kwargs)
    if kwargs:
        return kwargs
    return args[0] if len(args) == 1 and isinstance(args[0], torch.Tensor) else args


def _statements(candidate: Candidate) -> tuple[str, ...]:
    named = [(f"x{i}", d) for i, d in enumerate(candidate.args)] + [*candidate.kwargs.items()]
    uses = Counter(id(drawn) for _, drawn in named)
    names: dict[int, str] = {}
    lines = []
    for name, drawn in named:
        if uses[id(drawn)] > 1 and id(drawn) not in names:
            names[id(drawn)] = name
            lines.append(f"{name} = {drawn.source}")

    def spelled(drawn: Drawn) -> str:
        return names.get(id(drawn), drawn.source)

    args = [spelled(drawn) for drawn in candidate.args]
    if args and candidate.kwargs:
        keywords = [f"{name}={spelled(drawn)}" for name, drawn in candidate.kwargs.items()]
        lines.append(broken("inputs = Inputs(", [*args, *keywords], ")"))
    elif candidate.kwargs:
        items = [f'"{name}": {spelled(drawn)}' for name, drawn in candidate.kwargs.items()]
        lines.append(broken("inputs = {", items, "}"))
    elif len(args) == 1 and not args[0].startswith(("{", "[", "(", "True", "False")):
        lines.append(f"inputs = {args[0]}")
    elif len(args) == 1:
        lines.append(f"inputs = ({args[0]},)")
    else:
        one = f"inputs = {', '.join(args)}"
        lines.append(one if len(one) <= WIDTH else broken("inputs = (", args, ")"))
    if candidate.target is not None:
        lines.append(f"target = {candidate.target.source}")
    return tuple(lines)


def broken(opening: str, items: list[str], closing: str, width: int = WIDTH) -> str:
    """Return items in one line, or a line each where that is wider than `width`."""
    one = f"{opening}{', '.join(items)}{closing}"
    if len(one) <= width and "\n" not in one:
        return one
    return "\n".join([opening, *(textwrap.indent(f"{item},", "    ") for item in items), closing])
