"""Arguments of the Trainer that generates text to evaluate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .training import TrainingArguments, says

__all__ = ["Seq2SeqTrainingArguments"]


@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """`TrainingArguments`, and how to generate."""

    sortish_sampler: bool = says(False, "Accepted for old scripts; use train_sampling_strategy")
    predict_with_generate: bool = says(False, "Compute metrics on generated texts")
    generation_max_length: int | None = says(None, "Longest text to generate in evaluation")
    generation_num_beams: int | None = says(None, "Beams to generate with in evaluation")
    generation_config: Any = says(None, "GenerationConfig, its path or id; replaces the model's")
