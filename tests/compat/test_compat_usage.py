"""Members of transformers' Trainer and of accelerate that other libraries use: here, or refused by
name.

The list is docs/compat_usage.json, which docs/compat_usage.py writes from their sources.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from side_by_side import Classifier, both, samples

from drivetrain import compat

ROOT = Path(__file__).resolve().parents[2]
USED: dict[str, dict[str, str]] = json.loads((ROOT / "docs/compat_usage.json").read_text())["uses"]

REFUSED = {"AcceleratorState": ["_shared_state"]}
"""Members that are refused: the state that accelerate shares among all objects of a class."""

WHOLE = [kind for kind in USED if "Accelerator" not in kind and kind != "GradientState"]
"""Classes whose public members are all here."""
NOT_HERE = {"TrainingArguments": ["is_torch_greater_or_equal_than_2_8"]}
"""Members that are missing here, since only transformers itself uses them."""


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Return an object of each class and each library, after a run."""
    found: list[dict[str, Any]] = []
    for library, side in zip(
        (compat, transformers), both(tmp_path_factory.mktemp("usage")), strict=True
    ):
        given = {"max_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
        args = library.Seq2SeqTrainingArguments(str(side.folder), **given)
        trainer = library.Seq2SeqTrainer(Classifier(), args, train_dataset=samples(8))
        trainer.train()
        found.append(
            {
                "Trainer": trainer,
                "TrainingArguments": args,
                "TrainerState": trainer.state,
                "TrainerControl": trainer.control,
                "TrainerCallback": library.TrainerCallback(),
                "CallbackHandler": trainer.callback_handler,
                "Accelerator": trainer.accelerator,
                "AcceleratorState": trainer.accelerator.state,
                "GradientState": trainer.accelerator.gradient_state,
            }
        )
    return {kind: (found[0][kind], found[1][kind]) for kind in USED}


def test_the_list_is_of_many_libraries() -> None:
    assert sum(map(len, USED.values())) > 250
    libraries = {name for each in USED.values() for used in each.values() for name in used.split()}
    assert {"trl", "peft", "sentence_transformers", "setfit", "axolotl"} <= libraries


@pytest.mark.parametrize("kind", USED)
def test_what_is_used_is_here(objects: dict[str, tuple[Any, Any]], kind: str) -> None:
    ours, theirs = objects[kind]
    missing = [name for name in USED[kind] if hasattr(theirs, name) and not hasattr(ours, name)]
    assert sorted(missing) == REFUSED.get(kind, [])
    for name in missing:
        with pytest.raises(AttributeError, match=f"no '{name}': .* See docs/from-hf-trainer"):
            getattr(ours, name)


@pytest.mark.parametrize("kind", WHOLE)
def test_every_public_member_is_here(objects: dict[str, tuple[Any, Any]], kind: str) -> None:
    """Require all public members, used or not."""
    ours, theirs = objects[kind]
    assert [name for name in public(theirs) if not hasattr(ours, name)] == NOT_HERE.get(kind, [])


@pytest.mark.parametrize("kind", USED)
def test_methods_take_the_same(objects: dict[str, tuple[Any, Any]], kind: str) -> None:
    """Compare parameters: by position as far as transformers' go, and by name."""
    ours, theirs = objects[kind]
    for name in {*USED[kind], *(public(theirs) if kind in WHOLE else ())}:
        if callable(getattr(theirs, name, None)) and callable(getattr(ours, name, None)):
            compare(name, inspect.signature(getattr(ours, name)), getattr(theirs, name))


def public(each: Any) -> list[str]:
    return [name for name in dir(each) if not name.startswith("_")]


def compare(name: str, ours: inspect.Signature, method: Any) -> None:
    mine = ours.parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in mine.values())
    wanted = [
        each.name
        for each in inspect.signature(method).parameters.values()
        if each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    lacking = [each for each in wanted if each not in mine]
    assert not lacking or takes_any, (name, lacking)
    plain = [each.name for each in mine.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert plain[: len(wanted)] == wanted[: len(plain)], name
