"""Every model builder of torchvision but the quantised ones, untrained, on small images.

The quantised builders are left out: their weights are no floating-point numbers, and nothing can be
differentiated.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models

from benchmarks.zoo.architecture import BATCH, CLASSES, Architecture, images
from corpus.subject import Subject

KINDS = {
    "classification": models,
    "detection": models.detection,
    "segmentation": models.segmentation,
    "video": models.video,
    "optical flow": models.optical_flow,
}
"""Where torchvision registers a kind's builders."""


def architectures() -> Iterator[Architecture]:
    """Yield every builder, a family a kind."""
    for kind, module in KINDS.items():
        for name in models.list_models(module=module):
            modes = ("train",) if kind == "detection" else ("train", "eval")
            yield Architecture(f"torchvision, {kind}", name, partial(_MAKE[kind], name), modes)


def _make(name: str, **options: Any) -> nn.Module:
    return models.get_model(name, weights=None, **options).train()


def _classifier(name: str) -> Subject:
    """Return it with images of the smallest size that it takes."""
    side, batch, options = 64, BATCH, {}
    if name.startswith("vit"):
        side = 56 if name == "vit_h_14" else 64
        options = {"image_size": side}
    elif name.startswith(("maxvit", "inception")):  # windows of 7, a pooling of 17 by 17
        side, batch = 224 if name.startswith("maxvit") else 299, 4
    pixels, labels = images(side, batch)
    return Subject(_make(name, num_classes=CLASSES, **options), pixels, labels, _logits)


def _logits(output: Any, target: Tensor) -> Tensor:
    """Return the loss of the logits, and of those of the heads that help in training."""
    parts = [output] if isinstance(output, Tensor) else [one for one in output if one is not None]
    return sum(F.cross_entropy(part, target) for part in parts)  # type: ignore[return-value]


def _detector(name: str) -> Subject:
    """Return it with two images, each with two objects: their boxes, masks and keypoints."""
    few = {} if name.startswith("ssd") else {"min_size": 96, "max_size": 96}
    if "rcnn" in name:
        few |= {"box_batch_size_per_image": 32, "rpn_post_nms_top_n_test": 50}
        few |= {"box_detections_per_img": 10}
    made = _make(name, weights_backbone=None, num_classes=CLASSES, **few)
    boxes = torch.tensor([[10.0, 10.0, 50.0, 60.0], [30.0, 20.0, 80.0, 90.0]])
    target = {"boxes": boxes, "labels": torch.tensor([1, 2])}
    if name.startswith("maskrcnn"):
        target["masks"] = torch.stack([_filled(box) for box in boxes.long().tolist()])
    if name.startswith("keypoint"):
        target["labels"] = torch.ones(2, dtype=torch.long)
        places = boxes[:, None, :2] + torch.rand(2, 17, 2) * 30
        target["keypoints"] = torch.cat([places, torch.ones(2, 17, 1)], -1)
    pixels = [torch.rand(3, 96, 96) for _ in range(2)]
    return Subject(made, (pixels, [dict(target) for _ in pixels]), None, _losses)


def _filled(box: list[int]) -> Tensor:
    mask = torch.zeros(96, 96, dtype=torch.uint8)
    mask[box[1] : box[3], box[0] : box[2]] = 1
    return mask


def _losses(output: dict[str, Tensor]) -> Tensor:
    """Return the sum of the losses that the model returns in training mode."""
    return sum(output.values())  # type: ignore[return-value]


def _segmenter(name: str) -> Subject:
    aux = {} if name.startswith("lraspp") else {"aux_loss": True}
    made = _make(name, weights_backbone=None, num_classes=CLASSES, **aux)
    labels = torch.randint(0, CLASSES, (4, 64, 64))
    return Subject(made, images(64, 4)[0], labels, _pixelwise)


def _pixelwise(output: dict[str, Tensor], target: Tensor) -> Tensor:
    losses = {name: F.cross_entropy(part, target) for name, part in output.items()}
    return losses["out"] + 0.5 * losses.get("aux", 0.0)


def _video(name: str) -> Subject:
    """Return it with as few and small frames as its positions or its last pooling take."""
    frames, side, batch = (16, 224, 1) if name.startswith(("mvit", "s3d")) else (8, 64, 4)
    clips, labels = torch.randn(batch, 3, frames, side, side), images(1, batch)[1]
    return Subject(_make(name, num_classes=CLASSES), clips, labels, F.cross_entropy)


def _flow(name: str) -> Subject:
    pair = tuple(torch.rand(2, 1, 3, 128, 128) * 2 - 1)
    return Subject(_make(name), pair, torch.randn(1, 2, 128, 128), _end_point)


def _end_point(output: list[Tensor], target: Tensor) -> Tensor:
    return sum((flow - target).abs().mean() for flow in output)  # type: ignore[return-value]


_MAKE = dict(zip(KINDS, (_classifier, _detector, _segmenter, _video, _flow), strict=True))
