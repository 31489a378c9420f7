"""Snapshots recorded in one setting of the machine and read in others: nothing may drift.

Usage: ``python -m benchmarks.environments``

Every setting has a process of its own, since most are read once, when torch is loaded. Each records
four models, then each reads what all of them recorded. That what is read is not simply blind, the
same models with one layer scaled by 1.001 show: they must drift, wherever they were recorded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import header, machine, row
from benchmarks.tools import drift_of, inspect, record
from corpus.models.small import words
from corpus.subject import Subject, subject


@dataclass(frozen=True)
class Setting:
    """One way to run torch.

    Args:
        variables: of the process.
        threads: of torch.
        precision: of products of float32 matrices.
    """

    variables: dict[str, str] = field(default_factory=dict)
    threads: int = 1
    precision: str = "highest"

    def apply(self) -> None:
        """Set what is set from inside the process."""
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision(self.precision)


SETTINGS = {
    "1 thread": Setting(),
    "2 threads": Setting(threads=2),
    **{
        f"{name}={value}": Setting({name: value})
        for name, value in (
            ("ATEN_CPU_CAPABILITY", "avx2"),
            ("ATEN_CPU_CAPABILITY", "default"),
            ("ONEDNN_MAX_CPU_ISA", "AVX2"),
            ("ONEDNN_MAX_CPU_ISA", "SSE41"),
            ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
            ("MKL_ENABLE_INSTRUCTIONS", "SSE4_2"),
        )
    },
    "matmul precision high": Setting(precision="high"),
    "matmul precision medium": Setting(precision="medium"),
}


def bert() -> Subject:
    """Return a BERT-like model of 4 layers."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=18,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        num_labels=10,
    )

    def draw(n: int) -> tuple[dict[str, Tensor], None]:
        ids, labels = words(n)
        return {"input_ids": ids, "labels": labels}, None

    return subject(BertForSequenceClassification(config), draw, None, batch=16)


def gpt2() -> Subject:
    """Return a GPT-2-like model of 4 layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=18, n_embd=64, n_layer=4, n_head=4, n_positions=32)

    def draw(n: int) -> tuple[dict[str, Tensor], None]:
        ids, _ = words(n)
        return {"input_ids": ids, "labels": ids}, None

    return subject(GPT2LMHeadModel(config), draw, None, batch=16)


def resnet50() -> Subject:
    """Return a ResNet with the layers of ResNet-50, a quarter as wide."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[64, 128, 256, 512], num_labels=10)

    def draw(n: int) -> tuple[dict[str, Tensor], None]:
        pixels, labels = torch.randn(n, 3, 64, 64), torch.randint(0, 10, (n,))
        return {"pixel_values": pixels, "labels": labels}, None

    return subject(ResNetForImageClassification(config), draw, None, batch=8)


class Recurrent(nn.Module):
    """An LSTM of two layers on token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(18, 32), nn.Linear(64, 10)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0][:, -1])


def lstm() -> Subject:
    """Return a recurrent model."""
    return subject(Recurrent(), words, F.cross_entropy, batch=32)


MODELS: dict[str, tuple[Callable[[], Subject], str]] = {
    "BERT-like": (bert, "bert.encoder.layer.2.output.dense"),
    "GPT-2-like": (gpt2, "transformer.h.2.mlp.c_proj"),
    "ResNet-50-like": (resnet50, "resnet.encoder.stages.2.layers.3.layer.1.convolution"),
    "LSTM": (lstm, "head"),
}
"""Each with the layer that is scaled by 1.001 to see whether it drifts."""


def build(name: str) -> Subject:
    """Return a model and its batch, the same in every setting."""
    torch.manual_seed(0)
    return MODELS[name][0]()


def record_all(folder: Path, setting: str) -> None:
    """Write a snapshot of each model."""
    for name in MODELS:
        made = build(name)
        (folder / f"{setting} {name}").write_text(record(made, made.model))


def read_all(folder: Path) -> Iterator[tuple[str, str, bool, bool, str]]:
    """Yield setting, model, whether it drifted, whether it did when scaled, and what was said."""
    for name in MODELS:
        made, scaled = build(name), build(name)
        scaled.model.get_submodule(MODELS[name][1]).weight.data *= 1.001
        reports = inspect(made, made.model), inspect(scaled, scaled.model)
        for setting in SETTINGS:
            recorded = (folder / f"{setting} {name}").read_text()
            same, other = (drift_of(recorded, report) for report in reports)
            said = same[0].text if same else ""
            yield setting, name, bool(same), bool(other), said


def _run(action: str, setting: str, folder: Path) -> str:
    """Run one process in a setting."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.environments", action, setting, folder],
        env={**os.environ, "OMP_WAIT_POLICY": "passive", **SETTINGS[setting].variables},
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ).stdout


def main(arguments: list[str]) -> None:
    """Print the table; or do one thing in one setting, as a process of its own."""
    if arguments:
        action, setting, folder = arguments
        SETTINGS[setting].apply()
        if action == "record":
            record_all(Path(folder), setting)
        else:
            print(json.dumps(list(read_all(Path(folder)))))
        return
    print(f"{machine()}\n")
    with tempfile.TemporaryDirectory() as folder:
        for setting in SETTINGS:
            _run("record", setting, Path(folder))
        print(
            header(["read with", "false drifts", "scaled by 1.001: flagged", "first false drift"])
        )
        for setting in SETTINGS:
            found = json.loads(_run("read", setting, Path(folder)))
            wrong = [f"{name} of {where}: {text}" for where, name, bad, _, text in found if bad]
            flagged = sum(scaled for *_, scaled, _ in found)
            cells = f"{len(wrong)} of {len(found)}", f"{flagged} of {len(found)}"
            print(row([setting, *cells, *(wrong[:1] or [""])]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
