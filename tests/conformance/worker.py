"""The ranks of pools, each forked from a process that has imported what they need (`fork_server`).

A rank takes jobs, one JSON line each, and answers on a pipe. A job is the importable name of a
function and its arguments. The answer is written with `torch.save` and read with `weights_only`:
tensors and plain values, nothing that runs code.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import json
import os
import pkgutil
import resource
import select
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO

import torch

from ..data.random_state import seed_generators
from ..kernel.errors import BackendUnavailable
from ..registry import find_driver, shipped_backends
from .bench import Bench

IDLE_SECONDS = 120.0
"""A template ends when it had no server for so long."""


def main(listening: str, path: str, *packages: str) -> None:
    """Fork a server for each client of a socket, which forks a rank for each request until its
    client is gone.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # each rank's first optimizer would import the first
    for package in ("torch._dynamo", *packages, *jobs()):
        with suppress(ImportError):  # whoever needs it will say so
            importlib.import_module(package)
    for name in shipped_backends():
        with suppress(BackendUnavailable):
            find_driver(name)
    sys.stdout.flush()  # what they printed, before each rank inherits it
    gc.freeze()  # what they imported stays: no collection of a rank walks it, or copies its pages
    with socket.socket(fileno=int(listening)) as listener:
        channel = next_client(listener, path)
    with channel, channel.makefile("rb") as lines:
        while True:
            begun, files, _, _ = socket.recv_fds(channel, 1, 3)
            if not begun:
                os._exit(0)  # to free all imports one by one takes seconds
            request = json.loads(begun + lines.readline())
            if "pid" in request:
                answer = os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1])
            elif not (answer := os.fork()):
                break
            for file in files:
                os.close(file)
            channel.sendall(str(answer).encode())
    serve(request["environment"], *files)


def jobs() -> list[str]:
    """Return the names of the modules in which the suite's jobs lie."""
    found = [module.name for module in pkgutil.iter_modules([os.path.dirname(__file__)])]
    return [f"{__package__}.{name}" for name in found if name.startswith(("law_", "contract_"))]


def next_client(listener: socket.socket, path: str) -> socket.socket:
    """Fork a process for each client, and return the connection there. This process ends when it
    is no longer used, or when its socket is removed and the last server has ended.
    """
    num_servers, last_used, is_removed = 0, time.monotonic(), False
    while True:
        is_asked = bool(select.select([listener], [], [], 1.0)[0])
        if is_asked:
            channel, _ = listener.accept()
            if not os.fork():
                return channel
            channel.close()
            num_servers += 1
        while num_servers and os.waitpid(-1, os.WNOHANG)[0]:
            num_servers -= 1
        if is_asked or num_servers:
            last_used = time.monotonic()
        elif is_removed or not os.path.exists(path):
            os._exit(0)
        elif time.monotonic() - last_used > IDLE_SECONDS:
            is_removed = True  # who has connected by now is still served
            with suppress(FileNotFoundError):
                os.unlink(path)


def serve(environment: dict[str, str], jobs: int, answers: int, words: int) -> None:
    """Serve as a rank until its jobs end, which is also when the requesting process is gone."""
    os.setsid()
    former, path = import_path(os.environ), import_path(environment)
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in (*former, *path))]
    os.environ.clear()
    os.environ.update(environment)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(words, stream.fileno())
    faulthandler.enable(all_threads=True)  # the pool ends a hanging rank by SIGABRT
    with os.fdopen(jobs) as lines, os.fdopen(answers, "wb") as pipe:
        for number, line in enumerate(lines):
            job = json.loads(line)
            os.environ["MASTER_PORT"] = job["port"]
            scramble(number)
            _answer(pipe, _perform(job))


def import_path(environment: Mapping[str, str]) -> list[str]:
    """Return the folders that an environment adds to the import path."""
    return [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def scramble(number: int) -> None:
    """Seed all generators with a new value for each job: code that does not seed must not be right
    by luck.
    """
    value = 7919 * (number + 1) + int(os.environ["RANK"])
    seed_generators(value, devices=True)


def _perform(job: dict[str, Any]) -> dict[str, Any]:
    module, _, name = job["function"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        return {"value": function(Bench(**job["bench"]), **job["arguments"])}
    except Exception:
        return {"error": traceback.format_exc()}


def _answer(answers: BinaryIO, answer: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(answer, buffer)
    answers.write(buffer.tell().to_bytes(8, "little"))
    answers.write(buffer.getbuffer())
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
