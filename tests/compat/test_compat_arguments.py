"""TrainingArguments: names, defaults, checks and setters, compared with transformers' own."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, PartialState

import drivetrain.compat
from drivetrain.compat import Seq2SeqTrainingArguments, TrainingArguments
from drivetrain.compat.arguments import AcceleratorConfig, backend

OURS = ["backend", "backend_options", "profile", "stall_seconds", "checkpoint_format", "fp8"]
OURS += ["time_parts", "resume_hyper_parameters", "stats_steps", "memory_parts", "find_nonfinite"]
OURS += ["stats_activations", "run_records", "replay_step", "find_synchronisations"]
OURS += ["preemption_notice"]
PAIRS = [
    (TrainingArguments, transformers.TrainingArguments),
    (Seq2SeqTrainingArguments, transformers.Seq2SeqTrainingArguments),
]


def plain(value: Any) -> Any:
    return getattr(value, "value", value)


@pytest.mark.row("C28")
def test_names_order_and_defaults_are_those_of_transformers() -> None:
    for ours, theirs in PAIRS:
        wanted = {item.name: item for item in dataclasses.fields(theirs)}
        found = {item.name: item for item in dataclasses.fields(ours)}
        assert [name for name in found if name not in OURS] == list(wanted)
        for name, item in wanted.items():
            assert found[name].default == item.default, name
            assert found[name].default_factory == item.default_factory, name
        positional = list(inspect.signature(ours).parameters)
        assert positional[: len(dataclasses.fields(transformers.TrainingArguments))] == [
            item.name for item in dataclasses.fields(transformers.TrainingArguments)
        ]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"eval_strategy": "steps", "logging_steps": 7},
        {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True},
        {"metric_for_best_model": "f1", "warmup_steps": 0.1, "include_num_input_tokens_seen": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"torch_compile_backend": "eager", "optim": "sgd", "lr_scheduler_type": "cosine"},
        {"use_cpu": True, "bf16": True, "debug": "underflow_overflow", "save_steps": 40.0},
        {"lr_scheduler_kwargs": '{"num_cycles": "2", "deep": {"flag": "true", "part": "0.5"}}'},
        {"report_to": ["tensorboard"], "hub_token": "secret", "accelerator_config": {}},
        {"push_to_hub": True, "hub_strategy": "end", "group": None, "label_names": ["a"]},
    ],
)
@pytest.mark.row("C28", "C33", "C34", "C35")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_settled_values_are_those_of_transformers(given: dict[str, Any], tmp_path: Path) -> None:
    given = {key: value for key, value in given.items() if key != "group"}
    ours = TrainingArguments(str(tmp_path), **copy.deepcopy(given)).to_dict()
    theirs = transformers.TrainingArguments(str(tmp_path), **copy.deepcopy(given)).to_dict()
    theirs["accelerator_config"].setdefault("use_configured_state", False)
    assert {name: value for name, value in ours.items() if name not in OURS} == theirs
    assert json.loads(json.dumps(ours)) == ours
    assert TrainingArguments(**ours).to_dict() == ours


@pytest.mark.row("C35")
def test_tokens_are_masked_wherever_arguments_are_written() -> None:
    args = TrainingArguments("out", hub_token="secret", push_to_hub=False)
    sanitized = args.to_sanitized_dict()
    for text in (args.to_json_string(), str(args), repr(args), str(sanitized)):
        assert "<HUB_TOKEN>" in text and "secret" not in text
    assert sanitized["train_batch_size"] == 8
    assert all(isinstance(v, (bool, int, float, str, torch.Tensor)) for v in sanitized.values())
    assert args.hub_token == "secret"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fp16": True, "bf16": True, "use_cpu": True}, "fp16 and bf16"),
        ({"fp16_full_eval": True, "bf16_full_eval": True, "use_cpu": True}, "full_eval"),
        ({"load_best_model_at_end": True}, "eval_strategy"),
        (
            {
                "load_best_model_at_end": True,
                "eval_strategy": "steps",
                "eval_steps": 2,
                "save_steps": 3,
            },
            "multiple",
        ),
        (
            {
                "load_best_model_at_end": True,
                "eval_strategy": "steps",
                "eval_steps": 0.1,
                "save_steps": 3,
            },
            "shares",
        ),
        ({"logging_steps": 0}, "logging_steps"),
        ({"logging_steps": 2.5}, "integer"),
        ({"save_steps": 2.5}, "integer"),
        ({"eval_strategy": "steps", "eval_steps": 2.5}, "integer"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"dataloader_prefetch_factor": 2}, "dataloader_num_workers"),
        ({"optim": "adamw_torhc"}, "adamw_torch"),
        ({"lr_scheduler_type": "lineer"}, "linear"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "eval_strategy"),
        ({"lr_scheduler_type": "greedy"}, "eval_strategy"),
        ({"torch_empty_cache_steps": 0}, "torch_empty_cache_steps"),
        ({"tf32": True}, "tf32"),
    ],
)
@pytest.mark.row("C30", "C31", "C32", "P2", "P5")
def test_what_transformers_refuses_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        transformers.TrainingArguments("out", **given)
    with pytest.raises(ValueError, match=words):
        TrainingArguments("out", **given)


@pytest.mark.parametrize(
    "given",
    [
        {"load_best_model_at_end": True, "save_strategy": "best", "eval_strategy": "epoch"},
        {
            "load_best_model_at_end": True,
            "eval_strategy": "steps",
            "eval_steps": 0.1,
            "save_steps": 0.3,
        },
        {"tf32": False},
    ],
)
@pytest.mark.row("C31")
def test_what_transformers_accepts_is_accepted(given: dict[str, Any]) -> None:
    transformers.TrainingArguments("out", **given)
    TrainingArguments("out", **given)


@pytest.mark.row("P2")
def test_bfloat16_on_a_host_without_a_gpu_must_be_meant() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(ValueError, match="use_cpu"):
        TrainingArguments("out", bf16=True)
    for meant in ({"use_cpu": True}, {"backend": "cpu"}, {"profile": "4.47", "report_to": "none"}):
        assert TrainingArguments("out", bf16=True, **meant).mixed_precision == "bf16"


@pytest.mark.row("C36")
def test_setters_change_what_those_of_transformers_change() -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("set_training", {"learning_rate": 1e-4, "batch_size": 4, "max_steps": 9, "seed": 1}),
        ("set_evaluate", {"strategy": "steps", "steps": 5, "batch_size": 3, "delay": 2}),
        ("set_testing", {"batch_size": 2, "loss_only": True}),
        ("set_save", {"strategy": "epoch", "total_limit": 3}),
        ("set_logging", {"steps": 10, "level": "info"}),
        ("set_push_to_hub", {"model_id": "me/x", "strategy": "end", "revision": "b"}),
        ("set_optimizer", {"name": "sgd", "beta1": 0.8, "args": "momentum=0.1"}),
        ("set_lr_scheduler", {"name": "cosine", "warmup_steps": 0.05}),
        ("set_dataloader", {"train_batch_size": 16, "num_workers": 2, "sampler_seed": 3}),
    ]
    ours, theirs = TrainingArguments("out"), transformers.TrainingArguments("out")
    for method, given in calls:
        assert getattr(ours, method)(**given) is ours
        getattr(theirs, method)(**given)
    for item in dataclasses.fields(theirs):
        if item.name != "accelerator_config":
            mine, wanted = getattr(ours, item.name), getattr(theirs, item.name)
            assert plain(mine) == plain(wanted), item.name
    with pytest.raises(ValueError, match="saving by steps"):
        ours.set_save(steps=0)


@pytest.mark.row("C28")
def test_a_command_line_is_read(tmp_path: Path) -> None:
    parser = transformers.HfArgumentParser(TrainingArguments)
    line = "--output_dir o --learning_rate 1e-3 --bf16 --use_cpu --no_remove_unused_columns"
    line += " --optim sgd --label_names a b --backend cpu --profile 5.23"
    (args,) = parser.parse_args_into_dataclasses(
        [*line.split(), "--backend_options", '{"threads": 1}', "--eval_steps", "3"]
    )
    assert (args.learning_rate, args.bf16, args.remove_unused_columns) == (1e-3, True, False)
    assert (args.label_names, args.backend, args.optim) == (["a", "b"], "cpu", "sgd")
    assert args.backend_options == {"threads": 1}
    assert args.eval_steps == 3.0


REFUSED_LATER = ["adamw_hf", "adamw_apex_fused"]
"""Removed optimizers that a command line may name. They are refused, and the message names a
replacement.
"""
NOT_IN_A_LINE = "parallelism_config"
"""An object, which no word of a command line can give: both parsers end with an error."""


@pytest.mark.row("C28")
@pytest.mark.parametrize("pair", PAIRS, ids=["plain", "seq2seq"])
def test_a_command_line_is_parsed_as_theirs(pair: tuple[type, type]) -> None:
    """Compare every option: its spelling, the number and type of its values, and its default."""

    def options(arguments: type) -> dict[tuple[str, ...], list[Any]]:
        return {
            tuple(action.option_strings): [
                type(action),
                action.dest,
                getattr(action.type, "__name__", action.type),
                action.nargs,
                action.const,
                None if action.choices is None else [*action.choices],
                plain(action.default),
                action.required,
            ]
            for action in transformers.HfArgumentParser(arguments)._actions
            if action.dest != NOT_IN_A_LINE
        }

    ours, theirs = options(pair[0]), options(pair[1])
    added = [name for name in ours if name not in theirs]
    assert {ours[name][1] for name in added} == set(OURS)
    for name, wanted in theirs.items():
        if "--optim" in name:
            wanted[5] += REFUSED_LATER
        assert ours[name] == wanted, name


@pytest.mark.row("C28", "X11")
def test_an_option_without_a_value_is_true() -> None:
    line = ["--output_dir", "o", "--gradient_checkpointing", "--fsdp", "--use_cpu"]
    (args,) = transformers.HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line)
    assert args.gradient_checkpointing is True and args.activation_checkpointing is True
    assert args.fsdp is True and args.backend is None
    for word, driver in (("false", "cpu"), ("True", "fsdp")):
        line = ["--output_dir", "o", "--fsdp", word, "--use_cpu"]
        (args,) = transformers.HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line)
        assert backend.chosen(args).driver == driver


@pytest.mark.row("C28")
@pytest.mark.parametrize("given", ["--log_level loud", "--parallelism_config 2", "--fsdp_config"])
def test_a_wrong_command_line_ends_the_program(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in PAIRS[0]:
        with pytest.raises(SystemExit):
            transformers.HfArgumentParser(arguments).parse_args_into_dataclasses(given.split())
        assert given.split(maxsplit=1)[0] in capsys.readouterr().err


@pytest.mark.row("C28")
def test_subclasses_are_dataclasses_too() -> None:
    @dataclasses.dataclass
    class Mine(TrainingArguments):
        _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "extra"]
        extra: dict[str, Any] | str | None = None
        learning_rate: float = 2e-5

    args = Mine("out", extra='{"a": "1"}')
    assert (args.extra, args.learning_rate, args.seed) == ({"a": 1}, 2e-5, 42)
    assert dataclasses.replace(args, seed=3).seed == 3
    with pytest.raises(TypeError, match="did you mean extra"):
        Mine("out", extre=1)


@pytest.mark.row("D21")
def test_accelerator_config_in_all_its_forms(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"split_batches": true}')
    for given in ({"split_batches": True}, str(path), AcceleratorConfig(split_batches=True)):
        assert TrainingArguments("o", accelerator_config=given).accelerator_config.split_batches
    with pytest.raises(NotImplementedError, match="class AcceleratorConfig"):
        TrainingArguments("o", accelerator_config=AcceleratorConfig)
    with pytest.raises(ValueError, match="did you mean 'split_batches'"):
        TrainingArguments("o", accelerator_config={"split_batch": True})


@pytest.mark.parametrize("library", [transformers, drivetrain.compat])
def test_accelerate_s_loggers_can_be_used_with_arguments(library: Any, tmp_path: Path) -> None:
    """Log before there is a Trainer, as Trainers of other libraries do."""
    from accelerate.logging import get_logger

    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(RuntimeError, match="initialize the accelerate state"):
        get_logger("there").info("nothing")
    library.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    get_logger("there").info("something")
    assert PartialState._shared_state["num_processes"] == 1


def test_a_local_rank_alone_is_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set LOCAL_RANK alone, which DeepSpeed needs in a single process. accelerate would wait for a
    group.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert drivetrain.compat.TrainingArguments("o", use_cpu=True).world_size == 1
    assert not PartialState().use_distributed
    assert os.environ["LOCAL_RANK"] == "0" and not {"RANK", "WORLD_SIZE"} & {*os.environ}


@pytest.mark.parametrize("library", [transformers, drivetrain.compat])
def test_the_state_of_earlier_arguments_is_one_that_was_configured(library: Any) -> None:
    """Read accelerate's state after arguments were made, as sentence-transformers does."""
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        library.TrainingArguments("o", use_cpu=True).device  # noqa: B018
        config = {"use_configured_state": True}
        later = library.TrainingArguments("o", use_cpu=True, accelerator_config=config)
        assert later.device.type == "cpu"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow  # another process imports transformers
def test_without_a_state_none_can_be_used() -> None:
    """Run in a new process, where no arguments were made before."""
    program = """
from drivetrain.compat import TrainingArguments
config = {"use_configured_state": True}
try:
    TrainingArguments("o", use_cpu=True, accelerator_config=config)
except ValueError as error:
    assert "there is no state yet" in str(error), error
else:
    raise SystemExit("not refused")
import accelerate
accelerate.PartialState(cpu=True)
TrainingArguments("o", use_cpu=True, accelerator_config=config)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.row("G11")
@pytest.mark.parametrize("asked", ["none", "tensorboard", ["kubeflow"]])
def test_in_kubeflow_progress_is_reported(monkeypatch: pytest.MonkeyPatch, asked: Any) -> None:
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://localhost")
    for refused in ("false", "true"):
        monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", refused)
        ours, theirs = (
            library.TrainingArguments("o", use_cpu=True, report_to=asked).report_to
            for library in (drivetrain.compat, transformers)
        )
        assert ours == theirs


@pytest.mark.row("O21")
def test_warm_up_is_a_number_of_steps_or_a_share() -> None:
    for given in (0, 3, 0.25, 7.0):
        ours = TrainingArguments("o", warmup_steps=given).get_warmup_steps(10)
        theirs = transformers.TrainingArguments("o", warmup_steps=given).get_warmup_steps(10)
        assert ours == theirs


@pytest.mark.row("G8", "G9", "G10")
def test_log_levels_of_main_and_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments("o", log_level="info", log_level_replica="error")
    assert args.get_process_log_level() == logging.INFO
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert args.get_process_log_level() == logging.INFO
    args.log_on_each_node = False
    assert args.get_process_log_level() == logging.ERROR
    default = TrainingArguments("o")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert default.get_process_log_level() == logging.WARNING


@pytest.mark.row("X5", "X8")
def test_the_launcher_says_which_process_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments("o", use_cpu=True)
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    assert args.parallel_mode == "not_parallel"
    for name, value in {"WORLD_SIZE": 4, "RANK": 3, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert (args.world_size, args.process_index, args.local_process_index) == (4, 3, 1)
    assert (args.parallel_mode, args.device, args.n_gpu) == ("distributed", torch.device("cpu"), 0)
    assert not args.should_save and not args.should_log
    args.save_on_each_node = True
    assert not args.should_save
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert args.should_save and args.should_log


def test_copies_leave_out_the_open_place() -> None:
    args = TrainingArguments("o", seed=5)
    args._driver_session = object()
    assert copy.deepcopy(args)._driver_session is None
    assert copy.copy(args).seed == 5
