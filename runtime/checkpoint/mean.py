"""The mean of several checkpoints' weights (https://arxiv.org/abs/1803.05407)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..kernel.errors import CheckpointMismatch, SettingError
from ..kernel.paths import Place, Url
from ..kernel.shards import TensorInfo
from .export import write_weights
from .format.safetensors import Source
from .reader import CheckpointReader

__all__ = ["average_weights"]


def average_weights(
    checkpoints: Sequence[str | os.PathLike[str] | Url], root: str | os.PathLike[str] | Url
) -> Place:
    """Write a checkpoint of step 0 in `root` with the mean of the weights and buffers of several
    checkpoints. Any driver can start from it. Tensors that are not floating point are taken from
    the last checkpoint.

    One tensor at a time is in memory. Raises `CheckpointMismatch`, naming the tensor, if the
    checkpoints are of different models, and `OutputError` if `root` has a step 0 or cannot be
    written.
    """
    if not checkpoints:
        raise SettingError("there is no checkpoint to average; give one or more")
    readers = [CheckpointReader(checkpoint) for checkpoint in checkpoints]
    last = readers[-1]
    for reader in readers[:-1]:
        _refuse_another_model(reader, last)
    sources = {key: _source(readers, key) for key in last.names("weights")}
    return write_weights(root, [sources], last.manifest.tied)


def _refuse_another_model(reader: CheckpointReader, last: CheckpointReader) -> None:
    here, there = (
        {name: each.info("weights", name) for name in each.names("weights")}
        for each in (reader, last)
    )
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise CheckpointMismatch(
                f"{name!r} is {_describe(here.get(name))} in {reader.folder}, and "
                f"{_describe(there.get(name))} in {last.folder}: only checkpoints of one model can "
                "be averaged"
            )


def _describe(info: TensorInfo | None) -> str:
    return "missing" if info is None else f"{info.dtype} {info.shape}"


def _source(readers: Sequence[CheckpointReader], name: str) -> Source:
    info = readers[-1].info("weights", name)
    return Source(info.dtype, info.shape, partial(_mean, readers, name))


def _mean(readers: Sequence[CheckpointReader], name: str) -> Tensor:
    mean = readers[-1].read("weights", name)
    if not (mean.is_floating_point() or mean.is_complex()):
        return mean
    total = mean.to(torch.promote_types(mean.dtype, torch.float64))
    for reader in readers[:-1]:
        total += reader.read("weights", name)
    return (total / len(readers)).to(mean.dtype)
