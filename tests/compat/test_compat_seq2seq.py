"""Evaluation by generated texts, compared with transformers' Seq2SeqTrainer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from side_by_side import ARGUMENTS, LIBRARIES, without_times

from drivetrain.compat.arguments import Seq2SeqTrainingArguments
from drivetrain.compat.trainer.seq2seq import Seq2SeqTrainer

NO_LENGTH = pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=24,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config)


def texts(labels: bool = True, count: int = 6) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 24, (6,), generator=draw) for _ in range(count)]
    return [{"input_ids": row, **({"labels": row[:4]} if labels else {})} for row in rows]


def found(tmp_path: Path, act: Any, **asked: Any) -> list[Any]:
    """Return, for each library, the result of `act(trainer)` and the inputs of the metrics."""
    results = []
    for name, library in LIBRARIES.items():
        seen: list[Any] = []

        def measure(prediction: Any, seen: list[Any] = seen) -> dict[str, float]:
            # without generating: logits, and the encoder's states
            tokens = prediction.predictions
            tokens = tokens[0] if isinstance(tokens, tuple) else tokens
            seen.extend((tokens.tolist(), prediction.label_ids.tolist()))
            return {"mean": float(np.mean(tokens))}

        given = {**ARGUMENTS, "per_device_eval_batch_size": 2, "predict_with_generate": True}
        args = library.Seq2SeqTrainingArguments(str(tmp_path / name), **{**given, **asked})
        shared = {"eval_dataset": texts(), "compute_metrics": measure}
        trainer = library.Seq2SeqTrainer(model(), args, **shared)
        results.append((act(trainer), seen))
    return results


@NO_LENGTH
@pytest.mark.row("T1", "T2", "T3", "T5")
@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({}, {}),
        ({"generation_max_length": 9, "generation_num_beams": 2}, {}),
        ({"generation_max_length": 9}, {"max_new_tokens": 25}),
        ({"generation_num_beams": 2}, {"max_length": 7, "num_beams": 1}),
        ({"predict_with_generate": False}, {}),
    ],
)
def test_generated_texts(tmp_path: Path, asked: dict[str, Any], given: dict[str, Any]) -> None:
    def act(trainer: Any) -> Any:
        metrics = without_times(trainer.evaluate(**given))
        output = trainer.predict(texts(), **given)
        predictions = output.predictions
        if isinstance(predictions, tuple):  # logits, and the encoder's states
            predictions = predictions[0]
        return metrics, predictions.tolist(), output.label_ids.tolist()

    ours, theirs = found(tmp_path, act, **asked)
    assert ours == theirs
    if asked == {"generation_max_length": 9}:
        assert np.shape(ours[0][1]) == np.shape(theirs[0][1])


@NO_LENGTH
@pytest.mark.row("T1")
def test_without_labels_and_loss_alone(tmp_path: Path) -> None:
    def act(trainer: Any) -> Any:
        output = trainer.predict(texts(labels=False))
        assert trainer.gather_function == trainer.accelerator.gather_for_metrics
        return output.predictions.tolist(), output.label_ids

    ours, theirs = found(tmp_path, act)
    assert ours == theirs and ours[0][1] is None
    for side in found(tmp_path, lambda t: t.predict(texts())[:2], prediction_loss_only=True):
        assert side[0] == (None, None)


@pytest.mark.row("T4")
def test_a_generation_config(tmp_path: Path) -> None:
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0}
    config = transformers.GenerationConfig(max_length=6, **tokens)
    config.save_pretrained(tmp_path / "config")
    for source in (
        config,
        str(tmp_path / "config"),
        tmp_path / "config" / "generation_config.json",
    ):

        def act(trainer: Any) -> Any:
            return trainer.model.generation_config.max_length, trainer.predict(texts())[0].tolist()

        ours, theirs = found(tmp_path, act, generation_config=source)
        assert ours == theirs and ours[0][0] == 6
    with pytest.raises(ValueError, match="Fix these"):
        Seq2SeqTrainer.load_generation_config(
            transformers.GenerationConfig(do_sample=False, temperature=0.5)
        )


@pytest.mark.row("T3")
def test_no_token_to_fill_up_with(tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments(str(tmp_path), **ARGUMENTS)
    trainer = Seq2SeqTrainer(model(), args)
    assert trainer._pad_tensors_to_max_len(torch.ones(1, 2), 3).tolist() == [[1.0, 1.0, 0.0]]
    trainer.model.config.pad_token_id = None
    with pytest.raises(ValueError, match=r"set model\.config\.pad_token_id"):
        trainer._pad_tensors_to_max_len(torch.ones(1, 2), 3)


@pytest.mark.row("T7", "T8")
def test_the_signature() -> None:
    ours, theirs = (
        list(inspect.signature(library.Seq2SeqTrainer.__init__).parameters)
        for library in LIBRARIES.values()
    )
    assert ours == [*theirs, "tokenizer"]
    assert Seq2SeqTrainingArguments("o", sortish_sampler=True).sortish_sampler


@NO_LENGTH
@pytest.mark.row(
    "T6",
    status="differs",
    note="the loss of a short last batch counts by its samples; there as that of a full one",
)
@pytest.mark.parametrize("generate", [True, False])
def test_a_short_last_batch(tmp_path: Path, generate: bool) -> None:
    data = texts(count=5)
    with torch.no_grad():
        single = [{name: value[None] for name, value in text.items()} for text in data]
        each = [float(model().eval()(**text).loss) for text in single]

    def act(trainer: Any) -> Any:
        output = trainer.predict(data)
        return output.label_ids.tolist(), output.metrics["test_loss"]

    (ours, _), (theirs, _) = found(tmp_path, act, predict_with_generate=generate)
    assert ours[0] == theirs[0] and len(ours[0]) == 5
    assert ours[1] == pytest.approx(np.mean(each), rel=1e-6)
    assert theirs[1] == pytest.approx(np.mean([*each, each[-1]]), rel=1e-6)
