"""The image models of timm and torchvision, the smallest of each kind, on small images."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases.subject import Subject
from benchmarks.zoo.architecture import Architecture, NotBuiltError

CLASSES = 10
BATCH = 8
LARGEST = 30_000_000
SIDES = (64, 96, 128, 224, 256)


def architectures() -> Iterator[Architecture]:
    """Yield those of timm, then those of torchvision, where they are installed."""
    if find_spec("timm") is not None:
        yield from _timm()
    if find_spec("torchvision") is not None:
        yield from _torchvision()


# ---- timm ---------------------------------------------------------------------------------------


def _timm() -> Iterator[Architecture]:
    import timm

    for module in timm.list_modules():
        kinds: dict[str, str] = {}
        for name in timm.list_models(module=module):
            kinds.setdefault(_kind(name), name)
        for name in list(kinds.values())[:2]:
            yield Architecture("timm", name, lambda name=name: _timm_subject(name))


def _kind(name: str) -> str:
    """Return the name up to its first size."""
    return re.split(r"_?\d|_(?:tiny|small|base|nano|pico|atto|femto|xs|s|xxs|m|t|mini)\b", name)[0]


def _timm_subject(name: str) -> Subject:
    import timm

    for side in SIDES:
        for options in ({"img_size": side}, {}):
            try:
                with torch.device("meta"):
                    made = timm.create_model(name, num_classes=CLASSES, **options)
                _bounded(made)
                made = timm.create_model(name, num_classes=CLASSES, **options)
            except NotBuiltError:
                raise
            except Exception:  # noqa: BLE001 - not all take a size, nor build without memory
                continue
            if _runs(made, side):
                return Subject(made.train(), *_images(side), F.cross_entropy)
    raise NotBuiltError("no size of images fits")


def _bounded(model: nn.Module) -> None:
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > LARGEST:
        raise NotBuiltError(f"{count:,} parameters")


def _runs(model: nn.Module, side: int) -> bool:
    try:
        with torch.no_grad():
            output = model.eval()(torch.randn(1, 3, side, side))
    except Exception:  # noqa: BLE001 - whatever the model refuses this size with
        return False
    return isinstance(output, Tensor)


def _images(side: int) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 3, side, side), torch.randint(0, CLASSES, (BATCH,))


# ---- torchvision --------------------------------------------------------------------------------

_SMALLEST = [
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet",
    "inception_v3", "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small",
    "regnet_x_400mf", "regnet_y_400mf", "resnet18", "resnet50", "resnext50_32x4d",
    "shufflenet_v2_x0_5", "squeezenet1_0", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11",
    "vgg11_bn", "vit_b_32", "wide_resnet50_2",
]  # fmt: skip
_VIDEO = ["mc3_18", "mvit_v2_s", "r2plus1d_18", "r3d_18", "s3d", "swin3d_t"]
_SEGMENTATION = ["deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large"]
_DETECTION = ["fasterrcnn_mobilenet_v3_large_320_fpn", "fcos_resnet50_fpn",
              "retinanet_resnet50_fpn", "ssdlite320_mobilenet_v3_large"]  # fmt: skip


def _torchvision() -> Iterator[Architecture]:
    for name in _SMALLEST:
        yield Architecture("torchvision", name, lambda name=name: _classifier(name))
    for name in _VIDEO:
        yield Architecture("torchvision", name, lambda name=name: _video(name))
    for name in _SEGMENTATION:
        yield Architecture("torchvision", name, lambda name=name: _segmenter(name))
    for name in _DETECTION:
        yield Architecture("torchvision", name, lambda name=name: _detector(name))
    yield Architecture("torchvision", "raft_small", _flow)


def _make(name: str, **options: Any) -> nn.Module:
    from torchvision.models import get_model

    return get_model(name, weights=None, **options).train()


def _classifier(name: str) -> Subject:
    side = 299 if name.startswith("inception") else 224 if "vit" in name else 96
    batch = 4 if side > 96 else BATCH
    made = _make(name, num_classes=CLASSES)
    images, labels = _images(side)
    loss = _main_output if name in ("googlenet", "inception_v3") else F.cross_entropy
    return Subject(made, images[:batch], labels[:batch], loss)


def _main_output(output: Any, target: Tensor) -> Tensor:
    """Return the loss of the logits and of what helps to train them."""
    if isinstance(output, Tensor):
        return F.cross_entropy(output, target)
    parts = [part for part in output if part is not None]
    return sum(F.cross_entropy(part, target) for part in parts)  # type: ignore[return-value]


def _video(name: str) -> Subject:
    side = 224 if name.startswith("mvit") else 64
    frames = 16 if name in ("mvit_v2_s", "s3d") else 8
    batch = 1 if side == 224 else 4
    labels = torch.randint(0, CLASSES, (batch,))
    made = _make(name, num_classes=CLASSES)
    return Subject(made, torch.randn(batch, 3, frames, side, side), labels, F.cross_entropy)


def _segmenter(name: str) -> Subject:
    options = {"weights_backbone": None, "num_classes": CLASSES}
    labels = torch.randint(0, CLASSES, (4, 64, 64))
    return Subject(_make(name, **options), torch.randn(4, 3, 64, 64), labels, _pixelwise)


def _pixelwise(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output["out"], target)


def _detector(name: str) -> Subject:
    made = _make(name, weights_backbone=None, num_classes=CLASSES)
    images = [torch.rand(3, 96, 96) for _ in range(2)]
    boxes = [torch.tensor([[10.0, 10.0, 50.0, 60.0], [30.0, 20.0, 80.0, 90.0]]) for _ in images]
    targets = [{"boxes": one, "labels": torch.tensor([1, 2])} for one in boxes]
    return Subject(made, (images, targets), None, _summed)


def _summed(output: Any) -> Tensor:
    """Return the sum of the losses that the model returns; of its boxes in evaluation mode."""
    if isinstance(output, dict):
        return sum(output.values())  # type: ignore[return-value]
    return sum(found["scores"].sum() for found in output)  # type: ignore[return-value]


def _flow() -> Subject:
    made = _make("raft_small")
    images = tuple(torch.rand(1, 3, 128, 128) * 2 - 1 for _ in range(2))
    return Subject(made, images, torch.randn(1, 2, 128, 128), _end_point)


def _end_point(output: list[Tensor], target: Tensor) -> Tensor:
    return sum((flow - target).abs().mean() for flow in output)  # type: ignore[return-value]
