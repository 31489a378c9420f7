"""Models trained on scikit-learn's digits and tables, and what practice then does with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.zoo.architecture import Architecture
from corpus.models import small as models
from corpus.subject import Healthy, Subject, loss_of, run, trained

KINDS = [
    models.mlp, models.sequential, models.cnn, models.resnet, models.lstm, models.gru, models.gpt,
    models.bert, models.vit, models.unet, models.autoencoder, models.moe, models.graph,
    models.recommender, models.seq2seq, models.vae, models.regression, models.contrastive,
]  # fmt: skip
SOME = [models.mlp, models.cnn, models.lstm, models.gpt]


def architectures() -> Iterator[Architecture]:
    """Yield each kind after each treatment."""
    for treatment, (treat, kinds) in TREATMENTS.items():
        for kind in kinds:
            name = f"{kind.__name__}, {treatment}"
            yield Architecture("trained", name, lambda t=treat, k=kind: t(k))


def _train(one: Subject, steps: int, rate: float = 3e-3, decay: float = 0.0) -> Subject:
    """Train on batches of the subject's own; on its one batch where it draws no others."""
    parameters = [p for p in one.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)
    for _ in range(steps):
        inputs, target = one.draw(64) if one.draw else (one.inputs, one.target)
        optimizer.zero_grad()
        loss_of(one, run(one.model, inputs), target).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return one


def _weighted(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in list(model.modules()):
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            yield module, "weight"


def _overtrained(kind: Healthy) -> Subject:
    """Return the subject with its one batch learnt by heart."""
    one = trained(kind)
    one.draw = None
    return _train(one, 300)


def _pruned(kind: Healthy) -> Subject:
    one = trained(kind)
    for module, name in _weighted(one.model):
        prune.l1_unstructured(module, name, amount=0.9)
    return _train(one, 20)


def _pruned_for_good(kind: Healthy) -> Subject:
    one = _pruned(kind)
    for module, name in _weighted(one.model):
        prune.remove(module, name)
    return one


def _decayed(kind: Healthy) -> Subject:
    return _train(trained(kind), 60, rate=1e-2, decay=5.0)


def _frozen(kind: Healthy) -> Subject:
    """Freeze all but the last layer with weights."""
    one = trained(kind)
    one.model.requires_grad_(False)
    last = [module for module in one.model.modules() if list(module.parameters(recurse=False))][-1]
    last.requires_grad_(True)
    return one


def _averaged(kind: Healthy) -> Subject:
    one = trained(kind)
    average = AveragedModel(one.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(5):
        average.update_parameters(_train(one, 2).model)
    one.model = average
    return one


def _normed(norm: Callable[[nn.Module], object]) -> Callable[[Healthy], Subject]:
    def treat(kind: Healthy) -> Subject:
        one = trained(kind)
        for module, _ in _weighted(one.model):
            norm(module)
        return _train(one, 10)

    return treat


def _wrapped(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Healthy], Subject]:
    def treat(kind: Healthy) -> Subject:
        one = trained(kind)
        one.model = wrap(one.model)
        return one

    return treat


def _of(samples: int) -> Callable[[Healthy], Subject]:
    def treat(kind: Healthy) -> Subject:
        one = trained(kind)
        one.inputs, one.target = one.draw(samples)
        return one

    return treat


def _without_loss(kind: Healthy) -> Subject:
    one = trained(kind)
    one.target = one.loss = None
    return one


def _half_precision(kind: Healthy) -> Subject:
    one = trained(kind)
    forward = one.model.forward

    def cast(*args: object, **kwargs: object) -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*args, **kwargs)

    one.model.forward = cast  # type: ignore[method-assign]
    return one


def _quantised(kind: Healthy) -> Subject:
    """Return the subject in quantisation-aware training, observers and fake quantisers inside."""
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    one = trained(kind)
    one.model.qconfig = get_default_qat_qconfig("x86")
    one.model = prepare_qat(one.model.train())
    return _train(one, 20)


def _long(kind: Healthy) -> Subject:
    return trained(kind, 500)


def _one_step(kind: Healthy) -> Subject:
    return _train(kind(), 1)


def _other_optimizer(kind: Healthy) -> Subject:
    one = kind()
    optimizer = torch.optim.SGD(one.model.parameters(), lr=0.03, momentum=0.9)
    for _ in range(80):
        inputs, target = one.draw(64)
        optimizer.zero_grad()
        loss_of(one, run(one.model, inputs), target).backward()
        nn.utils.clip_grad_norm_(one.model.parameters(), 1.0)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return one


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def _copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


Treatment = Callable[[Healthy], Subject]
TREATMENTS: dict[str, tuple[Treatment, list[Healthy]]] = {
    "80 steps": (trained, KINDS),
    "one step": (_one_step, KINDS),
    "SGD": (_other_optimizer, KINDS),
    "500 steps": (_long, SOME),
    "one batch by heart": (_overtrained, KINDS),
    "pruned to a tenth": (_pruned, KINDS),
    "pruned for good": (_pruned_for_good, SOME),
    "decayed weights": (_decayed, KINDS),
    "frozen but for the head": (_frozen, KINDS),
    "moving average": (_averaged, KINDS),
    "weight norm": (_normed(parametrizations.weight_norm), SOME),
    "spectral norm": (_normed(parametrizations.spectral_norm), SOME),
    "data parallel": (_wrapped(nn.DataParallel), SOME),
    "compiled": (_wrapped(_compiled), SOME),
    "deep copy": (_wrapped(_copied), SOME),
    "batch of 1": (_of(1), KINDS),
    "batch of 2": (_of(2), KINDS),
    "without a loss": (_without_loss, KINDS),
    "autocast": (_half_precision, SOME),
    "quantisation-aware": (_quantised, [models.mlp, models.cnn]),
}
