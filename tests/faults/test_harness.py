"""The harness: what a job returns, and what is told when a rank raises, dies or hangs."""

import os
import time
from typing import Any

import pytest
import torch

from drivetrain.conformance.bench import Bench
from drivetrain.conformance.harness import WorkerFailure
from drivetrain.conformance.subject import Subject

SUBJECT = Subject("faulty", num_processes=2, timeout_seconds=60)


def answer(bench: Bench, *, text: str) -> dict[str, Any]:
    return {"rank": int(os.environ["RANK"]), "text": text, "tensor": torch.arange(3)}


def raise_on_one(bench: Bench) -> None:
    if os.environ["RANK"] == "1":
        raise LookupError("rank 1 lost something")
    while True:
        wait_for_the_other()


def exit_on_one(bench: Bench) -> None:
    if os.environ["RANK"] == "0":
        print("last words of rank 0", flush=True)
        os._exit(7)
    while True:
        wait_for_the_other()


def wait_for_the_other() -> None:
    time.sleep(0.01)


def test_a_job_runs_on_every_rank() -> None:
    answers = SUBJECT.run(answer, text="é")
    assert [told["rank"] for told in answers] == [0, 1]
    assert all(told["text"] == "é" and told["tensor"].tolist() == [0, 1, 2] for told in answers)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (raise_on_one, "LookupError: rank 1 lost something"),
        (exit_on_one, "exit code 7\nlast words of rank 0"),
    ],
)
def test_a_failure_shows_every_rank_and_the_next_job_runs(
    job: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.conformance.harness.GRACE_SECONDS", 0.5)
    with pytest.raises(WorkerFailure) as failure:
        SUBJECT.run(job)
    assert words in str(failure.value)
    assert "in wait_for_the_other" in str(failure.value)  # the stack of the rank that hung
    assert len(SUBJECT.run(answer, text="again")) == 2
