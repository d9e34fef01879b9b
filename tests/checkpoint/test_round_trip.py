"""Whatever is saved, in any partition over any ranks, is read back bit by bit in any other
partition.
"""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.checkpoint import CheckpointReader, CheckpointStore, load_rng
from drivetrain.checkpoint import reader as reader_module
from drivetrain.checkpoint.storage import local
from drivetrain.kernel.errors import CheckpointDamaged, CheckpointMismatch, SaveFailed
from drivetrain.kernel.shards import Box, Flat, TensorInfo

from .fakes import (
    FakeEngine,
    FakeSession,
    bits,
    on_ranks,
    piece,
    region_of,
    regions,
    run_of,
    save,
    tensors,
    tilings,
)


@pytest.mark.parametrize("buffer_bytes", [16 << 20, 16])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_region_of_any_tiling(buffer_bytes, data):
    """Read with a small buffer, which splits every copy among several threads, like copies of large
    tensors.
    """
    originals = {f"t{i}": data.draw(tensors()) for i in range(data.draw(st.integers(1, 3)))}
    ranks = [[] for _ in range(data.draw(st.integers(1, 3)))]
    for name, tensor in originals.items():
        for region in data.draw(tilings(tuple(tensor.shape))):
            data.draw(st.sampled_from(ranks)).append(piece(name, tensor, region))
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(reader_module, "_BUFFER_BYTES", buffer_bytes),
        mock.patch.object(local.LOCAL, "short_bytes", buffer_bytes // 4),
        mock.patch.object(local.LOCAL, "long_bytes", buffer_bytes // 4),
    ):
        reader = CheckpointReader(save(CheckpointStore(folder), 1, ranks))
        assert reader.verify() == []
        assert reader.names("weights") == sorted(originals)
        for name, tensor in originals.items():
            assert reader.info("weights", name) == TensorInfo(tensor.dtype, tuple(tensor.shape))
            assert bits(reader.read("weights", name)) == bits(tensor)
            for _ in range(3):
                region = data.draw(regions(tuple(tensor.shape)))
                wanted = region_of(tensor, region)
                assert bits(reader.read("weights", name, region)) == bits(wanted)
                into = torch.zeros_like(wanted, memory_format=torch.contiguous_format)
                assert reader.read("weights", name, region, out=into) is into
                assert bits(into) == bits(wanted)


@pytest.mark.parametrize("out", [torch.full((2, 3), 7.0), torch.full((3, 2), 7.0).half()])
def test_what_does_not_fit_is_not_written_to(tmp_path, out):
    reader = CheckpointReader(save(CheckpointStore(tmp_path), 1, [[piece("w", torch.ones(3, 2))]]))
    with pytest.raises(CheckpointMismatch, match=r"float32 \(3, 2\), and is to be read into"):
        reader.read("weights", "w", out=out)
    assert bool((out == 7).all())


def test_a_region_costs_its_own_size_and_a_buffer(tmp_path):
    tensor = torch.arange(4 << 20, dtype=torch.float32).view(512, -1)
    halves = [[piece("w", tensor, Box((256 * i, 0), (256, 8192)))] for i in range(2)]
    reader = CheckpointReader(save(CheckpointStore(tmp_path), 1, halves))
    region = Box((0, 100), (512, 256))
    with mock.patch.object(reader_module, "_BUFFER_BYTES", 1 << 20):
        tracemalloc.start()
        read = reader.read("weights", "w", region)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert torch.equal(read, region_of(tensor, region))
    assert peak_bytes < read.nbytes + (1 << 20) + 300_000


def test_long_runs_are_fetched_alone(tmp_path):
    """Read one column block of a wide matrix: the rank must not read all of it."""
    tensor = torch.zeros(16, 1 << 16)
    reader = CheckpointReader(save(CheckpointStore(tmp_path), 1, [[piece("w", tensor)]]))
    reader.names("weights")
    fetched = []
    real = local._Descriptor.read_into

    def counted(self, start, target):
        fetched.append(len(target))
        real(self, start, target)

    with mock.patch.object(local._Descriptor, "read_into", counted):
        read = reader.read("weights", "w", Box((0, 0), (16, 1 << 14)))
    assert sum(fetched) == read.nbytes


def test_views_strides_and_gradients_are_saved_as_they_look(tmp_path):
    base = torch.randn(6, 4)
    looks = {
        "transposed": base.t(),
        "sliced": base[::2, 1:3],
        "expanded": base[0].expand(3, 4),
        "parameter": torch.nn.Parameter(base),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    }
    path = save(CheckpointStore(tmp_path), 1, [[piece(name, t) for name, t in looks.items()]])
    for name, tensor in looks.items():
        read = CheckpointReader(path).read("weights", name)
        assert torch.equal(read, tensor.detach())
        assert not read.requires_grad


def test_names_that_look_like_keys_of_parts(tmp_path):
    tensors = {name: torch.randn(4) for name in ("a", "a#0", "a#1", "__metadata__", "", "é/☃")}
    pieces = []
    for name, tensor in tensors.items():
        pieces += [piece(name, tensor, Flat(0, 1)), piece(name, tensor, Flat(1, 4))]
    pieces[2:4] = [piece("a#0", tensors["a#0"])]
    pieces[-4:-2] = [piece("", tensors[""])]
    pieces.append(piece("__metadata__", torch.ones(2), kind="optimizer"))
    reader = CheckpointReader(save(CheckpointStore(tmp_path), 1, [pieces]))
    assert reader.names("weights") == sorted(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(reader.read("weights", name), tensor)
    assert torch.equal(reader.read("optimizer", "__metadata__"), torch.ones(2))


def test_what_does_not_tile_is_damage(tmp_path):
    tensor = torch.arange(12.0).view(4, 3)
    rows = [Box((2 * i, 0), (2, 3)) for i in range(2)]
    cases = {
        "not stored": [piece("w", tensor, rows[0])],
        "overlap": [piece("w", tensor, rows[0]), piece("w", tensor, Flat(3, 12))],
    }
    for step, (message, pieces) in enumerate(cases.items()):
        reader = CheckpointReader(save(CheckpointStore(tmp_path), step, [pieces]))
        with pytest.raises(CheckpointDamaged, match=message):
            reader.read("weights", "w")
        assert message in " ".join(reader.verify())
        # what is sound is still there to be read
        assert torch.equal(reader.read("weights", "w", Box((0, 0), (1, 3))), tensor[:1])


def test_ranks_that_disagree_on_a_tensor_are_damage(tmp_path):
    ranks = [
        [piece("w", torch.zeros(4), Flat(0, 2))],
        [piece("w", torch.zeros(4, dtype=torch.float16), Flat(2, 4))],
    ]
    reader = CheckpointReader(save(CheckpointStore(tmp_path), 1, ranks))
    with pytest.raises(CheckpointDamaged, match=r"float16 \(4,\), and torch.float32"):
        reader.read("weights", "w")


def test_malformed_pieces_are_refused_on_saving(tmp_path):
    good = piece("w", torch.zeros(4))
    cases = {
        "two pieces": [good, good],
        "not within": [piece("w", torch.zeros(4)), _with(good, region=Flat(2, 6))],
        "needs": [_with(good, region=Flat(0, 2))],
        "cannot hold": [piece("w", torch.zeros(4, dtype=torch.complex128))],
    }
    for message, pieces in cases.items():
        with pytest.raises(SaveFailed, match=message):
            save(CheckpointStore(tmp_path), 1, [pieces])
    assert list(tmp_path.iterdir()) == []


def test_a_reader_refuses_what_is_not_there(tmp_path):
    path = save(CheckpointStore(tmp_path), 1, [[piece("w", torch.zeros(2, 3))]])
    reader = CheckpointReader(path)
    with pytest.raises(CheckpointMismatch, match="no weights tensor 'v'"):
        reader.read("weights", "v")
    with pytest.raises(CheckpointMismatch, match="no optimizer tensor 'w'"):
        reader.info("optimizer", "w")
    for region in (Flat(0, 7), Flat(3, 2), Flat(-1, 2), Box((0,), (1,)), Box((0, 2), (1, 2))):
        with pytest.raises(CheckpointMismatch, match="not within"):
            reader.read("weights", "w", region)


def test_tied_names_lead_to_the_one_that_is_stored(tmp_path):
    engine = FakeEngine([piece("embed", torch.arange(3.0))], tied=(("embed", "head"),))
    reader = CheckpointReader(CheckpointStore(tmp_path).save(1, engine, FakeSession(), {}))
    assert reader.names("weights") == ["embed"]
    assert torch.equal(reader.read("weights", "head"), torch.arange(3.0))
    assert reader.manifest.tied == (("embed", "head"),)


def test_random_state_returns_to_its_rank(tmp_path):
    reader = CheckpointReader(save(CheckpointStore(tmp_path), 1, run_of(1.0, size=2)))

    def resume(session):
        session.rng = {"torch": torch.zeros(16, dtype=torch.uint8) + 99}
        return load_rng(reader, session), int(session.rng["torch"][0])

    assert on_ranks(2, resume) == [([], 0), ([], 1)]
    assert on_ranks(3, resume) == [(["torch"], 99)] * 3
    assert on_ranks(1, resume) == [(["torch"], 99)]
    other = FakeSession(0, 2)
    other.rng = {"another generator": torch.zeros(16, dtype=torch.uint8)}
    assert load_rng(reader, other) == ["another generator"]


def test_the_system_may_write_and_read_less_than_asked(tmp_path, monkeypatch):
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:5]], at))
    reader = CheckpointReader(save(CheckpointStore(tmp_path), 1, [[piece("w", torch.arange(9))]]))
    assert reader.verify() == []
    assert torch.equal(reader.read("weights", "w"), torch.arange(9))


def test_results_are_on_the_host_whatever_the_default_device(tmp_path):
    path = save(CheckpointStore(tmp_path), 1, [[piece("w", torch.ones(4, 4))]])
    with torch.device("meta"):
        read = CheckpointReader(path).read("weights", "w", Box((0, 1), (4, 2)))
    assert read.is_cpu
    assert torch.equal(read, torch.ones(4, 2))


def _with(original, **changes):
    return type(original)(**{**vars(original), **changes})
