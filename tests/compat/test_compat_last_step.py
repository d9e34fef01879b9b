"""The last step is kept if its evaluation, or a callback at the end, fails."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import last_step_ranks
import pytest
import torch
from last_step_ranks import checkpoints, order, trainer
from subjects import subject

EVENTS = ["evaluate", "save"]


@pytest.mark.parametrize("strategy", ["steps", "best"])
@pytest.mark.parametrize("fails", ["metrics", "evaluate", "predict"])
def test_a_last_evaluation_that_fails(
    tmp_path: Path, caplog: Any, fails: str, strategy: str
) -> None:
    best = {"metric_for_best_model": "loss"} if strategy == "best" else {}
    undisturbed = trainer(tmp_path / "whole", **best)
    undisturbed.train()
    made = trainer(tmp_path / "stopped", fails, save_strategy=strategy, **best)
    with pytest.raises(KeyError if fails == "metrics" else ConnectionError):
        made.train()
    assert checkpoints(tmp_path / "stopped")[-1] == "checkpoint-4"
    assert f"saved in {tmp_path / 'stopped' / 'checkpoint-4'}" in caplog.text
    assert "the last evaluation failed, after step 4" in caplog.text
    again = trainer(tmp_path / "stopped", **best)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
    for mine, other in zip(again.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert again.evaluate()["eval_loss"] == undisturbed.state.log_history[-2]["eval_loss"]


def test_the_order_of_events_is_that_of_transformers(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train()
    assert order(made) == [*EVENTS, *EVENTS, "end"]


def test_without_checkpoints_the_model_is_named(tmp_path: Path, caplog: Any) -> None:
    made = trainer(tmp_path, "metrics", save_strategy="no")
    with pytest.raises(KeyError):
        made.train()
    assert not checkpoints(tmp_path)
    assert "trainer.model has the trained weights, and trainer.save_model() keeps" in caplog.text


def test_an_evaluation_that_fails_before_the_last_step_saves_nothing_of_it(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.compute_metrics = lambda prediction: {}["f1"]
    with pytest.raises(KeyError):
        made.train()
    assert not checkpoints(tmp_path)  # as with transformers: the run resumes before it


def test_a_callback_that_fails_at_the_end(tmp_path: Path, caplog: Any) -> None:
    # the strategy has no save at the last step
    made = trainer(tmp_path, "end", save_strategy="steps", save_steps=3, eval_strategy="no")
    with pytest.raises(ConnectionError):
        made.train()
    assert checkpoints(tmp_path)[-1] == "checkpoint-4"
    assert "on_train_end failed, after step 4" in caplog.text
    assert not made.is_in_train


def test_a_hub_that_is_away_at_the_end(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    from concurrent.futures import Future

    class Away:
        def create_repo(self, *args: Any, **kwargs: Any) -> Any:
            return type("Made", (), {"repo_id": "me/run"})()

        def upload_folder(self, **kwargs: Any) -> Future[None]:
            failed: Future[None] = Future()
            failed.set_exception(ConnectionError("the hub is away"))
            return failed

    monkeypatch.setattr("drivetrain.compat.trainer.hub.hub_api", Away)
    made = trainer(tmp_path, push_to_hub=True)
    with caplog.at_level(logging.ERROR):
        made.train()
    assert checkpoints(tmp_path)[-1] == "checkpoint-4"
    assert "an upload to the Hub failed: the hub is away" in caplog.text


PAIRS = [("metrics", [1]), ("metrics", [0, 1]), ("predict", [0]), ("evaluate", [1])]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.parametrize(("fails", "ranks"), PAIRS)
def test_ranks(tmp_path: Path, backend: str, fails: str, ranks: list[int]) -> None:
    pair = subject(backend, 2, timeout_seconds=400)
    found = pair.run(
        last_step_ranks.failing, alone=True, folder=str(tmp_path), fails=fails, ranks=ranks
    )
    for rank, (error, kept, seen) in enumerate(found):
        expected = "KeyError" if fails == "metrics" else "ConnectionError"
        assert error == (expected if rank in ranks else "CollectiveFailed")
        assert kept == ["checkpoint-2", "checkpoint-4"]
        assert [name for name in seen if name != "predict"][:2] == EVENTS
        assert seen.count("save") == 1
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_ranks_that_do_not_fail(tmp_path: Path, strategy: str) -> None:
    """The save before the last evaluation calls no events, and leaves nothing behind that the
    strategy leaves out."""
    asked = {"save_strategy": strategy, "metric_for_best_model": "steady"}
    found = subject("ddp", 2).run(
        last_step_ranks.failing, alone=True, folder=str(tmp_path), fails="", ranks=[], **asked
    )
    best = strategy == "best"  # the metric never improves
    for error, kept, seen in found:
        assert not error
        assert kept == ["checkpoint-2", *([] if best else ["checkpoint-4"])]
        assert seen == [*EVENTS, "evaluate", *([] if best else ["save"]), "end"]
