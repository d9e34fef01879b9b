"""Collators: the same batches as transformers' own, also when transformers cannot be imported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from drivetrain import compat
from drivetrain.compat.data.collators import collator_for, default_data_collator


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert (np.asarray(ours[name]) == np.asarray(value)).all(), name


SAMPLES: dict[str, list[Any]] = {
    "whole labels": [{"x": [1.0, 2.0], "label": 1}, {"x": [3.0, 4.0], "label": 0}],
    "real labels": [{"x": [1, 2], "label": 0.5}, {"x": [3, 4], "label": 2.0}],
    "truths": [{"x": 1, "label": True}, {"x": 2, "label": False}],
    "tensors": [{"x": torch.ones(2), "label_ids": torch.tensor([1, 2], dtype=torch.int32)}] * 3,
    "lists of labels": [{"label_ids": [1, 2]}, {"label_ids": [3, 4]}],
    "lists of real labels": [{"label_ids": [1.0, 2.0]}, {"label_ids": [3.0, 4.0]}],
    "arrays": [{"x": np.ones(2, np.float64), "label": np.int32(3)}] * 2,
    "text and nothing": [{"x": 1, "text": "a", "none": None, "label": None}] * 2,
    "objects": [SimpleNamespace(x=1, label=2), SimpleNamespace(x=3, label=4)],
    "labels by name": [{"labels": 1.5, "x": torch.tensor(2)}] * 2,
}


@pytest.mark.row("C20")
@pytest.mark.parametrize("case", SAMPLES)
@pytest.mark.parametrize("kind", ["pt", "np"])
def test_the_default_collator_makes_their_batches(case: str, kind: str) -> None:
    ours = default_data_collator(SAMPLES[case], return_tensors=kind)
    theirs = transformers.default_data_collator(SAMPLES[case], return_tensors="pt")
    assert_same(ours, theirs if kind == "pt" else {k: v.numpy() for k, v in theirs.items()})


def test_what_cannot_be_stacked_is_named() -> None:
    with pytest.raises(ValueError, match=r"the samples' 'x' cannot be stacked.*Pad them"):
        default_data_collator([{"x": [1]}, {"x": [1, 2]}])
    with pytest.raises(ValueError, match="return_tensors='tf'"):
        default_data_collator([{"x": 1}], return_tensors="tf")


def tokenizer(**options: Any) -> transformers.PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "pad": 2}, unk_token="a"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="pad", **options)


@pytest.mark.row("C20")
def test_a_tokenizer_brings_padding_and_nothing_else_does() -> None:
    padding = collator_for(tokenizer())
    assert isinstance(padding, transformers.DataCollatorWithPadding)
    assert isinstance(padding, compat.DataCollatorWithPadding)
    for other in (None, object(), transformers.ViTImageProcessor):
        assert collator_for(other) is default_data_collator


def test_a_users_logger_receives_the_left_out_columns_once() -> None:
    """Use a logger that takes nothing but a text."""
    lines: list[str] = []
    reported = SimpleNamespace(info=lines.append)
    collator = compat.RemoveColumnsCollator(
        default_data_collator, ["x"], logger=reported, model_name="Net", description="training"
    )
    for _ in range(2):
        assert list(collator([{"x": 1, "spare": 2}, {"x": 3, "spare": 4}])) == ["x"]
    (line,) = lines
    assert "training data set" in line and "Net.forward" in line and "spare" in line


def test_collators_of_transformers_have_their_names_here() -> None:
    for name in ("DataCollatorForSeq2Seq", "DataCollatorWithFlattening", "DefaultDataCollator"):
        assert getattr(compat, name) is getattr(transformers, name)
    with pytest.raises(AttributeError):
        compat.DataCollatorOfNobody  # noqa: B018
