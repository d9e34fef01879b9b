"""Argument names that were removed after 4.47: mapped with a warning, or refused with
the reason.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from drivetrain.compat import TrainingArguments
from drivetrain.compat.arguments import backend
from drivetrain.compat.arguments.old_names import OLD_NAMES

# fmt: off
REMOVED = [
    "adafactor", "dispatch_batches", "evaluation_strategy", "fp16_backend", "fp16_opt_level",
    "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap", "group_by_length",
    "half_precision_backend", "include_inputs_for_metrics", "include_tokens_per_second",
    "jit_mode_eval", "logging_dir", "mp_parameters", "no_cuda", "overwrite_output_dir",
    "past_index", "per_gpu_eval_batch_size", "per_gpu_train_batch_size", "push_to_hub_model_id",
    "push_to_hub_organization", "push_to_hub_token", "ray_scope", "save_safetensors",
    "sharded_ddp", "split_batches", "torchdynamo", "tpu_metrics_debug", "tpu_num_cores",
    "use_ipex", "use_legacy_prediction_loop", "use_mps_device", "warmup_ratio",
]
# fmt: on


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENSORBOARD_LOGGING_DIR", "RAY_SCOPE"):
        monkeypatch.setenv(name, "before")  # and put back afterwards


@pytest.mark.row("C29", "Z8")
def test_every_removed_name_has_an_answer() -> None:
    assert sorted(OLD_NAMES) == REMOVED


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"evaluation_strategy": "epoch"}, {"eval_strategy": "epoch", "do_eval": True}),
        ({"no_cuda": True}, {"use_cpu": True, "dataloader_pin_memory": False}),
        ({"adafactor": True}, {"optim": "adafactor"}),
        ({"adafactor": False, "optim": "sgd"}, {"optim": "sgd"}),
        ({"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}),
        ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, {"warmup_steps": 5}),
        ({"per_gpu_train_batch_size": 3}, {"per_device_train_batch_size": 3}),
        ({"per_gpu_eval_batch_size": 3}, {"per_device_eval_batch_size": 3}),
        ({"include_inputs_for_metrics": True}, {"include_for_metrics": ["inputs"]}),
        ({"include_tokens_per_second": True}, {"include_num_input_tokens_seen": "all"}),
        ({"torchdynamo": "eager"}, {"torch_compile": True, "torch_compile_backend": "eager"}),
        ({"push_to_hub_token": "t"}, {"hub_token": "t"}),
        (
            {"push_to_hub_organization": "org", "push_to_hub_model_id": "m"},
            {"hub_model_id": "org/m"},
        ),
        ({"push_to_hub_organization": "org"}, {"hub_model_id": "org/out"}),
        ({"tpu_metrics_debug": True}, {"debug": ["tpu_metrics_debug"]}),
        ({"use_ipex": True}, {"backend": "ipex"}),
        ({"tpu_num_cores": 8}, {"backend": "xla"}),
        ({"overwrite_output_dir": True}, {"output_dir": "a/out"}),
        ({"save_safetensors": True, "past_index": -1, "jit_mode_eval": False}, {}),
        ({"half_precision_backend": "auto", "fp16_opt_level": "O1", "mp_parameters": ""}, {}),
        ({"sharded_ddp": "", "use_mps_device": False, "evaluation_strategy": None}, {}),
    ],
)
@pytest.mark.row("C29", "K38", "Z6", "Z7", "Z8", "U11", "W6", "D15")
def test_what_has_a_meaning_is_done(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    with pytest.warns(FutureWarning, match=r"removed after transformers 4\.47") as warned:
        args = TrainingArguments("a/out", **given)
    assert {name: getattr(args, name) for name in wanted} == wanted
    named = " ".join(str(warning.message) for warning in warned)
    assert all(name in named for name in given)
    assert all(warning.filename == __file__ for warning in warned)


@pytest.mark.filterwarnings("ignore:the argument:FutureWarning")
def test_entries_of_other_arguments() -> None:
    args = TrainingArguments("o", split_batches=True, dispatch_batches=False)
    assert args.accelerator_config.split_batches
    assert args.accelerator_config.dispatch_batches is False
    sharded = TrainingArguments("o", fsdp="full_shard", fsdp_min_num_params=10)
    assert backend.chosen(sharded).options["min_unit_params"] == 10
    layers = TrainingArguments("o", fsdp=True, fsdp_transformer_layer_cls_to_wrap="Block")
    assert backend.chosen(layers).options["wrap"] == ("Block",)
    TrainingArguments("o", logging_dir="logs", ray_scope="all")
    assert (os.environ["TENSORBOARD_LOGGING_DIR"], os.environ["RAY_SCOPE"]) == ("logs", "all")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sharded_ddp": "simple"}, "fairscale .*; use fsdp"),
        ({"mp_parameters": "partitions=2"}, "SageMaker"),
        ({"fp16_opt_level": "O2"}, "Apex"),
        ({"half_precision_backend": "apex"}, "Apex"),
        ({"fp16_backend": "apex"}, "Apex"),
        ({"jit_mode_eval": True}, "torch_compile"),
        ({"past_index": 2}, "Transformer-XL"),
        ({"use_legacy_prediction_loop": True}, "one evaluation loop"),
        ({"save_safetensors": False}, "never pickled"),
        ({"use_mps_device": True}, "Apple"),
    ],
)
@pytest.mark.row("X22", "Z3", "Z4", "P6", "W5", "L22", "E7", "K5", status="refused", note="removed")
def test_what_has_none_is_refused_with_the_reason(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        TrainingArguments("o", **given)


@pytest.mark.filterwarnings("ignore:the argument:FutureWarning")
def test_an_old_and_a_new_name_may_not_differ() -> None:
    with pytest.raises(ValueError, match="eval_strategy is given as 'steps'"):
        TrainingArguments("o", evaluation_strategy="epoch", eval_strategy="steps")
    TrainingArguments("o", evaluation_strategy="epoch", eval_strategy="epoch")
    with pytest.raises(ValueError, match="warmup_ratio is 2"):
        TrainingArguments("o", warmup_ratio=2)


@pytest.mark.row("C29")
def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="did you mean learning_rate"):
        TrainingArguments("o", lerning_rate=1)
    with pytest.raises(TypeError, match="did you mean evaluation_strategy"):
        TrainingArguments("o", evaluation_stratgy="no")


@pytest.mark.row("G11", "G12")
def test_the_old_profile_has_the_old_defaults() -> None:
    old = TrainingArguments("o", profile="4.47", report_to="none")
    assert (old.optim, old.average_tokens_across_devices, old.run_name) == (
        "adamw_torch",
        False,
        "o",
    )
    named = TrainingArguments(output_dir="p", profile="4.47", optim="sgd", report_to=None)
    assert (named.optim, named.run_name) == ("sgd", "p")
    assert "tensorboard" in named.report_to
    assert TrainingArguments("o").report_to == []


@dataclasses.dataclass
class OwnFields(TrainingArguments):
    """A script's own arguments, some of which have the names of former arguments."""

    overwrite_output_dir: bool = False
    logging_dir: str | None = None
    warmup_ratio: float = 0.0
    group_by_length: bool = False


def test_a_field_of_a_subclass_is_its_own(tmp_path: Path, monkeypatch: Any) -> None:
    """Require the subclass's value, even if an argument of that name was removed or renamed."""
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    given: dict[str, Any] = {
        "overwrite_output_dir": True,
        "logging_dir": "logs",
        "warmup_ratio": 0.5,
        "group_by_length": True,
    }
    with pytest.warns(FutureWarning, match="no_cuda") as warned:
        args = OwnFields(output_dir=str(tmp_path), report_to="none", no_cuda=True, **given)
    assert len(warned) == 1
    assert {name: getattr(args, name) for name in given} == given
    assert args.warmup_steps == 0 and args.train_sampling_strategy == "random"
    assert "TENSORBOARD_LOGGING_DIR" not in os.environ and args.use_cpu
