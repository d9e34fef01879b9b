"""The model card: README.md of a trained model, as transformers writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...checkpoint.storage.local import replace_text
from ..theirs import theirs
from ..trainer.inspection import unwrap_peft
from ..trainer.parts import TrainerParts

__all__ = ["write_card"]


def write_card(trainer: TrainerParts, tags: list[str], **given: Any) -> bool:
    """Write README.md into the output folder of `trainer`; `given` as `create_model_card` has it.
    The tags of a card that is there are kept. Returns whether that one was PEFT's.
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
    """The trainer as the summary reads it: with transformers' own words, and a model of theirs,
    without adapters, or one that says nothing of where it came from.
    """
    mode = theirs("training_args", "ParallelMode")(trainer.args.parallel_mode.value)
    model = unwrap_peft(trainer.model)
    return _With(
        trainer,
        args=_With(trainer.args, parallel_mode=mode),
        model=model if hasattr(model, "config") else _With(model, config=None),
    )


class _With:
    """An object, with other values of some of its attributes."""

    def __init__(self, other: Any, **values: Any) -> None:
        self._other = other
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)
