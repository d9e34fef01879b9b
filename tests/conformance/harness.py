"""Pools of worker processes that live on between tests.

Starting a rank costs seconds (it imports torch), running one law costs milliseconds. So the ranks
stay, and sessions come and go in them. After a failure, the state of the ranks is unknown: the pool
is closed, and the next job gets a new one. New ranks are forked from a process that has imported
what they need.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import selectors
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from .fork_server import ForkServer, WorkerFailure, last_words
from .ports import free_port

__all__ = ["Pool", "WorkerFailure", "lend"]

GRACE_SECONDS = 5.0
"""Time in which the other ranks must answer once one has failed."""

MAX_WORKERS = 8
"""Idle pools are closed, the longest unused first, before there are more processes than this."""


class Worker:
    """One rank: a process, pipes for its jobs and answers, and a log for all that it prints."""

    def __init__(self, rank: int, environment: Mapping[str, str], server: ForkServer) -> None:
        self.rank, self.server = rank, server
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        (reading, jobs), (answers, writing) = os.pipe(), os.pipe()
        self.jobs, self.answers = os.fdopen(jobs, "w"), os.fdopen(answers, "rb")
        self.pid = server.fork(environment, reading, writing, self.log.fileno())
        self.code: int | None = None
        os.close(reading)
        os.close(writing)

    def send(self, line: str) -> None:
        with suppress(BrokenPipeError):  # a dead rank is found when its answer is missing
            self.jobs.write(line)
            self.jobs.flush()

    def receive(self) -> dict[str, Any]:
        size = int.from_bytes(self.answers.read(8), "little")
        if not size:
            return {"error": f"the process ended: {self._ending()}\n{last_words(self.log)}"}
        answer: dict[str, Any] = torch.load(
            io.BytesIO(self.answers.read(size)), weights_only=True, map_location="cpu"
        )
        return answer

    def _ending(self) -> str:
        code = self._wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _wait(self) -> int:
        if self.code is None:
            self.code = self.server.wait(self.pid)
        return self.code

    def interrupt(self) -> dict[str, Any]:
        """End a rank that hangs, and return its stacks as the error."""
        os.kill(self.pid, signal.SIGABRT)
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ)
            selector.select(GRACE_SECONDS)  # it ends, and so does its pipe
        message = f"no answer; it was ended, its stacks were:\n{last_words(self.log)}"
        return {"error": message}

    def close(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # a session of its own: data workers end with it
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(WorkerFailure):  # its server has ended before it
            self._wait()
        with suppress(BrokenPipeError):
            self.jobs.close()
        self.answers.close()
        self.log.close()


def ending(error: str) -> str:
    """Return what a rank's error says: the end of a traceback, from the error's name on, or the
    first line of anything else.
    """
    if not error.startswith("Traceback"):
        return error.partition("\n")[0]
    lines = error.rstrip().splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith(" "))
    return textwrap.shorten(" ".join(lines[last + 1 :]), 600)


class Pool:
    """The ranks of one world, started as `torchrun` starts them."""

    def __init__(self, size: int, python: str | None, packages: Sequence[str]) -> None:
        path = import_path(foreign=python is not None)
        # of two servers, so that strings hash otherwise on rank 0 than on others, as they may
        self.workers = [
            Worker(
                rank,
                environment(rank, size, path),
                fork_server(python or sys.executable, path, tuple(packages), rank % 2),
            )
            for rank in range(size)
        ]

    def call(self, job: Mapping[str, Any], timeout_seconds: float) -> list[Any]:
        """Return the job's value on every rank, in rank order. Raises `WorkerFailure`, after which
        the pool must not be used.
        """
        # a port of its own for each job: what is left of the last one may still listen
        line = json.dumps({**job, "port": str(free_port())}) + "\n"
        for worker in self.workers:
            worker.send(line)
        answers = self._collect(timeout_seconds)
        if any("error" in answer for answer in answers.values()):
            errors = {
                f"rank {worker.rank} of {len(self.workers)}": str(
                    answers[worker.rank].get("error", "answered")
                )
                for worker in self.workers
            }
            # the errors before the stacks: what shows the end of a test run truncates long messages
            short = [f"{rank}: {ending(error)}" for rank, error in errors.items()]
            whole = [f"--- {rank}: {error}" for rank, error in errors.items()]
            arguments = textwrap.shorten(str(job["arguments"]), 300)
            head = f"{job['function']} with {arguments} failed"
            raise WorkerFailure("\n".join([head, *short, *whole]))
        return [answers[worker.rank]["value"] for worker in self.workers]

    def _collect(self, timeout_seconds: float) -> dict[int, dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.answers, selectors.EVENT_READ, worker)
            while len(answers) < len(self.workers):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                for key, _ in ready:
                    worker = key.data
                    answers[worker.rank] = worker.receive()
                    selector.unregister(worker.answers)
                    if "error" in answers[worker.rank]:
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                if not ready:
                    late = [worker for worker in self.workers if worker.rank not in answers]
                    answers.update({worker.rank: worker.interrupt() for worker in late})
        return answers

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def import_path(*, foreign: bool) -> str:
    """Return this process's import path, so that ranks find jobs of a test file. For a foreign
    interpreter, the entries of this process's interpreter are left out.
    """
    own = (sys.prefix, sys.base_prefix)
    entries = [entry for entry in sys.path if entry]
    return os.pathsep.join(e for e in entries if not (foreign and e.startswith(own)))


def environment(rank: int, size: int, import_path: str) -> dict[str, str]:
    """Environment of a rank: torchrun's variables without MASTER_PORT, and the import path."""
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": import_path,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
    }


_pools: dict[tuple[str, int, str | None], Pool] = {}
"""Pools by kind, world size and interpreter, the longest unused first."""

_servers: dict[tuple[Any, ...], ForkServer] = {}
"""Fork servers by the arguments that started them."""


def fork_server(python: str, path: str, packages: tuple[str, ...], number: int) -> ForkServer:
    """Return the server for these arguments, or start one."""
    key = python, packages, number
    if key not in _servers:
        _servers[key] = ForkServer(python, path, packages, number)
    return _servers[key]


@contextmanager
def lend(
    kind: str,
    size: int,
    python: str | None = None,
    packages: Sequence[str] = (),
) -> Iterator[Pool]:
    """Lend the living pool of a kind (driver, and options fixed for the life of a process), a world
    size and an interpreter (None: this one), or start one that has imported `packages`. An
    exception closes the pool.
    """
    if any(server.has_ended for server in _servers.values()):
        close_pools()  # such as after a machine was short of memory
    key = kind, size, python
    ranks = _pools.pop(key, None)
    if ranks is None:
        while _pools and sum(key[1] for key in _pools) + size > MAX_WORKERS:
            _pools.pop(next(iter(_pools))).close()
        ranks = Pool(size, python, packages)
    _pools[key] = ranks
    try:
        yield ranks
    except BaseException:
        _pools.pop(key).close()
        raise


@atexit.register
def close_pools() -> None:
    """End all ranks and all fork servers."""
    for living in (_pools, _servers):
        while living:
            living.popitem()[1].close()
