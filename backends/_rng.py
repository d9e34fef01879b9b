"""Random state of Python, torch and numpy, as tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping

import torch
from torch import Tensor


def seed_all(value: int) -> None:
    """Python, torch on every device, and numpy if the process uses it."""
    random.seed(value)
    torch.manual_seed(value)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(value % 2**32)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The state of what `seed_all` seeds, as host tensors."""
    _, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        _, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
        state["numpy_gauss"] = torch.tensor(cached, dtype=torch.float64)
    return state


def set_rng_state(device: torch.device, state: Mapping[str, Tensor]) -> None:
    """Undo draws since `rng_state`; generators that the state does not hold are left alone."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        has_gauss, gauss = state["python_gauss"].tolist()
        random.setstate((3, tuple(state["python"].tolist()), gauss if has_gauss else None))
    if "device" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"], device)
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        *keys, position, has_gauss = state["numpy"].tolist()
        numpy.random.set_state(("MT19937", keys, position, has_gauss, state["numpy_gauss"].item()))
