"""Divisor of the loss, label smoothing, and arguments of a model's forward, compared with
transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother as TheirSmoother

from drivetrain import compat
from drivetrain.compat.common.inspection import (
    accepted_columns,
    can_return_loss,
    find_labels,
    is_peft_model,
    model_accepts_loss_kwargs,
    unwrap_peft,
)
from drivetrain.compat.common.loss import (
    LabelSmoother,
    count_items,
    is_causal_lm,
    loss_of,
    loss_shifts_labels,
)

# what PEFT asks of models still has the old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def llama() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def bert(kind: str) -> Any:
    config = transformers.BertConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return getattr(transformers, f"BertFor{kind}")(config)


class Plain(nn.Module):
    def forward(self, x: Tensor, return_loss: bool = True, my_labels: Any = None) -> Tensor:
        return x


def labelled(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 5, 7, generator=generator, requires_grad=True)
    labels = torch.randint(0, 7, (3, 5), generator=generator)
    labels[0, 2:] = -100
    labels[2, 0] = -100
    return logits, labels


@pytest.mark.row("S10")
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("items", [None, 21, torch.tensor(21)])
@pytest.mark.parametrize("packed", [dict, tuple])
def test_smoothing_is_that_of_transformers(shift: bool, items: Any, packed: type) -> None:
    grads, losses = [], []
    for smoother in (LabelSmoother(0.2), TheirSmoother(0.2)):
        logits, labels = labelled(0)
        outputs: Any = {"logits": logits} if packed is dict else (logits,)
        loss: Tensor = smoother(outputs, labels, shift, num_items_in_batch=items)
        loss.backward()
        losses.append(loss)
        grads.append(logits.grad)
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-7)


@pytest.mark.row("S10")
def test_smoothing_is_its_formula() -> None:
    logits, labels = labelled(1)
    surprise = -torch.log_softmax(logits, -1)[labels != -100]
    targets = labels[labels != -100]
    wanted = 0.9 * surprise.gather(-1, targets[:, None]).mean() + 0.1 * surprise.mean()
    torch.testing.assert_close(LabelSmoother(0.1)((logits,), labels.unsqueeze(-1)), wanted)


@pytest.mark.row("S5", "S11")
def test_labels_are_counted_as_transformers_counts_them(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    labels = labelled(2)[1]
    plain = [{"labels": labels}, {"labels": labels[:1]}]
    shifted = [{"labels": labels, "shift_labels": labels[:, 2:]}]
    objects = [{"labels": [{"boxes": labels}]}]
    models = (llama(), bert("SequenceClassification"))
    for model in models:
        reference = transformers.Trainer(model, arguments)
        reference.model_accepts_loss_kwargs = True
        shifts = loss_shifts_labels(model)
        assert shifts == reference._loss_shifts_labels == is_causal_lm(model)
        for batches in (plain, shifted, objects, [], [{"x": labels}]):
            theirs = reference._get_num_items_in_batch(batches, torch.device("cpu"))
            assert count_items(batches, shifts) == theirs
    assert count_items(plain, True) != count_items(plain, False)
    old = compat.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", profile="4.47")
    assert not compat.Trainer(models[0], old)._loss_shifts_labels
    assert not loss_shifts_labels(Plain()) and not is_causal_lm(Plain())


def test_without_transformers_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.delitem(sys.modules, "transformers")
    assert not is_causal_lm(model) and not loss_shifts_labels(model)
    assert not is_peft_model(model)
    assert "transformers" not in sys.modules


@pytest.mark.row("S1", "C12")
def test_the_loss_of_what_a_model_returns() -> None:
    loss = torch.tensor(1.0)
    assert loss_of({"loss": loss, "logits": 0}, {}) is loss
    assert loss_of((loss, 0), {}) is loss
    output = transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=loss)
    assert loss_of(output, {}) is loss
    with pytest.raises(ValueError, match=r"no loss, but logits, hidden, of the inputs x, y"):
        loss_of({"logits": 0, "hidden": 0}, {"x": 0, "y": 0})


@pytest.mark.row("C25", "C26", "S6", "D14")
def test_what_forward_says_is_what_transformers_reads(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    models: list[Any] = [
        Plain(),
        llama(),
        bert("QuestionAnswering"),
        bert("PreTraining"),
        get_peft_model(llama(), LoraConfig(target_modules=["q_proj"])),
    ]
    for model in models:
        reference = transformers.Trainer(model, arguments)
        bare = unwrap_peft(model)
        assert find_labels(type(bare)) == reference.label_names
        assert can_return_loss(type(bare)) == reference.can_return_loss
        assert model_accepts_loss_kwargs(model) == reference.model_accepts_loss_kwargs
        reference._set_signature_columns_if_needed()
        columns = accepted_columns(model, reference.label_names)
        assert set(columns) == set(reference._signature_columns)
        assert len(columns) == len(set(columns))
    assert find_labels(type(models[2])) == ["start_positions", "end_positions"]


@pytest.mark.row("S6")
def test_a_model_may_say_what_it_accepts() -> None:
    model = Plain()
    assert not model_accepts_loss_kwargs(model)
    model.accepts_loss_kwargs = True  # type: ignore[assignment]
    assert model_accepts_loss_kwargs(model)


@pytest.mark.row("N12", "S6", "S11")
def test_peft_models_are_looked_through() -> None:
    base = llama()
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    assert is_peft_model(model) and unwrap_peft(model) is base
    assert is_causal_lm(model) and loss_shifts_labels(model)
    mixed = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]), mixed=True)
    assert isinstance(unwrap_peft(mixed), transformers.LlamaForCausalLM)
    assert unwrap_peft(base) is base
