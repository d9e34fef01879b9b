"""The recipe of `hf:CONFIG.json`: a model of transformers by its configuration alone.

Weights are drawn at random, and so are the tokens, since only shapes are known: it is for planning
and for trying a machine, and learns nothing. Shapes: B sequences, T positions, V tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.data.parallel import Parallel
from drivetrain.data.user_frames import last_line
from drivetrain.kernel.errors import RecipeError
from drivetrain.kernel.recipe import Recipe
from drivetrain.symbolic.fake_world import undisturbed
from drivetrain.trainer.settings import OptimizerSettings, Settings

_MOST_BYTES = 16 << 20
"""The largest file that is read as a configuration."""
_SAMPLES = 1 << 20
_DEFAULT_SEQUENCE = 2048
_NOT_READ = ("_", "auto_map", "attn_implementation")
"""Beginnings of keys of private values, of the model's own code, and of kernels that a machine may
lack."""

item_name = "tokens"

settings = Settings(
    steps=10,
    global_batch=64,
    optimizer=OptimizerSettings(lr=1e-4, weight_decay=0.1),
)


@dataclass(frozen=True)
class Config:
    """The values that `--set recipe.KEY=VALUE` changes."""

    model: str
    """The path of a `config.json` of transformers."""
    sequence: int | None = None
    """Tokens of one sample; by default 2,048, or as many as the model has positions if they are
    fewer."""


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples of random tokens `input_ids` (T), and `labels` (T)."""

    def __init__(self, vocabulary: int, length: int, shift: int) -> None:
        self.vocabulary, self.length, self.shift = vocabulary, length, shift

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        drawn = torch.randint(self.vocabulary, (self.length + self.shift,), generator=generator)
        return {"input_ids": drawn[: self.length], "labels": drawn[self.shift :]}


def loss(sequence: int, module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the cross entropy, summed over the batch: of each sample the mean over its `sequence`
    positions, of which some may be on other ranks."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = module(**inputs).logits.float()
    summed = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return summed / sequence


def count_items(batch: Mapping[str, Tensor]) -> int:
    """Return the number of tokens."""
    return batch["labels"].numel()


def recipe(config: Config) -> Recipe:
    """Build the model that the configuration describes. Nothing is downloaded."""
    described = _read(Path(config.model))
    build, shift = _builder(config.model, described)
    of_text = described.get_text_config()
    longest = getattr(of_text, "max_position_embeddings", None)
    sequence = config.sequence
    if sequence is None:
        sequence = min(longest or _DEFAULT_SEQUENCE, _DEFAULT_SEQUENCE)
    if sequence < 1:
        raise RecipeError(f"recipe.sequence is {sequence}; a sample has at least one token")
    if longest is not None and sequence > longest:
        raise RecipeError(
            f"recipe.sequence is {sequence}, and the model of {config.model} has {longest} "
            f"positions; give at most {longest}, or a copy of the file with more "
            "max_position_embeddings"
        )
    return Recipe(
        model=build,
        loss=partial(loss, sequence),
        train_data=Tokens(of_text.vocab_size, sequence, shift),
        count_items=count_items,
        parallel=Parallel(sequence={"input_ids": 1, "labels": 1}, positions="position_ids"),
    )


def _read(path: Path) -> Any:
    """Return the configuration in a file."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise RecipeError("hf: needs the package transformers: pip install transformers") from error
    if not path.is_file():
        raise RecipeError(
            f"there is no file {path}; give the config.json of a model of transformers, such as "
            "hf:config.json"
        )
    if path.stat().st_size > _MOST_BYTES:
        raise RecipeError(f"{path} has {path.stat().st_size} bytes, too many for a configuration")
    try:
        table = json.loads(path.read_text())
    except ValueError as error:
        raise RecipeError(f"{path} is not a configuration in JSON: {error}") from error
    kind = table.pop("model_type", None) if isinstance(table, dict) else None
    if not isinstance(kind, str):
        raise RecipeError(
            f"{path} has no model_type; give the config.json of a model of transformers"
        )
    given = {key: value for key, value in table.items() if not key.startswith(_NOT_READ)}
    try:
        return AutoConfig.for_model(kind, **given)
    except Exception as error:  # each model checks its values in its own way
        raise RecipeError(f"transformers cannot read {path}: {last_line(error)}") from error


def _builder(path: str, described: Any) -> tuple[Callable[[], nn.Module], int]:
    """Return a function that builds the model, and the number of positions from a token to the one
    that it predicts."""
    with undisturbed():  # it imports much
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL
        from transformers import MODEL_FOR_MASKED_LM_MAPPING as MASKED
        from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

        described.use_cache = False
        classes = getattr(described, "architectures", None) or []
        for kind, mapping, endings, shift in (
            (AutoModelForCausalLM, CAUSAL, ("ForCausalLM", "LMHeadModel"), 1),
            (AutoModelForMaskedLM, MASKED, ("ForMaskedLM",), 0),
        ):
            is_named = not classes or any(each.endswith(endings) for each in classes)
            if is_named and mapping.get(type(described), None) is not None:
                return partial(kind.from_config, described, dtype=torch.float32), shift
    what = ", ".join(classes) or f"a model of type {described.model_type}"
    raise RecipeError(
        f"{path} describes {what}, which does not predict tokens; write a recipe for it: "
        "https://huggingface.co/docs/transformers has its inputs"
    )
