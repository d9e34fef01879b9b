"""Tests that hold of either library, and the end of what Trainers leave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from side_by_side import LIBRARIES


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Any:
    return LIBRARIES[request.param]


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """It outlives the Trainers that made it: a test that makes one also ends it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()  # the tests that follow are not at fault
        pytest.fail("a process group is left: call the Trainer's end()")
