"""Frozen weights are written only when they change. Until then checkpoints share their files."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.checkpoint import CheckpointReader, CheckpointStore, list_checkpoints
from drivetrain.checkpoint.format.safetensors import TensorFile
from drivetrain.checkpoint.storage.local import LOCAL
from drivetrain.kernel.errors import SaveFailed
from drivetrain.kernel.paths import Url
from drivetrain.kernel.shards import Box, Piece

from .fakes import bits, contents, piece, region_of, save

FROZEN = {"base"}


def ranks_of(step: float, base: float = 1.0, size: int = 2) -> list[list[Piece]]:
    """Return a frozen base and a trained head, partitioned by rows over the ranks."""
    return [
        [
            piece("base", torch.full((2 * size, 500), base), Box((2 * rank, 0), (2, 500))),
            piece("head", torch.full((2 * size, 3), step), Box((2 * rank, 0), (2, 3))),
            piece("head/moment", torch.full((2 * size, 3), -step), Box((2 * rank, 0), (2, 3)),
                  "optimizer"),
        ]
        for rank in range(size)
    ]  # fmt: skip


def saved(store: CheckpointStore, step: int, **of: Any) -> Path:
    path = save(store, step, ranks_of(step, **of), frozen=FROZEN)
    store.wait()
    assert read(path, "head", float(step)) and CheckpointReader(path).verify() == []
    return path


def read(folder: Path, name: str, value: float) -> bool:
    return bool((CheckpointReader(folder).read("weights", name) == value).all())


def inodes(folder: Path) -> list[int]:
    """Return the inodes of the files of frozen weights, by rank."""
    found = sorted(folder.glob("frozen-*"))
    assert found
    return [path.stat().st_ino for path in found]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of bytes of each call that writes."""
    sizes, write = list[int](), os.write

    def counting(fd: int, block: Any) -> int:
        sizes.append(len(block))
        return write(fd, block)

    monkeypatch.setattr(os, "write", counting)
    return sizes


def test_two_files_take_turns(tmp_path: Path, written: list[int]) -> None:
    store, of_step, wrote = CheckpointStore(tmp_path), list[list[int]](), list[int]()
    for step in range(1, 6):
        written.clear()
        of_step.append(inodes(saved(store, step)))
        wrote.append(sum(written))
    first, second = of_step[:2]
    assert of_step == [first, second, first, second, first] and not set(first) & set(second)
    assert min(wrote[:2]) > 8000 > max(wrote[2:])
    for found in list_checkpoints(tmp_path).complete:
        assert read(found.folder, "base", 1.0)


@pytest.mark.parametrize(
    ("kept", "num_files"),
    [({"keep_last": 1}, 1), ({"keep_last": 2}, 2), ({"keep_last": 3, "keep_every": 2}, 2)],
)
def test_what_stays_is_whole_whichever_goes(
    tmp_path: Path, kept: dict[str, int], num_files: int
) -> None:
    """Require as many copies of the frozen weights as there are checkpoints to resume from, two at
    most.
    """
    store, seen = CheckpointStore(tmp_path, **kept), set[int]()
    for step in range(1, 9):
        seen.update(inodes(saved(store, step)))
        complete = [found.folder for found in list_checkpoints(tmp_path).complete]
        assert all(CheckpointReader(folder).verify() == [] for folder in complete)
        for one, other in pairwise(complete[-2:]):
            assert not set(inodes(one)) & set(inodes(other))
    assert len(seen) == 2 * num_files


@pytest.mark.parametrize("best", [1, 5])
def test_the_best_is_not_left_on_the_file_of_the_last(tmp_path: Path, best: int) -> None:
    """Require a separate file for the best checkpoint: with `keep_last=1` it is the only one to
    which a run can go back.
    """
    store = CheckpointStore(tmp_path, keep_last=1, best_metric="loss")
    for step in range(1, 9):
        metrics = {"step": step, "metrics": {"loss": abs(step - best)}}
        save(store, step, ranks_of(step), metrics, frozen=FROZEN)
        store.wait()
        folders = [found.folder for found in list_checkpoints(tmp_path).complete]
        if step > best:
            one, other = folders
            assert not set(inodes(one)) & set(inodes(other))


def test_one_that_changes_is_written_and_the_old_one_stays(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    old = [saved(store, step) for step in (1, 2, 3)]
    new = [saved(store, step, base=2.0) for step in (4, 5, 6)]
    assert all(read(folder, "base", 1.0) for folder in old)
    assert all(read(folder, "base", 2.0) for folder in new)
    assert not set(inodes(new[0]) + inodes(new[1])) & set(inodes(old[0]) + inodes(old[1]))
    assert inodes(new[2]) == inodes(new[0])


def test_of_two_ranks_the_one_that_changed_writes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    first = inodes(saved(store, 1))
    ranks = ranks_of(2)
    ranks[1][0].tensor[0, 7] += 1
    path = save(store, 2, ranks, frozen=FROZEN)
    assert inodes(path)[0] == first[0] and inodes(path)[1] not in first
    assert float(CheckpointReader(path).read("weights", "base")[2, 7]) == 2.0


def test_a_step_that_is_saved_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 2, 2, 3):
        saved(store, step)
    assert len(list_checkpoints(tmp_path).complete) == 3


def no_links(number: int) -> Callable[..., None]:
    def refuse(source: Path, target: Path, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number), str(source))

    return refuse


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOENT])
def test_where_no_link_can_be_made_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, number: int
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    monkeypatch.setattr(os, "link", no_links(number))
    first, second, third = (inodes(saved(store, step)) for step in (1, 2, 3))
    assert first != second != third
    assert len(caplog.records) == 1 and os.strerror(number) in caplog.text


def test_one_that_is_gone_or_was_replaced_by_a_link_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run", keep_last=1)
    path = saved(store, 1)
    (path / "frozen-00000-of-00002.safetensors").unlink()
    other = path / "frozen-00001-of-00002.safetensors"
    other.rename(tmp_path / "elsewhere")
    other.symlink_to(tmp_path / "elsewhere")
    path = saved(store, 2)
    assert not any(each.is_symlink() for each in path.iterdir())
    assert (tmp_path / "elsewhere").stat().st_ino not in inodes(path)


def test_a_file_that_is_replaced_while_it_is_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, link = tmp_path / "old", os.link
    old.write_bytes(b"as it was")

    def too_late(source: Path, target: Path, **kwargs: Any) -> None:
        old.rename(tmp_path / "aside")
        old.symlink_to(tmp_path / "aside")
        link(source, target, **kwargs)

    monkeypatch.setattr(os, "link", too_late)
    with pytest.raises(OSError, match=r"[Ss]tale"):
        LOCAL.link(old, tmp_path / "new")
    assert not os.path.lexists(tmp_path / "new")


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the files that were read as a whole."""
    paths, crc32 = list[Path](), TensorFile.crc32

    def noting(file: TensorFile) -> int:
        paths.append(file.path)  # type: ignore[arg-type]
        return crc32(file)

    monkeypatch.setattr(TensorFile, "crc32", noting)
    return paths


def test_another_process_reads_a_file_once_before_it_is_shared(
    tmp_path: Path, summed: list[Path]
) -> None:
    def again(store: CheckpointStore, step: int) -> list[int]:
        path = save(store, step, ranks_of(step), frozen=FROZEN)
        return inodes(path)

    store = CheckpointStore(tmp_path)
    first, second, *_ = [again(store, step) for step in (1, 2, 3)]
    assert summed == []
    resumed = CheckpointStore(tmp_path)
    assert [again(resumed, step) for step in (4, 5, 6)] == [second, first, second]
    assert len(summed) == 4  # two files of two ranks


def damage(path: Path) -> None:
    """Flip one bit of the last number, in place, so that all links to the file show it."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def test_a_bad_block_is_in_every_second_one_and_spreads_no_further(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    folders = [saved(store, step) for step in range(1, 7)]
    damage(next(folders[5].glob("frozen-00000*")))
    sound = [CheckpointReader(folder).verify() == [] for folder in folders]
    assert sound == [True, False, True, False, True, False]
    shutil.rmtree(folders[5])  # as a run leaves it out that resumes
    for one in (store, CheckpointStore(tmp_path)):
        for step in (6, 7, 8):
            saved(one, step)  # which verifies it


def test_a_checkpoint_is_copied_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    expected = [contents(saved(store, step)) for step in (1, 2, 3)][2]
    copy = shutil.copytree(tmp_path / "run" / "checkpoint-000003", tmp_path / "checkpoint-000003")
    shutil.rmtree(tmp_path / "run")
    assert contents(Path(copy)) == expected


@pytest.mark.parametrize("size", [1, 3])
def test_another_world_size_writes_its_own(tmp_path: Path, size: int) -> None:
    store = CheckpointStore(tmp_path)
    first = [saved(store, step) for step in (1, 2)]
    path = saved(CheckpointStore(tmp_path), 3, size=size)
    assert not set(inodes(path)) & set(inodes(first[0]) + inodes(first[1]))
    assert read(path, "base", 1.0)


def test_many_ranks_have_an_index_of_them(tmp_path: Path) -> None:
    store, size = CheckpointStore(tmp_path, keep_last=1), 9
    _, path = (saved(store, step, size=size) for step in (1, 2))
    assert (path / "index.json").is_file() and len(set(inodes(path))) == size
    rows, wanted = torch.full((2 * size, 500), 1.0), Box((3, 4), (9, 5))
    assert bits(CheckpointReader(path).read("weights", "base", wanted)) == bits(
        region_of(rows, wanted)
    )
    assert CheckpointReader(path).names("weights") == ["base", "head"]


def test_room_for_what_learns_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(LOCAL, "free_bytes", lambda folder: 4000)
    with pytest.raises(SaveFailed, match=r"8\d\d\d bytes to write and 4000 free"):
        saved(store, 1)
    monkeypatch.undo()
    for step in (1, 2):
        saved(store, step)
    monkeypatch.setattr(LOCAL, "free_bytes", lambda folder: 4000)
    saved(store, 3)


def test_tensors_of_all_kinds_are_the_same_bytes_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    looks: dict[str, Tensor] = {
        "half": torch.arange(5).to(torch.bfloat16),
        "packed": torch.arange(256).to(torch.uint8),
        "nan": torch.tensor([float("nan"), -0.0]),
        "empty": torch.zeros(0, 3),
        "turned": torch.arange(12.0).view(3, 4).t(),
    }
    pieces = [piece(name, tensor) for name, tensor in looks.items()]
    first, second = (save(store, step, [pieces], frozen=set(looks)) for step in (1, 2))
    store.wait()
    assert not first.exists() and CheckpointReader(second).verify() == []
    for name, tensor in looks.items():
        assert bits(CheckpointReader(second).read("weights", name)) == bits(tensor)
    names = {path.name.partition("-")[0] for path in second.iterdir()}
    assert names == {"frozen", "state", "manifest.json"}


def test_an_object_store_has_no_links_and_says_so(caplog: Any) -> None:
    store = CheckpointStore(Url("memory://frozen/checkpoints"), keep_last=1)
    for step in (1, 2):
        path = save(store, step, ranks_of(step), frozen=FROZEN)
        reader = CheckpointReader(path)
        assert bool((reader.read("weights", "base") == 1).all())
        assert not [file for file in reader.manifest.files if file.name.startswith("frozen")]
    (record,) = caplog.records
    assert "memory://frozen/checkpoints is in an object store, which has no links" in record.message
