"""Pushing to a Hub on loopback, and model cards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from hub_server import OWNER, Hub, serving
from huggingface_hub import ModelCard
from side_by_side import both

from drivetrain.compat import (
    CallbackHandler,
    DefaultFlowCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from drivetrain.compat.integrations.hub import quiet_uploads
from drivetrain.compat.trainer.hub import HubMixin

HISTORY = [
    {"loss": 2.0, "epoch": 0.5, "step": 1},
    {"eval_loss": 1.25, "eval_accuracy": 0.5, "eval_runtime": 3.0, "epoch": 1, "step": 2},
    {"train_runtime": 3.0, "total_flos": 1.0, "train_loss": 1.5, "epoch": 1, "step": 2},
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield server


class Listener(TrainerCallback):
    pushes = 0

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pushes += 1


class Pusher(HubMixin):
    """A stand-in for a Trainer, with the attributes that pushing uses."""

    def __init__(self, folder: Path, main: bool = True, **arguments: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        given: dict[str, Any] = {
            "hub_token": "hf_secret",
            "save_strategy": "steps",
            "report_to": "none",
        }
        self.args = TrainingArguments(
            output_dir=str(folder), use_cpu=True, **{**given, **arguments}
        )
        self.main = main
        self.model: Any = torch.nn.Linear(1, 1)
        self.processing_class = None
        self.train_dataset = self.eval_dataset = None
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
        self.state = TrainerState(global_step=2, epoch=1.0, log_history=list(HISTORY))
        self.control = TrainerControl()
        self.listener = Listener()
        flow = DefaultFlowCallback
        self.callback_handler = CallbackHandler([flow, self.listener], None, None, None, None)

    def is_world_process_zero(self) -> bool:
        return self.main

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        assert _internal_call
        Path(self.args.output_dir, "model.safetensors").write_bytes(b"whole")

    def checkpoint(self, number: int = 2) -> str:
        """Make a folder as a save leaves it."""
        folder = Path(self.args.output_dir, f"checkpoint-{number}")
        folder.mkdir()
        for name in ("config.json", "model.safetensors", "trainer_state.json"):
            (folder / name).write_text(f"{name} of {number}")
        return str(folder)


@pytest.mark.row("U1", "U3", "U6")
@pytest.mark.parametrize(
    ("model_id", "full"),
    [(None, f"{OWNER}/run"), ("named", f"{OWNER}/named"), ("some/named", "some/named")],
)
def test_a_repository_is_made(hub: Hub, tmp_path: Path, model_id: str | None, full: str) -> None:
    pusher = Pusher(tmp_path / "run", hub_model_id=model_id, hub_private_repo=True)
    assert pusher.hub_model_id is None
    pusher.init_hf_repo()
    assert pusher.hub_model_id == full
    assert hub.repositories[full]["visibility"] == "private"
    pusher.init_git_repo(private=False)
    assert hub.repositories[full]["visibility"] == "public"


@pytest.mark.row("U11")
def test_older_names_of_arguments_are_mapped(tmp_path: Path) -> None:
    old = {"push_to_hub_token": "hf_old", "push_to_hub_model_id": "named"}
    with pytest.warns(FutureWarning, match="push_to_hub_"):
        args = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, push_to_hub_organization="some", **old
        )
    assert (args.hub_token, args.hub_model_id) == ("hf_old", "some/named")


@pytest.mark.row("U1")
def test_only_the_first_rank_makes_and_uploads(hub: Hub, tmp_path: Path) -> None:
    pusher = Pusher(tmp_path, main=False)
    pusher.init_hf_repo()
    assert pusher.push_to_hub() is None
    pusher._push_from_checkpoint(pusher.checkpoint())
    assert not hub.repositories and not hub.commits
    assert not (tmp_path / "README.md").exists()


@pytest.mark.row("U5", "U12")
@pytest.mark.parametrize("blocking", [True, False])
def test_pushing_saves_and_uploads_all_but_checkpoints(
    hub: Hub, tmp_path: Path, blocking: bool
) -> None:
    pusher = Pusher(tmp_path / "run")
    pusher.checkpoint()
    (tmp_path / "run" / "_mine.txt").touch()
    pusher.model.model_tags = ["of-model", "given"]
    pushed = pusher.push_to_hub("It is done", blocking, language="en", tags="given", private=True)
    assert isinstance(pushed, Future) != blocking
    info = pushed if blocking else pushed.result(60)
    [commit] = hub.commits
    assert info.oid == f"{1:040x}"
    assert (commit.repository, commit.revision) == (f"{OWNER}/run", "main")
    assert (commit.message, commit.token) == ("It is done", "hf_secret")
    assert set(commit.files) == {"README.md", "model.safetensors"}
    assert commit.files["model.safetensors"] == b"whole"
    card = ModelCard(commit.files["README.md"].decode())
    assert card.data.language == ["en"]
    assert card.data.tags == ["given", "of-model", "generated_from_trainer"]
    assert pusher.listener.pushes == 1
    assert hub.repositories[f"{OWNER}/run"]["visibility"] == "private"


@pytest.mark.row("U3")
def test_what_is_given_to_the_call_goes_before_the_arguments(hub: Hub, tmp_path: Path) -> None:
    pusher = Pusher(tmp_path, hub_revision="side")
    pusher.push_to_hub()
    pusher.push_to_hub(token="hf_other", revision="third")
    assert [(c.revision, c.token) for c in hub.commits] == [
        ("side", "hf_secret"),
        ("third", "hf_other"),
    ]


@pytest.mark.row("U2", "K37")
@pytest.mark.parametrize(
    ("strategy", "folder"),
    [
        ("end", None),
        ("every_save", ""),
        ("checkpoint", "last-checkpoint/"),
        ("all_checkpoints", "checkpoint-2/"),
    ],
)
def test_what_a_save_uploads(hub: Hub, tmp_path: Path, strategy: str, folder: str | None) -> None:
    pusher = Pusher(tmp_path / "run", hub_strategy=strategy)
    pusher.init_hf_repo()
    pusher._push_from_checkpoint(pusher.checkpoint())
    pusher._finish_current_push()
    uploads = {commit.message: set(commit.files) for commit in hub.commits}
    expected = {}
    if folder is not None:
        expected["Training in progress, step 2"] = {"config.json", "model.safetensors"}
    if folder:
        names = ("config.json", "model.safetensors", "trainer_state.json")
        expected["Training in progress, step 2, checkpoint"] = {folder + name for name in names}
    assert uploads == expected
    assert pusher.listener.pushes == len(expected and [1])
    assert (tmp_path / "run" / "config.json").exists() == bool(expected)


def test_by_epochs_the_message_names_the_epoch(hub: Hub, tmp_path: Path) -> None:
    pusher = Pusher(tmp_path, save_strategy="epoch")
    pusher.init_hf_repo()
    pusher._push_from_checkpoint(pusher.checkpoint())
    pusher._finish_current_push()
    assert hub.commits[0].message == "Training in progress, epoch 1"


@pytest.mark.row("U4", "U7", "U3")
@pytest.mark.parametrize("always", [False, True])
def test_a_push_waits_for_none_and_the_end_waits_for_all(
    hub: Hub, tmp_path: Path, always: bool
) -> None:
    pusher = Pusher(tmp_path, hub_always_push=always)
    pusher.init_hf_repo()
    hub.gate.clear()
    pusher._push_from_checkpoint(pusher.checkpoint(2))
    pusher._push_from_checkpoint(pusher.checkpoint(4))
    assert pusher.push_in_progress is not None
    assert not pusher.push_in_progress.is_done()
    assert hub.commits == []
    hub.gate.set()
    pusher._finish_current_push()
    assert len(hub.commits) == (2 if always else 1)
    pusher._push_from_checkpoint(pusher.checkpoint(6))
    pusher._finish_current_push()
    assert hub.commits[-1].files["config.json"] == b"config.json of 6"


def test_a_failed_upload_is_said_and_training_goes_on(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pusher = Pusher(tmp_path)
    pusher.init_hf_repo()
    hub.refuses = True
    pusher._push_from_checkpoint(pusher.checkpoint())
    with caplog.at_level(logging.ERROR):
        pusher._finish_current_push()
    assert "an upload to the Hub failed" in caplog.text
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError):
        pusher.push_to_hub()


@pytest.mark.row("L24")
def test_uploads_can_be_quiet() -> None:
    from huggingface_hub.utils import are_progress_bars_disabled

    before = are_progress_bars_disabled()
    with quiet_uploads():
        assert are_progress_bars_disabled()
    assert are_progress_bars_disabled() == before


def card_of(pusher: Pusher, **given: Any) -> ModelCard:
    pusher.create_model_card(**given)
    return ModelCard.load(Path(pusher.args.output_dir, "README.md"))


@pytest.mark.row("U9")
def test_a_card_is_theirs(hub: Hub, tmp_path: Path) -> None:
    """Compare the card's text with transformers', with metrics and a model-index, and for a folder
    that has a card already.
    """
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(num_attention_heads=1, **sizes)
    data = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 4
    given = {"dataset_tags": "glue", "dataset": "GLUE", "dataset_args": "mrpc", "tags": "mine"}
    texts = []
    for side in both(tmp_path):
        trainer = side.trainer(
            lambda: transformers.LlamaForCausalLM(config),
            train_dataset=data,
            eval_dataset=data,
            compute_metrics=lambda prediction: {"accuracy": 0.5},
            max_steps=2,
            eval_strategy="steps",
            eval_steps=1,
        )
        trainer.train()
        trainer.model.config._name_or_path = "some/base"
        trainer.state.log_history = HISTORY
        trainer.create_model_card(model_name="named", language="en", **given)
        texts.append(Path(trainer.args.output_dir, "README.md").read_text())
    assert texts[0] == texts[1]
    data = ModelCard(texts[0]).data
    [result] = data.eval_results
    assert (result.metric_name, result.metric_value, data.license) == ("Accuracy", 0.5, "mit")


@pytest.mark.row("U9")
def test_a_card_of_any_module(tmp_path: Path) -> None:
    card = card_of(Pusher(tmp_path / "small-run", learning_rate=3e-3))
    assert card.data.model_name == "small-run"
    assert card.data.tags == ["generated_from_trainer"]
    for line in ("# small-run", "- Loss: 1.25", "- learning_rate: 0.003", "distributed_type"):
        assert (line in card.text) is (line != "distributed_type")
    assert "hf_secret" not in card.content
    assert str(tmp_path) not in card.content


@pytest.mark.row("U13", status="differs", note="left out of uploads; no .gitignore, as in 5.23")
def test_marks_of_sagemakers_uploads_stay_here(hub: Hub, tmp_path: Path) -> None:
    pusher = Pusher(tmp_path / "run")
    for name in ("model.safetensors.sagemaker-uploading", "config.json.sagemaker-uploaded"):
        (tmp_path / "run" / name).touch()
    pusher.push_to_hub()
    assert set(hub.commits[0].files) == {"README.md", "model.safetensors"}
    assert not (tmp_path / "run" / ".gitignore").exists()


@pytest.mark.row("U9", "U10")
def test_tags_of_a_card_that_is_there_are_kept_and_peft_adds_its_own(tmp_path: Path) -> None:
    pusher = Pusher(tmp_path)
    before = "---\nlibrary_name: peft\ntags:\n- lora\n- mine\n---\n\n# Old\n"
    (tmp_path / "README.md").write_text(before)
    asked: list[str] = []
    pusher.model.create_or_update_model_card = asked.append
    card = card_of(pusher, tags=["mine", "new"])
    assert card.data.tags == ["mine", "new", "lora", "generated_from_trainer"]
    assert asked == [str(tmp_path)]
