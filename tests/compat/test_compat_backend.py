"""Choice of the driver and its options from the arguments, and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate.parallelism_config import ParallelismConfig
from torch import nn

from drivetrain import Recipe
from drivetrain.compat import Trainer, TrainingArguments
from drivetrain.compat.arguments import backend
from drivetrain.compat.arguments.launcher import launched
from drivetrain.kernel.errors import CapabilityRefused, SettingError
from drivetrain.registry import find_driver


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set the environment of a launcher of two processes."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def made(**given: Any) -> TrainingArguments:
    return TrainingArguments("o", **given)


@pytest.mark.parametrize(
    ("given", "driver"),
    [
        ({"use_cpu": True}, "cpu"),
        ({"backend": "ddp"}, "ddp"),
        ({"fsdp": True}, "fsdp"),
        ({"fsdp": "full_shard auto_wrap"}, "fsdp"),
        ({"fsdp": ["full_shard"]}, "fsdp"),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, "deepspeed"),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "xla"),
        ({"backend": "fsdp", "fsdp": True}, "fsdp"),
    ],
)
@pytest.mark.row("X11", "X17")
def test_arguments_choose(given: dict[str, Any], driver: str) -> None:
    assert backend.chosen(made(**given)).driver == driver


@pytest.mark.row("A5", "X1")
def test_several_processes_are_ddp(ranks: pytest.MonkeyPatch) -> None:
    assert backend.chosen(made(use_cpu=True)).driver == "ddp"
    assert backend.chosen(made(use_cpu=True)).options["device"] == "cpu"
    assert backend.chosen(made()).driver == "ddp"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backend": "ddp", "fsdp": True}, ["backend='ddp'", "fsdp=True"]),
        ({"fsdp": True, "deepspeed": {}}, ["fsdp=True"]),
        ({"fsdp": True, "deepspeed": {"x": 1}}, ["deepspeed=a dict", "fsdp=True"]),
        ({"use_cpu": True, "backend": "ddp", "backend_options": {"device": "cuda"}}, ["'cuda'"]),
        ({"backend": "ddp", "ddp_bucket_cap_mb": 5, "backend_options": {"bucket_cap_mb": 6}}, "56"),
        ({"backend": "ddp", "backend_options": {"bucket_cap": 1}}, ["bucket_cap_mb"]),
        ({"backend": "xpu", "use_cpu": True}, ["xpu", "use_cpu"]),
        ({"backend": "xla", "fp16": True}, ["xla", "fp16"]),
        ({"backend": "ipex", "torch_compile": True}, ["ipex", "compile"]),
        ({"backend": "ddp", "ddp_backend": "mpi"}, ["mpi"]),
        ({"local_rank": 3}, ["LOCAL_RANK"]),
        ({"fsdp": "no_shard"}, ["backend='ddp'"]),
        ({"fsdp": "half_shard"}, ["half_shard", "full_shard"]),
        ({"fsdp": True, "fsdp_config": {"min_num_param": 1}}, ["min_num_params"]),
        (
            {
                "fsdp": True,
                "fsdp_config": {"min_num_params": 1, "transformer_layer_cls_to_wrap": "A"},
            },
            ["by class", "by size"],
        ),
        ({"fsdp": True, "fsdp_config": {"ignored_modules": "a"}}, ["ignored_modules"]),
        ({"fsdp": True, "fsdp_config": {"auto_wrap_policy": "X"}}, ["TRANSFORMER_BASED_WRAP"]),
        ({"fsdp": True, "fsdp_config": {"state_dict_type": "LOCAL_STATE_DICT"}}, ["FULL"]),
        (
            {
                "fsdp": True,
                "fsdp_config": {"activation_checkpointing": True},
                "gradient_checkpointing": True,
            },
            ["activation_checkpointing", "gradient_checkpointing"],
        ),
    ],
)
@pytest.mark.row("X11", "X12", "X13", "X20")
def test_contradictions_and_what_cannot_be_are_refused(given: dict[str, Any], words: Any) -> None:
    if given.get("deepspeed") == {}:
        assert backend.chosen(made(**given)).driver == "fsdp"  # an empty dict asks for nothing
        return
    with pytest.raises(ValueError, match=r".*") as caught:
        made(**given)
    assert isinstance(caught.value, SettingError | CapabilityRefused)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"fsdp": True}, {}),
        ({"fsdp": "full_shard offload"}, {"reshard_after_forward": True, "cpu_offload": True}),
        ({"fsdp": "shard_grad_op"}, {"reshard_after_forward": False}),
        ({"fsdp": "hybrid_shard"}, {"reshard_after_forward": True, "shard_size": 2}),
        ({"fsdp": "hybrid_shard_zero2"}, {"reshard_after_forward": False, "shard_size": 2}),
        (
            {"fsdp": True, "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "A, B"}},
            {"wrap": ("A", "B")},
        ),
        (
            {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["A"]}},
            {"wrap": ("A",)},
        ),
        ({"fsdp": True, "fsdp_config": {"min_num_params": 100}}, {"min_unit_params": 100}),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": "false"}}, None),
        (
            {"fsdp": True, "fsdp_config": {"version": 1, "reshard_after_forward": "shard_grad_op"}},
            {"reshard_after_forward": False},
        ),
        ({"fsdp": True, "fsdp_config": {"cpu_ram_efficient_loading": True}}, {"from_rank_0": True}),
        ({"fsdp": True, "use_cpu": True}, {"device": "cpu"}),
        ({"fsdp": True, "backend_options": {"shard_size": 1}}, {"shard_size": 1}),
    ],
)
@pytest.mark.row("X11", "X12", "X13")
def test_fsdp_in_hf_s_words(
    given: dict[str, Any], options: dict[str, Any] | None, ranks: pytest.MonkeyPatch
) -> None:
    choice = backend.chosen(made(**given))
    assert choice.options == ({"reshard_after_forward": False} if options is None else options)
    assert backend.planned(made(**given)).options is not None


@pytest.mark.row("X12", "X13")
def test_fsdp_s_activation_checkpointing_names_the_layers() -> None:
    config = {"activation_checkpointing": True}
    args = made(fsdp=True, fsdp_config=config)
    model = nn.Module()
    model._no_split_modules = ["Block"]
    assert backend.settings(args, model).activation_checkpointing == ("Block",)
    with pytest.raises(ValueError, match="transformer_layer_cls_to_wrap"):
        backend.settings(args, nn.Linear(1, 1))
    named = made(fsdp=True, fsdp_config={**config, "transformer_layer_cls_to_wrap": "Layer"})
    assert backend.settings(named, nn.Linear(1, 1)).activation_checkpointing == ("Layer",)


@pytest.mark.row("X9")
def test_ddp_arguments_are_the_driver_s_options(ranks: pytest.MonkeyPatch) -> None:
    args = made(
        backend="ddp",
        ddp_bucket_cap_mb=7,
        ddp_broadcast_buffers=False,
        ddp_static_graph=True,
        ddp_find_unused_parameters=False,
        ddp_timeout=60,
    )
    options = backend.planned(args).options
    assert (options.bucket_cap_mb, options.sync_buffers, options.static_graph) == (7, False, True)
    assert options.find_unused_parameters is False
    assert backend.planned(args).timeout_seconds == 60
    assert backend.planned(made(backend="ddp")).options.find_unused_parameters
    recomputing = made(backend="ddp", gradient_checkpointing=True)
    assert not backend.planned(recomputing).options.find_unused_parameters


@pytest.mark.row("A4", "P3")
def test_settings_follow_the_arguments(ranks: pytest.MonkeyPatch) -> None:
    args = made(
        use_cpu=True,
        bf16=True,
        max_grad_norm=0.0,
        seed=9,
        torch_compile=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
    )
    ranks.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    found = backend.settings(args)
    assert (found.precision, found.max_grad_norm, found.seed, found.compile) == (
        "bf16",
        None,
        9,
        True,
    )
    assert (found.global_batch, found.micro_batch) == (24, 4)
    assert backend.settings(made(use_cpu=True)).precision == "fp16"
    ranks.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    emulated = {"use_cpu": True, "backend_options": {"float8_emulated": True}}
    assert backend.settings(made(**emulated)).precision == "float8"
    assert backend.settings(made(**emulated, bf16=True)).precision == "bf16"
    split = made(use_cpu=True, bf16=True, accelerator_config={"split_batches": True})
    assert (backend.settings(split).micro_batch, backend.settings(split).global_batch) == (4, 8)


@pytest.mark.row("A1", "A3", "A6")
def test_accelerate_launch_says_it_by_the_environment(ranks: pytest.MonkeyPatch) -> None:
    ranks.setenv("ACCELERATE_USE_FSDP", "true")
    ranks.setenv("FSDP_SHARDING_STRATEGY", "1")
    ranks.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Block")
    ranks.setenv("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
    ranks.setenv("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    ranks.setenv("FSDP_MIN_NUM_PARAMS", "0")
    ranks.setenv("FSDP_OFFLOAD_PARAMS", "true")
    choice = backend.chosen(made())
    assert choice.driver == "fsdp" and "from the launcher" in choice.why
    assert choice.options == {
        "reshard_after_forward": True,
        "cpu_offload": True,
        "wrap": ("Block",),
    }
    with pytest.raises(ValueError, match=r"deepspeed=a dict asks for .* \(from the launcher\)"):
        made(deepspeed={"zero_optimization": {"stage": 2}})


@pytest.mark.row("A1", "A6", "X23")
def test_deepspeed_by_the_environment(ranks: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    ranks.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    ranks.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
    ranks.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
    args = made()
    zero = backend.chosen(args).options["config"]["zero_optimization"]
    assert zero == {"stage": 3, "offload_param": {"device": "cpu"}}
    assert args.deepspeed_plugin.zero_stage == 3
    assert args.hf_deepspeed_config.is_zero3() and args.hf_deepspeed_config.is_offload()
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    ranks.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    assert made().deepspeed_plugin.zero_stage == 1
    ranks.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    ranks.delenv("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    with pytest.raises(ValueError, match="gradient_accumulation_steps is 4"):
        made()


@pytest.mark.row("A1", "X25")
def test_the_launcher_s_sizes_choose_the_mesh(ranks: pytest.MonkeyPatch) -> None:
    ranks.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    ranks.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    ranks.setenv("PARALLELISM_CONFIG_CP_BACKEND", "torch")
    assert backend.chosen(made()).driver == "mesh"
    assert backend.chosen(made()).options["context"] == 2
    assert backend.ranks_of_a_reader(made()) == 2
    assert backend.settings(made(per_device_train_batch_size=4)).global_batch == 4


def test_two_names_for_ranks_of_a_sequence_are_one_too_many(ranks: pytest.MonkeyPatch) -> None:
    both = SimpleNamespace(cp_size=2, sp_size=2)
    with pytest.raises(ValueError, match="two names"):
        made(parallelism_config=both)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("cp_handler", "cp_comm_strategy", "alltoall"),
        ("sp_handler", "sp_attn_implementation", "flash_attention_2"),
    ],
)
def test_another_library_s_way_is_said_to_have_no_effect(
    name: str, field: str, value: str, ranks: pytest.MonkeyPatch
) -> None:
    handler = SimpleNamespace(**{field: value})
    config = SimpleNamespace(cp_size=2, **{name: handler})
    (note,) = backend.notes(made(parallelism_config=config), "mesh")
    assert note.startswith(f"parallelism_config.{name}.{field}='{value}' has no effect on mesh")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron"),
        (
            {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "two"},
            "parallelism_config has a size that is no number",
        ),
        ({"ACCELERATE_MIXED_PRECISION": "fp4"}, "fp4"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "te"}, "fp8 by te"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_USE_DYNAMIC": "True"}, "dyn"),
        ({"ACCELERATE_USE_CPU": "perhaps"}, "true or false"),
    ],
)
@pytest.mark.row("A1")
def test_what_the_launcher_cannot_have_is_refused(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        made()


@pytest.mark.row("A1", "W3")
def test_the_launcher_s_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not backend.settings(made(use_cpu=True)).compile
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")
    args = made()
    assert backend.settings(args).compile and backend.chosen(args).driver == "cpu"


@pytest.mark.row("X17", "X18", "O28")
def test_deepspeed_s_auto_is_filled_in_and_contradictions_are_named() -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
    }
    args = made(deepspeed=config, per_device_train_batch_size=2, learning_rate=1e-3)
    filled = backend.chosen(args).options["config"]
    assert filled["train_micro_batch_size_per_gpu"] == filled["train_batch_size"] == 2
    assert filled["optimizer"]["params"]["lr"] == 1e-3
    assert filled["optimizer"]["params"]["betas"] == [0.9, 0.999]
    assert filled["zero_optimization"]["reduce_bucket_size"] == "auto"
    assert config["train_batch_size"] == "auto"  # the user's own is left alone
    assert args.hf_deepspeed_config.dtype() == torch.float32
    assert (
        made(deepspeed=config, bf16=True, use_cpu=True).deepspeed_plugin.dtype() == torch.bfloat16
    )
    with pytest.raises(
        ValueError, match=r"train_batch_size is 9.*optimizer.params.lr is 1.*"
    ) as reported:
        made(
            deepspeed={
                "train_batch_size": 9,
                "optimizer": {"type": "AdamW", "params": {"lr": 1}},
                "fp16": {"enabled": True},
            }
        )
    assert "fp16.enabled is True and fp16 is False" in str(reported.value)


def test_what_makes_no_difference_is_said(ranks: pytest.MonkeyPatch) -> None:
    config = {"use_orig_params": False, "limit_all_gathers": True}
    args = made(fsdp=True, fsdp_config=config, ddp_static_graph=True, debug="tpu_metrics_debug")
    reported = list(backend.notes(args, "fsdp"))
    assert len(reported) == 3
    assert any("use_orig_params" in line and "always kept" in line for line in reported)
    assert not list(backend.notes(made(use_cpu=True), "cpu"))


def test_arguments_of_transformers_choose_by_the_same_rules() -> None:
    args = transformers.TrainingArguments("o", use_cpu=True, bf16=True, max_grad_norm=0.5)
    assert backend.chosen(args).driver == "cpu"
    plan = backend.planned(args)
    assert (plan.precision.name, plan.max_grad_norm) == ("bf16", 0.5)
    sharded = transformers.TrainingArguments("o", use_cpu=True, fsdp=True)
    assert backend.chosen(sharded).driver == "fsdp"


def test_the_launcher_must_give_numbers() -> None:
    with pytest.raises(ValueError, match="WORLD_SIZE is 'two'"):
        launched({"WORLD_SIZE": "two"})


def test_a_driver_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_BACKEND", "fsdp")
    assert backend.chosen(made()).driver == "fsdp"
    monkeypatch.setenv("DRIVETRAIN_BACKEND", "fsdpp")
    with pytest.raises(Exception, match="Did you mean 'fsdp'"):
        made()


@pytest.mark.row("W3")
def test_the_compiler_and_its_mode_reach_the_driver() -> None:
    args = made(use_cpu=True, torch_compile_backend="eager", torch_compile_mode="default")
    plan = backend.planned(args)
    assert plan.compile
    assert plan.compile_options == {"backend": "eager", "mode": "default"}
    calls = []

    def counting(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph.forward

    plan = backend.planned(made(use_cpu=True, torch_compile=True))
    plan = dataclasses.replace(plan, compile_options={"backend": counting})
    recipe = Recipe(
        model=lambda: nn.Linear(2, 1),
        loss=lambda module, batch: module(batch).sum(),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    with find_driver("cpu").open(plan) as session:
        session.prepare(recipe).module(torch.ones(1, 2))
    assert len(calls) == 1


@pytest.mark.row(
    "X25",
    status="refused",
    note="the driver mesh partitions layers, sequences and experts, and no other does",
)
@pytest.mark.parametrize(
    ("sizes", "given", "words"),
    [
        ({"tp_size": 2}, {"backend": "cpu"}, "asks for 'mesh'"),
        ({"tp_size": 2}, {"backend": "mesh", "fsdp": "hybrid_shard"}, "dp_replicate_size"),
        ({"tp_size": 4}, {}, "asks for tp_size=4 processes, and there are 2"),
        ({"cp_size": 2, "dp_shard_size": 2}, {}, "dp_shard_size=2 times cp_size=2 processes"),
        ({"cp_size": 2}, {"backend": "ddp"}, "parallelism_config asks for 'mesh'"),
        ({"sp_size": 2}, {"deepspeed": {"x": 1}}, "parallelism_config asks for 'mesh'"),
        ({"dp_shard_size": 2}, {"backend": "ddp"}, "set fsdp=True"),
        ({"dp_shard_size": 4}, {"fsdp": True}, "dp_shard_size=4 processes, and there are 2"),
        ({"dp_replicate_size": 2}, {"fsdp": True}, "backend='ddp'"),
    ],
)
def test_other_parallelism_is_refused(
    sizes: dict[str, int], given: dict[str, Any], words: str, ranks: pytest.MonkeyPatch
) -> None:
    config = ParallelismConfig(**sizes)
    with pytest.raises(ValueError, match=words):
        made(parallelism_config=config, **given)


@pytest.mark.row("X25")
def test_parallelism_over_data(ranks: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sharded = made(fsdp=True, parallelism_config=ParallelismConfig(dp_shard_size=2))
    assert backend.chosen(sharded).options["shard_size"] == 2
    layers = made(parallelism_config=ParallelismConfig(tp_size=2))
    assert backend.chosen(layers).driver == "mesh"
    sizes = {"replicate": 1, "shard": 1, "context": 1, "tensor": 2}
    assert backend.chosen(layers).options == sizes
    for name in ("cp_size", "sp_size"):
        parts = made(fsdp=True, parallelism_config=ParallelismConfig(**{name: 2}))
        assert backend.chosen(parts).driver == "mesh"
        assert backend.chosen(parts).options.items() >= {"context": 2, "tensor": 1}.items()
    copied = ParallelismConfig(dp_replicate_size=2)
    assert backend.chosen(made(use_cpu=True, parallelism_config=copied)).driver == "ddp"
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        ranks.delenv(name)
    alone = ParallelismConfig()
    args = TrainingArguments(str(tmp_path), use_cpu=True, parallelism_config=alone)
    trainer = Trainer(nn.Linear(1, 1), args)
    assert trainer.accelerator.parallelism_config is alone
    assert trainer.get_tp_size() == trainer.get_cp_size() == trainer.get_sp_size() == 1
    assert trainer.driver_session.world.size == 1
    ranks.delattr(backend, "chosen")
    assert trainer.get_tp_size() == 1, "the session knows"


@pytest.mark.row(
    "X27",
    status="differs",
    note="the driver accelerator takes them; if torch knows too little of one, the CPU is used",
)
@pytest.mark.parametrize("device", ["mps", "privateuseone", "hpu"])
def test_a_device_without_a_driver_is_said(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = torch.device(device)
    args = TrainingArguments(str(tmp_path))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    Trainer(nn.Linear(1, 1), args)
    assert f"does not compute on {found.type}: training on the CPU" in caplog.text
    caplog.clear()
    Trainer(nn.Linear(1, 1), TrainingArguments(str(tmp_path), use_cpu=True))
    assert "does not compute" not in caplog.text


@pytest.mark.row("X27", status="refused", note="use_mps_device by name")
def test_apple_s_gpu_asked_for_by_name() -> None:
    with pytest.raises(TypeError, match="use_cpu=True"):
        made(use_mps_device=True)


@pytest.mark.row("Z9", status="refused", note="optimum-neuron trains on it")
def test_neuron_has_a_trainer_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_neuronx.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="optimum-neuron"):
        made()
    assert backend.chosen(made(use_cpu=True)).driver == "cpu"
    assert backend.chosen(made(backend="ddp")).driver == "ddp"


@pytest.mark.row("Z1", "Z2", status="refused", note="ask SageMaker for torch_distributed")
@pytest.mark.parametrize(
    ("variable", "asked"),
    [
        ("SM_FRAMEWORK_PARAMS", {"sagemaker_distributed_dataparallel_enabled": True}),
        ("SM_HP_MP_PARAMETERS", {"partitions": 2}),
    ],
)
def test_sagemaker_s_own_parallelism(
    variable: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, json.dumps(asked))
    with pytest.raises(ValueError, match="torch_distributed"):
        made()
    monkeypatch.setenv(variable, json.dumps(dict.fromkeys(asked, 0)))
    assert backend.chosen(made(use_cpu=True)).driver == "cpu"
