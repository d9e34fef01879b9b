"""The harness: results of jobs, and reports when a rank raises, dies or hangs."""

import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.conformance import fork_server, harness
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.fork_server import ForkServer, WorkerFailure
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


def server_of(bench: Bench) -> int:
    return os.getppid()


def test_strings_hash_otherwise_on_another_rank() -> None:
    """Require different hashes of strings, as in processes that a launcher starts, although the
    harness forks its ranks.
    """
    first, second = SUBJECT.run(hashed)
    assert first != second


def server(*packages: str, path: str = "") -> ForkServer:
    path = os.pathsep.join(part for part in (path, harness.import_path(foreign=False)) if part)
    return ForkServer(sys.executable, path, packages, 0)


@pytest.fixture
def own_templates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Share no template with other tests. Return the folder of their sockets."""
    with tempfile.TemporaryDirectory() as folder:  # `tmp_path` is too long for a socket
        monkeypatch.setenv(fork_server.SHARED, folder)
        yield Path(folder)


def forked(by: ForkServer) -> tuple[int, int]:
    """Fork a rank without jobs; return the process ids of the server and of its template."""
    with tempfile.TemporaryFile() as output:
        reading, jobs = os.pipe()
        rank = by.fork(dict(os.environ), reading, output.fileno(), output.fileno())
        parents = [parent_of(rank), parent_of(parent_of(rank))]
        for end in (reading, jobs):
            os.close(end)
    assert by.wait(rank) == 0
    return parents[0], parents[1]


def parent_of(process: int) -> int:
    stat = Path(f"/proc/{process}/stat").read_bytes()
    return int(stat[stat.rindex(b")") + 1 :].split()[1])


def has_ended(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return not stat.exists() or b") Z " in stat.read_bytes()


def wait_for_the_end(process: int) -> None:
    while not has_ended(process):  # the time-out of the test is the limit
        wait_for_the_other()


def test_what_was_imported_once_serves_all_who_name_the_folder() -> None:
    first, second = server(), server()
    (one, template), (other, same) = forked(first), forked(second)
    assert template == same and one != other
    first.close()
    wait_for_the_end(one)
    assert forked(second) == (other, template)
    second.close()


def test_a_job_is_found_by_the_path_of_the_process_that_sends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job_elsewhere.py").write_text("def where(bench):\n    return __file__\n")
    monkeypatch.syspath_prepend(tmp_path)
    job = importlib.import_module("job_elsewhere")
    answers = SUBJECT.run(job.where, alone=True)
    assert answers == [str(tmp_path / "job_elsewhere.py")] * 2


def test_a_server_that_was_killed_is_replaced() -> None:
    first = SUBJECT.run(server_of)
    os.kill(first[0], signal.SIGKILL)
    wait_for_the_end(first[0])
    second = SUBJECT.run(server_of)
    assert not {*first} & {*second}


@pytest.mark.slow
def test_a_template_ends_when_its_folder_is_removed(own_templates: Path) -> None:
    first = server()
    _, template = forked(first)
    first.close()
    shutil.rmtree(own_templates)
    wait_for_the_end(template)
    own_templates.mkdir()


@pytest.mark.slow
@pytest.mark.usefixtures("own_templates")
def test_a_template_that_was_killed_is_started_again() -> None:
    first = server()
    _, template = forked(first)
    os.kill(template, signal.SIGKILL)
    wait_for_the_end(template)
    second = server()
    assert forked(second)[1] != template
    assert forked(first)  # which needs its template no more
    for each in (first, second):
        each.close()


@pytest.mark.slow
def test_what_a_template_printed_is_in_the_error(own_templates: Path) -> None:
    (own_templates / "unusable.py").write_text("raise MemoryError('no memory for this library')")
    unusable = server("unusable", path=str(own_templates))
    with pytest.raises(WorkerFailure, match="no memory for this library"):
        forked(unusable)
    unusable.close()


def test_a_server_ends_although_a_fork_of_this_process_lives_on() -> None:
    """Close a server whose socket a fork holds open, as persistent data workers do."""
    ending = server()
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    fork.start()
    try:
        closing = threading.Thread(target=ending.close, daemon=True)
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
