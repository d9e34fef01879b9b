"""The embedded GPT on texts of your own.

::

    drivetrain train examples/gpt.py --set recipe.folder=~/notes --set "recipe.pattern=*.md"

Everything but the text comes from `drivetrain.cli.gpt`, what `drivetrain train` trains without a
recipe. One file in twenty, chosen by a hash of its name, is held out.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

from drivetrain import Recipe
from drivetrain.cli import gpt

settings = replace(gpt.settings, steps=300)
item_name = gpt.item_name
sample = gpt.sample


@dataclass(frozen=True)
class Config(gpt.Config):
    """The GPT's own, and which files it reads. By default: the standard library's e-mail."""

    folder: str = str(Path(sysconfig.get_paths()["stdlib"]) / "email")
    pattern: str = "*.py"


def read_folder(folder: Path, pattern: str) -> tuple[bytes, bytes]:
    """The texts for training, and the held-out ones."""
    training: list[bytes] = []
    held_out: list[bytes] = []
    for path in sorted(path for path in folder.rglob(pattern) if path.is_file()):
        name = path.relative_to(folder).as_posix()
        is_held_out = hashlib.sha256(name.encode()).digest()[0] % 20 == 0
        (held_out if is_held_out else training).append(path.read_bytes())
    if not training or not held_out:
        training, held_out = training + held_out, training[-1:] or held_out
    return b"\n".join(training), b"\n".join(held_out)


def recipe(config: Config) -> Recipe:
    """The GPT's recipe with other data."""
    training, held_out = read_folder(Path(config.folder).expanduser(), config.pattern)
    return Recipe(
        model=lambda: gpt.GPT(config),
        loss=gpt.loss,
        train_data=gpt.Windows(training, config.context),
        eval_data={"held_out": gpt.Windows(held_out, config.context, config.eval_sequences)},
        collate=gpt.collate,
        count_items=gpt.count_items,
        parallel=gpt.parallel,
        measure=gpt.measure,
        summarise=gpt.summarise,
        flops_per_item=gpt.flops_per_item(config),
    )
