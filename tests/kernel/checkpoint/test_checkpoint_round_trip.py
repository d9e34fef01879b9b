"""Whatever is saved, cut in any way over any ranks, is read back bit by bit, cut in any other."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_fakes import bits, cut, cuts, piece, regions, save, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.kernel.checkpoint import CheckpointReader, CheckpointStore
from drivetrain.kernel.checkpoint import reader as reader_module
from drivetrain.kernel.contract import Box, Flat, TensorInfo
from drivetrain.kernel.errors import CheckpointMismatch


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_region_of_any_cut(data):
    originals = {f"t{i}": data.draw(tensors()) for i in range(data.draw(st.integers(1, 3)))}
    ranks = [[] for _ in range(data.draw(st.integers(1, 3)))]
    for name, tensor in originals.items():
        for region in data.draw(cuts(tuple(tensor.shape))):
            data.draw(st.sampled_from(ranks)).append(piece(name, tensor, region))
    with tempfile.TemporaryDirectory() as folder:
        reader = CheckpointReader(save(CheckpointStore(folder), 1, ranks))
        assert reader.verify() == []
        assert reader.names("weights") == sorted(originals)
        for name, tensor in originals.items():
            assert reader.info("weights", name) == TensorInfo(tensor.dtype, tuple(tensor.shape))
            assert bits(reader.read("weights", name)) == bits(tensor)
            for _ in range(3):
                region = data.draw(regions(tuple(tensor.shape)))
                assert bits(reader.read("weights", name, region)) == bits(cut(tensor, region))
