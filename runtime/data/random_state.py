"""The random generators of the host (Python's, NumPy's, torch's for the CPU) and of a device."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from torch import Tensor

__all__ = [
    "device_state",
    "generators_kept",
    "host_state",
    "seed_generators",
    "set_device_state",
    "set_host_state",
]


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


def device_state(device: torch.device) -> Tensor:
    """Return the state of torch's generator of an accelerator, as a host tensor. Does not wait for
    the device."""
    shared = getattr(torch.accelerator, "random", None)  # newer torch has it
    if shared is not None:  # the module of a TPU refuses the call below
        with suppress(NotImplementedError):  # a device that was registered in Python
            return cast(Tensor, shared.get_rng_state(device))
    return cast(Tensor, torch.get_device_module(device).get_rng_state(device))


def set_device_state(device: torch.device, state: Tensor) -> None:
    """Restore the generator to the result of `device_state`."""
    torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the host's generators at the end of the block."""
    before = host_state()
    try:
        yield
    finally:
        set_host_state(before)
