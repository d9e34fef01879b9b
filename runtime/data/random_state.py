"""The generators that code on the host draws from: Python's, torch's for the CPU, and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["generators_kept", "seed_generators"]


def seed_generators(seed: int, *, devices: bool = False) -> None:
    """NumPy's is seeded if the process uses it; with `devices`, also torch's of every device."""
    random.seed(seed)
    (torch if devices else torch.default_generator).manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards the generators of the host are as before."""
    numpy = sys.modules.get("numpy")
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)
        if numpy:
            numpy.random.set_state(numpy_state)
