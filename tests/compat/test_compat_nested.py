"""Nested tensors, shards of streams, parameter names, seeds and folders, compared with
transformers.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import trainer, trainer_pt_utils, trainer_utils

from drivetrain import compat
from drivetrain.compat.evaluation import nested
from drivetrain.data.nested import leaves

Pair = namedtuple("Pair", "left right")


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    for mine, other in zip(leaves(ours), leaves(theirs), strict=True):
        assert type(mine) is type(other)
        assert mine.dtype == other.dtype and mine.shape == other.shape
        assert (np.asarray(mine) == np.asarray(other)).all()


NESTS: dict[str, Callable[[int, int], Any]] = {
    "tensor": torch.rand,
    "scalar": lambda n, w: torch.rand(()),
    "one dimension": lambda n, w: torch.arange(n),
    "three dimensions": lambda n, w: torch.rand(n, w, 2),
    "tuple": lambda n, w: (torch.rand(n, w), torch.arange(n)),
    "list in dict": lambda n, w: {"a": [torch.rand(n, w)], "b": torch.rand(n)},
}


@pytest.mark.row("E5")
@pytest.mark.parametrize("case", NESTS)
@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("width", [3, 5])
def test_joining_pads_as_theirs(case: str, arrays: bool, width: int) -> None:
    pair = NESTS[case](2, 3), NESTS[case](4, width)
    if arrays:
        pair = nested.nested_numpify(pair[0]), nested.nested_numpify(pair[1])
    for first, second in (pair, pair[::-1]):
        ours = nested.nested_concat(first, second, padding_index=-7)
        assert_same(ours, trainer_pt_utils.nested_concat(first, second, padding_index=-7))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([torch.ones(1)], (torch.ones(1),), "nests differ: list, tuple"),
        (torch.ones(1), np.ones(1), "Tensor, ndarray"),
        ("a", "b", "not str"),
    ],
)
def test_joining_unlike_things_is_refused(first: Any, second: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        nested.nested_concat(first, second)


@pytest.mark.parametrize("case", NESTS)
def test_detaching_truncating_measuring(case: str) -> None:
    nest = NESTS[case](4, 3)
    assert nested.find_batch_size(nest) == trainer_pt_utils.find_batch_size(nest)
    assert_same(nested.nested_numpify(nest), trainer_pt_utils.nested_numpify(nest))
    assert_same(nested.nested_detach(nest), nest)
    if case != "scalar":
        assert_same(nested.nested_truncate(nest, 2), trainer_pt_utils.nested_truncate(nest, 2))


def test_small_things_of_nests() -> None:
    half = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    assert nested.nested_numpify(half).dtype == np.float32
    assert not nested.nested_detach([half, 3])[0].requires_grad
    assert isinstance(nested.nested_detach(Pair(half, half)), Pair)
    assert nested.find_batch_size({"a": 1, "b": [], "c": np.ones((3, 2))}) == 3
    assert nested.find_batch_size([torch.tensor(1)]) is None
    assert nested.nested_gather(None) is None
    assert nested.nested_gather(half) is half


@pytest.mark.row("M4")
def test_scalars_become_python_numbers() -> None:
    metrics = {"a": np.float32(1.5), "b": [torch.tensor([2])], "c": (np.int64(3), "x"), "d": None}
    ours = nested.denumpify_detensorize(metrics)
    assert ours == trainer_utils.denumpify_detensorize(metrics)
    assert [type(leaf) for leaf in leaves(ours)] == [float, int, int, str, type(None)]
    several = torch.ones(2)
    assert nested.denumpify_detensorize(several) is several


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("every", [1, 2, 9])
@pytest.mark.parametrize("rows", [2, 100_000])  # of which no more than two batches are joined first
def test_a_container_collects_as_theirs(concat: bool, every: int, rows: int) -> None:
    batches = [(torch.rand(rows, width), torch.arange(rows)) for width in (3, 2, 4)]
    made = []
    for library in (compat, trainer_pt_utils):
        container = library.EvalLoopContainer(concat, padding_index=-1)
        assert container.get_arrays() is None
        for count, batch in enumerate(batches, 1):
            container.add(batch)
            if count % every == 0:
                container.to_cpu_and_numpy()
        assert_same(container.get_arrays(), container.get_arrays())
        made.append(container.get_arrays())
    assert_same(*made)


class Stream(torch.utils.data.IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length, generator=self.generator).tolist()

    def __len__(self) -> int:
        return self.length


@pytest.mark.row("D10")
@pytest.mark.parametrize("length", [0, 1, 5, 8, 11])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_stream_is_sharded_as_theirs(length: int, drop_last: bool, ranks: int) -> None:
    for rank in range(ranks):
        shards = [
            library.IterableDatasetShard(
                Stream(length), 2, drop_last, num_processes=ranks, process_index=rank, seed=5
            )
            for library in (compat, trainer_pt_utils)
        ]
        for epoch in (0, 3):
            seen = []
            for shard in shards:
                shard.set_epoch(epoch)
                seen.append((list(shard), len(shard), shard.num_examples))
            assert seen[0] == seen[1]


def test_a_stream_that_knows_epochs_receives_them() -> None:
    stream = Stream(3)
    reported: list[int] = []
    stream.set_epoch = reported.append  # type: ignore[attr-defined]
    compat.IterableDatasetShard(stream).set_epoch(4)
    assert reported == [4]


def model() -> nn.Module:
    inner = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    whole = nn.ModuleDict({"inner": inner, "final_norm": nn.Linear(2, 2)})
    whole.scale = nn.Parameter(torch.ones(1), requires_grad=False)
    return whole


@pytest.mark.parametrize("patterns", [None, ["bias"], ["bias", "norm"], [r"^inner\.0"], ["SCALE"]])
def test_names_of_parameters_as_theirs(patterns: list[str] | None) -> None:
    for types in ([], [nn.LayerNorm], [nn.Sequential]):
        ours = compat.get_parameter_names(model(), types, patterns)
        assert ours == trainer_pt_utils.get_parameter_names(model(), types, patterns)


def test_counts_of_parameters_as_theirs() -> None:
    for trainable in (True, False):
        theirs = trainer_pt_utils.get_model_param_count(model(), trainable)
        assert compat.get_model_param_count(model(), trainable) == theirs


@pytest.mark.row("R1")
def test_one_seed_seeds_all() -> None:
    def draws(seeder: Callable[[int], None]) -> tuple[float, float, float]:
        seeder(7)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draws(compat.set_seed) == draws(trainer_utils.set_seed) == draws(compat.set_seed)


@pytest.mark.slow
@pytest.mark.row("R2")
def test_full_determinism_is_what_theirs_is() -> None:
    """Compare in processes of their own, since determinism is set for a whole process."""
    script = """
import json, os, sys
before = dict(os.environ)
import torch
if sys.argv[1] == "ours":
    from drivetrain.compat import enable_full_determinism
else:
    from transformers import enable_full_determinism
enable_full_determinism(3)
changed = {k: v for k, v in os.environ.items() if before.get(k) != v and k.isupper()}
known = ("LAUNCH_BLOCKING", "DETERMINISTIC", "CUBLAS")
print(json.dumps([
    {k: v for k, v in sorted(changed.items()) if any(word in k for word in known)},
    torch.are_deterministic_algorithms_enabled(),
    torch.backends.cudnn.deterministic,
    torch.backends.cudnn.benchmark,
    torch.rand(()).item(),
]))
"""
    said = [
        subprocess.run(
            [sys.executable, "-c", script, who], capture_output=True, text=True, check=True
        ).stdout.splitlines()[-1]
        for who in ("ours", "theirs")
    ]
    assert said[0] == said[1]
    assert '"CUBLAS_WORKSPACE_CONFIG": ":16:8"' in said[0]


def test_names_of_files_as_theirs() -> None:
    names = [name for name in compat.__all__ if name.isupper() and name.endswith(("NAME", "_BIN"))]
    assert len(names) == 7
    for name in names:
        expected = getattr(trainer, name)
        assert getattr(compat, name) == expected.replace("training_args.bin", "training_args.json")
    assert compat.PREFIX_CHECKPOINT_DIR == trainer_utils.PREFIX_CHECKPOINT_DIR


def test_the_last_checkpoint_has_the_greatest_number(tmp_path: Path) -> None:
    assert compat.get_last_checkpoint(tmp_path) is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x", "xcheckpoint-11", "runs"):
        os.mkdir(tmp_path / name)
    (tmp_path / "checkpoint-99").touch()
    ours = compat.get_last_checkpoint(str(tmp_path))
    assert ours == trainer_utils.get_last_checkpoint(str(tmp_path))
    assert ours is not None and ours.endswith("checkpoint-10")
