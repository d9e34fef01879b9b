"""The random generators of the host: Python's, torch's for the CPU, and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["generators_kept", "host_state", "seed_generators", "set_host_state"]


def seed_generators(seed: int, *, devices: bool = False) -> None:
    """Seed Python's and torch's generators; NumPy's, too, if the process uses NumPy. With
    `devices`, seed torch's generators of every device."""
    random.seed(seed)
    (torch if devices else torch.default_generator).manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def host_state() -> tuple[Any, ...]:
    """Return the state of the three generators, for `set_host_state` in this process; takes some
    microseconds."""
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    return random.getstate(), torch.default_generator.get_state(), of_numpy


def set_host_state(state: tuple[Any, ...]) -> None:
    """Restore the generators to the result of `host_state`."""
    of_python, of_torch, of_numpy = state
    random.setstate(of_python)
    torch.default_generator.set_state(of_torch)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the host's generators at the end of the block."""
    before = host_state()
    try:
        yield
    finally:
        set_host_state(before)
