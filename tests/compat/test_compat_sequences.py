"""Sequences and experts that a driver partitions: their batches, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from drivetrain.compat import Trainer, TrainingArguments
from drivetrain.compat.arguments.driver_session import DriverSession
from drivetrain.compat.data.sequences import WholeSequences
from drivetrain.compat.trainer.partitioning import partition_plan, whole_sequences

SMALL: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 11, "pad_token_id": None,
}  # fmt: skip


@pytest.fixture
def along(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the ranks along each dimension of a mesh, without making the mesh."""
    sizes: dict[str, int] = {}
    monkeypatch.setattr(DriverSession, "ranks_along", lambda self, name: sizes.get(name, 1))
    return sizes


def llama(**more: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SMALL, **more))


def mixtral(**more: Any) -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SMALL, **more))


def built(model: nn.Module, own: dict[str, Any] | None = None, **given: Any) -> Trainer:
    args = TrainingArguments("o", use_cpu=True, report_to=[], **given)
    return Trainer(model, args, **(own or {}))


# --- batches -------------------------------------------------------------------------------------


def test_labels_are_shifted_and_positions_counted_before_the_split() -> None:
    words = torch.arange(1, 6)[None].repeat(2, 1)
    batch = WholeSequences(2)({"input_ids": words, "labels": words, "attention_mask": None})
    assert batch["shift_labels"].tolist() == [[2, 3, 4, 5, -100, -100]] * 2
    assert batch["labels"].tolist() == [[1, 2, 3, 4, 5, -100]] * 2
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]]
    assert batch["input_ids"].shape == (2, 6), "as many more as divide"
    short = WholeSequences(2)({"input_ids": words[:, :2], "labels": words[:, :2]})
    assert short["input_ids"].shape == (2, 4), "a part has two positions, or it is not causal"


def test_a_mask_that_hides_the_end_is_taken_away() -> None:
    words, mask = torch.ones(1, 4, dtype=torch.int64), torch.tensor([[1, 1, 1, 0]])
    labels = torch.tensor([[1, 1, 1, -100]])
    positions = torch.tensor([[3, 4, 5, 1]])  # of padding they may be any
    batch = WholeSequences(2)(
        {"input_ids": words, "labels": labels, "attention_mask": mask, "position_ids": positions}
    )
    assert sorted(batch) == ["input_ids", "labels", "position_ids", "shift_labels"]
    assert batch["position_ids"].tolist() == [[3, 4, 5, 6]]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "padding_side='right'"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, r"\(1, 1, 4, 4\) hides more"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 0]])}, "give padding the label -100"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, "do not go up by one"),
        ({"position_ids": torch.arange(4).expand(3, 1, 4)}, r"\(3, 1, 4\) do not go up"),
        ({"pixel_values": torch.ones(1, 3)}, "batches hold pixel_values"),
        ({"labels": None}, "no labels"),
    ],
)
def test_what_parts_would_not_see_is_refused(entries: dict[str, Any], said: str) -> None:
    words = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=said):
        WholeSequences(2)({"input_ids": words, "labels": words, **entries})


def test_attention_that_reaches_less_far_than_sequences_is_refused(along: dict[str, int]) -> None:
    along["context"] = 2
    made = whole_sequences(built(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=6))))
    assert made == WholeSequences(2, reach=6)
    assert made is not None
    words = torch.ones(1, 6, dtype=torch.int64)
    made({"input_ids": words, "labels": words})
    words = torch.ones(1, 7, dtype=torch.int64)
    with pytest.raises(ValueError, match="back 6 positions, and a batch has sequences of 7"):
        made({"input_ids": words, "labels": words})


# --- what a model says of itself -----------------------------------------------------------------


def test_experts_are_those_of_the_model_s_plan(along: dict[str, int]) -> None:
    assert partition_plan(built(mixtral())) is None
    along["expert"] = 2
    how = partition_plan(built(mixtral()))
    assert how is not None
    assert (how.experts, how.sequence) == (["model.layers.*.mlp.experts"], {})


@pytest.mark.parametrize(
    ("model", "given", "own", "said"),
    [
        (lambda: llama(attn_implementation="eager"), {}, {}, "attn_implementation='sdpa'"),
        (lambda: mixtral(output_router_logits=True), {}, {}, "output_router_logits=False"),
        (llama, {"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor"),
        (llama, {"neftune_noise_alpha": 1.0}, {}, "neftune_noise_alpha"),
        (llama, {"gradient_checkpointing": True}, {}, "'activation_checkpointing': True"),
        (llama, {"include_num_input_tokens_seen": "non_padding"}, {}, "Set it to 'all'"),
        (llama, {}, {"compute_loss_func": lambda *given, **more: 0}, "compute_loss_func"),
        (lambda: nn.Linear(1, 1), {}, {}, "a loss other than the causal one"),
        (
            lambda: BertForMaskedLM(BertConfig(**{**SMALL, "pad_token_id": 0})),
            {},
            {},
            "a loss other than the causal one",
        ),
    ],
)
def test_what_is_no_sum_over_parts_is_refused(
    model: Any, given: dict[str, Any], own: dict[str, Any], said: str, along: dict[str, int]
) -> None:
    along["context"] = 2
    with pytest.raises(ValueError, match=said):
        built(model(), own, **given)


def test_a_model_without_stacked_experts_is_refused(along: dict[str, int]) -> None:
    along["expert"] = 2
    with pytest.raises(ValueError, match="LlamaForCausalLM has no ep_plan"):
        built(llama())
