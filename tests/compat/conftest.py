"""A process group outlives the Trainers that made it: a test that makes one also ends it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()  # the tests that follow are not at fault
        pytest.fail("a process group is left: call the Trainer's end()")
