"""The architectures of the transformers library: each class, small, from its own configuration."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (  # what most models import, once before the sweep starts processes
    CONFIG_MAPPING,
    DetrForObjectDetection,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    T5ForConditionalGeneration,
    Wav2Vec2ForCTC,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from benchmarks.zoo.architecture import Architecture, NotBuiltError
from benchmarks.zoo.shrinking import FRAMES, VOCABULARY, Sizes, shrunk
from corpus.subject import Subject

SHARED = (
    DetrForObjectDetection,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    T5ForConditionalGeneration,
    Wav2Vec2ForCTC,
)
LARGEST = 20_000_000
PATIENCE = 4.0
"""Seconds of processor time after which no other batch is tried."""
BATCH = 4
LENGTH = 24
CLASSES = 3

TASKS = {
    "image classification": "MODEL_FOR_IMAGE_CLASSIFICATION",
    "semantic segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION",
    "universal segmentation": "MODEL_FOR_UNIVERSAL_SEGMENTATION",
    "object detection": "MODEL_FOR_OBJECT_DETECTION",
    "depth estimation": "MODEL_FOR_DEPTH_ESTIMATION",
    "audio classification": "MODEL_FOR_AUDIO_CLASSIFICATION",
    "speech recognition": "MODEL_FOR_CTC",
    "speech to text": "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "x-vectors": "MODEL_FOR_AUDIO_XVECTOR",
    "video classification": "MODEL_FOR_VIDEO_CLASSIFICATION",
    "masked images": "MODEL_FOR_MASKED_IMAGE_MODELING",
    "zero-shot images": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION",
    "time series": "MODEL_FOR_TIME_SERIES_PREDICTION",
    "time series classification": "MODEL_FOR_TIME_SERIES_CLASSIFICATION",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "masked language model": "MODEL_FOR_MASKED_LM",
    "causal language model": "MODEL_FOR_CAUSAL_LM",
    "next sentence": "MODEL_FOR_NEXT_SENTENCE_PREDICTION",
    "pretraining": "MODEL_FOR_PRETRAINING",
    "question answering": "MODEL_FOR_QUESTION_ANSWERING",
    "token classification": "MODEL_FOR_TOKEN_CLASSIFICATION",
    "sequence classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "images and text to text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "zero-shot detection": "MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION",
    "visual questions": "MODEL_FOR_VISUAL_QUESTION_ANSWERING",
    "masks": "MODEL_FOR_MASK_GENERATION",
    "base": "MODEL",
}

RECIPES: tuple[Sizes, ...] = (
    {"width": 64, "wide": 96, "image": 32},
    {"width": 64, "wide": 64, "image": 64},
    {"width": 1 << 20, "wide": 1 << 20, "image": 64},
)


def architectures(per_type: int = 1) -> Iterator[Architecture]:
    """Yield for each type of model its first `per_type` heads in the order of the tasks."""
    taken: dict[str, int] = {}
    seen: set[str] = set()
    for task, mapping in TASKS.items():
        names = getattr(modeling_auto, f"{mapping}_MAPPING_NAMES")
        for model_type, classes in names.items():
            name = classes if isinstance(classes, str) else classes[0]
            is_full = taken.get(model_type, 0) >= per_type
            if model_type not in CONFIG_MAPPING_NAMES or name in seen or is_full:
                continue
            taken[model_type] = taken.get(model_type, 0) + 1
            seen.add(name)
            yield Architecture("transformers", name, _builder(model_type, name, task))


def _builder(model_type: str, name: str, task: str) -> Callable[[], Subject]:
    return lambda: build(model_type, name, task)


def build(model_type: str, name: str, task: str) -> Subject:
    """Return the model with a batch that it takes.

    Raises:
        NotBuiltError: no recipe makes a model that runs.
    """
    seed, until = torch.initial_seed(), time.process_time() + PATIENCE
    errors: list[str] = []
    for sizes in RECIPES:
        torch.manual_seed(seed)
        try:
            config = small_config(model_type, sizes)
            made = _model(getattr(transformers, name), config)
            for batch in batches(made, task):
                if _runs(made, batch, errors):
                    torch.manual_seed(seed)
                    return Subject(_model(type(made), config).train(), batch)
                if time.process_time() > until:
                    break
        except Exception as error:  # noqa: BLE001 - a library of 800 configurations
            errors.append(f"{type(error).__name__}: {error}")
    raise NotBuiltError(" / ".join(e.partition("\n")[0][:150] for e in dict.fromkeys(errors)))


def _runs(model: nn.Module, batch: dict[str, Any], errors: list[str]) -> bool:
    try:
        with torch.no_grad():
            model.train()(**batch)
    except Exception as error:  # noqa: BLE001 - whatever the model refuses this batch with
        errors.append(f"{type(error).__name__}: {error}")
        return False
    return True


def small_config(model_type: str, sizes: Sizes) -> Any:
    """Return the type's default configuration, shrunk."""
    kind = CONFIG_MAPPING[model_type]
    values = shrunk(kind().to_dict(), sizes)
    values.pop("model_type", None)
    config = kind(**values | {"num_labels": CLASSES, "use_cache": False})
    for part in _parts(config):
        if getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0
    return config


def _model(kind: type[nn.Module], config: Any) -> nn.Module:
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    if count > LARGEST:
        raise NotBuiltError(f"{count:,} parameters")
    return kind(config)


# ---- what a configuration says ------------------------------------------------------------------


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict"):
            yield from _parts(value)


def _number(config: Any, *names: str, default: int) -> int:
    """Return the first number of these names in the configuration or its parts."""
    for part in _parts(config):
        for name in names:
            value = getattr(part, name, None)
            value = value[0] if isinstance(value, list | tuple) and value else value
            if isinstance(value, int):
                return value
    return default


def _ids(config: Any, *shape: int) -> Tensor:
    """Return ids of words, none of them special."""
    top = min(_number(config, "vocab_size", default=VOCABULARY), VOCABULARY)
    return torch.randint(5, max(top - 12, 6), shape)


# ---- batches ------------------------------------------------------------------------------------


def batches(model: nn.Module, task: str) -> Iterator[dict[str, Any]]:
    """Yield batches that may fit, those with labels first."""
    takes = set(inspect.signature(model.forward).parameters)
    for inputs in _inputs(model, takes):
        for labels in _labels(task, takes, model.config, inputs):
            yield inputs | labels
        yield inputs


def _inputs(model: nn.Module, takes: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the inputs of the kind that the model's forward names."""
    text = _text(model.config, takes)
    kinds = (
        ("past_values", _series),
        ("input_features", _spectra),
        ("input_values", _sound),
        ("pixel_values", _images),
        ("pixel_values_videos", _images),
    )
    for name, make in kinds:
        if name in takes:
            yield from make(model.config, takes, text)
            return
    if text:
        yield text
        yield {name: value for name, value in text.items() if name != "attention_mask"}
    else:
        width = _number(model.config, "hidden_size", default=64)
        yield {getattr(model, "main_input_name", "x"): torch.randn(BATCH, LENGTH, width)}


def _text(config: Any, takes: set[str]) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    if "input_ids" in takes:
        made["input_ids"] = _ids(config, BATCH, LENGTH)
        made["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if "decoder_input_ids" in takes:
        made["decoder_input_ids"] = _ids(config, BATCH, LENGTH)
    if "bbox" in takes:
        corner = torch.randint(0, 40, (BATCH, LENGTH, 2))
        made["bbox"] = torch.cat([corner, corner + torch.randint(1, 40, corner.shape)], -1)
    return {name: value for name, value in made.items() if name in takes}


def _series(config: Any, takes: set[str], text: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    context = _number(config, "context_length", default=32)
    ahead = _number(config, "prediction_length", default=8) or 8
    channels = _number(config, "num_input_channels", default=1)
    past = {"past_values": torch.randn(BATCH, context, channels)}
    yield past | {"future_values": torch.randn(BATCH, ahead, channels)}
    yield past | {"target_values": torch.randint(0, CLASSES, (BATCH,))}
    yield past
    steps = context + max(getattr(config, "lags_sequence", None) or [0])
    times = _number(config, "num_time_features", default=0)
    yield {
        "past_values": torch.randn(BATCH, steps),
        "past_time_features": torch.randn(BATCH, steps, times),
        "past_observed_mask": torch.ones(BATCH, steps),
        "future_values": torch.randn(BATCH, ahead),
        "future_time_features": torch.randn(BATCH, ahead, times),
    }


def _spectra(config: Any, takes: set[str], text: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    mels = _number(config, "num_mel_bins", "feature_size", "n_mels", default=80)
    longest = _number(config, "max_source_positions", default=32)
    text = {name: value for name, value in text.items() if name != "attention_mask"}
    for shape in ((mels, 2 * longest), (64, mels), (64, 2 * mels)):
        yield text | {"input_features": torch.randn(BATCH, *shape)}


def _sound(config: Any, takes: set[str], text: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    mels = _number(config, "num_mel_bins", default=128)
    longest = min(_number(config, "max_length", default=128), 1024)
    text = {name: value[:2] for name, value in text.items() if name != "attention_mask"}
    for shape in ((4000,), (1, 4000), (longest, mels)):
        yield text | {"input_values": torch.randn(2, *shape)}


def _images(config: Any, takes: set[str], text: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    key = "pixel_values" if "pixel_values" in takes else "pixel_values_videos"
    for pixels in _pixels(config):
        given: dict[str, Any] = {name: value[: len(pixels)] for name, value in text.items()}
        if "input_ids" in given:
            yield from _with_image_tokens(given, key, pixels, config, takes)
        if "bool_masked_pos" in takes:
            patch = _number(config, "patch_size", default=8)
            tubes = pixels.shape[1] // _number(config, "tubelet_size", default=2)
            patches = (pixels.shape[-1] // patch) ** 2 * (tubes if pixels.ndim == 5 else 1)
            mask = torch.zeros(len(pixels), patches, dtype=torch.bool)
            mask[:, : patches // 2] = True
            yield given | {key: pixels, "bool_masked_pos": mask}
        yield given | {key: pixels}


def _pixels(config: Any) -> Iterator[Tensor]:
    side = _number(config, "image_size", "input_size", "img_size", default=64)
    channels = _number(config, "num_channels", "in_chans", default=3)
    frames = min(_number(config, "num_frames", "frames_per_clip", default=FRAMES), 16)
    yield torch.randn(BATCH, channels, side, side)
    yield torch.randn(BATCH, channels, 64, 64)
    yield torch.randn(2, frames, channels, side, side)


def _with_image_tokens(
    given: dict[str, Any], key: str, pixels: Tensor, config: Any, takes: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield token ids with as many placeholders in them as an image may have features."""
    token = _number(config, "image_token_id", "image_token_index", default=-1)
    if token < 0 or pixels.ndim != 4:
        return
    n, patch = len(pixels), _number(config, "patch_size", default=8)
    side = pixels.shape[-1] // patch
    for count in (side**2, side**2 // 4, side**2 + 1):
        words = _ids(config, n, 4), torch.full((n, count), token), _ids(config, n, 12)
        ids = torch.cat(words, 1)
        made = {"input_ids": ids, "attention_mask": torch.ones_like(ids), key: pixels}
        if "image_sizes" in takes:
            made["image_sizes"] = torch.tensor([list(pixels.shape[-2:])] * n)
        if "image_grid_thw" in takes:
            tubes = _number(config, "temporal_patch_size", default=2)
            made[key] = torch.randn(n * side**2, pixels.shape[1] * tubes * patch**2)
            made["image_grid_thw"] = torch.tensor([[1, side, side]] * n)
        if "mm_token_type_ids" in takes:
            made["mm_token_type_ids"] = (ids == token).long()
        yield made


# ---- labels -------------------------------------------------------------------------------------


def _labels(
    task: str, takes: set[str], config: Any, inputs: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield labels as the task's loss takes them."""
    n, ids = len(next(iter(inputs.values()))), inputs.get("input_ids")
    make = _BY_TASK.get(task)
    if make is not None:
        yield from (made for made in make(n, inputs) if takes.issuperset(made))
    if "labels" not in takes:
        return
    if task in ("speech to text", "sequence to sequence"):
        yield {"labels": _ids(config, n, LENGTH)}
    elif ids is not None and task in ("masked language model", "pretraining"):
        chosen = torch.rand(ids.shape) < 0.2
        chosen[:, 3] = True
        masked = {"labels": torch.where(chosen, ids, -100)}
        if "next_sentence_label" in takes:
            yield masked | {"next_sentence_label": torch.randint(0, 2, (n,))}
        yield masked
    elif ids is not None and make is None:
        yield {"labels": ids.masked_fill(ids >= VOCABULARY - 12, -100)}


def _classes(n: int, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"labels": torch.randint(0, CLASSES, (n,))}


def _token_classes(n: int, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"labels": torch.randint(0, CLASSES, inputs["input_ids"].shape)}


def _spans(n: int, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    places = {name: torch.randint(0, LENGTH, (n,)) for name in ("start_positions", "end_positions")}
    yield places


def _pixel_classes(n: int, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    side = inputs["pixel_values"].shape[-1]
    yield {"labels": torch.randint(0, CLASSES, (n, side, side))}


def _depths(n: int, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    side = inputs["pixel_values"].shape[-1]
    yield {"labels": torch.rand(n, side, side)}


def _boxes(n: int, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    boxes = [torch.rand(2, 4) * 0.3 + 0.3 for _ in range(n)]
    yield {"labels": [{"class_labels": torch.tensor([0, 1]), "boxes": box} for box in boxes]}


def _masks(n: int, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    side = inputs["pixel_values"].shape[-1]
    masks = [(torch.rand(2, side, side) < 0.5).float() for _ in range(n)]
    yield {"mask_labels": masks, "class_labels": [torch.tensor([0, 1]) for _ in range(n)]}


_BY_TASK: dict[str, Callable[[int, dict[str, Any]], Iterator[dict[str, Any]]]] = {
    "image classification": _classes,
    "video classification": _classes,
    "audio classification": _classes,
    "sequence classification": _classes,
    "x-vectors": _classes,
    "next sentence": lambda n, inputs: iter([{"labels": torch.randint(0, 2, (n,))}]),
    "token classification": _token_classes,
    "question answering": _spans,
    "semantic segmentation": _pixel_classes,
    "universal segmentation": _masks,
    "object detection": _boxes,
    "depth estimation": _depths,
    "speech recognition": lambda n, inputs: iter([{"labels": torch.randint(5, 30, (n, 4))}]),
    "visual questions": lambda n, inputs: iter([{"labels": torch.rand(n, CLASSES)}]),
}
