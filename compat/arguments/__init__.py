"""Arguments of a run: names, checks, and how they choose a driver."""

from .accelerator_config import AcceleratorConfig
from .seq2seq import Seq2SeqTrainingArguments
from .training import TrainingArguments

__all__ = ["AcceleratorConfig", "Seq2SeqTrainingArguments", "TrainingArguments"]
