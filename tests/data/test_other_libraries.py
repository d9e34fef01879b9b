"""Data in the formats of other libraries: resuming in the middle, and refusals."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from drivetrain import Mix, TarShards
from drivetrain.data.open_dataset import by_sample
from drivetrain.data.positions import position_from_json, position_to_json
from drivetrain.kernel.batches import ENDLESS, Position
from drivetrain.kernel.errors import DataError, DataFailed

Make = Callable[[], Any]


def rows() -> Any:
    return Dataset.from_dict({"x": list(range(23))})


def values(samples: list[Any]) -> list[int]:
    return [int(sample["x"]) for sample in samples]


def read(data: Any, start: Position, num_steps: int, readers: int = 1) -> Any:
    """Return the samples of each step over all readers, and the end as a checkpoint keeps it."""
    found: list[list[int]] = []
    options: Any = {"global_batch": 4, "micro_batch": 2, "collate": values, "num_epochs": 2}
    for index in range(readers):
        source = by_sample(data(), reader_index=index, num_readers=readers, **options)
        for number, group in enumerate(source.groups(start, num_steps)):
            found += [[]] if index == 0 else []
            for each in group.microbatches:
                found[number] += each.batch[: each.num_samples]
            end = group.next
    return found, position_from_json(json.loads(json.dumps(position_to_json(end))))


def goes_on(data: Make, steps: int = 12) -> list[int]:
    """Require equal samples when read in one go, and in three parts at other world sizes. Return
    the first epoch.
    """
    whole, _ = read(data, Position(), steps)
    first, position = read(data, Position(), 2)
    second, position = read(data, position, 3, readers=2)
    rest, _ = read(data, position, steps - 5, readers=3)
    assert first + second + rest == whole
    return sum(whole[: len(whole) // 2], [])


def test_a_data_set_of_the_datasets_library() -> None:
    epoch = goes_on(rows)
    assert sorted(epoch) == list(range(23)) and epoch != list(range(23))
    formatted = rows().with_format("torch")
    assert sorted(goes_on(lambda: formatted)) == list(range(23))


LOADERS: dict[str, Make] = {
    "map": lambda: StatefulDataLoader(rows(), batch_size=None),
    "stream": lambda: StatefulDataLoader(rows().to_iterable_dataset(4), batch_size=None),
    "workers": lambda: StatefulDataLoader(
        rows().to_iterable_dataset(4), batch_size=None, num_workers=2
    ),
    "buffer": lambda: StatefulDataLoader(
        rows().to_iterable_dataset(4).shuffle(seed=1, buffer_size=4), batch_size=None
    ),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_of_torchdata(kind: str) -> None:
    epoch = goes_on(LOADERS[kind])
    assert sorted(epoch) == list(range(23))
    assert (epoch == list(range(23))) == (kind in ("map", "stream"))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_whose_state_is_no_json_is_refused() -> None:
    with pytest.raises(DataError, match=r"\['generator'\] is a Tensor.*ReadAgain"):
        read(lambda: StatefulDataLoader(rows(), batch_size=None, shuffle=True), Position(), 2)


def tar(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content.encode()))
    return path


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Make four shards of uneven length, whose samples have two files of any size."""
    bounds = [0, 9, 10, 17, 23]
    return [
        tar(
            tmp_path / f"{number}.tar",
            {
                name: content
                for x in range(*bounds[number : number + 2])
                for name, content in (
                    (f"a.b/{x:04}.json", json.dumps({"x": x})),
                    (f"a.b/{x:04}.seg.txt", "t" * (x * 100)),
                )
            },
        )
        for number in range(4)
    ]


def decoded(sample: dict[str, Any]) -> Any:
    found = json.loads(sample["json"])
    assert sample["__key__"] == f"a.b/{found['x']:04}"
    assert len(sample["seg.txt"]) == found["x"] * 100
    return found


def test_tar_shards(shards: list[Path]) -> None:
    epoch = goes_on(lambda: TarShards(shards, decoded))
    assert sorted(epoch) == list(range(23)) and epoch != list(range(23))
    assert goes_on(lambda: TarShards(shards, decoded, shuffle=False)) == list(range(23))
    epochs, _ = read(lambda: TarShards(shards, decoded), Position(), ENDLESS)
    assert sum(epochs[:6], []) != sum(epochs[6:], [])
    assert sorted(sum(epochs[6:], [])) == list(range(23))


def test_tar_shards_do_not_read_what_was_before(shards: list[Path]) -> None:
    whole, _ = read(lambda: TarShards(shards, decoded, shuffle=False), Position(), 6)
    _, position = read(lambda: TarShards(shards, decoded, shuffle=False), Position(), 3)
    shards[0].write_bytes(b"gone")
    rest, _ = read(lambda: TarShards(shards, decoded, shuffle=False), position, 3)
    assert rest == whole[3:]


def test_tar_shards_in_a_mixture(shards: list[Path]) -> None:
    def mixture() -> Any:
        return Mix({"tar": (TarShards(shards, decoded), 2), "rows": (rows(), 1)})

    goes_on(mixture)


def truncated(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:5000])
    return path


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), ["9.tar", "No such file"]),
        (lambda path: path.write_bytes(b"x" * 2048), ["9.tar", "tar file"]),
        (lambda path: tar(path, {}), ["9.tar", "no files"]),
        (truncated, ["9.tar", "tar file", "truncated at byte 4608"]),
        (lambda path: tar(path, {"a.x": "1", "a.y": "2", "b.x": "3", "b.x ": "4"}), []),
    ],
)
def test_what_is_no_tar_shard_is_named(
    tmp_path: Path, spoil: Callable[[Path], Any], words: list[str]
) -> None:
    path = tar(tmp_path / "9.tar", {f"{n}.txt": "y" * 900 for n in range(9)})
    spoil(path)
    if not words:
        assert [sorted(sample) for sample in TarShards([path])] == [
            ["__key__", "x", "y"],
            ["__key__", "x", "x "],
        ]
        return
    with pytest.raises((DataError, DataFailed)) as raised:
        list(TarShards([path]))
    assert all(word in str(raised.value) for word in words), raised.value


def test_shards_are_given_one_by_one_and_stay_as_many(shards: list[Path]) -> None:
    with pytest.raises(DataError, match="a list of paths"):
        TarShards(str(shards[0]))
    with pytest.raises(DataError, match="a list of paths"):
        TarShards([])
    with pytest.raises(DataError, match="not the state of TarShards"):
        TarShards(shards).load_state_dict({"shard": 1})
    _, position = read(lambda: TarShards(shards, decoded), Position(), 3)
    with pytest.raises(DataError, match="were 4 tar shards, and are 3"):
        read(lambda: TarShards(shards[:3], decoded), position, 1)
