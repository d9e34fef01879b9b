"""Arguments of a run: names, checks, and how they choose a driver."""

from .accelerator_config import AcceleratorConfig
from .training import Seq2SeqTrainingArguments, TrainingArguments

__all__ = ["AcceleratorConfig", "Seq2SeqTrainingArguments", "TrainingArguments"]
