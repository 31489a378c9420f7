"""What stands in padding has no effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth.report import Outcome
from tests.probes.models import Block, Reader, found, probed, rows, texts

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


class Placed(Reader):
    """Counts positions by the ids that are no padding, as encoders of texts do."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.places = nn.Embedding(16, 16)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        real = ids != 0
        x = self.words(ids) + self.places(real.long().cumsum(1) * real)
        x = self.block(x, mask if self.attends else None)
        shown = mask.unsqueeze(-1).float()
        return self.head((x * shown).sum(1) / shown.sum(1) if self.pools else x.mean(1))


@pytest.mark.parametrize("raises", [False, True])
def test_what_a_model_derives_of_ids_is_no_effect_of_padding(raises: bool) -> None:
    """Other ids move the positions of left-padded texts, or raise; other rows for them do not."""

    class Picky(Placed):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            if raises and int((ids != 0).sum()) != 39:
                raise ValueError("as many places as the image has patches")
            return super().forward(ids, mask)

    batch = {name: tensor.flip(1) for name, tensor in texts().items()}
    report = probed(Picky(), batch, CLASSES, probes=PROBE)
    record = report.observation.probes[PROBE]
    assert record.outcome is Outcome.JUDGED
    assert "derives positions" in record.notes[0]
    assert found(report, PROBE) == []
    leaks = probed(Picky(pools=False), batch, CLASSES, probes=PROBE)
    assert [v.layer for v in leaks.violations] == [""]


def test_another_sequence_as_long_is_no_padding() -> None:
    """A decoder's words, as many as an encoder's, stay where the encoder's mask shows padding."""

    class Translator(nn.Module):
        def __init__(self, leaks: bool) -> None:
            super().__init__()
            self.reader, self.rnn = Reader(pools=not leaks), nn.GRU(16, 16, batch_first=True)

        def forward(self, ids: Tensor, mask: Tensor, written: Tensor) -> Tensor:
            read = self.reader(ids, mask)
            return self.rnn(self.reader.words(written))[0] + read.sum(1)[:, None, None]

    batch = {name: tensor.flip(1) for name, tensor in texts().items()}
    batch["written"] = torch.randint(1, 20, (6, 9))
    assert found(probed(Translator(leaks=False), batch, probes=PROBE), PROBE) == []
    assert found(probed(Translator(leaks=True), batch, probes=PROBE), PROBE)


def test_steps_may_be_joined_to_others() -> None:
    """Words before patches: what was made of padding is no real place of the joined output."""

    class Both(Reader):
        def forward(self, ids: Tensor, mask: Tensor, patches: Tensor) -> Tensor:
            x = torch.cat([self.words(ids), patches], 1)
            seen = torch.cat([mask, torch.ones(len(mask), 4)], 1)
            return self.block(x, seen if self.attends else None)

    batch = texts() | {"patches": torch.randn(6, 4, 16)}
    assert found(probed(Both(), batch, probes=PROBE), PROBE) == []
    report = probed(Both(attends=False), batch, probes=PROBE)
    assert found(report, PROBE)[0][0] == "block.softmax"

    class First(Both):
        def forward(self, ids: Tensor, mask: Tensor, patches: Tensor) -> Any:
            joined = super().forward(ids, mask, patches)
            return joined, joined[:, 0]

    left = batch | {name: batch[name].flip(1) for name in ("ids", "mask")}
    assert "no loss was given" in probed(First(), left, probes=PROBE).warnings[-1].cause


class Merging(Reader):
    """Takes the mean of two steps at a time, and gives both of them what is made of that."""

    def __init__(self, coarse: nn.Module) -> None:
        super().__init__()
        self.coarse = coarse

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.block(self.words(ids), mask)
        merged = self.coarse(F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2))
        return merged.repeat_interleave(2, dim=1)


def test_steps_that_are_merged_at_the_border_are_warned_of() -> None:
    """What only padding in the pair of the last real step does may be meant, other is not."""
    batch = texts(steps=10)
    report = probed(Merging(nn.Linear(16, 16)), batch, probes=PROBE)
    assert not report.violations
    assert "one step of several" in report.warnings[-1].cause
    assert probed(Merging(Block(16, causal=False)), batch, probes=PROBE).violations


class Stateful(nn.Module):
    """A recurrence over padding that returns its last state as well, of one layer or of each."""

    def __init__(self, layered: bool) -> None:
        super().__init__()
        self.layered = layered
        self.words, self.rnn = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        steps, last = self.rnn(self.words(ids))
        return steps, last.permute(1, 2, 0) if self.layered else last[0]


@pytest.mark.parametrize("layered", [False, True])
def test_a_state_beside_the_steps_counts_where_the_loss_reads_it(layered: bool) -> None:
    """It fails where it is read, is nothing where it is not, and is warned of without a loss."""
    batch = texts()

    def of_steps(output: Any, target: Tensor) -> Tensor:
        return (output[0] * batch["mask"].unsqueeze(-1)).square().mean()

    def of_state(output: Any, target: Tensor) -> Tensor:
        return output[1].square().mean()

    assert (
        found(probed(Stateful(layered), batch, CLASSES, loss=of_steps, probes=PROBE), PROBE) == []
    )
    assert probed(Stateful(layered), batch, CLASSES, loss=of_state, probes=PROBE).violations
    report = probed(Stateful(layered), batch, probes=PROBE)
    assert not report.violations
    assert "no loss was given" in report.warnings[-1].cause


@pytest.mark.parametrize("counts_all", [False, True])
def test_the_first_real_step_is_asked_of_the_padding_before_it(counts_all: bool) -> None:
    """A loss that looks ahead reads one padded place of left-padded texts: no more is a fault."""
    batch = {name: tensor.flip(1) for name, tensor in texts().items()}

    class Writer(Reader):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return nn.functional.linear(self.block(self.words(ids), mask), self.words.weight)

    def ahead(output: Tensor, target: Tensor) -> Tensor:
        labels = target if counts_all else target.masked_fill(batch["mask"] == 0, -100)
        return F.cross_entropy(output[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    report = probed(Writer(), batch, batch["ids"], loss=ahead, probes=PROBE)
    assert bool(found(report, PROBE)) is counts_all
