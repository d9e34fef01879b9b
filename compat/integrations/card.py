"""Writes the model card, README.md, of a trained model, as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...checkpoint.storage.local import replace_text
from ..common.inspection import unwrap_peft
from ..parts import TrainerParts
from ..theirs import theirs

__all__ = ["write_card"]


def write_card(trainer: TrainerParts, tags: list[str], **given: Any) -> bool:
    """Write README.md into the output folder of `trainer`; `given`: the arguments of
    `create_model_card`. The tags of an existing card are kept. Return whether that card was PEFT's.
    """
    from huggingface_hub import ModelCard

    path = Path(trainer.args.output_dir, "README.md")
    before = ModelCard.load(path).data if path.exists() else None
    tags = list(dict.fromkeys([*tags, *(getattr(before, "tags", None) or ())]))
    summary = theirs("modelcard", "TrainingSummary").from_trainer(
        _seen(trainer), tags=tags, **given
    )
    replace_text(path, summary.to_model_card())
    return getattr(before, "library_name", None) == "peft"


def _seen(trainer: TrainerParts) -> Any:
    """Return the trainer in the form that transformers' summary reads: with transformers' enums,
    and a transformers model without adapters, or a placeholder without an origin.
    """
    mode = theirs("training_args", "ParallelMode")(trainer.args.parallel_mode.value)
    model = unwrap_peft(trainer.model)
    return _Overridden(
        trainer,
        args=_Overridden(trainer.args, parallel_mode=mode),
        model=model if hasattr(model, "config") else _Overridden(model, config=None),
    )


class _Overridden:
    """A proxy of an object with other values of some attributes."""

    def __init__(self, other: Any, **values: Any) -> None:
        self._other = other
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)
