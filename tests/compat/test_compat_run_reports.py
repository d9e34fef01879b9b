"""Reports of a whole run, compared with those of transformers' Trainer: logs, events, files."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hub_server import Hub, serving
from huggingface_hub.utils import are_progress_bars_disabled
from side_by_side import LIBRARIES, arguments, assert_same_history, classifier, samples

from drivetrain import compat


class Diary:
    """Writes down each event with its step."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)

        def event(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.events.append(f"{name[3:]}{state.global_step}")

        return event


def trainer(library: Any, folder: Path, callbacks: Any = None, **changes: Any) -> Any:
    args = arguments(
        library, folder, **{"gradient_accumulation_steps": 2, "max_steps": 5, **changes}
    )
    data = {"train_dataset": samples(), "eval_dataset": samples(4)}
    return library.Trainer(classifier(), args, **data, callbacks=callbacks)


@pytest.mark.row("G2", "G3", "G4", "G5", "G6", "G7")
@pytest.mark.parametrize(
    "changes",
    [
        {"logging_steps": 1},
        {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3},
        {"logging_steps": 3, "logging_first_step": True, "max_steps": 4},
        {"logging_steps": 0.5, "max_steps": 4},
        {"logging_strategy": "epoch", "eval_strategy": "epoch", "max_steps": 8},
        {"logging_strategy": "no"},
    ],
    ids=["each", "with evaluation", "first", "share", "epoch", "none"],
)
def test_the_history_of_a_run_is_theirs(tmp_path: Path, changes: dict[str, Any]) -> None:
    outputs, histories = [], []
    for name, library in LIBRARIES.items():
        runner = trainer(library, tmp_path / name, **changes)
        outputs.append(runner.train())
        histories.append(runner.state.log_history)
    assert_same_history(*histories, rel=1e-6)
    assert outputs[0].global_step == outputs[1].global_step
    assert outputs[0].training_loss == pytest.approx(outputs[1].training_loss, rel=1e-6)
    assert {"train_runtime", "train_loss", "total_flos", "epoch"} <= set(histories[0][-1])


@pytest.mark.row("B7", "B30", "B31", "B16", "B12")
def test_the_events_of_a_run_are_theirs(tmp_path: Path) -> None:
    diaries = []
    for name, library in LIBRARIES.items():
        diary = Diary()
        runner = trainer(
            library,
            tmp_path / name,
            callbacks=[diary],
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            max_steps=3,
        )
        before = runner.state
        runner.train()
        assert runner.state is not before
        runner.predict(samples(4))
        diaries.append(diary.events)
    assert diaries[0] == diaries[1]
    assert diaries[0][:4] == ["init_end0", "train_begin0", "epoch_begin0", "step_begin0"]
    assert diaries[0][-2:] == ["prediction_step3", "predict3"]


@pytest.mark.row("B31", "B30")
def test_files_are_there_when_their_event_comes(tmp_path: Path) -> None:
    class Looker(compat.TrainerCallback):
        found: dict[str, list[str]] = {}  # noqa: RUF012

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.found[f"save{state.global_step}"] = self.folders(args)
            state_file = Path(args.output_dir, f"checkpoint-{state.global_step}/trainer_state.json")
            assert state_file.exists()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.found["end"] = self.folders(args)

        def folders(self, args: Any) -> list[str]:
            return sorted(path.name for path in Path(args.output_dir).glob("checkpoint-*"))

    looker = Looker()
    runner = trainer(
        compat,
        tmp_path,
        callbacks=[looker],
        max_steps=3,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    losses = iter([1.0, 2.0, 3.0])
    evaluated = runner.evaluate

    def worse_each_time(*given: Any, **words: Any) -> dict[str, float]:
        return {**evaluated(*given, **words), "eval_loss": next(losses)}

    runner.evaluate = worse_each_time
    runner.train()
    assert looker.found == {
        "save1": ["checkpoint-1"],
        "save2": ["checkpoint-1", "checkpoint-2"],
        "save3": ["checkpoint-1", "checkpoint-3"],
        "end": ["checkpoint-1"],
    }


@pytest.mark.row("B11")
def test_callbacks_change_nothing_of_the_run(tmp_path: Path) -> None:
    quiet, watched = trainer(compat, tmp_path / "a"), trainer(compat, tmp_path / "b")
    watched.add_callback(Diary())
    assert quiet.train().training_loss == watched.train().training_loss


@pytest.mark.row("B10", "B17")
def test_a_dict_from_a_callback_stops_the_run(tmp_path: Path) -> None:
    class Stopper(compat.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return {"should_training_stop": True} if state.global_step == 2 else None

    runner = trainer(compat, tmp_path, callbacks=[Stopper])
    assert runner.train().global_step == 2


@pytest.mark.row("F1", "F2")
def test_memory_is_in_the_metrics_where_theirs_is(tmp_path: Path) -> None:
    keys = []
    for name, library in LIBRARIES.items():
        runner = trainer(library, tmp_path / name, skip_memory_metrics=False, max_steps=1)
        metrics = [runner.train().metrics, runner.evaluate(), runner.predict(samples(4)).metrics]
        keys.append([{key for key in each if "_mem_" in key} for each in metrics])
    assert keys[0] == keys[1]
    assert "init_mem_cpu_alloc_delta" in keys[0][0]


@pytest.mark.row("F4")
def test_speed_counts_the_samples_of_this_call(tmp_path: Path) -> None:
    metrics = trainer(compat, tmp_path).train().metrics
    ratio = metrics["train_samples_per_second"] / metrics["train_steps_per_second"]
    assert ratio == pytest.approx(4, rel=0.01)


@pytest.mark.row("F9")
def test_preparing_the_model_is_not_counted_as_evaluating(tmp_path: Path) -> None:
    evaluated = []
    for name, library in LIBRARIES.items():
        start = time.perf_counter()
        metrics = trainer(library, tmp_path / name).evaluate()
        seconds = time.perf_counter() - start
        assert metrics["eval_model_preparation_time"] + metrics["eval_runtime"] <= seconds
        evaluated.append(set(metrics))
    assert evaluated[0] == evaluated[1]


@pytest.mark.row("F10")
def test_the_plan_of_a_run_is_said_at_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"log_level": "info", "max_steps": 5, "save_strategy": "steps", "save_steps": 3}
    reported = []
    for start in (None, str(tmp_path / "checkpoint-3")):
        runner = trainer(compat, tmp_path, **asked)
        caplog.clear()
        with caplog.at_level(logging.INFO, "drivetrain.compat"):
            runner.train(resume_from_checkpoint=start)
        logging.getLogger("drivetrain.compat").setLevel(logging.NOTSET)
        reported.append([record.getMessage().strip() for record in caplog.records])
    for fact in (
        "Num examples = 14",
        "Num update steps per epoch = 4",
        "Total optimization steps = 5",
        "Number of trainable parameters = 67",
    ):
        assert fact in reported[0] and fact in reported[1]
    resuming = [[line for line in lines if "resuming after step 3" in line] for lines in reported]
    assert [len(lines) for lines in resuming] == [0, 1]


@pytest.mark.row("G13", "G18")
def test_tensorboard_gets_a_run(tmp_path: Path) -> None:
    trainer(compat, tmp_path, report_to="tensorboard", logging_steps=1).train()
    assert list((tmp_path / "runs").rglob("events.*"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield server


@pytest.mark.row("U1", "U7", "U8", "L24")
def test_a_run_is_pushed(hub: Hub, tmp_path: Path) -> None:
    class Listener(compat.TrainerCallback):
        quiet: list[bool] = []  # noqa: RUF012

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.quiet.append(are_progress_bars_disabled())

    runner = trainer(
        compat,
        tmp_path / "run",
        callbacks=[Listener],
        push_to_hub=True,
        hub_token="hf_secret",
        save_strategy="steps",
        save_steps=2,
        hub_strategy="checkpoint",
        hub_always_push=True,
        max_steps=4,
    )
    assert runner.hub_model_id == "tester/run" and list(hub.repositories) == ["tester/run"]
    runner.train()
    assert Listener.quiet == [True] * 4
    assert not are_progress_bars_disabled()
    said = {commit.message for commit in hub.commits}
    assert said == {
        f"Training in progress, step {n}{c}" for n in (2, 4) for c in ("", ", checkpoint")
    }
    assert all("model.safetensors" in str(commit.files) for commit in hub.commits)
    runner.save_model()
    assert hub.commits[-1].message == "Model save"
    assert {"README.md", "model.safetensors"} <= set(hub.commits[-1].files)
    assert not any("checkpoint-" in name for name in hub.commits[-1].files)
    assert math.isfinite(runner.state.total_flos)
