"""Packages of AOTInductor: outputs are seen, layers are known by name, and no more is claimed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pytest_modelhealth import Inputs, InspectionError, Inspector, compare
from pytest_modelhealth.report import Status, Verdict


class Net(nn.Module):
    """Two layers with weights that the compiler keeps, and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.act = nn.ReLU()
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, *, shift: Tensor) -> dict[str, Tensor]:
        hidden = self.act(self.stem(x)) + shift
        return {"logits": self.head(hidden), "hidden": hidden}


def net() -> nn.Module:
    """Return the same model each time."""
    torch.manual_seed(0)
    return Net().eval()


def batch() -> Inputs:
    """Return the same batch each time."""
    generator = torch.Generator().manual_seed(0)
    return Inputs(torch.randn(6, 8, generator=generator), shift=torch.ones(16))


class AOTICompiledModel:
    """Stands for torch's class of that name: a package that runs `function`."""

    __module__ = "torch.export.pt2_archive._package"

    def __init__(
        self, function: Callable[..., Any], names: list[str], device: str = "cpu", count: int = 1
    ) -> None:
        arguments = ((torch.ones(1),) * count, {"shift": torch.ones(1)})
        form = pytree.treespec_dumps(pytree.tree_structure(arguments))
        self.loader = SimpleNamespace(get_call_spec=lambda: [form, ""])
        self._function, self._names, self._device = function, names, device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), torch._C.DisableTorchFunction():  # no function of torch is called
            return self._function(*args, **kwargs)

    def get_constant_fqns(self) -> list[str]:
        """Return the names of the constants that it keeps."""
        return self._names

    def get_metadata(self) -> dict[str, str]:
        """Return where it was compiled for."""
        return {"AOTI_DEVICE_KEY": self._device}


def check_that_outputs_alone_are_judged(model: Any) -> None:
    """Assert what is seen of a package of `Net`."""
    report = Inspector(model).run_inspection(batch())
    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.judgement.passes
    (nothing,) = report.judgement.inconclusive
    assert "its inputs and outputs alone were judged" in nothing.reason
    with torch.no_grad():
        expected = net()(*batch().args, **batch().kwargs)
    assert report[""].activations.count == sum(value.numel() for value in expected.values())
    for layer in ("stem", "head"):
        assert report[layer].status is Status.OPAQUE
        assert "AOTInductor" in report[layer].reason
        assert report[layer].activations is None
        assert report[layer].parameters == {}
    result = compare(net(), model, batch(), strict_names=True)
    assert result.equivalent
    assert "in its outputs alone: no layer inside was compared" in str(result)
    assert "removed" not in str(result)
    assert "folded" not in str(result)
    assert len(result.outputs) == 2


def test_a_package_is_judged_by_its_outputs_alone() -> None:
    """So it is where the compiler kept no constant by name, of which no layer is known."""
    check_that_outputs_alone_are_judged(AOTICompiledModel(net(), ["stem.weight", "head.weight"]))
    report = Inspector(AOTICompiledModel(net(), [])).run_inspection(batch())
    assert list(report.observation.layers) == [""]
    assert report.verdict is Verdict.INCONCLUSIVE


def test_outputs_that_are_wrong_fail() -> None:
    """A NaN is a violation, and another output a divergence of the model itself."""

    def broken(x: Tensor, *, shift: Tensor) -> Any:
        outputs = net()(x, shift=shift)
        outputs["logits"][0, 0] = torch.nan
        return outputs

    model = AOTICompiledModel(broken, ["stem.weight"])
    report = Inspector(model).run_inspection(batch())
    assert report.verdict is Verdict.UNHEALTHY
    assert report.violations[0].check == "finite"
    result = compare(net(), model, batch())
    assert not result.equivalent
    assert result.first_divergence is not None
    assert result.first_divergence.layer == ""
    assert "no layer inside the candidate can be seen" in str(result)
    assert "is gone" not in str(result)


def test_batches_of_another_form_are_refused() -> None:
    """The library reads its inputs as it was compiled for them, whatever they are."""
    x, shift = torch.ones(6, 8), torch.ones(16)
    model = AOTICompiledModel(net(), [])
    inspector = Inspector(model)
    for wrong, said in (
        (x, "1 positional argument and shift=, and the batch is 1 positional argument"),
        (Inputs(x, x, shift=shift), "the batch is 2 positional arguments and shift="),
        (Inputs((x, x), shift=shift), "2 values nested in its arguments, and the batch has 3"),
    ):
        with pytest.raises(InspectionError, match=said):
            inspector.run_inspection(wrong)
    elsewhere = Inspector(AOTICompiledModel(net(), [], device="cuda"))
    with pytest.raises(InspectionError, match="compiled for 'cuda', and the batch lies on 'cpu'"):
        elsewhere.run_inspection(batch())
    with pytest.raises(InspectionError, match="there is no backward pass"):
        inspector.run_inspection(batch(), backward=True)
    with pytest.raises(InspectionError, match="a compiled package can only be the candidate"):
        compare(model, net(), batch())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_file_that_aotinductor_compiled(tmp_path: Path) -> None:
    """The file is found to be a package; batches of other dtypes and shapes are refused by it."""
    program = torch.export.export(net(), batch().args, batch().kwargs)
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    loaded = torch._inductor.aoti_load_package(path)
    for model in (path, Path(path), loaded):
        check_that_outputs_alone_are_judged(model)
    x, shift = batch().args[0], batch().kwargs["shift"]
    inspector = Inspector(path)
    for wrong, said in ((x.double(), "unmatched dtype"), (x[:, :4], "unmatched dim value")):
        with pytest.raises(RuntimeError, match=said):
            inspector.run_inspection(Inputs(wrong, shift=shift))
