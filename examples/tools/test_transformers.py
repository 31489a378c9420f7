"""transformers: a model from its config, a batch from its dummy inputs, and a watched `Trainer`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pytest_modelhealth import ModelHealthError

transformers = pytest.importorskip("transformers")

# what the trainer and accelerate say about themselves
pytestmark = pytest.mark.filterwarnings("ignore:::(transformers|accelerate|torch)")

BEGIN = 17
"""Ink counts 0 to 16; the token after them begins the image."""


@pytest.fixture
def bert():
    """A BERT with two layers that reads an image as text, a token for each two by two pixels."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=BEGIN + 1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=17,
        num_labels=10,
        initializer_range=0.2,  # that of 0.02 is made for a width of 768
    )
    return transformers.BertForSequenceClassification(config)


@pytest.fixture
def samples(digits):
    """What a tokenized data set of transformers holds: a mapping a sample."""
    pixels = (F.avg_pool2d(digits.train_images, 2).flatten(1) * 16).long()
    begin = torch.full((len(pixels), 1), BEGIN)
    ids = torch.cat([begin, pixels], dim=1)
    return [
        {"input_ids": one, "labels": label}
        for one, label in zip(ids[:640], digits.train_labels[:640], strict=True)
    ]


@pytest.fixture
def trainer(bert, samples, tmp_path):
    """A trainer of one epoch, with what most people leave as it is."""
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=32,
        num_train_epochs=1,
        learning_rate=3e-3,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        seed=0,
    )
    return transformers.Trainer(bert, arguments, train_dataset=samples)


@pytest.mark.parametrize("name", ["GPT2", "Llama", "T5"])
def test_a_model_from_its_config_is_healthy(name, inspector):
    """Every language model of transformers brings inputs to try it with."""
    torch.manual_seed(0)
    sizes = {
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
        "Llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                  "num_attention_heads": 2},
        "T5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
               "decoder_start_token_id": 0},
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(vocab_size=64, **sizes[name])
    model = getattr(transformers, f"{name}Model")(config)
    inspector(model.train()).run_inspection(model.dummy_inputs).assert_healthy()


def test_a_batch_of_the_trainer_is_healthy(trainer, inspector):
    """The batch as the collator makes it, with its labels: the model's own loss."""
    batch = next(iter(trainer.get_train_dataloader()))
    inspector(trainer.model.train()).run_inspection(batch).assert_healthy()


def test_a_step_of_the_trainer_trains_the_model(trainer, inspector):
    """With its optimizer, schedule, clipping and accumulation; it is left as it was."""
    batch = next(iter(trainer.get_train_dataloader()))
    inspector(trainer.model).run_step(trainer, batch=batch).assert_healthy()


def test_an_epoch_is_healthy(trainer, inspector):
    """The `with` takes the monitor off where training raises, of which no callback is told."""
    with inspector(trainer.model).monitor(every=5) as monitor:
        trainer.add_callback(monitor.callback("transformers"))
        trainer.train()
    monitor.assert_healthy()
    assert monitor.history.loss[-1] < monitor.history.loss[0], monitor


def test_a_head_that_is_cut_off_is_found(bert, samples, inspector):
    """Someone keeps the encoder from learning, for one experiment, and forgets it there."""
    encode = bert.bert.forward

    def forward(*args, **kwargs):
        output = encode(*args, **kwargs)
        output.pooler_output = output.pooler_output.detach()
        return output

    bert.bert.forward = forward
    batch = transformers.default_data_collator(samples[:32])
    with pytest.raises(ModelHealthError, match=r"bert\.pooler\S* \(missing_gradients\)"):
        inspector(bert).run_inspection(batch).assert_healthy()
