"""Models whose weights have other names in files than in the model: separate experts, and earlier
layouts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from side_by_side import QUIET
from torch import Tensor, nn

from drivetrain import compat
from drivetrain.compat.checkpoints.key_conversion import converted_weights
from drivetrain.kernel.errors import CheckpointMismatch

SIZES: dict[str, int] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}


def qwen() -> Any:
    torch.manual_seed(0)
    more = {"moe_intermediate_size": 16, "num_experts": 12, "num_experts_per_tok": 2, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **more))


def mixtral() -> Any:
    torch.manual_seed(0)
    more = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **more))


def llava() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(
        **sizes, num_hidden_layers=1, image_size=8, patch_size=4, projection_dim=8
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**SIZES), image_token_index=31
    )
    return transformers.LlavaForConditionalGeneration(config)


def data() -> list[dict[str, Tensor]]:
    dice = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, 30, (6,), generator=dice) for _ in range(12)]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def trainer(library: Any, model: nn.Module, folder: Path, **changes: Any) -> Any:
    asked = {
        **QUIET,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        **changes,
    }
    given = {"train_dataset": data(), "eval_dataset": data()[:4]}
    scores = iter((3.0, 2.0, 1.0))
    if "load_best_model_at_end" in changes:
        given["compute_metrics"] = lambda _: {"score": next(scores)}
    args = library.TrainingArguments(output_dir=str(folder), **asked)
    return library.Trainer(model=model, args=args, **given)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.row("K28", "K11")
@pytest.mark.parametrize("make", [qwen, mixtral, llava])
def test_the_best_model_is_loaded_by_the_model_s_own_names(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    best = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "greater_is_better": True,
    }
    trained = trainer(compat, make(), tmp_path, **best)
    trained.train()
    folder = tmp_path / "checkpoint-1"
    assert trained.state.best_model_checkpoint == str(folder)
    file = load_file(folder / "model.safetensors")
    assert file.keys() - trained.model.state_dict().keys()
    wanted = type(trained.model).from_pretrained(folder)
    assert_equal(weights(trained.model), weights(wanted))
    converted = converted_weights(trained.model, file, trained.model.state_dict().keys())
    assert_equal({**weights(wanted), **converted}, weights(wanted))
    assert not converted.keys() - wanted.state_dict().keys()


@pytest.mark.row("K11", "K2", "K4")
@pytest.mark.parametrize(
    ("writer", "changes"),
    [
        (transformers, {}),
        (compat, {"save_only_model": True}),
        (compat, {"checkpoint_format": "hf"}),
    ],
    ids=["theirs", "only-model", "hf"],
)
def test_such_files_are_resumed_from(writer: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    """Resume without momentum, so that the result depends on the weights alone."""
    whole = trainer(writer, qwen(), tmp_path, **changes)
    whole.train()
    resumed = trainer(compat, qwen(), tmp_path / "again", save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    wanted = weights(whole.model)
    for name, found in weights(resumed.model).items():
        torch.testing.assert_close(found, wanted[name], rtol=0, atol=1e-6)


class AtBegin(compat.TrainerCallback):
    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.weights = weights(model)


@pytest.mark.row("K11")
def test_such_a_file_that_was_edited_counts_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(compat, qwen(), tmp_path).train()
    folder, again = tmp_path / "checkpoint-1", {"save_strategy": "no", "max_steps": 2}
    began = AtBegin()
    resumed = trainer(compat, qwen(), tmp_path, **again)
    resumed.add_callback(began)
    resumed.train(resume_from_checkpoint=str(folder))
    assert "were changed after" not in caplog.text
    file = folder / "model.safetensors"
    halved = {n: w / 2 if "experts.10.gate" in n else w for n, w in load_file(file).items()}
    save_file(halved, file, {"format": "pt"})
    resumed = trainer(compat, qwen(), tmp_path, **again)
    resumed.add_callback(began)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=str(folder))
    assert "were changed after the checkpoint was saved" in caplog.text
    edited = type(resumed.model).from_pretrained(folder)
    assert_equal(began.weights, weights(edited))
    save_file({f"x.{name}": each for name, each in halved.items()}, file, {"format": "pt"})
    trainer(compat, qwen(), tmp_path, **again).train(resume_from_checkpoint=str(folder))
    assert "which the checkpoint has not" in caplog.text


class Half(nn.Module):
    """A model of two layers; `extra` is the name of the second."""

    def __init__(self, extra: str, frozen: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.add_module(extra, nn.Linear(2, 1).requires_grad_(not frozen))


@pytest.mark.row(
    "K20", status="differs", note="a weight that finds no match is an error, a frozen one a warning"
)
def test_a_weight_without_a_match_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def of(model: nn.Module) -> Any:
        args = compat.TrainingArguments(output_dir=str(tmp_path), **QUIET)
        return compat.Trainer(model=model, args=args)

    of(Half("mine")).save_model(str(tmp_path / "saved"))
    with pytest.raises(CheckpointMismatch, match=r"lacks 'yours.*has 'mine\.bias', 'mine\.weight'"):
        of(Half("yours"))._load_from_checkpoint(str(tmp_path / "saved"))
    save_file(
        {"inner.weight": torch.ones(2, 2), "inner.bias": torch.ones(2)},
        tmp_path / "saved/model.safetensors",
    )
    frozen = of(Half("yours", frozen=True))
    with caplog.at_level(logging.WARNING):
        frozen._load_from_checkpoint(str(tmp_path / "saved"))
    assert "missing keys in the checkpoint model loaded: ['yours.weight', 'yours" in caplog.text
    assert frozen.model.inner.bias.tolist() == [1, 1]
