"""From a name to a test file."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytest_modelhealth.commands.first_test.building import Built, built
from pytest_modelhealth.commands.first_test.measuring import Measured, measured, seeded
from pytest_modelhealth.commands.first_test.naming import named
from pytest_modelhealth.commands.first_test.text import TestText, returned
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.guessing import guess_inputs
from pytest_modelhealth.rendering.notation import plural, printable
from pytest_modelhealth.report import Violation

_TAIL = 4
"""How many lines of a user's traceback are shown."""


def write_first_test(
    spelled: str, batch: str | None, seeds: int, output: Path | None
) -> Iterator[str]:
    """Write the file, and yield what to tell.

    Raises:
        InspectionError: nothing could be written.
    """
    if seeds < 1:
        raise InspectionError(f"--seeds must be at least 1, not {seeds}")
    if output is not None:
        _require_free(output)
    how = built(named(spelled, "init"), spelled)
    text, said = _first_text(how, spelled, batch)
    path = _default_path(text) if output is None else output
    _require_free(path)
    seen = _measured(text, seeds, spelled)
    text = TestText(
        text.name, text.imports, text.statements, text.returned, text.loss, (*seen.attributes(),)
    )
    _write(path, str(text), made_by=output is not None)
    yield from _told(seen, path, said)


def _first_text(how: Built, spelled: str, batch: str | None) -> tuple[TestText, str]:
    """Return a test file without settings, and how its batch came about."""
    made = _made(how, spelled)
    if isinstance(made, tuple):
        if not made or not isinstance(made[0], nn.Module) or len(made) > 4:
            raise InspectionError(
                f"{spelled} made a tuple that is no model with a batch: return (model, inputs), "
                "(model, inputs, loss) or (model, inputs, target, loss)"
            )
        if len(made) > 1:
            return TestText(how.name, how.imports, how.statements, how.expression), (
                f"what {how.expression} makes has a batch"
            )
        made = made[0]
    if not isinstance(made, nn.Module):
        raise InspectionError(
            f"{spelled} made {type(made).__name__}, and no torch.nn.Module: return the model, or a "
            "tuple (model, inputs, target, loss)"
        )
    statements = (*how.statements, f"model = {how.expression}")
    if batch is not None:
        return _with_batch(how, statements, batch)
    guess = guess_inputs(made)
    text = TestText(
        how.name,
        (*how.imports, *guess.imports),
        (*statements, *guess.statements),
        returned(guess.loss_source, has_target=guess.target is not None),
        guess.loss_source,
    )
    return text, guess.how


def _with_batch(how: Built, statements: tuple[str, ...], batch: str) -> tuple[TestText, str]:
    make_batch = named(batch, "--batch")
    if not callable(make_batch):
        raise InspectionError(f"--batch {batch}: name a function that makes a batch")
    module, _, name = batch.partition(":")
    given = _called(make_batch, f"--batch {batch}")
    star = "*" if isinstance(given, tuple) else ""
    if star and not 1 <= len(given) <= 3:
        raise InspectionError(
            f"--batch {batch} made a tuple of {len(given)}: return inputs, (inputs, target) or "
            "(inputs, target, loss); several inputs are a mapping of keywords, or a tuple in "
            "that tuple: ((x, mask), target)"
        )
    imports = (*how.imports, f"from {module} import {name.partition('.')[0]}")
    text = TestText(how.name, imports, statements, f"model, {star}{name}()")
    return text, f"the batch of {batch}"


def _made(how: Built, spelled: str) -> Any:
    lines = [*how.imports, *how.statements, f"made = {how.expression}"]
    names: dict[str, Any] = {}

    def run() -> Any:
        exec(compile("\n".join(lines), "<init>", "exec"), names)
        return names["made"]

    return _called(run, spelled)


def _called(make: Callable[[], Any], spelled: str) -> Any:
    """Return what a user's function makes, under the first seed.

    Raises:
        InspectionError: it raises; the message has the end of its traceback.
    """
    try:
        with seeded(0):
            return make()
    except InspectionError:
        raise
    except Exception as error:
        raise InspectionError(f"{spelled} raised, when called:\n{_tail(error)}") from error


def _tail(error: Exception) -> str:
    """Return where a user's code raised, a line each, without the frames of torch and our own."""
    every = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != "<init>"]
    ours = str(Path(__file__).parents[2])
    kept = [f for f in every if not f.filename.startswith((ours, str(Path(torch.__file__).parent)))]
    frames = [
        f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in (kept[-_TAIL:] or every[-1:])
    ]
    said = f"{type(error).__name__}: {error}".splitlines()[:_TAIL]
    return "\n".join(f"  {printable(line)}" for line in (*frames, *said))


def _measured(text: TestText, seeds: int, spelled: str) -> Measured:
    """Run the text itself: what is measured is what is written."""
    names: dict[str, Any] = {"__name__": "modelhealth_first_test"}
    exec(compile(str(text), "<init>", "exec"), names)
    suite = names[text.class_name]
    try:
        return measured(suite().make, seeds)
    except InspectionError:
        raise
    except Exception as error:
        raise InspectionError(
            f"{spelled} raised, when inspected on its batch:\n{_tail(error)}\ngive a batch that "
            "it takes: --batch package.module:make_batch"
        ) from error


def _default_path(text: TestText) -> Path:
    folder = Path("tests") if Path("tests").is_dir() else Path()
    return folder / text.file_name


def _require_free(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise InspectionError(
            f"{path} exists, and is never written over: name another with --output, or move it away"
        )


def _write(path: Path, text: str, *, made_by: bool) -> None:
    """Write all of the file or nothing, and never over another.

    Raises:
        InspectionError: it cannot be written.
    """
    temporary = ""
    try:
        if made_by:
            path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=".", suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            temporary = file.name
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        os.link(temporary, path)  # which fails where a file has appeared meanwhile
    except FileExistsError:
        _require_free(path)
        raise InspectionError(f"{path.parent} is no folder: name another --output") from None
    except OSError as error:
        raise InspectionError(
            f"cannot write {path}: {error.strerror}; name a file in a folder that can be written "
            "to: --output"
        ) from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def _told(seen: Measured, path: Path, said: str) -> Iterator[str]:
    always = seen.always
    if always:
        first = always[0]
        yield f"unhealthy: {_line(first)}"
        if first.cause:
            yield f"  likely cause: {printable(first.cause)}"
        for other in always[1:4]:
            yield f"  also: {_line(other)}"
        yield f"  So under {plural(seen.seeds, 'seed')}; the test will fail until this is mended."
    yield f"written: {path}"
    yield f"  batch: {printable(said)}"
    if not always:
        yield f"  healthy under {plural(seen.seeds, 'seed')}, in training and evaluation mode"
    for _, line in seen.attributes():
        yield f"  {line}"
    yield f"run: python -m pytest {path}"


def _line(violation: Violation) -> str:
    where = printable(violation.layer) or "the model"
    return f"{where} ({violation.check}): {printable(violation.message)}"
