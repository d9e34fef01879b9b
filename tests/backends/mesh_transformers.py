"""A job: compat's Trainer on small models of transformers, which have tensor plans of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from drivetrain.compat import Trainer, TrainingArguments
from drivetrain.conformance.bench import Bench

VOCABULARY, LENGTH = 61, 13
"""Length of a sequence. No number of ranks that partition sequences divides it."""


class Sentences:
    """Sentences of several lengths, padded at the end."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels, mask = words.clone(), torch.ones_like(words)
        labels[: index % 5] = -100
        labels[LENGTH - index % 4 :] = -100
        mask[LENGTH - index % 4 :] = 0
        return {"input_ids": words, "labels": labels, "attention_mask": mask}


def model_of(kind: str, adapter: bool = False, **more: Any) -> nn.Module:
    """Return a model of few weights: `llama`, or `mixtral` with four experts; or an adapter around
    one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
        "max_position_embeddings": 32, "pad_token_id": None,
    }  # fmt: skip
    if kind == "mixtral":
        shape |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(kind, **shape, **more)
    built: nn.Module = AutoModelForCausalLM.from_config(config)
    if adapter:
        from peft import LoraConfig, get_peft_model

        chosen = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        built = get_peft_model(built, chosen)  # type: ignore[arg-type]
    return built


class Counting(Trainer):
    """A Trainer that records the number of labels that ranks train on."""

    counted = 0

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        if self.model.training:
            targets = inputs.get("shift_labels", inputs["labels"][:, 1:])
            number = self.accelerator.gather_for_metrics((targets != -100).sum())
            self.counted += int(number.sum())
        return super().compute_loss(model, inputs, *rest, **more)


class OfMeans(Trainer):
    """A Trainer whose loss is a mean over the positions that it receives."""

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), inputs["shift_labels"].flatten())


class WithoutPositions(Trainer):
    """A Trainer that drops the positions, so that all parts of a sequence begin at 0."""

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        inputs.pop("position_ids", None)
        return super().compute_loss(model, inputs, *rest, **more)


class OwnStep(Trainer):
    """A Trainer that overrides `training_step` without a change."""

    def training_step(self, *given: Any, **more: Any) -> Tensor:
        return super().training_step(*given, **more)


TRAINERS: dict[str, type[Trainer]] = {
    kind.__name__: kind for kind in (Counting, OfMeans, OwnStep, WithoutPositions)
}


def train(
    bench: Bench,
    *,
    folder: str,
    kind: str = "llama",
    model: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
    options: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    readers: int = 1,
    trainer: str = "Counting",
    resume: str | None = None,
    cached: bool = False,
    says: bool = True,
) -> dict[str, Any]:
    """Train five updates; return losses, norms and evaluations, the weights saved after the third,
    and the final messages. The run has one process, a mesh of these `sizes`, or a mesh with
    `options`. `given` adds arguments.
    """
    from accelerate.utils import ParallelismConfig

    torch.manual_seed(3)
    args = TrainingArguments(
        folder, use_cpu=True, max_steps=5, per_device_train_batch_size=4,
        per_device_eval_batch_size=4, gradient_accumulation_steps=2 // readers, logging_steps=1,
        report_to=[], disable_tqdm=True, eval_strategy="steps", eval_steps=3, save_steps=3,
        max_grad_norm=0.5, learning_rate=1e-2, adam_epsilon=1e-4, lr_scheduler_type="constant",
        include_num_input_tokens_seen="all",
        parallelism_config=ParallelismConfig(**sizes) if sizes else None,
        backend="mesh" if options else None, backend_options=options, **(given or {}),
    )  # fmt: skip
    own = TRAINERS[trainer](
        model_of(kind, **(model or {})), args,
        train_dataset=Sentences(24), eval_dataset=Sentences(8),
        compute_metrics=lambda seen: {"rows": len(seen.label_ids)},
    )  # fmt: skip
    try:
        own.train(resume_from_checkpoint=resume)
        evaluated = own.evaluate()
        asked = {"max_new_tokens": 5, "do_sample": False, "use_cache": cached}
        said = own.model.eval().generate(torch.arange(6)[None], **asked) if says else None
        logs = own.state.log_history
        return {
            "losses": [log["loss"] for log in logs if "loss" in log],
            "norms": [log["grad_norm"] for log in logs if "grad_norm" in log],
            "evaluated": [log["eval_loss"] for log in logs if "eval_loss" in log],
            "rows": evaluated["eval_rows"],
            "said": None if said is None else said.tolist(),
            "counted": getattr(own, "counted", None),
            "tokens": own.state.num_input_tokens_seen,
            "global batch": own.get_total_train_batch_size(args),
            "shared by": (own.get_tp_size(), own.get_cp_size(), own.get_sp_size()),
            "saved": load_file(*Path(f"{folder}/checkpoint-3").glob("*model.safetensors")),
        }
    finally:
        own.end()
