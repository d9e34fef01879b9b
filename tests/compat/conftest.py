"""The parameter `library` of tests that hold for either library, and a check that no Trainer is
left open.
"""

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
    """Require that a test ends its process group, which outlives the Trainers that made it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()  # the tests that follow are not at fault
        pytest.fail("a process group is left: call the Trainer's end()")
