"""Generated texts whose length differs from that of the labels, with several tokenizers, collators
and configurations, compared with transformers' Seq2SeqTrainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from side_by_side import LIBRARIES, QUIET, assert_same_history, without_times
from test_compat_seq2seq import NO_LENGTH, found, model, texts
from torch import Tensor

TOKENS = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}


def config(**asked: Any) -> Any:
    return transformers.GenerationConfig(**TOKENS, **asked)


def tokenizer() -> Any:
    """Return a tokenizer with one word a token."""
    words = {"<pad>": 0, "</s>": 1, **{f"w{number}": number for number in range(2, 24)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>"
    )


def ragged(count: int = 6) -> list[dict[str, Any]]:
    """Return texts and labels of several lengths."""
    return [
        {
            "input_ids": (row := text["input_ids"].tolist())[: 3 + number % 3],
            "attention_mask": [1] * (3 + number % 3),
            "labels": row[: 2 + number % 4],
        }
        for number, text in enumerate(texts(count=count))
    ]


def predicted(trainer: Any, data: Any, **given: Any) -> Any:
    output = trainer.predict(data, **given)
    return output.predictions.tolist(), output.label_ids.tolist(), without_times(output.metrics)


def longer(text: dict[str, Any]) -> dict[str, Any]:
    return {**text, "labels": text["labels"].repeat(4)}


def begun(text: dict[str, Any]) -> dict[str, Any]:
    """Add the decoder's inputs, made from the labels."""
    return {**text, "decoder_input_ids": torch.cat([torch.zeros(1).long(), text["labels"][:-1]])}


@NO_LENGTH
@pytest.mark.row("T1", "T3", "T4", "T5")
@pytest.mark.parametrize(
    ("asked", "data", "given"),
    [
        ({"generation_config": config(max_length=5)}, [longer(text) for text in texts()], {}),
        ({"generation_config": config(max_new_tokens=4)}, texts(), {}),
        ({"generation_config": config(max_new_tokens=4)}, texts(), {"max_new_tokens": 30}),
        (
            {"generation_config": config(max_length=6, num_beams=3, num_return_sequences=3)},
            texts(),
            {},
        ),
        ({}, texts(), {"num_beams": 3, "num_return_sequences": 2, "max_length": 6}),
        ({}, [begun(text) for text in texts()], {"max_length": 8}),
        ({"generation_num_beams": 2}, texts(), {"num_beams": None, "max_length": None}),
    ],
    ids=["long labels", "new", "more new", "several", "several asked", "begun", "none"],
)
def test_lengths_and_returned_texts(
    tmp_path: Path, asked: dict[str, Any], data: list[Any], given: dict[str, Any]
) -> None:
    ours, theirs = found(tmp_path, lambda trainer: predicted(trainer, data, **given), **asked)
    assert ours == theirs
    if asked.get("generation_config") is not None and "several" in str(given):
        assert len(ours[0][0]) == 3 * len(data)


@NO_LENGTH
@pytest.mark.row("T1", "T3")
@pytest.mark.parametrize("given", [{"max_new_tokens": 7}, {"max_length": 5}])
def test_a_tokenizer_and_its_collator(tmp_path: Path, given: dict[str, Any]) -> None:
    """Pad labels with -100, and then texts and labels with the tokenizer's padding."""
    results = []
    for name, library in LIBRARIES.items():
        built, words = model(), tokenizer()
        args = library.Seq2SeqTrainingArguments(
            str(tmp_path / name),
            per_device_eval_batch_size=2,
            predict_with_generate=True,
            **QUIET,
        )
        trainer = library.Seq2SeqTrainer(
            built,
            args,
            data_collator=transformers.DataCollatorForSeq2Seq(words, model=built),
            processing_class=words,
        )
        results.append(predicted(trainer, ragged(), **given))
        assert all(isinstance(text, str) for text in words.batch_decode(results[-1][0]))
    assert results[0] == results[1]


@NO_LENGTH
@pytest.mark.row("T1", "T5")
def test_a_step_is_called_by_itself(tmp_path: Path) -> None:
    """Call a prediction step alone. Arguments of None must have no effect, and arguments of one
    step must not last.
    """
    batch = {name: torch.stack([text[name] for text in texts()[:2]]) for name in texts()[0]}

    def act(trainer: Any) -> Any:
        trainer.model.eval()
        asked: list[dict[str, Any]] = [
            {},
            {"max_length": 5, "num_beams": 2},
            {"max_length": None, "num_beams": None},
        ]
        steps = [trainer.prediction_step(trainer.model, batch, False, **each) for each in asked]
        alone = trainer.prediction_step(trainer.model, batch, True)
        return [
            [part.tolist() if isinstance(part, Tensor) else part for part in step]
            for step in (*steps, alone)
        ]

    ours, theirs = found(tmp_path, act)
    assert ours == theirs


@pytest.mark.row("T4")
def test_a_generation_config_that_could_not_be_saved_fails_early(tmp_path: Path) -> None:
    bad = transformers.GenerationConfig(do_sample=False, top_p=0.9)
    for library in LIBRARIES.values():
        args = library.Seq2SeqTrainingArguments(str(tmp_path), generation_config=bad, **QUIET)
        with pytest.raises(ValueError, match="Fix these issues to train your model"):
            library.Seq2SeqTrainer(model(), args)


@NO_LENGTH
@pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces:FutureWarning")
@pytest.mark.row("T1", "T2")
def test_two_berts_are_trained_to_generate(tmp_path: Path) -> None:
    """Repeat a test of transformers up to the first evaluation, which in transformers draws random
    numbers from training's generator.
    """
    words, results = tokenizer(), []

    def measure(prediction: Any) -> dict[str, float]:
        sides = prediction.predictions, prediction.label_ids
        said, wanted = (words.batch_decode(each, skip_special_tokens=True) for each in sides)
        return {"same": float(np.mean([a == b for a, b in zip(said, wanted, strict=True)]))}

    for name, library in LIBRARIES.items():
        torch.manual_seed(0)
        half = transformers.BertConfig(
            vocab_size=24,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
        )
        both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(half, half)
        both.vocab_size = 24
        built = transformers.EncoderDecoderModel(both)
        for key, value in TOKENS.items():
            setattr(built.config, key, value)
        args = library.Seq2SeqTrainingArguments(
            str(tmp_path / name),
            generation_config=config(max_length=8),
            predict_with_generate=True,
            max_steps=3,
            eval_strategy="steps",
            eval_steps=3,
            warmup_steps=1,
            **QUIET,
        )
        trainer = library.Seq2SeqTrainer(
            built,
            args,
            train_dataset=texts(),
            eval_dataset=texts(),
            processing_class=words,
            compute_metrics=measure,
        )
        trainer.train()
        results.append(trainer.state.log_history)
    assert_same_history(*results, rel=1e-5)
