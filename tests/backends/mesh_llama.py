"""A job: compat's Trainer on a small Llama of transformers, which has a tensor plan of its own."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from drivetrain.compat import Trainer, TrainingArguments
from drivetrain.conformance.bench import Bench

VOCABULARY, LENGTH = 61, 12
ADAPTED = ["q_proj", "o_proj", "down_proj", "lm_head", "embed_tokens"]


class Sentences:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = words.clone()
        labels[: index % 5] = -100
        return {"input_ids": words, "labels": labels}


def train(
    bench: Bench, *, folder: str, tp_size: int, tied: bool, adapter: bool = False
) -> dict[str, Any]:
    """Return losses, norms, an evaluation, and the saved weights: those of the model, or those of
    an adapter that is trained alone. The adapter is around layers of each kind of partition, and
    around layers that are not partitioned.
    """
    from accelerate.utils import ParallelismConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=32,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    if adapter:
        from peft import LoraConfig, get_peft_model

        # by default nothing comes of an adapter at first: faults would not be seen
        lora = LoraConfig(r=3, init_lora_weights=False, target_modules=ADAPTED)
        model = get_peft_model(model, lora)
    args = TrainingArguments(
        folder, use_cpu=True, max_steps=5, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, logging_steps=1, report_to=[], disable_tqdm=True,
        eval_strategy="steps", eval_steps=5, save_steps=5, max_grad_norm=0.5, learning_rate=1e-2,
        lr_scheduler_type="constant",
        parallelism_config=ParallelismConfig(tp_size=tp_size) if tp_size > 1 else None,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=Sentences(40), eval_dataset=Sentences(7))
    try:
        trainer.train()
        assert trainer.get_tp_size() == tp_size
        logs = trainer.state.log_history
        return {
            "losses": [log["loss"] for log in logs if "loss" in log],
            "norms": [log["grad_norm"] for log in logs if "grad_norm" in log],
            "evaluated": [log["eval_loss"] for log in logs if "eval_loss" in log],
            "global batch": trainer.get_total_train_batch_size(args),
            "saved": load_file(f"{folder}/checkpoint-5/{'adapter_' * adapter}model.safetensors"),
        }
    finally:
        trainer.end()
