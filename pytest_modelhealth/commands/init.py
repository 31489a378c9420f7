"""Write a test file for a model: python -m pytest_modelhealth init package.module:Model

The model is a class, or a function that makes one. It is imported and nothing of it runs: the file
holds what the signatures say, and one place to fill in, the batch. A file that exists is never
written over. Exit status: 0 where the file was written, 2 where it could not be.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
import typing
from pathlib import Path
from typing import Any

from pytest_modelhealth.errors import InspectionError

_WIDTH = 80
_OWN_LOSS = ("labels", "label", "targets", "target", "return_loss")
_LOCAL = ("model", "inputs", "target", "loss", "config", "torch", "F")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("model", metavar="MODULE:NAME", help="a class, or a function of a model")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the file to write; default: test_NAME_health.py, in tests/ where there is one",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the file, and say what is to be filled in.

    Raises:
        InspectionError: it cannot be written, or the name is no model.
        SettingsError: the name cannot be imported.
    """
    from pytest_modelhealth.plugin.suite.making import TODO, named

    module, colon, path = arguments.model.partition(":")
    if module.endswith(".py"):
        module = module.removesuffix(".py").removeprefix("./").replace("/", ".")
    text = _template(named(f"{module}{colon}{path}", Path.cwd()), module, path)
    file: Path | None = arguments.output
    if file is None:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", path.rpartition(".")[2]).lower()
        file = (Path("tests") if Path("tests").is_dir() else Path()) / f"test_{words}_health.py"
    _write(file, text)
    line = text.partition(TODO)[0].count("\n") + 1
    print(f"written: {file}\nfill in: {file}:{line} ({TODO})\nrun:     python -m pytest {file}")  # noqa: T201
    return 0


def _template(thing: Any, module: str, path: str) -> str:
    """Return the text of the test file, laid out as ``ruff format`` has it."""
    from pytest_modelhealth.plugin.suite.making import TODO, arguments_of, parameters_of
    from pytest_modelhealth.plugin.suite.transformers_models import is_pretrained

    model_class = _model_class(thing, f"{module}:{path}")
    forward = parameters_of(getattr(model_class, "forward", None))[1:]
    batch, has_own_loss = _inputs(forward)
    first, _, rest = path.partition(".")
    alias = f"make_{first}" if first in _LOCAL else first
    imported = first if alias == first else f"{first} as {alias}"
    called = f"{alias}.{rest}" if rest else alias
    body = [f"# {TODO}, some 32 samples, in place of each ... below"]
    if is_pretrained(thing):
        config, arguments = thing.config_class, ["config"]
        imported = f"{config.__name__}, {imported}"
        module = "transformers" if module.partition(".")[0] == "transformers" else module
        body.append(_broken(f"config = {config.__name__}(", _small_config(config), ")"))
    else:
        arguments = arguments_of(thing)
        body += _comment(called, parameters_of(thing))
    body.append(_broken(f"model = {called}(", arguments, ")"))
    body += _comment("forward", forward)
    body.append(batch)
    if has_own_loss:
        body.append("return model, inputs")
    else:
        body += [
            "# no target (None): a loss of the output alone; no loss: the model's own",
            "target = ...",
            "loss = ...",
            "return model, inputs, target, loss",
        ]
    imports = [f"from {module} import {imported}"]
    ours = "from pytest_modelhealth import ModelHealthSuite"
    functional = [] if has_own_loss else ["import torch.nn.functional as F"]
    name = "".join(f"{word[:1].upper()}{word[1:]}" for word in re.split(r"[._]", path))
    lines = [
        f'"""Is {path} healthy? pytest --modelhealth-explain says what is checked."""',
        *("", "import torch", *functional, ours, "", *imports, "", ""),
        f"class Test{name}(ModelHealthSuite):",
        "    def make(self):",
        *(textwrap.indent(line, " " * 8) for line in body),
    ]
    return "\n".join(lines) + "\n"


def _model_class(thing: Any, spelled: str) -> Any:
    """Return the class of the model that a class or function makes; ``None`` where unknown.

    Raises:
        InspectionError: it makes no model.
    """
    from torch import nn

    if isinstance(thing, type) and issubclass(thing, nn.Module):
        return thing
    if isinstance(thing, type | nn.Module) or not callable(thing):
        what = "another class" if isinstance(thing, type) else f"of type {type(thing).__name__}"
        raise InspectionError(
            f"{spelled} is {what}: name a class of torch.nn.Module, or a function that makes a "
            "model anew"
        )
    try:
        made = typing.get_type_hints(thing).get("return")
    except Exception:  # noqa: BLE001 - annotations of the user's may name anything
        return None
    return made if isinstance(made, type) and issubclass(made, nn.Module) else None


def _inputs(forward: list[inspect.Parameter]) -> tuple[str, bool]:
    """Return the statement of the batch, and whether the model computes its own loss of it."""
    from pytest_modelhealth.plugin.suite.making import required

    needed = required(forward) or forward[:1]
    labels = [p for p in forward if p.name in _OWN_LOSS and p.default is None]
    needed += [p for p in labels if p not in needed]
    if any(p.kind is p.POSITIONAL_ONLY for p in needed[1:]):
        return f"inputs = ({', '.join(['...'] * len(needed))})", bool(labels)
    if len(needed) < 2 and not any(p.kind is p.KEYWORD_ONLY for p in needed):
        return "inputs = ...", bool(labels)
    return _broken("inputs = {", [f'"{p.name}": ...' for p in needed], "}"), bool(labels)


def _small_config(config: Any) -> list[str]:
    from pytest_modelhealth.plugin.suite.transformers_models import small_sizes

    arguments = []
    for name, size in small_sizes(config()).items():
        inner = [f'"{k}": {v!r}' for k, v in size.items()] if isinstance(size, dict) else []
        arguments.append(f"{name}={_broken('{', inner, '}', 40) if inner else repr(size)}")
    return arguments


def _comment(called: str, parameters: list[inspect.Parameter]) -> list[str]:
    """Return a signature as lines of comment, where there is something to give."""
    listed = [
        re.sub(r"^(\w+: )'(.*?)'(?= = |$)", r"\1\2", str(p))  # an annotation that is a string
        for p in parameters
        if p.kind is not p.VAR_KEYWORD
    ]
    text = f"{called}({', '.join(listed)})" if listed else ""
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="#     ")


def _broken(opening: str, items: list[str], closing: str, width: int = _WIDTH) -> str:
    """Return items in one line, or a line each where that is wider than `width`."""
    line = f"{opening}{', '.join(items)}{closing}"
    if len(line) <= width and "\n" not in line:
        return line
    return "\n".join([opening, *(textwrap.indent(f"{item},", "    ") for item in items), closing])


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError as error:  # the file, or one that has the name of its folder
        raise InspectionError(
            f"{error.filename} exists, and is never written over: name another with --output, or "
            "move it away"
        ) from None
    except OSError as error:
        raise InspectionError(
            f"cannot write {file}: {error.strerror}; name a file in a folder that can be written "
            "to: --output"
        ) from None
