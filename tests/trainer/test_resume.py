"""Choice of the checkpoint that a run resumes from."""

from __future__ import annotations

import pytest
from checkpoint.fakes import on_ranks, run_of, save

from drivetrain.checkpoint import CheckpointStore
from drivetrain.kernel.errors import CheckpointNotFound
from drivetrain.trainer.resume import find_checkpoint


def test_rank_0_chooses_for_all(tmp_path):
    for rank, step in ((0, 1), (1, 2)):
        save(CheckpointStore(tmp_path / str(rank) / "checkpoints"), step, run_of(1.0))

    def chosen(session):
        return find_checkpoint(session, "auto", tmp_path / str(session.world.rank))

    assert on_ranks(3, chosen) == [tmp_path / "0" / "checkpoints" / "checkpoint-000001"] * 3


def test_auto_finds_none_where_there_is_none(tmp_path):
    assert on_ranks(2, lambda session: find_checkpoint(session, "auto", tmp_path)) == [None] * 2


@pytest.mark.parametrize("named", ["", "checkpoints", "checkpoints/checkpoint-000003"])
def test_a_run_its_checkpoints_or_one_of_them_may_be_named(tmp_path, named):
    save(CheckpointStore(tmp_path / "checkpoints"), 3, run_of(1.0))
    (found,) = on_ranks(1, lambda session: find_checkpoint(session, tmp_path / named, None))
    assert found == tmp_path / "checkpoints" / "checkpoint-000003"


def test_a_path_without_any_is_refused_on_all_ranks(tmp_path):
    for reported in on_ranks(2, lambda session: find_checkpoint(session, tmp_path, None)):
        assert isinstance(reported, CheckpointNotFound)
        assert "it holds manifest.json" in str(reported)
