"""Contents of checkpoints, their rotation, and resuming, compared with transformers' Trainer."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from side_by_side import Classifier, both, losses, samples
from torch import nn
from transformers.trainer_pt_utils import safe_globals

from drivetrain.checkpoint import CheckpointReader, store
from drivetrain.compat import EarlyStoppingCallback, TrainerCallback, TrainerState
from drivetrain.trainer.run_lock import LOCK

STEPS: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}
SCORES = [5.0, 4.0, 4.5, 3.0, 6.0]


def files(folder: Path) -> set[str]:
    """List the names in a folder, without the lock of the process that trains there."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(LOCK)}


def equal(mine: nn.Module, other: nn.Module) -> bool:
    ours, theirs = mine.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train a run to the end in each library, with dropout and several checkpoints."""
    dropping = partial(Classifier, dropout=0.2)
    folder = tmp_path_factory.mktemp("runs")
    found: dict[str, Any] = {"model": dropping}
    for name, side in zip(("ours", "theirs"), both(folder), strict=True):
        trainer = side.trainer(dropping, gradient_accumulation_steps=2, **STEPS)
        trainer.train()
        found[name] = trainer
    return found


@pytest.mark.row("K1", "K3", "K6", "R3")
@pytest.mark.row("K2", status="differs", note="pieces that any driver reads, in place of pickles")
def test_what_a_checkpoint_holds(runs: dict[str, Any]) -> None:
    for name in ("ours", "theirs"):
        root = Path(runs[name].args.output_dir)
        assert files(root) == {f"checkpoint-{step}" for step in range(1, 6)}
    ours = files(Path(runs["ours"].args.output_dir, "checkpoint-1"))
    theirs = files(Path(runs["theirs"].args.output_dir, "checkpoint-1"))
    assert theirs - ours == {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}
    assert ours - theirs == {
        "manifest.json",
        "training_args.json",
        *(f"{kind}-00000-of-00001.safetensors" for kind in ("weights", "optimizer", "state")),
    }
    state = TrainerState.load_from_json(
        Path(runs["ours"].args.output_dir, "checkpoint-3", "trainer_state.json")
    )
    assert (state.global_step, state.max_steps, len(state.log_history)) == (3, 5, 3)


@pytest.mark.row("K11", "K12", "R4", "D4")
@pytest.mark.parametrize("step", [1, 3, 4])
def test_resuming_ends_bit_equal(runs: dict[str, Any], tmp_path: Path, step: int) -> None:
    whole = runs["ours"]
    root = Path(whole.args.output_dir)
    trainer = both(tmp_path)[0].trainer(
        runs["model"], gradient_accumulation_steps=2, **{**STEPS, "save_steps": 2}
    )
    torch.manual_seed(99)
    output = trainer.train(resume_from_checkpoint=str(root / f"checkpoint-{step}"))
    assert losses(trainer) == losses(whole)
    assert equal(trainer.model, whole.model)
    history = [
        {k: v for k, v in entry.items() if "train_" not in k} for entry in trainer.state.log_history
    ]
    assert history == [
        {k: v for k, v in entry.items() if "train_" not in k} for entry in whole.state.log_history
    ]
    assert output.global_step == 5
    assert files(tmp_path / "ours") == {f"checkpoint-{n}" for n in (2, 4, 5) if n > step}


class Augmented(torch.utils.data.Dataset[Any]):
    """Data whose samples differ each time, drawn from each of the host's generators."""

    def __init__(self) -> None:
        self.kept = samples()

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return {**self.kept[index], "x": self.kept[index]["x"] * noise}


@pytest.mark.row("K12", "R4")
def test_data_that_draw_random_numbers_resume_bit_equal(tmp_path: Path) -> None:
    """Resume at steps in the middle of an epoch and at its end, and resume a resumed run."""
    dropping = partial(Classifier, dropout=0.2)
    keywords = {**STEPS, "gradient_accumulation_steps": 2, "max_steps": 7}
    keywords |= {"train_dataset": Augmented(), "save_total_limit": None}
    whole = both(tmp_path / "whole")[0].trainer(dropping, **keywords)
    whole.train()
    for step in (1, 3, 6):
        folder = Path(whole.args.output_dir, f"checkpoint-{step}")
        torch.manual_seed(99 + step)
        again = both(tmp_path / str(step))[0].trainer(dropping, **keywords)
        again.train(resume_from_checkpoint=str(folder))
        assert losses(again) == losses(whole), step
        assert equal(again.model, whole.model), step
        folder = Path(again.args.output_dir, "checkpoint-6")
        if step == 3:
            torch.manual_seed(5)
            chained = both(tmp_path / "chained")[0].trainer(dropping, **keywords)
            chained.train(resume_from_checkpoint=str(folder))
            assert equal(chained.model, whole.model)


def test_random_numbers_of_data_workers_are_named_where_a_run_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Require the warning in the middle of an epoch with workers only."""
    side = both(tmp_path)[0]
    whole = side.trainer(**{**STEPS, "max_steps": 6}, save_total_limit=None)
    whole.train()
    per_epoch = len(whole.get_train_dataloader())
    for workers, step, reported in ((1, 1, True), (0, 1, False), (1, per_epoch, False)):
        caplog.clear()
        again = side.trainer(**{**STEPS, "max_steps": step}, dataloader_num_workers=workers)
        again.train(resume_from_checkpoint=str(side.folder / f"checkpoint-{step}"))
        assert ("no random state of such data workers" in caplog.text) is reported, (workers, step)


@pytest.mark.row("K11")
def test_the_training_loss_of_a_resumed_run_is_of_its_own_updates(tmp_path: Path) -> None:
    """Require that losses since the last log count in the mean of the next log, but not in the
    run's `train_loss`.
    """
    found = []
    for side in both(tmp_path):
        keywords = {**STEPS, "save_steps": 4, "logging_steps": 3, "max_steps": 6}
        side.trainer(**keywords).train()
        output = side.trainer(**keywords).train(
            resume_from_checkpoint=str(side.folder / "checkpoint-4")
        )
        found.append(output.training_loss)
    assert found[0] == pytest.approx(found[1], abs=1e-6)


@pytest.mark.row("K11", "K17")
@pytest.mark.parametrize("step", [1, 3])
def test_their_folder_continues_as_theirs(runs: dict[str, Any], tmp_path: Path, step: int) -> None:
    whole = runs["theirs"]
    root = Path(whole.args.output_dir, f"checkpoint-{step}")
    trainer = both(tmp_path)[0].trainer(
        runs["model"], gradient_accumulation_steps=2, **{**STEPS, "save_strategy": "no"}
    )
    trainer.train(resume_from_checkpoint=str(root))
    assert losses(trainer) == losses(whole)
    assert equal(trainer.model, whole.model)


@pytest.mark.row("K2", "K17")
def test_files_for_other_tools(runs: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = both(tmp_path)
    keywords = {"gradient_accumulation_steps": 2, **STEPS}
    writer = ours.trainer(runs["model"], checkpoint_format="hf", **keywords)
    writer.train()
    folder = tmp_path / "ours" / "checkpoint-2"
    assert files(folder) == {
        *(files(Path(runs["theirs"].args.output_dir, "checkpoint-2")) - {"training_args.bin"}),
        "training_args.json",
    }
    curves = []
    for side in (ours, theirs):
        reader = side.trainer(runs["model"], **{**keywords, "save_strategy": "no"})
        reader.train(resume_from_checkpoint=str(folder))
        curves.append(losses(reader))
    assert curves == [losses(writer)] * 2
    (folder / "scheduler.pt").unlink()
    fresh = ours.trainer(runs["model"], **{**keywords, "save_strategy": "no"})
    fresh.train(resume_from_checkpoint=str(folder))
    assert losses(fresh)[:2] == losses(writer)[:2] and losses(fresh) != losses(writer)


@pytest.mark.row("B31")
def test_nothing_runs_after_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Require that a replaced checkpoint is gone before `on_save` is called, and before `train`
    returns.
    """
    remove, seen = store._remove, []

    def slowly(retired: list[Any]) -> None:
        time.sleep(0.3)
        remove(retired)

    class Lister(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(files(Path(args.output_dir)))

    monkeypatch.setattr(store, "_remove", slowly)
    steps = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer = both(tmp_path)[0].trainer(callbacks=[Lister], **steps)
    for _ in range(2):
        trainer.train()
    shutil.rmtree(trainer.args.output_dir)
    assert seen == [{"checkpoint-1"}, {"checkpoint-1"}]


@pytest.mark.row("K2", "K17")
@pytest.mark.parametrize(
    "how",
    [
        {"optim": "adamw_torch", "lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"optim": "adafactor", "lr_scheduler_type": "polynomial"},
        {"optim": "sgd", "optim_args": "momentum=0.9", "lr_scheduler_type": "greedy"},
        {"optim": "rmsprop", "lr_scheduler_type": "reduce_lr_on_plateau"},
    ],
    ids=lambda how: how["optim"],
)
def test_their_trainer_goes_on_bit_equal(tmp_path: Path, how: dict[str, Any]) -> None:
    """Let transformers resume from `checkpoint_format="hf"`, in the middle of an epoch. Dropout is
    used where nothing is evaluated, since transformers' evaluations draw random numbers. torch's
    unpickler loads the pickled files with weights only.
    """
    ours, theirs = both(tmp_path)
    keywords = {**STEPS, **how, "gradient_accumulation_steps": 2}
    make = partial(Classifier, dropout=0.2)
    if how["lr_scheduler_type"] in ("greedy", "reduce_lr_on_plateau"):
        make = partial(Classifier)
        keywords |= {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    writer = ours.trainer(make, checkpoint_format="hf", **keywords)
    writer.train()
    folder = tmp_path / "ours" / "checkpoint-2"
    with safe_globals():
        for path in (*folder.glob("*.pt"), *folder.glob("*.pth")):
            torch.load(path, weights_only=True)
    reader = theirs.trainer(make, **{**keywords, "save_strategy": "no"})
    reader.train(resume_from_checkpoint=str(folder))
    assert equal(reader.model, writer.model)
    logs = [
        [
            {name: entry.get(name) for name in ("step", "loss", "learning_rate", "eval_loss")}
            for entry in each.state.log_history[:-1]
        ]
        for each in (reader, writer)
    ]
    assert logs[0] == logs[1] and reader.state.best_metric == writer.state.best_metric
    states = [each.optimizer.state_dict()["state"] for each in (reader, writer)]
    for key, value in states[0].items():
        for name, part in value.items():
            assert torch.equal(torch.as_tensor(part), torch.as_tensor(states[1][key][name])), name


@pytest.mark.row("K4", "K16", status="differs", note="a run past max_steps makes no more step")
def test_only_the_model(runs: dict[str, Any], tmp_path: Path, caplog: Any) -> None:
    ours, _ = both(tmp_path)
    trainer = ours.trainer(save_only_model=True, **STEPS)
    trainer.train()
    folder = tmp_path / "ours" / "checkpoint-2"
    assert files(folder) == {"model.safetensors", "trainer_state.json", "training_args.json"}
    again = ours.trainer(**STEPS)
    with caplog.at_level(logging.WARNING):
        again.train(resume_from_checkpoint=str(folder))
    assert "holds no optimizer" in caplog.text
    assert losses(again)[:2] == losses(trainer)[:2] and again.state.global_step == 5
    past = ours.trainer(max_steps=1)
    assert past.train(resume_from_checkpoint=str(folder)).global_step == 2


def test_train_data_of_another_length_are_reported(
    runs: dict[str, Any], tmp_path: Path, caplog: Any
) -> None:
    checkpoint = Path(runs["ours"].args.output_dir, "checkpoint-2")
    for length, reported in ((30, "had 22 samples, and has 30"), (22, "")):
        trainer = both(tmp_path)[0].trainer(
            runs["model"],
            gradient_accumulation_steps=2,
            train_dataset=samples(length),
            **{**STEPS, "save_strategy": "no"},
        )
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            trainer.train(resume_from_checkpoint=str(checkpoint))
        assert reported in caplog.text and ("come twice" in caplog.text) is bool(reported)


@pytest.mark.row("K9", "K10")
def test_which_checkpoint(runs: dict[str, Any], tmp_path: Path, caplog: Any) -> None:
    root = tmp_path / "ours"
    shutil.copytree(runs["ours"].args.output_dir, root)
    (damaged,) = (root / "checkpoint-5").glob("optimizer-*")
    damaged.write_bytes(damaged.read_bytes()[:-8])
    trainer = both(tmp_path)[0].trainer(
        runs["model"], gradient_accumulation_steps=2, **{**STEPS, "save_strategy": "no"}
    )
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-5 is left out, and kept" in caplog.text
    assert losses(trainer) == losses(runs["ours"]) and trainer._initial_global_step == 4
    with pytest.raises(ValueError, match=r"Can't find a valid checkpoint at .*checkpoint-5"):
        trainer.train(resume_from_checkpoint=str(root / "checkpoint-5"))
    with pytest.raises(ValueError, match="there is no such folder"):
        trainer.train(resume_from_checkpoint=str(root / "checkpoint-7"))
    trainer.args.output_dir = str(tmp_path / "empty")
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.row("K13")
def test_the_epoch_starts_over(runs: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for name, side in zip(("ours", "theirs"), both(tmp_path), strict=True):
        trainer = side.trainer(
            gradient_accumulation_steps=2, ignore_data_skip=True, **{**STEPS, "save_strategy": "no"}
        )
        folder = Path(runs["theirs"].args.output_dir, "checkpoint-1")
        trainer.train(resume_from_checkpoint=str(folder))
        found.append((losses(trainer), name != "", trainer.state.global_step))
    assert found[0] == found[1]


@pytest.mark.row("K14", status="differs", note="the new arguments count, not the checkpoint's")
def test_other_arguments_are_named(runs: dict[str, Any], tmp_path: Path, caplog: Any) -> None:
    folder = Path(runs["ours"].args.output_dir, "checkpoint-3")
    trainer = both(tmp_path)[0].trainer(
        gradient_accumulation_steps=2, **{**STEPS, "save_steps": 2, "logging_steps": 2}
    )
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=str(folder))
    assert (
        "logging_steps: 2 (from args) != 1 (from trainer_state.json); save_steps: 2" in caplog.text
    )
    assert files(tmp_path / "ours") == {"checkpoint-4", "checkpoint-5"}


@pytest.mark.row("K15")
def test_the_batch_size_that_was_found(tmp_path: Path) -> None:
    ours, _ = both(tmp_path)
    ours.trainer(**STEPS, per_device_train_batch_size=2).train()
    for found, size in ((False, 4), (True, 2)):
        trainer = ours.trainer(**{**STEPS, "save_strategy": "no"}, auto_find_batch_size=found)
        trainer.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-5"))
        assert trainer.state.train_batch_size == size


class Scores(TrainerCallback):
    """Returns the next of the given scores from each evaluation."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["metrics"]["eval_score"] = SCORES[state.global_step - 1]


TRACKED: dict[str, Any] = {
    **STEPS,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "metric_for_best_model": "score",
    "greater_is_better": False,
    "load_best_model_at_end": True,
}


class Listing(transformers.TrainerCallback):
    """Records the checkpoints that exist after each save."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(sorted(files(Path(args.output_dir))))


class TheirScores(Scores, transformers.TrainerCallback):
    pass


@pytest.mark.row("K25", "K26", "K28", "K31", "K32", "B30", "B31")
@pytest.mark.parametrize(
    "asked", [{"save_total_limit": 1}, {"save_total_limit": 2}, {"save_strategy": "best"}]
)
def test_the_best_model(tmp_path: Path, asked: dict[str, Any]) -> None:
    found = []
    for side in both(tmp_path):
        listing = Listing()
        trainer = side.trainer(callbacks=[TheirScores(), listing], **{**TRACKED, **asked})
        trainer.train()
        state = trainer.state
        best = Path(state.best_model_checkpoint).relative_to(side.folder)
        weights = safe_load(side.folder / best)
        assert all(torch.equal(weights[n], p) for n, p in trainer.model.named_parameters())
        noted = state.best_metric, state.best_global_step, best
        found.append((listing.seen, sorted(files(side.folder)), noted))
    assert found[0] == found[1]


def safe_load(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.row("K32")
def test_a_best_checkpoint_that_is_gone(tmp_path: Path, caplog: Any) -> None:
    ours, _ = both(tmp_path)
    ours.trainer(callbacks=[Scores()], **{**TRACKED, "load_best_model_at_end": False}).train()
    shutil.rmtree(ours.folder / "checkpoint-2")
    trainer = ours.trainer(**STEPS)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=str(ours.folder / "checkpoint-3"))
    assert "checkpoint-2, is gone" in caplog.text
    assert trainer.state.best_model_checkpoint is None and trainer.state.best_metric == 4.0


@pytest.mark.row("K33")
def test_states_of_callbacks(tmp_path: Path, caplog: Any) -> None:
    ours, _ = both(tmp_path)
    asked = {**TRACKED, "load_best_model_at_end": False}
    early = EarlyStoppingCallback(early_stopping_patience=9, early_stopping_threshold=0.25)
    ours.trainer(callbacks=[Scores(), early], **asked).train()
    folder = ours.folder / "checkpoint-3"
    stored = json.loads((folder / "trainer_state.json").read_text())["stateful_callbacks"]
    assert stored["EarlyStoppingCallback"]["attributes"] == {"early_stopping_patience_counter": 1}
    assert set(stored) == {"EarlyStoppingCallback", "TrainerControl"}
    for restored in (False, True):
        mine = EarlyStoppingCallback(early_stopping_patience=1)
        trainer = ours.trainer(
            callbacks=[Scores(), mine],
            **{**asked, "save_strategy": "no"},
            restore_callback_states_from_checkpoint=restored,
        )
        trainer.train(resume_from_checkpoint=str(folder))
        (now,) = (c for c in trainer.callback_handler.callbacks if type(c) is type(mine))
        assert now.early_stopping_patience == (9 if restored else 1)
    with caplog.at_level(logging.WARNING):
        ours.trainer(**STEPS, restore_callback_states_from_checkpoint=True).train(
            resume_from_checkpoint=str(folder)
        )
    assert "does not have: EarlyStoppingCallback" in caplog.text


def test_a_save_that_fails_leaves_the_ones_before(tmp_path: Path, caplog: Any) -> None:
    """Require that training continues, and that its later checkpoint equals that of an undisturbed
    run.
    """
    ours, _ = both(tmp_path)
    trainer = ours.trainer(**STEPS)
    save = trainer._save

    def failing(output_dir: str | None = None, state_dict: Any = None) -> None:
        if trainer.state.global_step == 3:
            raise OSError("no space left on device")
        save(output_dir, state_dict)

    trainer._save = failing
    assert trainer.train().global_step == trainer.state.max_steps > 3
    assert re.search("checkpoint-3 was not saved.*no space left.*Training continues", caplog.text)
    saved = {f"checkpoint-{step}" for step in range(1, trainer.state.max_steps + 1)}
    assert files(ours.folder) == saved - {"checkpoint-3"}
    assert CheckpointReader(ours.folder / "checkpoint-2").verify() == []


def test_what_is_not_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail to write the state, the metrics and the model: the earlier files stay."""
    ours, _ = both(tmp_path)
    trainer = ours.trainer(**STEPS)
    folder = ours.folder

    def write() -> None:
        for act in (
            trainer.save_model,
            trainer.save_state,
            lambda: trainer.save_metrics("train", {"train_loss": 1.0}),
        ):
            with contextlib.suppress(OSError):
                act()

    write()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"model.safetensors", "trainer_state.json", "train_results.json"} <= before.keys()

    def full(*_: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trainer.state.global_step = 7
    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(os, "write", full)
    write()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


class Halves(transformers.TrainerCallback):
    """Edits each checkpoint, like averages of weights: rewrites the model's file alone."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        for path in folder.glob("*model.safetensors"):
            halved = {name: tensor / 2 for name, tensor in load_file(path).items()}
            save_file(halved, path, {"format": "pt"})


@pytest.mark.row("K11", "K28")
@pytest.mark.parametrize("driver", ["cpu", "fsdp"])
def test_edited_weights_count(
    tmp_path: Path, driver: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Require that edited weights count for resuming and as the best model, whole or sharded, with
    a message.
    """
    found, chosen = [], {"backend": driver}
    for side in both(tmp_path):
        trainer = side.trainer(callbacks=[Halves, TheirScores()], **TRACKED, **chosen)
        trainer.train()
        best = safe_load(Path(trainer.state.best_model_checkpoint))
        trainer.save_model(str(tmp_path / "last"))
        last = safe_load(tmp_path / "last")
        assert all(torch.equal(best[name], tensor) for name, tensor in last.items())
        resumed = side.trainer(max_steps=5, **chosen)
        resumed.train(resume_from_checkpoint=str(side.folder / "checkpoint-2"))
        found.append(losses(resumed))
        if chosen:  # a process group outlives its trainers, and another test makes its own
            resumed.end()
            trainer.end()
        chosen = {}
    assert found[0] == pytest.approx(found[1], abs=0 if driver == "cpu" else 1e-6)
    assert "their weights count" in caplog.text


@pytest.mark.parametrize("how", ["torn", "gone"])
def test_a_checkpoint_has_its_own_weights(runs: dict[str, Any], tmp_path: Path, how: str) -> None:
    """Require the checkpoint's own weights if the file beside them is torn, or was deleted to save
    room.
    """
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(Path(runs["ours"].args.output_dir, folder.name), folder)
    if how == "torn":
        (folder / "model.safetensors").write_bytes(b"torn")
    else:
        (folder / "model.safetensors").unlink()
    trainer = both(tmp_path)[0].trainer(runs["model"], gradient_accumulation_steps=2, max_steps=5)
    trainer.train(resume_from_checkpoint=str(folder))
    assert losses(trainer) == losses(runs["ours"])
    if how == "gone":
        trainer.state.best_model_checkpoint = str(folder)
        trainer._load_best_model()
        stored = CheckpointReader(folder)
        for name, tensor in trainer.model.state_dict().items():
            assert torch.equal(stored.read("weights", name), tensor)


# --- models of transformers and peft ------------------------------------------------------------


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def texts() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 32, (8,), generator=draw) for _ in range(12)]
    return [{"input_ids": row, "labels": row} for row in rows]


LANGUAGE: dict[str, Any] = {"train_dataset": texts(), "eval_dataset": texts()}


@pytest.mark.row("K7", "K19")
def test_every_checkpoint_is_a_pretrained_model(tmp_path: Path, caplog: Any) -> None:
    ours, _ = both(tmp_path)
    trainer = ours.trainer(llama, **LANGUAGE, save_strategy="steps", save_steps=2, max_steps=4)
    trainer.train()
    loaded = transformers.LlamaForCausalLM.from_pretrained(ours.folder / "checkpoint-4")
    assert equal(loaded, trainer.model)
    assert "generation_config.json" in files(ours.folder / "checkpoint-2")
    trainer.save_model()
    assert {"model.safetensors", "config.json", "training_args.json"} <= files(ours.folder)
    config = ours.folder / "config.json"
    config.write_text(config.read_text().replace(transformers.__version__, "1.2.3"))
    with caplog.at_level(logging.WARNING):
        trainer._load_from_checkpoint(str(ours.folder))
    assert "written by transformers 1.2.3" in caplog.text and "missing" not in caplog.text


class Words:
    """A stand-in for a processing class, which can only be saved."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "words.json").write_text("{}")


class Collating:
    tokenizer = Words()

    def __call__(self, batch: list[Any]) -> Any:
        return torch.utils.data.default_collate(batch)


@pytest.mark.row("K8")
@pytest.mark.parametrize("given", [{"processing_class": Words()}, {"data_collator": Collating()}])
def test_the_processing_class_is_saved(tmp_path: Path, given: dict[str, Any]) -> None:
    collator = {"data_collator": torch.utils.data.default_collate}
    trainer = both(tmp_path)[0].trainer(**{**collator, **given})
    trainer.save_model(str(tmp_path / "saved"))
    assert "words.json" in files(tmp_path / "saved")


# peft asks transformers for a property by its old name
OLD_NAME = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def adapted(names: tuple[str, ...] = ("default",)) -> Any:
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(llama(), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    return model


@OLD_NAME
@pytest.mark.row("K22", "N11", "N14")
@pytest.mark.parametrize("names", [("default",), ("first", "second")])
@pytest.mark.parametrize("written", ["ours", "theirs"])
def test_adapters(tmp_path: Path, names: tuple[str, ...], written: str) -> None:
    ours, theirs = both(tmp_path)
    keywords = {**LANGUAGE, "max_steps": 4, "label_names": ["labels"]}
    make = partial(adapted, names)
    writer = (ours if written == "ours" else theirs).trainer(
        make, **keywords, save_strategy="steps", save_steps=2
    )
    writer.train()
    folder = Path(writer.args.output_dir, "checkpoint-2")
    for name in names:
        place = folder if name == "default" else folder / name
        assert {"adapter_config.json", "adapter_model.safetensors"} <= files(place)
    assert "model.safetensors" not in files(folder)
    if written == "ours":
        stored = CheckpointReader(folder).names("weights")
        assert stored and all("lora" in name for name in stored)
    trainer = ours.trainer(make, **keywords)
    trainer.train(resume_from_checkpoint=str(folder))
    assert losses(trainer) == losses(writer)
    assert equal(trainer.model, writer.model)


@OLD_NAME
@pytest.mark.row("N11", "K28")
def test_the_best_adapter(tmp_path: Path) -> None:
    import peft

    ours, _ = both(tmp_path)
    asked = {**TRACKED, "label_names": ["labels"]}
    trainer = ours.trainer(adapted, **LANGUAGE, callbacks=[Scores()], **asked)
    trainer.train()
    best = ours.folder / "checkpoint-4"
    assert trainer.state.best_model_checkpoint == str(best)
    torch.manual_seed(3)
    again = peft.PeftModel.from_pretrained(llama(), best)
    for name, weight in again.named_parameters():
        assert torch.equal(weight, trainer.model.get_parameter(name)), name


@OLD_NAME
@pytest.mark.row("K11", "N11")
@pytest.mark.parametrize("names", [("default",), ("first", "second")])
def test_an_edited_adapter_counts(tmp_path: Path, names: tuple[str, ...], caplog: Any) -> None:
    ours, _ = both(tmp_path)
    keywords = {**LANGUAGE, "max_steps": 4, "label_names": ["labels"]}
    make = partial(adapted, names)
    ours.trainer(make, **keywords, save_strategy="steps", save_steps=2).train()
    folder = ours.folder / "checkpoint-2"
    found = []
    for edited in (False, True):
        for path in folder.rglob("adapter_model.safetensors") if edited else ():
            save_file({n: t + 0.5 for n, t in load_file(path).items()}, path, {"format": "pt"})
        trainer = ours.trainer(make, **keywords)
        trainer.train(resume_from_checkpoint=str(folder))
        found.append(losses(trainer)[2:])
        assert ("their weights count" in caplog.text) is edited
    assert found[0] != found[1]


@OLD_NAME
@pytest.mark.row("N13")
def test_the_best_of_adapters_that_are_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    def prompted() -> Any:
        torch.manual_seed(3)
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        return peft.get_peft_model(llama(), config)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("size mismatch for prompt_embeddings")

    for side in both(tmp_path):
        asked = {**TRACKED, "label_names": ["labels"]}
        trainer = side.trainer(prompted, **LANGUAGE, callbacks=[Scores()], **asked)
        monkeypatch.setattr(trainer.model, "load_adapter", refuse)
        with pytest.raises(RuntimeError, match=r"PROMPT_TUNING.*PeftModel\.from_pretrained"):
            trainer.train()
