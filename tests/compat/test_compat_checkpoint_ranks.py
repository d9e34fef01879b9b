"""Evaluation and checkpoints on two processes, and resuming them on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoint_ranks
import pytest
import torch
import transformers
from side_by_side import (
    Classifier,
    accuracy,
    arguments,
    both,
    llama,
    losses,
    ours,
    samples,
    sentences,
    without_times,
)
from subjects import subject

from drivetrain.compat.checkpoints.model_files import read_weights

EVERY_STEP: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 1,
}
DRIVERS = ["ddp", *(pytest.param(d, marks=pytest.mark.slow) for d in ("fsdp", "deepspeed"))]


@pytest.fixture(scope="module", params=DRIVERS)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a driver, the folder that two ranks wrote to, the results of each rank, and the losses
    of the run of transformers' Trainer that they resume.
    """
    folder = tmp_path_factory.mktemp(request.param)
    theirs = both(folder)[1].trainer(train_dataset=samples(24), **EVERY_STEP)
    theirs.train()
    pair = subject(request.param, 2, timeout_seconds=400)
    ranks = pair.run(checkpoint_ranks.everything, out=str(folder))
    return request.param, folder, ranks, losses(theirs)


@pytest.mark.row("E5", "E6", "D6", "D26", "M11", "X10")
def test_two_ranks_predict_as_one(ran: Any, tmp_path: Path) -> None:
    driver, _, ranks, _ = ran
    assert ranks[0]["predictions"] == ranks[1]["predictions"]
    output = ours(tmp_path).trainer(compute_metrics=accuracy).predict(samples(11))
    found = torch.tensor(ranks[0]["predictions"][0])
    torch.testing.assert_close(found, torch.tensor(output.predictions), rtol=0, atol=1e-6)
    assert ranks[0]["predictions"][1] == output.label_ids.tolist()
    metrics = without_times(output.metrics)
    assert ranks[0]["metrics"]["test_accuracy"] == metrics["test_accuracy"]
    # 4, 4, and 3 samples, of which the last rank's batch holds none
    assert ranks[0]["metrics"]["test_loss"] == pytest.approx(metrics["test_loss"], abs=1e-6)
    assert ranks[0]["loss alone"] == pytest.approx(metrics["test_loss"], abs=1e-6)
    if driver == "ddp":
        rows = [[float(n)] * max(pair) for pair in ((2, 3), (1, 4), (5,)) for n in pair]
        assert ranks[0]["wide"] == [
            [row + [-100.0] * (5 - len(row)) for row in rows],
            [2, 3, 1, 4, 5],
        ]


@pytest.mark.row("K11", "K18", "R3", "R4", "X4", "X5")
def test_two_ranks_resume_bit_equal(ran: Any) -> None:
    _, folder, ranks, _ = ran
    assert ranks[0] == ranks[1]
    assert ranks[0]["resumed"] == ranks[0]["losses"] and len(ranks[0]["losses"]) == 4
    names = sorted(path.name for path in (folder / "ours" / "checkpoint-2").iterdir())
    assert "model.safetensors" in names and "state-00001-of-00002.safetensors" in names


@pytest.mark.row("X14", status="differs", note="each checkpoint holds both, for every driver")
@pytest.mark.row(
    "X21", status="differs", note="the best model is loaded whole, so nothing is refused"
)
@pytest.mark.row("K7", "K28")
def test_the_model_file_is_whole(ran: Any) -> None:
    _, folder, ranks, _ = ran
    best = ranks[0]["best"]
    step = 2 * (1 + ranks[0]["evaluations"].index(min(ranks[0]["evaluations"])))
    assert best == str(folder / "ours" / f"checkpoint-{step}")
    saved, stored = read_weights(folder / "saved"), read_weights(Path(best))
    wanted = Classifier().state_dict()
    assert {name: t.shape for name, t in saved.items()} == {n: t.shape for n, t in wanted.items()}
    assert all(torch.equal(saved[name], stored[name]) for name in saved)


@pytest.mark.row("C38")
def test_what_a_subclass_overrides_is_called_on_two_ranks(ran: Any) -> None:
    """Require calls of overridden methods; files of both ranks stay in the folder."""
    _, folder, ranks, _ = ran
    found = ranks[0]["overridden"]
    assert found["losses"] == found["resumed"]
    assert found["losses"] == pytest.approx(ranks[0]["plain"], abs=1e-6)
    assert len(found["norms"]) == 4 and min(found["norms"]) > 100
    for rank in (0, 1):
        assert (folder / "overridden" / "checkpoint-2" / f"mine-{rank}.txt").read_text() == "put"


@pytest.mark.row("K11", "K18")
def test_two_ranks_continue_what_theirs_began(ran: Any) -> None:
    _, _, ranks, wanted = ran
    assert ranks[0]["from theirs"] == pytest.approx(wanted, abs=2e-6)


@pytest.mark.row("K2", "K11", "X14")
def test_hf_s_files_are_resumed_by_theirs_and_by_ours(ran: Any, tmp_path: Path) -> None:
    """Resume from HF's files in both libraries. The optimizer's file is whole, however ranks shard
    it.
    """
    _, folder, ranks, _ = ran
    assert ranks[0]["from hf"] == pytest.approx(ranks[0]["plain"], abs=1e-6)
    for side in both(tmp_path):
        trainer = side.trainer(train_dataset=samples(24), **{**EVERY_STEP, "save_strategy": "no"})
        trainer.train(resume_from_checkpoint=str(folder / "hf" / "checkpoint-2"))
        assert losses(trainer) == pytest.approx(ranks[0]["plain"], abs=1e-6)
    assert not [path for path in (folder / "hf" / "checkpoint-2").iterdir() if path.is_dir()]


@pytest.mark.row("K11", "K28")
def test_edited_weights_count_on_all_ranks(ran: Any, tmp_path: Path) -> None:
    _, folder, ranks, _ = ran
    found = ranks[0]["edited"]
    stored = read_weights(Path(found["best"]))
    assert {name: each.tolist() for name, each in stored.items()} == found["weights"]
    alone = ours(tmp_path).trainer(
        train_dataset=samples(24), **{**EVERY_STEP, "save_strategy": "no", "backend": "cpu"}
    )
    alone.train(resume_from_checkpoint=str(folder / "edited" / "checkpoint-2"))
    assert losses(alone) == pytest.approx(found["resumed"], abs=1e-6)
    assert losses(alone)[2] != pytest.approx(ranks[0]["plain"][2], abs=1e-3)


@pytest.mark.row("L18", "C38")
def test_a_loop_copied_from_theirs_runs_on_two_ranks(ran: Any) -> None:
    """Compare with the plain run. The copied loop makes its optimizer before the driver shards the
    weights.
    """
    driver, _, ranks, _ = ran
    if driver == "deepspeed":
        assert "looped" not in ranks[0]  # refused when it is built
        return
    for run in ("losses", "resumed"):
        assert ranks[0]["looped"][run] == pytest.approx(ranks[0]["plain"], abs=1e-6)


@pytest.mark.row("T1")
def test_ranks_generate_while_training(ran: Any) -> None:
    """Generate a different number of tokens on each rank. Where forwards gather weights, all ranks
    continue to the last token.
    """
    _, _, ranks, _ = ran
    assert ranks[0]["spoken"] == [4, 4]


@pytest.mark.row("S10", "S11")
@pytest.mark.row(
    "S9",
    status="differs",
    note="in evaluation a rank divides by the tokens of its own batch, as one process does",
)
def test_smoothed_labels_are_shifted_whatever_wraps_the_model(ran: Any, tmp_path: Path) -> None:
    """Compare two ranks with batches of two to one process with batches of four; the evaluation has
    batches of two on both.
    """
    _, _, ranks, _ = ran
    *found, evaluated = ranks[0]["smoothed"]
    asked = {"max_steps": 2, "label_smoothing_factor": 0.2, "per_device_train_batch_size": 4}
    given = {"train_dataset": sentences(), "eval_dataset": sentences(8)}
    args = arguments(transformers, tmp_path, per_device_eval_batch_size=2, **asked)
    theirs = transformers.Trainer(llama(), args, **given)
    theirs.train()
    assert found == pytest.approx(losses(theirs), rel=1e-5)
    assert evaluated == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)


@pytest.mark.row("K18", "X14")
def test_one_process_continues_what_two_began(ran: Any, tmp_path: Path) -> None:
    _, folder, ranks, _ = ran
    trainer = ours(tmp_path).trainer(
        train_dataset=samples(24),
        per_device_train_batch_size=8,
        max_steps=4,
        save_strategy="no",
        backend="cpu",
    )
    trainer.train(resume_from_checkpoint=str(folder / "plain" / "checkpoint-1"))
    assert losses(trainer) == pytest.approx(ranks[0]["plain"], abs=1e-6)
