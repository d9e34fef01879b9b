"""Text that a callback has the model generate amid training, also one inside a wrapper of PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import QUIET
from subjects import subject
from torch import nn

from drivetrain import compat
from drivetrain.conformance.bench import Bench

WORDS = 40


def model() -> nn.Module:
    """Return a small Llama with an adapter."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    whole = LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, hidden_size=16, intermediate_size=32, pad_token_id=0, **sizes)
    )
    chosen = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(whole, chosen)  # type: ignore[arg-type]
    return adapted


def written(module: Any) -> list[int]:
    prompt = torch.tensor([[1, 5, 7]])
    mask = torch.ones_like(prompt)
    asked = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    return module.generate(input_ids=prompt, attention_mask=mask, **asked)[0].tolist()  # type: ignore[no-any-return]


class Writes(compat.TrainerCallback):
    """Keeps what the model writes at the beginning, after each step and after each evaluation."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def note(self, *given: Any, model: Any = None, **kwargs: Any) -> None:
        self.texts.append(written(model))

    on_train_begin = on_step_end = on_evaluate = note


def trained(bench: Bench, *, folder: str, batch: int) -> list[list[int]]:
    """A job: return all texts of a run, and that of the model which the Trainer gave back."""
    draws = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, WORDS, (8,), generator=draws) for _ in range(12)]
    rows = [{"input_ids": text, "labels": text} for text in texts]
    args = compat.TrainingArguments(
        output_dir=folder,
        **{**QUIET, "save_strategy": "no", "max_steps": 3},
        eval_strategy="steps",
        eval_steps=2,
        per_device_train_batch_size=batch,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        backend=bench.backend,
    )
    seen = Writes()
    trainer = compat.Trainer(
        model(), args, train_dataset=rows, eval_dataset=rows[:4], callbacks=[seen]
    )
    trainer.train()
    trainer.end()
    return [*seen.texts, written(trainer.model.eval())]


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("mesh", marks=pytest.mark.slow)])
def test_an_adapted_model_writes_in_callbacks_what_it_writes_in_one_process(
    backend: str, tmp_path: Path
) -> None:
    found = subject(backend, 2).run(trained, folder=str(tmp_path / "two"), batch=2)
    (alone,) = subject("cpu").run(trained, folder=str(tmp_path / "one"), batch=4)
    assert found == [alone, alone]
    assert len({tuple(text) for text in alone}) > 2  # it learns
