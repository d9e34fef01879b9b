"""The state of a rank's generators, Python's, torch's and NumPy's, as tensors of a checkpoint.

They are seeded by `drivetrain.data.random_state`. A driver adds the state of its own.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...data.random_state import device_state, set_device_state
from ...kernel.errors import CheckpointDamaged

__all__ = ["drawn_seed", "rng_state", "seeded", "set_rng_state"]

_ALWAYS = {"torch", "python", "python_gauss"}
_OF_NUMPY = {"numpy", "numpy_gauss"}
_KNOWN = _ALWAYS | _OF_NUMPY | {"device"}


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The state of the generators of the host, and of `device`, as host tensors."""
    _, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
    }
    if device.type != "cpu":
        state["device"] = device_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        _, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
        state["numpy_gauss"] = torch.tensor(cached, dtype=torch.float64)
    return state


def set_rng_state(device: torch.device, state: Mapping[str, Tensor]) -> None:
    """Undo draws since `rng_state`; NumPy's and the device's generators, where the state does not
    hold them, are left alone. Raises `CheckpointDamaged`, naming the entry that is missing, unknown
    or malformed, before any generator is changed."""
    wanted = _ALWAYS | (_OF_NUMPY if state.keys() & _OF_NUMPY else set())
    for what, names in (
        ("unknown here", state.keys() - _KNOWN),
        ("missing", wanted - state.keys()),
    ):
        if names:
            raise CheckpointDamaged(f"random state {', '.join(sorted(names))} is {what}")
    acts = [*_of_torch(device, state), *_of_python(state), *_of_numpy(state)]
    for name, try_out, _ in acts:
        try:
            try_out()
        except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointDamaged(
                f"random state {name!r} is not what a generator can have: {error!r:.200}"
            ) from error
    for _, _, put_back in acts:
        put_back()


def drawn_seed() -> int:
    """Draw a seed from torch's generator of the host, small enough to add to."""
    return int(torch.randint(2**62, ()))


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators, of the host and of `device`, within the block; restore them
    afterwards."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(seed)
        yield


_Act = tuple[str, Callable[[], Any], Callable[[], Any]]
"""Name; a function that tries the state on a new generator; one that sets the process's generator.
"""


def _of_torch(device: torch.device, state: Mapping[str, Tensor]) -> Iterator[_Act]:
    stored = state["torch"]
    yield (
        "torch",
        lambda: torch.Generator().set_state(stored),
        lambda: torch.set_rng_state(stored),
    )
    if device.type != "cpu" and (of_device := state.get("device")) is not None:

        def try_out() -> None:  # not every device can make a second generator
            before = device_state(device)
            set_device_state(device, of_device)
            set_device_state(device, before)

        yield "device", try_out, lambda: set_device_state(device, of_device)


def _of_python(state: Mapping[str, Tensor]) -> Iterator[_Act]:
    def put(setstate: Callable[[Any], None]) -> None:
        has_gauss, gauss = map(_finite, state["python_gauss"].tolist())
        words = tuple(state["python"].tolist())
        setstate((3, words, gauss if has_gauss else None))

    yield "python_gauss", lambda: list(map(_finite, state["python_gauss"].reshape(2))), _nothing
    yield "python", lambda: put(random.Random().setstate), lambda: put(random.setstate)


def _of_numpy(state: Mapping[str, Tensor]) -> Iterator[_Act]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or "numpy" not in state:
        return

    def put(set_state: Callable[[Any], None]) -> None:
        *keys, position, has_gauss = state["numpy"].tolist()
        if not 0 <= position <= len(keys):  # which NumPy does not look at
            raise ValueError(f"position {position}")
        set_state(("MT19937", keys, position, has_gauss, state["numpy_gauss"].item()))

    yield "numpy_gauss", lambda: _finite(state["numpy_gauss"].reshape(())), _nothing
    yield (
        "numpy",
        lambda: put(numpy.random.RandomState(0).set_state),
        lambda: put(numpy.random.set_state),
    )


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value}")
    return float(value)


def _nothing() -> None:
    pass
