"""Write a test file for a model: python -m pytest_modelhealth init package.module:Model

The model is a class, or a function that makes one. Nothing of it runs: the file holds what the
signatures say, and one place to fill in, the batch. A class that says all in its source is read
there, in a second; else its module is imported. A file that exists is never
written over. Exit status: 0 where the file was written, 2 where it could not be.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import pkgutil
import re
import sys
import typing
from pathlib import Path
from typing import Any

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.wings import wing

_OWN_LOSS = ("labels", "label", "targets", "target", "return_loss")
_HEAD = '''"""Is {path} healthy? pytest --modelhealth-explain says what is checked."""

import torch
import torch.nn.functional as F
from pytest_modelhealth import ModelHealthSuite

from {module} import {imported}


class Test{name}(ModelHealthSuite):
    strict = True  # warnings fail; what is meant so is waived with a reason: modelhealth_waive

    def make(self):
        # {todo}, some 32 samples, in place of each ... below
'''


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
    todo = wing("plugin.suite.suite:TODO")
    module, colon, path = arguments.model.partition(":")
    if module.endswith(".py"):
        module = module.removesuffix(".py").removeprefix("./").replace("/", ".")
    thing = _from_source(module, path)
    if thing is not None:
        text = _suite(thing, thing, module, path)
    else:
        thing = wing("plugin.suite.making:named")(f"{module}{colon}{path}", Path.cwd())
        text = _suite(thing, _model_class(thing, arguments.model), module, path)
    file: Path | None = arguments.output
    if file is None:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", path.rpartition(".")[2]).lower()
        file = (Path("tests") if Path("tests").is_dir() else Path()) / f"test_{words}_health.py"
    _write(file, text)
    line = text.partition(todo)[0].count("\n") + 1
    fill_in = f"fill in: {file}:{line} ({todo})\n" if todo in text else ""
    print(f"written: {file}\n{fill_in}run:     python -m pytest {file}")  # noqa: T201
    return 0


def _suite(thing: Any, model_class: Any, module: str, path: str) -> str:
    """Return the text by the signatures of what makes the model, and of its class."""
    making = wing("plugin.suite.suite")
    forward = making.parameters_of(getattr(model_class, "forward", None))[1:]
    needed = [p for p in forward if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    needed = [p for p in needed if p.kind is not p.VAR_KEYWORD] or forward[:1]
    labels = [p for p in forward if p.name in _OWN_LOSS and p.default is None]
    needed += [p for p in labels if p not in needed]
    if len(needed) < 2:
        batch = "..."
    elif any(p.kind is p.POSITIONAL_ONLY for p in needed):
        batch = f"({', '.join('...' for _ in needed)})"
    else:
        batch = "{" + ", ".join(f'"{p.name}": ...' for p in needed) + "}"
    # a function may be called as one of our own names is
    first, _, rest = path.partition(".")
    alias = f"make_{first}" if first in ("model", "inputs", "target", "loss") else first
    called = f"{alias}.{rest}" if rest else alias
    lines = [
        *_comment(called, making.parameters_of(thing)),
        f"model = {called}({making.arguments_of(thing)})",
        *_comment("forward", forward),
        f"inputs = {batch}",
    ]
    if labels:
        lines += ["return model, inputs"]
    else:
        lines += [
            "# no target (None): a loss of the output alone; no loss: the model's own",
            "target = ...",
            "loss = ...",
            "return model, inputs, target, loss",
        ]
    head = _HEAD.format(
        path=path,
        module=module,
        imported=first if alias == first else f"{first} as {alias}",
        name="".join(f"{word[:1].upper()}{word[1:]}" for word in re.split(r"[._]", path)),
        todo=making.TODO,
    )
    return head + "".join(f"        {line}\n" for line in lines)


class _Source(str):
    """What stands in the source for a default or an annotation, which nothing evaluates."""

    __repr__ = str.__str__


def _from_source(module: str, path: str) -> Any:
    """Return a stand-in for a class of torch, with its signatures; ``None`` if its source lacks it.

    Neither its module nor torch is imported, which alone takes seconds.
    """
    places = [str(Path.cwd()), *sys.path]
    origin = None
    for name in module.split("."):
        finders = filter(None, map(pkgutil.get_importer, places))
        specs = [spec for finder in finders if (spec := finder.find_spec(name)) is not None]
        if not specs:
            return None
        spec = next((one for one in specs if one.loader is not None), specs[0])
        origin, places = spec.origin, [*(spec.submodule_search_locations or ())]
    try:
        tree = ast.parse(Path(origin or "").read_bytes())
    except (OSError, SyntaxError, ValueError):  # compiled, a package without a file, another text
        return None
    bound = [one for one in tree.body if path in _binds(one)]
    if len(bound) != 1 or not isinstance(made := bound[0], ast.ClassDef) or made.decorator_list:
        return None
    is_torch = any(re.search(r"(^|\.)nn\.Module$|^Module$", ast.unparse(b)) for b in made.bases)
    own = {one.name: one for one in made.body if isinstance(one, ast.FunctionDef)}
    methods = [own[name] for name in ("__init__", "forward") if name in own]
    if not is_torch or len(methods) < 2 or any(one.decorator_list for one in methods):
        return None
    return type(path, (), {one.name: _stub(one) for one in methods})


def _binds(statement: ast.stmt) -> set[str | None]:
    """Return the names that a statement of a module may bind, those inside of it included."""
    inside = [*ast.walk(statement)] if not isinstance(statement, ast.ClassDef) else [statement]
    named = {getattr(one, "name", None) or getattr(one, "asname", None) for one in inside}
    return named | {
        one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }


def _stub(method: ast.FunctionDef) -> Any:
    """Return a function of the same signature, whose values are pieces of source."""

    def quoted(node: ast.expr | None) -> Any:
        if node is None or isinstance(node, ast.Constant):
            return node
        source = ast.Call(ast.Name("_Source", ast.Load()), [ast.Constant(ast.unparse(node))], [])
        return ast.copy_location(source, node)

    arguments = method.args
    for one in (node for node in ast.walk(arguments) if isinstance(node, ast.arg)):
        one.annotation = quoted(one.annotation)
    arguments.defaults = [*map(quoted, arguments.defaults)]
    arguments.kw_defaults = [*map(quoted, arguments.kw_defaults)]
    method.body, method.returns = [ast.Pass()], None
    tree = ast.fix_missing_locations(ast.Module([method], []))
    values: dict[str, Any] = {"_Source": _Source}
    exec(compile(tree, "<signature>", "exec", dont_inherit=True), values)
    return values[method.name]


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


def _comment(called: str, parameters: list[inspect.Parameter]) -> list[str]:
    """Return a signature as a comment, where there is something to give."""
    listed = [
        re.sub(r"^(\w+: )'(.*?)'(?= = |$)", r"\1\2", str(p))  # an annotation that is a string
        for p in parameters
        if p.kind is not p.VAR_KEYWORD
    ]
    return [f"# {called}({', '.join(listed)})"] if listed else []


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
