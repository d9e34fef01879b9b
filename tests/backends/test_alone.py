"""A driver that shards says so when it is started where there is nothing to shard over."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject


def said(bench: Bench) -> list[str]:
    """What is logged while a session opens."""
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


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_one_process_is_warned(name: str, num_processes: int) -> None:
    answers: list[Any] = Subject(name, num_processes).run(said)
    for lines in answers:
        warned = [line for line in lines if "shards nothing" in line]
        assert len(warned) == (num_processes == 1)
        assert all(name in line and "cpu or ddp" in line for line in warned)
