"""What is seen of a model in each form that it can be deployed in, and how each compares.

Usage: ``python -m benchmarks.kinds [KIND ...] [--write]``

One small model of convolutions, batch norms, a residual sum, linear layers, a layer norm and
activations that are functions is brought into each form by the library that makes it, and inspected
and compared with itself as it was. What is printed is measured; ``--write`` puts the table of all
kinds into docs/reference/kinds.md. Those in `SLOW` compile or export, and take seconds each.
"""

from __future__ import annotations

import argparse
import copy
import logging
import platform
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, prune

from corpus import deploying
from corpus.command import header, row
from corpus.models.deployed import ResidualBlock
from corpus.models.small import images
from corpus.subject import Subject, subject, trained
from pytest_modelhealth import HealthReport, InspectionError, Inspector, __version__, compare
from pytest_modelhealth.report import LayerRecord, Status

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "kinds.md"
STEPS = 40


class Net(nn.Module):
    """Digits by a residual block and three linear layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width)
        self.block = ResidualBlock(width)
        self.fc1, self.norm = nn.Linear(width, 32), nn.LayerNorm(32)
        self.fc2, self.head = nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(F.relu(self.bn(self.stem(x)))).mean((2, 3))
        x = F.gelu(self.norm(self.fc1(x)))
        return self.head(x + F.silu(self.fc2(x)))


def net() -> Subject:
    return subject(Net(), images, F.cross_entropy, batch=32)


def made() -> tuple[nn.Module, Tensor]:
    """Return the model after some training, in evaluation mode, and a batch."""
    torch.manual_seed(0)
    healthy = trained(net, STEPS)
    return healthy.model.eval(), images(32)[0]


# ---- the kinds ----------------------------------------------------------------------------------

Make = Callable[[nn.Module, Tensor], Any]
"""Brings a copy of the model into a form; the batch is what it is traced or calibrated on."""

KINDS: dict[str, Make] = {}
SLOW: set[str] = set()


def kind(name: str, *, slow: bool = False) -> Callable[[Make], Make]:
    """Add a row to the table."""

    def add(make: Make) -> Make:
        KINDS[name] = make
        if slow:
            SLOW.add(name)
        return make

    return add


@kind("eager")
def _(model: nn.Module, batch: Tensor) -> Any:
    return model


@kind("`torch.compile`", slow=True)
def _(model: nn.Module, batch: Tensor) -> Any:
    return torch.compile(model, backend="aot_eager")


@kind("`torch.fx.symbolic_trace`")
def _(model: nn.Module, batch: Tensor) -> Any:
    return fx.symbolic_trace(model)


@kind("`torch.fx`, batch norms fused")
def _(model: nn.Module, batch: Tensor) -> Any:
    from torch.fx.experimental.optimization import fuse

    return fuse(model)


@kind("`torch.export`", slow=True)
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.exported(model, batch)


@kind("`torch.export`, decomposed", slow=True)
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.decomposed(model, batch)


@kind("`torch.export`, from a file", slow=True)
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.through_file(deploying.exported(model, batch))


@kind("`torch.export`, `.module()`", slow=True)
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.exported(model, batch).module()


@kind("`torch.jit.script`")
def _(model: nn.Module, batch: Tensor) -> Any:
    return torch.jit.script(model)


@kind("`torch.jit.trace`")
def _(model: nn.Module, batch: Tensor) -> Any:
    return torch.jit.trace(model, batch)


@kind("`torch.jit.freeze`, scripted")
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.frozen(model)


@kind("`torch.jit.freeze`, traced")
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.frozen(model, batch)


@kind("`torch.jit.optimize_for_inference`")
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.optimised(model)


@kind("ONNX file, `dynamo=True`", slow=True)
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.onnx_file(model, batch)


@kind("ONNX file, `dynamo=True`, not optimised", slow=True)
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.onnx_file(model, batch, optimize=False)


@kind("ONNX file, `dynamo=False`")
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.legacy_file(model, batch, opset_version=20)


@kind("`torch.ao`, dynamic int8")
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.dynamic(model)


@kind("`torch.ao`, static int8 by FX")
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.static(model, batch)


@kind("torchao, int8 weights")
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.torchao(model, "Int8WeightOnlyConfig")


@kind("torchao, int8 weights and activations")
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.torchao(model, "Int8DynamicActivationInt8WeightConfig")


@kind("torchao, float8 weights")
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.torchao(model, "Float8WeightOnlyConfig")


@kind("PT2E, int8 for inductor", slow=True)
def _(model: nn.Module, batch: Tensor) -> Any:
    return deploying.pt2e(model, batch)


@kind("pruned, with its mask")
def _(model: nn.Module, batch: Tensor) -> Any:
    prune.custom_from_mask(model.fc2, "weight", model.fc2.weight != 0)
    return model


@kind("parametrized by `weight_norm`")
def _(model: nn.Module, batch: Tensor) -> Any:
    for layer in (model.stem, model.fc2):
        parametrizations.weight_norm(layer)
    return model


def adapted(model: nn.Module) -> Any:
    """Return the model with an adapter of peft at each linear layer, which does nothing yet."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["fc1", "fc2"])).eval()


@kind("LoRA by peft, beside the weights", slow=True)
def _(model: nn.Module, batch: Tensor) -> Any:
    return adapted(model)


@kind("LoRA by peft, merged", slow=True)
def _(model: nn.Module, batch: Tensor) -> Any:
    return adapted(model).merge_and_unload()


# ---- what is seen of one -------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What is seen of the model in one form.

    Args:
        counts: what was seen of the model as it was, by column.
        rest: the layers that are opaque or unsupported, and why.
        verdict: what a comparison with the model as it was says.
        basis: what that verdict rests on.
    """

    counts: dict[str, str]
    rest: str
    verdict: str
    basis: str

    def cells(self) -> list[str]:
        """Return the cells of its row."""
        counts = [self.counts.get(name, "") for name in COUNTED]
        return [*counts, self.rest, self.verdict, self.basis]


COUNTED = ("modules", "functions", "gradients", "parameters", "flow", "lines")
COLUMNS = ["kind", *COUNTED, "opaque or unsupported", "`compare(eager, it)`", "tolerance from"]


def examine(name: str) -> Seen:
    """Bring the model into a form, inspect it, and compare it with what it was."""
    model, batch = made()
    with deploying.quietly():
        torch.manual_seed(0)
        form = KINDS[name](copy.deepcopy(model), batch)
        counts, rest = seen(model, form, batch)
        verdict, basis = compared(model, form, batch)
    return Seen(counts, rest, verdict, basis)


def seen(model: nn.Module, form: Any, batch: Tensor) -> tuple[dict[str, str], str]:
    """Return what is seen of the layers of the model as it was, and what of the rest."""
    try:
        report = Inspector(form).run_inspection(batch)
    except (InspectionError, NotImplementedError) as error:
        return {}, said(error)
    reference = Inspector(model).run_inspection(batch)
    modules = [name for name, one in model.named_modules() if name and not list(one.children())]
    functions = [one.name for one in reference if one.functional]
    found = {name: layer for name in (*modules, *functions) if (layer := of(report, name))}
    flow = report.flow
    counts = {
        "modules": share(modules, [n for n in modules if n in found and found[n].activations]),
        "functions": share(functions, [n for n in functions if n in found]),
        "gradients": share(modules, [n for n in modules if n in found and found[n].gradients]),
        "parameters": share(dict(model.named_parameters()), parameters(report, model)),
        "flow": share(
            modules, [n for n in modules if n in found and flow and found[n].name in flow]
        ),
        "lines": share(
            [*modules, *functions], [name for name, layer in found.items() if layer.source]
        ),
    }
    return counts, rest_of(report)


WRAPPERS = ("", "base_model.model.")
"""What stands before the names of a model in those that hold it."""


def of(report: HealthReport, name: str) -> LayerRecord | None:
    """Return the layer of a name, where its activations were seen."""
    for layer in report:
        if {layer.name, *layer.aliases} & {before + name for before in WRAPPERS}:
            return layer if layer.activations is not None else None
    return None


def parameters(report: HealthReport, model: nn.Module) -> list[str]:
    """Return the parameters of a model whose values are seen in a report."""
    there = {f"{layer.name}.{own}".lstrip(".") for layer in report for own in layer.parameters}
    names = [name for name, _ in model.named_parameters()]
    return [name for name in names if there & {before + name for before in WRAPPERS}]


def share(whole: Iterable[str], part: Iterable[str]) -> str:
    """Return how many of the layers were seen."""
    return f"{len(list(part))} of {len(list(whole))}"


def rest_of(report: HealthReport) -> str:
    """Return the layers that are opaque or unsupported, with the reasons, each once."""
    groups: dict[tuple[Status, str], list[str]] = {}
    for layer in report:
        if layer.status in (Status.OPAQUE, Status.UNSUPPORTED):
            groups.setdefault((layer.status, layer.reason), []).append(f"`{layer.name or 'model'}`")
    return "; ".join(
        f"{', '.join(names)} `{status}`: {reason}" for (status, reason), names in groups.items()
    )


def compared(model: nn.Module, form: Any, batch: Tensor) -> tuple[str, str]:
    """Return what a comparison says, and what its tolerance rests on."""
    try:
        comparison = compare(model, form, batch)
    except (InspectionError, NotImplementedError) as error:
        return said(error), ""
    if comparison.equivalent:
        return "equivalent", comparison.basis
    found = comparison.first_divergence
    return f"NOT equivalent: {found.label}: {found.story}", comparison.basis


def said(error: Exception) -> str:
    """Return the first sentence of an error."""
    return str(error).partition("\n")[0] or type(error).__name__


# ---- the page ------------------------------------------------------------------------------------

INTRODUCTION = """\
# Kinds of models

What is seen of one small model in each form that it can be deployed in, and what
`compare(eager, it)` says where nothing is wrong. Made by running
`python -m benchmarks.kinds --write`; a test runs it again and holds this page to it. The model has
convolutions, batch norms, a residual sum, linear layers, a layer norm, and activations that are
functions. How to inspect and compare such models is in [the guide](../how-to/deployed.md).

- **modules**, **functions**: of the layers of the eager model, those whose activations are seen
  under their names. A layer that was folded into another is no longer there, and a frozen script
  has operations in the place of layers, named after what they compute.
- **gradients**: modules with the gradient of their output. **parameters**: those whose values are
  seen under their names.
- **flow**: modules of which producers and consumers are known. **lines**: layers with the file and
  line that call them.
- **opaque or unsupported**: layers of the deployed form that are not seen, with the reason that the
  report has; or why nothing is.
- **tolerance from**: what the verdict of the comparison rests on.

"""
CLOSING = """
A CUDA graph runs on a GPU only, and is not among the rows.
"""


def page(rows: Iterable[tuple[str, Seen]]) -> str:
    """Return the page for these rows."""
    lines = [line_of(name, one) for name, one in rows]
    return INTRODUCTION + "\n".join([header(COLUMNS), *lines]) + "\n" + CLOSING + "\n" + versions()


def line_of(name: str, one: Seen) -> str:
    """Return a row of the table."""
    return row([name, *(cell.replace("|", "\\|") for cell in one.cells())])


def versions() -> str:
    """Return what the page was made with."""
    libraries = ", ".join(
        f"{name} {version(name)}" for name in ("onnx", "onnxruntime", "torchao", "peft")
    )
    return (
        f"pytest-modelhealth {__version__}, torch {torch.__version__}, {libraries}, "
        f"Python {platform.python_version()}, {date.today()}\n"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the rows, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--write", action="store_true", help="docs/reference/kinds.md, all kinds")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if options.write:
            PAGE.write_text(page((name, examine(name)) for name in KINDS), encoding="utf-8")
            return
        print(header(COLUMNS))
        for name in options.kinds or KINDS:
            print(line_of(name, examine(name)), flush=True)


if __name__ == "__main__":
    main()
