"""One rank of a pool: takes jobs from standard input, one JSON line each, and answers on a pipe.

A job is the importable name of a function and its arguments. The answer is written with
`torch.save` and read with `weights_only`: tensors and plain values, nothing that runs code.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import json
import os
import resource
import sys
import traceback
from typing import Any, BinaryIO

import torch

from ..data.random_state import seed_generators
from .bench import Bench


def main() -> None:
    """Serve until standard input ends, which it does when the parent is gone."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(all_threads=True)  # the pool ends a hanging rank by SIGABRT
    with os.fdopen(int(sys.argv[1]), "wb") as answers:
        for number, line in enumerate(sys.stdin):
            job = json.loads(line)
            os.environ["MASTER_PORT"] = job["port"]
            scramble(number)
            _answer(answers, _perform(job))


def scramble(number: int) -> None:
    """Leave no generator as the last job left it: who does not seed must not be right by luck."""
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
    main()
