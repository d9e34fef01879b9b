"""Sequences of uneven length: packed into rows without attending to each other, or grouped by
length.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from trainer.problems import everything

from drivetrain import DataSettings, Pack, Recipe, Settings
from drivetrain.data.order import ByLength
from drivetrain.data.packing import IGNORED, rows_of
from drivetrain.kernel.errors import DataError, SettingError
from drivetrain.kernel.events import Event, Logged
from drivetrain.trainer.fit import fit

VOCABULARY, WIDTH, LONGEST = 19, 16, 24


class Sentences:
    """Sentences of uneven length, each a pure function of its index."""

    def __init__(self, size: int = 40) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, LONGEST + 1, (size,), generator=generator).tolist()
        self.lengths: list[int] = lengths
        self.sentences = [torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.sentences[index]}


class Reader(nn.Module):
    """A model that embeds tokens and positions, attends under a mask, and predicts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=batch["attention_mask"])
        result: Tensor = self.head(x + mixed[:, 0])
        return result


class VarlenReader(Reader):
    """A reader that attends within the bounds of sequences alone, like kernels for variable
    lengths.
    """

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        bounds = batch["cu_seqlens"]
        mixed = torch.cat(
            [
                F.scaled_dot_product_attention(
                    *self.qkv(x.flatten(0, 1)[start:stop])[None].chunk(3, -1), is_causal=True
                )[0]
                for start, stop in itertools.pairwise(bounds.tolist())
            ]
        )
        result: Tensor = self.head(x + mixed.view_as(x))
        return result


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the sum of losses over predicted tokens. Each token predicts the next."""
    logits, labels = module(batch)[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def alone(samples: Sequence[Any]) -> dict[str, Tensor]:
    """Return each sample in a padded row of its own."""
    rows = [Pack(LONGEST)([sample]) for sample in samples]
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 90))
def test_rows_hold_each_sequence_once(lengths: list[int], capacity: int) -> None:
    rows = rows_of(lengths, capacity)
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert all(0 < total <= capacity for total in filled)
    assert sum(2 * total <= capacity for total in filled) <= 1  # two of these would be one


@pytest.mark.parametrize("capacity", [LONGEST, 40, 200])
@pytest.mark.parametrize("mask", ["dense", "varlen"])
def test_loss_and_gradient_are_those_of_sequences_by_themselves(capacity: int, mask: Any) -> None:
    data = Sentences()
    samples = [data[index] for index in range(len(data))]
    figures = []
    packed_model = Reader if mask == "dense" else VarlenReader
    for build, batch in (
        (Reader, alone(samples)),
        (packed_model, Pack(capacity, mask=mask)(samples)),
    ):
        torch.manual_seed(0)
        model = build()
        total = loss(model, batch)
        total.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        figures.append((float(total.detach()), Pack.count_items(batch), grads))
    (one, items, grads), (packed, packed_items, packed_grads) = figures
    assert packed == pytest.approx(one, rel=1e-6)
    assert packed_items == items == sum(data.lengths) - len(data)
    for grad, expected in zip(packed_grads, grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5)


def test_what_a_batch_holds() -> None:
    samples = [{"input_ids": [5, 6], "labels": [7, 8], "kind": [1, 1]}, {"input_ids": [9, 10, 11]}]
    samples[1] |= {"labels": [12, 13, 14], "kind": [2, 2, 2], "attention_mask": [1, 1, 1]}
    batch = Pack(6, padding={"input_ids": 3})(samples)
    assert batch["input_ids"].tolist() == [[9, 10, 11, 5, 6, 3]]
    assert batch["labels"].tolist() == [[IGNORED, 13, 14, IGNORED, 8, IGNORED]]
    assert batch["kind"].tolist() == [[2, 2, 2, 1, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch["sequence_ids"].tolist() == [[1, 1, 1, 2, 2, 0]]
    assert batch["attention_mask"].int().tolist() == [
        [
            [
                [1, 0, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [1, 1, 1, 0, 0, 0],
                [0, 0, 0, 1, 0, 0],
                [0, 0, 0, 1, 1, 0],
                [0, 0, 0, 0, 0, 1],
            ]
        ]
    ]
    both_ways = Pack(6, causal=False)(samples)["attention_mask"][0, 0]
    assert both_ways.int().sum().item() == 3 * 3 + 2 * 2 + 1
    assert "attention_mask" not in Pack(6, mask="none")(samples)
    varlen = Pack(6, mask="varlen")([*samples, {**samples[0]}])
    assert "attention_mask" not in varlen
    assert varlen["sequence_ids"].tolist() == [[1, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0]]
    assert varlen["cu_seqlens"].tolist() == [0, 3, 5, 6, 8, 12]
    assert varlen["cu_seqlens"].dtype == torch.int32 and varlen["max_seqlen"] == 4
    assert Pack(2, mask="varlen")(samples[:1])["cu_seqlens"].tolist() == [0, 2]  # nothing is left
    with pytest.raises(SettingError, match=r"mask is 'flash'.*dense, varlen, none"):
        Pack(6, mask="flash")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ([1, 2], "a dict with 'input_ids'"),
        ({"labels": [1]}, "a dict with 'input_ids'"),
        ({"input_ids": []}, "has no tokens"),
        ({"input_ids": [1, 2], "labels": [1]}, "of one length"),
        ({"input_ids": [[1, 2]]}, "of one length"),
        ({"input_ids": [1] * 9}, "9 tokens does not fit into a row of 8"),
    ],
)
def test_what_cannot_be_packed_is_refused(sample: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Pack(8)([sample])


def test_a_language_model_of_transformers_reads_packed_rows() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model, data = LlamaForCausalLM(config).eval(), Sentences(10)
    samples = [data[index] for index in range(len(data))]
    packed = Pack(60)(samples)
    batch = {key: value for key, value in packed.items() if key != "sequence_ids"}
    one = model(**batch, num_items_in_batch=1).loss  # the sum
    parts = [model(s["input_ids"][None], labels=s["input_ids"][None]) for s in samples]
    total = sum(
        float(part.loss.detach()) * (len(s["input_ids"]) - 1)
        for part, s in zip(parts, samples, strict=True)
        if len(s["input_ids"]) > 1
    )
    assert float(one.detach()) == pytest.approx(total, rel=1e-5)


SETTINGS = Settings(steps=7, global_batch=8, micro_batch=3, log_every=1)
RECIPE = Recipe(model=Reader, loss=loss, train_data=Sentences(), count_items=Pack.count_items)


def run(what: Recipe, settings: Settings, **kwargs: Any) -> tuple[Any, list[float]]:
    events: list[Event] = []
    result = fit(what, settings, backend="cpu", observers=[events.append], **kwargs)
    return result, [event.loss for event in events if isinstance(event, Logged)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_packed_run_has_the_curve_of_an_unpacked_one(workers: int) -> None:
    settings = dataclasses.replace(SETTINGS, data=DataSettings(workers=workers))
    padded = run(dataclasses.replace(RECIPE, collate=alone), settings)[1]
    packed = run(dataclasses.replace(RECIPE, collate=Pack(50)), settings)[1]
    assert packed == pytest.approx(padded, rel=1e-6)
    varlen = dataclasses.replace(RECIPE, model=VarlenReader, collate=Pack(50, mask="varlen"))
    assert run(varlen, settings)[1] == pytest.approx(padded, rel=1e-6)


# --- by length -------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=80),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(0, 3),
)
def test_an_order_by_length_has_each_sample_once(
    lengths: list[int], batch: int, stretch: int, epoch: int
) -> None:
    order = ByLength(lengths, batch, stretch)(len(lengths), 7, epoch)
    whole = torch.as_tensor(order[0 : len(lengths)])
    assert sorted(whole.tolist()) == list(range(len(lengths)))
    for start in range(0, len(lengths), 7):  # read from anywhere
        part = torch.as_tensor(order[start : start + 5])
        assert part.tolist() == whole[start : start + 5].tolist()


def padding(data: Sentences, order: list[int], batch: int) -> int:
    batches = [
        [data.lengths[index] for index in order[start : start + batch]]
        for start in range(0, len(order), batch)
    ]
    return sum(len(each) * max(each) - sum(each) for each in batches)


def test_batches_by_length_need_little_padding() -> None:
    data = Sentences(1000)
    by_length = ByLength(data.lengths, 8, 400)
    orders = [torch.as_tensor(by_length(1000, 0, epoch)[0:1000]).tolist() for epoch in (0, 1)]
    assert padding(data, orders[0], 8) < 0.1 * padding(data, list(range(1000)), 8)
    assert orders[0] != orders[1]
    firsts = [data.lengths[order[0]] for order in orders]
    assert firsts[0] != max(data.lengths) or firsts[1] != max(data.lengths)  # batches are shuffled


def test_a_run_by_length_resumes_exactly(tmp_path: Path) -> None:
    data = Sentences()
    what = dataclasses.replace(RECIPE, collate=alone, train_data=data, lengths=data.lengths)
    settings = dataclasses.replace(SETTINGS, data=DataSettings(by_length=2), steps=9)
    every = dataclasses.replace(settings.checkpoint, every=4, keep_last=9)
    whole, curve = run(what, dataclasses.replace(settings, checkpoint=every), out=tmp_path)
    source = tmp_path / "checkpoints" / "checkpoint-000004"
    resumed, rest = run(what, settings, out=tmp_path / "on", resume=source)
    assert rest == curve[4:]
    one, other = everything(whole.checkpoint), everything(resumed.checkpoint)
    assert not [name for name in one if not torch.equal(one[name], other[name])]
    other_order = run(what, dataclasses.replace(settings, data=DataSettings()))[1]
    assert other_order != curve


@pytest.mark.parametrize(
    ("changes", "shuffle"), [({}, None), ({"lengths": [1] * 40}, False)], ids=["no lengths", "off"]
)
def test_what_it_needs_is_asked_for(changes: dict[str, Any], shuffle: bool | None) -> None:
    what = dataclasses.replace(RECIPE, collate=alone, **changes)
    settings = dataclasses.replace(SETTINGS, data=DataSettings(by_length=2, shuffle=shuffle))
    with pytest.raises(SettingError, match=r"data\.by_length is 2, which needs recipe\.lengths"):
        run(what, settings)


def test_lengths_of_other_data_are_refused() -> None:
    what = dataclasses.replace(RECIPE, collate=alone, lengths=[1, 2, 3])
    settings = dataclasses.replace(SETTINGS, data=DataSettings(by_length=2))
    with pytest.raises(DataError, match="3 lengths for 40 samples"):
        run(what, settings)
