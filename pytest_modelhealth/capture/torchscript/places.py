"""Where in the source a node of a TorchScript graph came from, and in which layer's code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_SCRIPTED = re.compile(r'^ *File "(?P<path>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\w+))?')
_TRACED = re.compile(r"^(?P<path>\S.*)\((?P<line>\d+)\): (?P<function>\S+)$")
_HERE = "<--- HERE"
_CALLS_A_LAYER = "_slow_forward"
_LIBRARY = "/torch/"
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of the code around a node.

    Args:
        path: the file.
        line: the number of the line.
        function: the function that the line is in, ``""`` where that is not known.
        column: where in the line the call stands, where that is known.
    """

    path: str
    line: int
    function: str = ""
    column: int = -1

    @property
    def is_torchs(self) -> bool:
        """Whether the line is in torch's own code, on this machine or where the file was made."""
        return self.path.startswith((_TORCH, "<")) or f"/site-packages{_LIBRARY}" in self.path


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node came from.

    Args:
        frames: the lines of the code, outermost first; those of calls between layers are left out.
        calls: for each layer around the node, outermost first and the model itself included, the
            number of the frame in which the code of its forward begins; empty where unknown.
    """

    frames: tuple[Frame, ...] = ()
    calls: tuple[int, ...] = ()

    @property
    def source(self) -> str:
        """``path:line`` of the innermost line outside torch, ``""`` where there is none."""
        own = [frame for frame in self.frames if not frame.is_torchs]
        return f"{own[-1].path}:{own[-1].line}" if own else ""

    def home(self, depth: int) -> str:
        """Return the file in which the forward of the layer at a depth stands, as far as known."""
        return self.frames[self.calls[depth]].path if depth < len(self.calls) else ""

    def site(self, depth: int) -> tuple[Frame, ...]:
        """Return the lines that lead to the call of the layer at a depth, as far as known."""
        return self.frames[: self.calls[depth]] if depth < len(self.calls) else ()


def place_of(node: Any, depth: int) -> Place:
    """Return where a node came from.

    Args:
        node: a node of a TorchScript graph.
        depth: how many layers, the calls of functions included, TorchScript says lie around it.
    """
    text = node.sourceRange()
    if not text.strip():
        return Place()
    if text.lstrip().startswith("File"):
        frames = _scripted(_stack(node)) or _scripted(text)
        whole = len(frames) == depth + 1
        return Place(frames, tuple(range(depth + 1)) if whole else ())
    return _traced(text)


def _stack(node: Any) -> str:
    """Return the calls that led to a node, which TorchScript tells of a node that raises alone."""
    graph = torch._C.Graph()
    text = graph.insertConstant("")
    raising = graph.create("prim::RaiseException", [text, text], 0)
    graph.insertNode(raising)
    graph.registerOutput(text)
    raising.copyMetadata(node)
    try:
        torch._C._create_function_from_graph("forward", graph)()
    except torch.jit.Error as error:
        return str(error).partition("serialized code")[0]
    return ""


def _scripted(text: str) -> tuple[Frame, ...]:
    """Return the frames of code that was compiled, outermost first."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if line.startswith("Serialized"):
            break
        if match := _SCRIPTED.match(line):
            frames.append(Frame(match["path"], int(match["line"]), match["function"] or ""))
        elif line.endswith(_HERE) and frames and frames[-1].column < 0:
            last = frames[-1]
            column = len(line) - len(line.lstrip())
            frames[-1] = Frame(last.path, last.line, last.function, column)
    return tuple(frames)


def _traced(text: str) -> Place:
    """Return the place of a node of a trace, which holds the stack of the Python code."""
    frames: list[Frame] = []
    calls: list[int] = []
    for line in reversed(text.splitlines()):
        match = _TRACED.match(line)
        if match is None:
            continue
        frame = Frame(match["path"], int(match["line"]), match["function"])
        if frame.path.endswith("/torch/nn/modules/module.py"):
            if frame.function == _CALLS_A_LAYER:
                calls.append(len(frames))
        else:
            frames.append(frame)
    return Place(tuple(frames), tuple(calls))
