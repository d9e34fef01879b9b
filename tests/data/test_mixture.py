"""Mixtures of data sets: shares at any length, one order for all world sizes, and refusal of a
changed past.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Batches, Mix, ReadAgain, Recipe, Settings
from drivetrain.data.open_dataset import by_sample
from drivetrain.data.positions import position_from_json, position_to_json
from drivetrain.data.shares import shares_of
from drivetrain.kernel.batches import Position
from drivetrain.kernel.errors import DataError, DataFailed, SettingError, UsageError
from drivetrain.kernel.events import Event, Logged
from drivetrain.trainer.fit import fit

quickly = settings(deadline=None, max_examples=60)
weights = st.lists(st.floats(0.001, 1000), min_size=1, max_size=9)


def texts(name: str, size: int) -> list[str]:
    return [f"{name}{index}" for index in range(size)]


class Stream:
    """A stream of `size` texts, in order. A `stateful` stream resumes from its state."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.reads = name, size, 0

    def __iter__(self) -> Iterator[str]:
        for text in texts(self.name, self.size):
            self.reads += 1
            yield text


def three(stream: bool = False, **options: Any) -> Mix:
    b: Any = Stream("b", 7) if stream else texts("b", 7)
    return Mix({"a": (texts("a", 40), 5), "b": (b, 3), "c": (texts("c", 3), 0.5)}, **options)


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def steps(
    data: Any, readers: int = 1, start: Position | None = None, num: int = 6, **options: Any
) -> tuple[list[list[str]], Position, Any]:
    """Return the samples of each step over all readers, the end, and what a checkpoint keeps."""
    found: list[list[str]] = [[] for _ in range(num)]
    start, begun = start or Position(), options.pop("begun", {})
    for index in range(readers):
        loader = by_sample(
            data,
            global_batch=9,
            micro_batch=2,
            collate=as_list,
            reader_index=index,
            num_readers=readers,
            **options,
        )
        loader.resume(start, begun)
        for number, group in enumerate(loader.groups(start, num)):
            for each in group.microbatches:
                found[number] += each.batch[: each.num_samples]
            end = group.next
    kept = json.loads(json.dumps([position_to_json(end), loader.begun(end)]))
    return found, position_from_json(kept[0]), kept[1]


@quickly
@given(weights, st.integers(0, 10**12), st.integers(0, 3000))
def test_shares_are_kept_at_any_length(given: list[float], first: int, count: int) -> None:
    shares = shares_of({str(number): weight for number, weight in enumerate(given)}, "")
    before, after = shares.counts(first), shares.counts(first + count)
    drawn = Counter(shares.sources(first, first + count).tolist())
    assert [drawn[number] for number in range(len(given))] == [
        b - a for a, b in zip(before, after, strict=True)
    ]
    assert sum(before) == first
    total = sum(map(Fraction, given))
    away = math.ceil(math.log2(len(given))) / 2 + first * len(given) / 2**40
    for weight, counted in zip(given, before, strict=True):
        assert abs(counted - first * Fraction(weight) / total) <= away


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", [1, 3])
def test_the_order_is_the_same_at_any_world_size_and_wherever_it_is_resumed(
    stream: bool, first: int
) -> None:
    whole, _, _ = steps(three(stream), num=12)
    assert steps(three(stream), readers=3, num=12)[0] == whole
    begun, position, kept = steps(three(stream), readers=first, num=5)
    # the seed is the one that the run began with
    rest, _, _ = steps(three(stream), 2, position, 7, begun=kept, seed=8)
    assert begun + rest == whole
    assert steps(three(stream), seed=1, num=12)[0] != whole


def test_each_source_goes_through_its_own_epochs() -> None:
    mixture = three()
    drawn = sum(steps(mixture, num=60)[0], [])
    assert len(drawn) == 500
    assert mixture.drawn(500) == Counter(text[0] for text in drawn)
    for name, size in mixture.lengths.items():
        own = [text for text in drawn if text[0] == name]
        epochs = [own[start : start + size] for start in range(0, len(own), size or 1)]
        assert all(sorted(epoch) == sorted(texts(name, size or 0)) for epoch in epochs[:-1])
        assert len(set(epochs[-1])) == len(epochs[-1])
        assert mixture.epochs(500)[name] == len(own) / (size or 1)
        assert epochs[0] != epochs[1]


def test_a_source_keeps_its_order_when_others_come_and_go() -> None:
    alone, _, _ = steps(Mix({"a": (texts("a", 40), 1)}), num=2)
    mixed = [text for text in sum(steps(three(), num=4)[0], []) if text[0] == "a"]
    assert mixed[:18] == sum(alone, [])


def test_weights_change_at_the_sample_that_a_stage_names() -> None:
    mixture = three(stages=[(20, {"a": 0, "b": 3}), (33, {"c": 0, "a": 1, "b": 0})])
    drawn = sum(steps(mixture, num=6)[0], [])
    assert {text[0] for text in drawn[20:33]} == {"b", "c"}
    assert {text[0] for text in drawn[33:]} == {"a"}
    assert drawn[:20] == sum(steps(three(), num=6)[0], [])[:20]
    assert mixture.drawn(50) == Counter(text[0] for text in drawn)


def mixed(a: Any = (1,), b: Any = (2,), weight: Any = 1, **options: Any) -> Callable[[], Any]:
    return lambda: Mix({"web": (list(a), 1), "code": (b, weight)}, **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (mixed(b=[]), ["'code'", "no samples"]),
        (mixed(b=7), ["'code'", "int", "neither indexed"]),
        (mixed(b=Batches([])), ["'code'", "Batches"]),
        (mixed(b=DataLoader([1])), ["'code'", "DataLoader"]),  # type: ignore[arg-type]
        (mixed(weight=-0.5), ["'code'", "-0.5"]),
        (mixed(weight=math.nan), ["'code'", "nan"]),
        (mixed(weight=math.inf), ["'code'", "inf"]),
        (mixed(weight="1"), ["'code'", "'1'"]),
        (mixed(weight=True), ["'code'", "True"]),
        (mixed(weight=0), ["'code'", "0 from beginning to end"]),
        (mixed(weight=1e-15), ["'code'", "1e-15", "10^12"]),
        (mixed(stages=[(5, {"cod": 1})]), ["5", "'cod'", "web, code"]),
        (mixed(stages=[(5, {"code": -1})]), ["'code'", "from sample 5 on", "-1"]),
        (mixed(stages=[(5, {"code": 0, "web": 0})]), ["from sample 5 on", "web, code"]),
        (mixed(stages=[(5, {}), (5, {})]), ["5", "ascending"]),
        (mixed(stages=[(0, {})]), ["0", "ascending"]),
        (mixed(length=0), ["length is 0"]),
        (mixed(b=Stream("b", 3), length=9), ["'code'", "stream", "steps"]),
        (lambda: Mix({}), ["no sources"]),
        (lambda: Mix({"web": [1]}), ["'web'", "(data, weight)"]),  # type: ignore[dict-item]
        (lambda: Mix({1: ([1], 1)}), ["1", "text"]),  # type: ignore[dict-item]
    ],
)
def test_what_cannot_be_mixed_is_named(make: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(DataError) as raised:
        make()
    assert all(word in str(raised.value) for word in words), raised.value


class Broken(list[str]):
    def __getitem__(self, index: Any) -> Any:
        raise KeyError(index)


def failing() -> Iterator[str]:
    yield "b0"
    raise OSError("gone")


@pytest.mark.parametrize(
    ("b", "words"),
    [
        (Broken(texts("b", 1)), ["sample 0 of source 'b'", "KeyError"]),
        (failing, ["source 'b'", "sample 1 of epoch 0", "OSError: gone"]),
        (Stream("b", 0), ["source 'b'", "no samples in epoch 0"]),
        (iter(texts("b", 2)), ["source 'b'", "no samples in epoch 1", "once"]),
    ],
)
def test_a_source_that_fails_is_named(b: Any, words: list[str]) -> None:
    with pytest.raises((DataFailed, DataError)) as raised:
        steps(Mix({"a": (texts("a", 4), 1), "b": (b, 1)}))
    assert all(word in str(raised.value) for word in words), raised.value


def test_samples_are_labelled_by_their_sources() -> None:
    loader = by_sample(three(), global_batch=3, micro_batch=3, collate=as_list)
    first = sum(steps(three(), num=1)[0], [])[:3]
    named = ", ".join(f"{text[0]}[{text[1:]}]" for text in first)
    assert loader.where(Position(), 3) == f"samples 0 to 2 of epoch 0 ({named})"


@pytest.mark.parametrize("stream", [False, True])
def test_another_past_is_refused_and_another_future_is_not(stream: bool) -> None:
    whole, _, _ = steps(three(stream), num=5)
    _, position, kept = steps(three(stream), num=3)
    rest, _, _ = steps(three(stream, stages=[(36, {"c": 9})]), 1, position, 2, begun=kept)
    assert rest[0] == whole[3] and rest[1] != whole[4]
    longer = Mix({"a": (texts("a", 41), 5), **_without(three(stream), "a")})
    heavier = Mix({"a": (texts("a", 40), 9), **_without(three(stream), "a")})
    fewer = Mix(_without(three(stream), "a"))
    more = Mix({**_with_weights(three(stream)), "d": (texts("d", 9), 0)}, stages=[(27, {"d": 9})])
    for other, words in (
        (longer, ["'a'", "40 samples, and has 41"]),
        (heavier, ["'a'", "first 27 samples", "stages=[(27, "]),
        (fewer, ["'a'", "no more"]),
    ):
        with pytest.raises(DataError) as raised:
            steps(other, 1, position, 2, begun=kept)
        assert all(word in str(raised.value) for word in words), raised.value
    found = sum(steps(more, 1, position, 2, begun=kept)[0], [])
    assert {"a", "d"} <= {text[0] for text in found}


def _with_weights(mixture: Mix) -> dict[str, tuple[Any, float]]:
    weight = {"a": 5, "b": 3, "c": 0.5}
    return {name: (data, weight[name]) for name, data in mixture.data.items()}


def _without(mixture: Mix, name: str) -> dict[str, tuple[Any, float]]:
    return {key: pair for key, pair in _with_weights(mixture).items() if key != name}


def test_other_data_do_not_resume_as_a_mixture() -> None:
    _, position, kept = steps(texts("a", 40), num=2)
    with pytest.raises(DataError, match="not trained on a Mix"):
        steps(three(), 1, position, begun=kept)
    with pytest.raises(ValueError, match="not the draws"):
        steps(three(), 1, position, begun={"drawn": []})


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    result: Tensor = (module(batch.float()[:, None]) - batch[:, None]).square().sum()
    return result


def numbers(first: int, size: int) -> list[float]:
    return [first + 0.25 * index for index in range(size)]


def rows() -> Any:
    """Return a stream with a state, of the datasets library."""
    return Dataset.from_dict({"x": numbers(-3, 11)}).to_iterable_dataset(num_shards=2)


def collate(samples: list[Any]) -> Tensor:
    return torch.tensor([sample["x"] if isinstance(sample, dict) else sample for sample in samples])


def mixture(kind: str) -> Mix:
    sources: dict[str, tuple[Any, float]] = {"a": (numbers(0, 23), 2), "b": (numbers(5, 4), 1)}
    if kind == "stream":
        sources |= {"c": (rows(), 1), "d": (ReadAgain(rows().shuffle(seed=1, buffer_size=3)), 0.5)}
    return Mix(sources, stages=[(31, {"b": 2})])


@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_a_run_on_a_mixture_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    def losses(steps: int, out: str, **options: Any) -> dict[int, float]:
        found: dict[int, float] = {}

        def watch(event: Event) -> None:
            if isinstance(event, Logged):
                found[event.step] = event.loss

        recipe = Recipe(lambda: nn.Linear(1, 1), loss, train_data=mixture(kind), collate=collate)
        chosen = Settings(steps=steps, global_batch=5, log_every=1)
        chosen = dataclasses.replace(
            chosen, schedule=dataclasses.replace(chosen.schedule, name="constant")
        )
        fit(recipe, chosen, backend="cpu", out=tmp_path / out, observers=[watch], **options)
        return found

    whole = losses(14, "whole")
    assert losses(6, "parts") | losses(14, "parts", resume="auto") == whole


def test_a_mixture_is_not_evaluated_on_nor_without_end() -> None:
    recipe = Recipe(lambda: nn.Linear(1, 1), loss, train_data=mixture("stream"), collate=collate)
    with pytest.raises(SettingError, match="set steps"):
        fit(recipe, Settings(epochs=1), backend="cpu")
    recipe = dataclasses.replace(recipe, eval_data={"all": mixture("indexed")})
    with pytest.raises(UsageError, match=r"eval_data=\{name: data\}"):
        fit(recipe, Settings(steps=1, global_batch=2), backend="cpu")


def test_a_billion_samples_are_opened_at_any_place_at_once() -> None:
    class Huge:
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: int) -> int:
            return index

    mixture = Mix({"huge": (Huge(), 0.9), "small": (range(1000), 0.1)})
    start = 7 * len(mixture) + 123_456_789
    began = time.perf_counter()
    found = mixture.order(len(mixture), 0, 7)[123_456_789 : 123_456_789 + 50].tolist()
    assert time.perf_counter() - began < 1
    assert sum(index < 10**9 for index in found) == 45
    assert mixture.drawn(start)["huge"] == pytest.approx(0.9 * start, abs=1)
