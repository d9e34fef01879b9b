"""A process that takes itself for one of many ranks, with tensors that have no elements.

Tensors are those of torch's `FakeTensorMode`: each operation computes shapes and dtypes alone.
Collectives are those of torch's `fake` process group, which return at once.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh

from .fake_replicas import fake_replicas
from .healthy_values import HealthyValues
from .modes import fake_mode, many_known_numbers, without_modes

__all__ = ["fake_tensors", "fake_world", "undisturbed"]


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Within the block, this process is rank 0 of `size`, and the others do not exist."""
    from torch.distributed._tools import fake_collectives  # noqa: F401 (for tensors of torch 2.8)
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

    environment = dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
    environment |= {name: str(size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    with patch.dict(os.environ, environment):
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("fake", store=store, rank=0, world_size=size)
        try:
            yield
        finally:
            if dist.is_initialized():  # a driver may have destroyed it, with what it keeps of it
                dist.destroy_process_group()


@contextmanager
def fake_tensors() -> Iterator[Any]:
    """Within the block, tensors have no elements. Yield the mode that makes one of a tensor."""
    mode = fake_mode()
    with (
        mode,
        HealthyValues(),
        _mended_torch(),
        many_known_numbers(),
        fake_replicas(),
        _as_in_a_run(),
    ):
        yield mode


@contextmanager
def undisturbed() -> Iterator[None]:
    """Suppress warnings, such as of tensors whose memory has no address, and restore the state of
    random numbers."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextmanager
def _as_in_a_run() -> Iterator[None]:
    """Within the block, models of transformers attend as in a run. Given tensors without elements,
    they would make masks that no run has."""
    library = sys.modules.get("transformers.utils.import_utils")
    if library is None or not hasattr(library, "is_fake_tensor"):
        yield
        return
    with patch.object(library, "is_fake_tensor", lambda tensor: False):
        yield


@contextmanager
def _mended_torch() -> Iterator[None]:
    """Within the block, torch makes meshes of real tensors, whose numbers of ranks it reads, and
    moves and casts modules whose parameters have no elements."""
    make, swap = device_mesh.init_device_mesh, torch.utils.swap_tensors

    def made(*args: Any, **kwargs: Any) -> Any:
        with without_modes():
            return make(*args, **kwargs)

    def swapped(one: Tensor, other: Tensor) -> None:
        # fake tensors are referred to weakly by their mode, which is no reason to refuse
        with patch.object(weakref, "getweakrefs", lambda _: []):
            swap(one, other)  # type: ignore[no-untyped-call]

    with (
        patch.object(device_mesh, "init_device_mesh", made),
        patch.object(torch.utils, "swap_tensors", swapped),
    ):
        yield
