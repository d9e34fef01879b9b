"""Files of `accelerate config`, written by accelerate itself and read as arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig

from drivetrain.compat import TrainingArguments
from drivetrain.compat.accelerate.config_file import from_accelerate_config
from drivetrain.compat.arguments import backend

BASE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "NO",
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 1,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}


def written(folder: Path, **keys: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**BASE, **keys}))
    return path


@pytest.mark.row("A1", "A2")
def test_what_accelerate_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="NO",
        mixed_precision="bf16",
        use_cpu=True,
        debug=False,
        num_processes=1,
    ).to_yaml_file(str(path))
    found = from_accelerate_config(path)
    assert found == {"use_cpu": True, "bf16": True}
    args = TrainingArguments("o", **found)
    assert backend.planned(args).precision.name == "bf16"


@pytest.mark.parametrize(
    ("keys", "driver", "options"),
    [
        ({"distributed_type": "MULTI_CPU"}, "ddp", {"device": "cpu"}),
        (
            {
                "distributed_type": "MULTI_GPU",
                "parallelism_config": {
                    "parallelism_config_dp_shard_size": 1,
                    "parallelism_config_cp_size": 2,
                    "parallelism_config_cp_comm_strategy": "alltoall",
                },
            },
            "mesh",
            {"context": 2, "shard": 1},
        ),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": {
                    "fsdp_version": 2,
                    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                    "fsdp_transformer_layer_cls_to_wrap": "Block",
                    "fsdp_reshard_after_forward": True,
                    "fsdp_offload_params": False,
                    "fsdp_state_dict_type": "FULL_STATE_DICT",
                    "fsdp_cpu_ram_efficient_loading": True,
                    "fsdp_activation_checkpointing": False,
                },
            },
            "fsdp",
            {"reshard_after_forward": True, "wrap": ("Block",), "from_rank_0": True},
        ),
        (
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {
                    "zero_stage": 3,
                    "offload_optimizer_device": "none",
                    "offload_param_device": "cpu",
                    "gradient_accumulation_steps": 1,
                    "gradient_clipping": 1.0,
                    "zero3_init_flag": True,
                    "zero3_save_16bit_model": True,
                },
            },
            "deepspeed",
            {
                "config": {
                    "zero_optimization": {
                        "stage": 3,
                        "offload_param": {"device": "cpu"},
                        "stage3_gather_16bit_weights_on_model_save": True,
                    },
                    "gradient_accumulation_steps": 1,
                    "gradient_clipping": 1.0,
                },
            },
        ),
    ],
)
@pytest.mark.row("A1", "A6")
def test_each_kind_chooses_its_driver(
    keys: dict[str, Any],
    driver: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    path = written(tmp_path, num_processes=2, **keys)
    choice = backend.chosen(TrainingArguments("o", **from_accelerate_config(path)))
    assert choice.driver == driver
    assert options.items() <= choice.options.items()


@pytest.mark.row("A1", "P3")
def test_fp8_is_torchao_s(tmp_path: Path) -> None:
    config = {"backend": "AO", "enable_fsdp_float8_all_gather": True, "pad_inner_dim": True}
    path = written(tmp_path, mixed_precision="fp8", fp8_config=config, use_cpu=True)
    found = from_accelerate_config(path)
    with pytest.raises(ValueError, match=r"float8.*backend\.float8_emulated=true"):
        TrainingArguments("o", **found)
    args = TrainingArguments("o", **found, backend_options={"float8_emulated": True})
    assert args.mixed_precision == "fp8"
    assert backend.planned(args).precision.name == "float8"


def test_compilation_and_a_configuration_elsewhere(tmp_path: Path) -> None:
    dynamo = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": False}
    found = from_accelerate_config(written(tmp_path, dynamo_config=dynamo))
    assert found["torch_compile_backend"] == "inductor" and found["torch_compile_mode"] is None
    keys = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": "d.json"},
    }
    assert from_accelerate_config(written(tmp_path, **keys)) == {"deepspeed": "d.json"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_processes": 4}, "torchrun --nproc-per-node=4"),
        ({"num_processes": 8, "num_machines": 2}, "--nproc-per-node=4 --nnodes=2"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "LOCAL_MACHINE"),
        ({"parallelism_config": {"parallelism_config_cp": 2}}, "unknown key 'cp'"),
        ({"distributed_type": "MEGATRON_LM"}, "DEEPSPEED"),
        ({"megatron_lm_config": {"tp": 2}}, "megatron_lm_config"),
        ({"mixed_precision": "fp4"}, "fp4"),
        ({"mixed_precision": "fp8", "fp8_config": {"backend": "TE"}}, "fp8 by TE"),
        ({"mixed_precision": "fp8", "fp8_config": {"margin": 1}}, "unknown key 'margin'"),
        ({"num_procesess": 1}, "did you mean 'num_processes'"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stagee": 1}}, "zero_stage"),
        ({"tpu_env": ["A=1"]}, "tpu_env"),
    ],
)
@pytest.mark.row("A1", "Z1", status="refused", note="SageMaker and Megatron are not driven")
def test_what_is_not_driven_is_refused_by_key(
    keys: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        from_accelerate_config(written(tmp_path, **keys))
