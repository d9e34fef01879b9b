"""The harness: results of jobs, and reports when a rank raises, dies or hangs."""

import multiprocessing
import os
import sys
import threading
import time
from typing import Any

import pytest
import torch

from drivetrain.conformance import harness
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


def hashed(bench: Bench) -> int:
    return hash("a name")


def test_strings_hash_otherwise_on_another_rank() -> None:
    """Require different hashes of strings, as in processes that a launcher starts, although the
    harness forks its ranks.
    """
    first, second = SUBJECT.run(hashed)
    assert first != second


def test_what_no_rank_was_forked_from_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        def __init__(self, *given: Any) -> None:
            self.num_ranks, self.living = 0, True

        def close(self) -> None:
            self.living = False

    monkeypatch.setattr(harness, "ForkServer", Server)
    monkeypatch.setattr(harness, "_servers", {})
    monkeypatch.setattr(harness, "_pools", {})
    started = []
    for number in range(2 * harness.MAX_SERVERS):
        started.append(harness.fork_server("python", "", (), number))
        started[0].num_ranks = 1
    last = harness.MAX_SERVERS - 1
    assert [each.living for each in started] == [True, *[False] * last, False, *[True] * last]
    assert harness.fork_server("python", "", (), 0) is started[0]
    laden = harness.fork_server("python", "", ("a_library",), 0)
    harness.close_pools(kept_servers=1)
    assert [each.living for each in (laden, *started)].count(True) == 1
    assert not laden.living  # the one that is kept has imported less


def test_a_server_ends_although_a_fork_of_this_process_lives_on() -> None:
    """Close a server whose socket a fork holds open, as persistent data workers do."""
    server = harness.ForkServer(sys.executable, harness.import_path(foreign=False), ())
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    fork.start()
    try:
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(60)
        assert fork.is_alive() and not closing.is_alive()
    finally:
        fork.kill()
        fork.join()


def test_a_job_runs_on_every_rank() -> None:
    answers = SUBJECT.run(answer, text="é")
    assert [reported["rank"] for reported in answers] == [0, 1]
    assert all(
        reported["text"] == "é" and reported["tensor"].tolist() == [0, 1, 2] for reported in answers
    )


@pytest.mark.parametrize(
    ("job", "errors", "words"),
    [
        (
            raise_on_one,
            {0: "no answer", 1: "LookupError: rank 1 lost something\n"},
            "LookupError: rank 1 lost something",
        ),
        (
            exit_on_one,
            {0: "the process ended: exit code 7\n", 1: "no answer"},
            "exit code 7\nlast words of rank 0",
        ),
    ],
)
def test_a_failure_shows_every_rank_and_the_next_job_runs(
    job: Any, errors: dict[int, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.conformance.harness.GRACE_SECONDS", 0.5)
    with pytest.raises(WorkerFailure) as failure:
        SUBJECT.run(job)
    assert words in str(failure.value)
    before_stacks = str(failure.value).partition("--- rank 0")[0]
    assert all(f"rank {rank} of 2: {error}" in before_stacks for rank, error in errors.items())
    assert "in wait_for_the_other" in str(failure.value)  # the stack of the rank that hung
    assert len(SUBJECT.run(answer, text="again")) == 2
