"""A driver that shards warns when it starts in one process, where there is nothing to
shard over.
"""

from __future__ import annotations

import logging
import os
from typing import Any
from unittest import mock

import pytest

from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject


def said(bench: Bench) -> list[str]:
    """Return the warnings logged while a session opens."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logger = logging.getLogger("drivetrain")
    logger.addHandler(handler)
    try:
        with bench.open():
            return lines
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("name", ["fsdp", pytest.param("deepspeed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_one_process_is_warned(name: str, num_processes: int) -> None:
    answers: list[Any] = Subject(name, num_processes).run(said)
    for lines in answers:
        warned = [line for line in lines if "shards nothing" in line]
        assert len(warned) == (num_processes == 1)
        assert all(name in line and "cpu or ddp" in line for line in warned)


def left_over(bench: Bench) -> list[str]:
    """A job: return the names of environment variables that a session added."""
    with mock.patch.dict(os.environ):
        del os.environ["LOCAL_RANK"]
        before = set(os.environ)
        with bench.open():
            pass
        return sorted(set(os.environ) - before)


def test_deepspeed_leaves_no_launchers_environment() -> None:
    """Require that no variable is left: accelerate takes a process with LOCAL_RANK for one of
    several, and waits for a group.
    """
    (names,) = Subject("deepspeed", 1).run(left_over)
    assert "LOCAL_RANK" not in names
