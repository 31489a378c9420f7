"""What stands in padding has no effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth.report import Outcome
from tests.probes.models import Reader, found, probed, rows, texts

PROBE = "padding"
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("faults", "layer", "cause"),
    [
        ({"attends": False}, "block.softmax", "attention"),
        ({"pools": False}, "", "pools over all places"),
    ],
)
def test_padding_that_has_an_effect_is_located(
    faults: dict[str, Any], layer: str, cause: str
) -> None:
    """Attended padding at the softmax, pooled padding in the code that pools."""
    report = probed(Reader(**faults), texts(), CLASSES, probes=PROBE)
    assert [name for name, _ in found(report, PROBE)] == [layer]
    assert cause in report.violations[0].cause
    with pytest.raises(AssertionError, match="padding has an effect"):
        report.assert_padding_ignored()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("true_is", ["real", "padding"])
def test_masks_of_any_convention_are_read(side: str, true_is: str) -> None:
    """The side on which all rows agree is real, whatever the mask calls it."""

    class Either(Reader):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return super().forward(ids, mask if true_is == "real" else ~mask)

    batch = {name: t.flip(1) if side == "left" else t for name, t in texts().items()}
    mask = batch["mask"].bool()
    batch["mask"] = mask if true_is == "real" else ~mask
    report = probed(Either(), batch, CLASSES, probes=PROBE)
    assert report.observation.probes[PROBE].outcome is Outcome.JUDGED
    report.assert_padding_ignored()
    assert found(probed(_wrong(Either()), batch, CLASSES, probes=PROBE), PROBE)


def _wrong(model: Reader) -> Reader:
    model.pools = False
    return model


def test_masks_of_texts_that_are_all_padded_are_read_by_the_value_in_padding() -> None:
    """Rows agree on both sides: padding is where one and the same id stands."""
    batch = {name: F.pad(tensor, (0, 2)) for name, tensor in texts().items()}
    assert probed(Reader(), batch, CLASSES).observation.probes[PROBE].outcome is Outcome.JUDGED
    probed(Reader(), batch, CLASSES).assert_padding_ignored()
    assert found(probed(Reader(pools=False), batch, CLASSES), PROBE)


def test_lengths_are_read_by_their_argument() -> None:
    """An integer for each sample, called len..., beside what is that long."""

    class Packed(nn.Module):
        def __init__(self, packs: bool) -> None:
            super().__init__()
            self.rnn, self.head, self.packs = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3), packs

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            if self.packs:
                x = nn.utils.rnn.pack_padded_sequence(
                    x, lengths, batch_first=True, enforce_sorted=False
                )
            return self.head(self.rnn(x)[1][0])

    lengths = torch.tensor([3, 7, 5, 4])
    x = torch.randn(4, 7, 4) * (torch.arange(7) < lengths.unsqueeze(1)).unsqueeze(-1)
    y = torch.tensor([0, 1, 2, 0])
    probed(Packed(True), (x, lengths), y, probes=PROBE).assert_padding_ignored()
    assert found(probed(Packed(False), (x, lengths), y, probes=PROBE), PROBE)[0][0] == "rnn"


def test_a_loss_over_padding_is_warned_of() -> None:
    """No output changes, and the loss does."""

    class Tagger(Reader):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.head(self.block(self.words(ids), mask))

    target = torch.randint(0, 3, (6, 9))

    def everywhere(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    report = probed(Tagger(), texts(), target, loss=everywhere, probes=PROBE)
    assert report.warnings[-1].role == "loss"
    masked = target.masked_fill(texts()["mask"] == 0, -100)
    report = probed(Tagger(), texts(), masked, loss=everywhere, probes=PROBE)
    assert found(report, PROBE) == []


def test_first_and_second_sentences_are_no_padding() -> None:
    """What may be a mask and is not named so is judged where one value stands in its padding."""

    class Kinds(Reader):
        def forward(self, ids: Tensor, kind: Tensor) -> Tensor:
            return self.head(self.block(self.words(ids) + kind.unsqueeze(-1)).mean(1))

    kind = texts()["mask"]
    batch = {"ids": torch.randint(1, 20, (6, 9)), "kind": kind}
    report = probed(Kinds(), batch, CLASSES, probes=PROBE)
    assert "may show padding or something else" in report.observation.probes[PROBE].reason


def test_padding_can_be_said() -> None:
    """A mask in a form of one's own cannot be read: padding= says where it is."""

    class Additive(Reader):
        def forward(self, ids: Tensor, bias: Tensor) -> Tensor:
            return super().forward(ids, bias[:, 0, 0] == 0)

    made = texts()
    padding = made["mask"] == 0
    batch = {"ids": made["ids"], "bias": (padding.float() * -1e9)[:, None, None]}
    assert "say padding=" in probed(Additive(), batch, CLASSES).observation.probes[PROBE].reason
    probed(Additive(), batch, CLASSES, padding=padding).assert_padding_ignored()
    assert found(probed(Additive(pools=False), batch, CLASSES, padding=padding), PROBE)


def test_a_batch_without_padding_does_not_apply() -> None:
    """A table has none, and a mask of ones shows none."""
    assert probed(nn.Linear(12, 3), *rows()).observation.probes[PROBE].reason
    whole = {"ids": torch.randint(1, 20, (6, 9)), "mask": torch.ones(6, 9)}
    record = probed(Reader(), whole, CLASSES).observation.probes[PROBE]
    assert record.outcome is Outcome.NOT_APPLICABLE
