"""Calls and events of both libraries, recorded in the same way and compared."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest
import transformers
import transformers.trainer
from side_by_side import LIBRARIES, arguments, classifier, llama, samples, sentences

EVENTS = [name for name in dir(transformers.TrainerCallback) if name.startswith("on_")]
FLAGS = ("training_stop", "epoch_stop", "save", "evaluate", "log")


class Flags(transformers.TrainerCallback):  # type: ignore[misc]
    """Records the flags that are set at each event."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, list[str]]] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in EVENTS:
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            up = [flag for flag in FLAGS if getattr(control, f"should_{flag}")]
            self.seen.append((name, state.global_step, up))

        return note


@pytest.mark.row("B7", "B18")
def test_the_flags_that_are_up_at_each_event_of_two_runs(tmp_path: Path) -> None:
    seen = []
    for name, library in LIBRARIES.items():
        asked = {
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "gradient_accumulation_steps": 2,
            "load_best_model_at_end": True,
        }
        flags = Flags()
        args = arguments(library, tmp_path / name, **asked)
        data = {"train_dataset": samples(), "eval_dataset": samples(3)}
        trainer = library.Trainer(classifier(), args, **data, callbacks=[flags])
        trainer.train()
        trainer.evaluate()
        trainer.predict(samples(3))
        trainer.train()
        seen.append(flags.seen)
    assert seen[0] == seen[1] and len(seen[0]) > 40


@pytest.mark.row("C21")
@pytest.mark.parametrize("data", ["dummy", [], {}])
def test_only_no_data_to_evaluate_on_is_refused(tmp_path: Path, data: Any) -> None:
    """Give evaluation data of odd types: sentence-transformers gives a text when it has an
    evaluator.
    """
    for library in LIBRARIES.values():
        args = arguments(library, tmp_path, eval_strategy="epoch")
        given = {"train_dataset": samples(), "eval_dataset": data}
        assert library.Trainer(classifier(), args, **given).eval_dataset == data
        with pytest.raises(ValueError, match="eval_dataset"):
            library.Trainer(classifier(), args, train_dataset=samples())


class Api:
    """A stand-in for the Hub, whose uploads are done at once, or never."""

    calls: ClassVar[list[Any]] = []
    done: ClassVar[bool] = True

    def create_repo(self, name: str, **asked: Any) -> Any:
        self.calls.append((name, asked))
        return huggingface_hub.RepoUrl(f"https://huggingface.co/me/{Path(name).name}")

    def upload_folder(self, folder_path: Any, ignore_patterns: Any = None, **asked: Any) -> Any:
        self.calls.append(asked)
        job: Future[None] = Future()
        if self.done or not asked["run_as_future"]:
            job.set_result(None)
        return job


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(Api, "calls", [])
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(transformers.trainer, "hf_api", Api)
    return Api.calls


@pytest.mark.row("U2", "U4")
@pytest.mark.parametrize(
    ("done", "asked", "uploads"),
    [
        (True, {}, 2),
        (False, {}, 1),
        (False, {"hub_always_push": True}, 2),
        (True, {"hub_strategy": "checkpoint"}, 4),
        (False, {"hub_strategy": "all_checkpoints", "save_strategy": "epoch"}, 2),
        (True, {"hub_strategy": "end"}, 0),
    ],
)
def test_pushes_of_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[Any],
    done: bool,
    asked: dict[str, Any],
    uploads: int,
) -> None:
    monkeypatch.setattr(Api, "done", done)
    seen = []
    for name, library in LIBRARIES.items():
        given = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, **asked}
        hub = {"push_to_hub": True, "hub_model_id": "me/x", "hub_token": "token"}
        args = arguments(library, tmp_path / name, **hub, **given)
        trainer = library.Trainer(classifier(), args, train_dataset=samples(8))
        trainer._finish_current_push = lambda: None
        trainer.train()
        seen.append(calls.copy())
        calls.clear()
    assert seen[0] == seen[1] and len(seen[0]) == 1 + uploads


@pytest.mark.row("U6")
def test_who_says_by_which_token_a_repository_is_made(tmp_path: Path, calls: list[Any]) -> None:
    """Compare tokens. An empty one counts as given."""
    seen = []
    for library in LIBRARIES.values():
        args = arguments(library, tmp_path, hub_token="token", hub_private_repo=True)
        trainer = library.Trainer(classifier(), args, train_dataset=samples())
        for given in ({}, {"token": "other", "private": False}, {"token": ""}):
            trainer.init_hf_repo(**given)
        seen.append([*calls, trainer.hub_model_id])
        calls.clear()
    assert seen[0] == seen[1] and len(seen[0]) == 4


@pytest.mark.row("U9", "U10")
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("given", [{}, {"tags": "c"}, {"tags": ["b", "c"]}])
def test_tags_of_a_model_are_on_its_card(
    tmp_path: Path, calls: list[Any], before: bool, given: dict[str, Any]
) -> None:
    cards = []
    for name, library in LIBRARIES.items():
        (folder := tmp_path / name).mkdir()
        if before:
            (folder / "README.md").write_text("---\ntags:\n- old\n---\n")
        model = llama()
        model.add_model_tags(["a", "b"])
        args = arguments(library, folder, hub_model_id="me/x")
        trainer = library.Trainer(model, args, train_dataset=sentences())
        trainer.push_to_hub(**given)
        cards.append(huggingface_hub.ModelCard.load(folder / "README.md").data.to_dict())
    assert cards[0] == cards[1] and {"a", "b"} <= set(cards[0]["tags"])
