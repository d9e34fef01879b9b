"""Argument names of transformers up to 4.47: accepted and mapped, or refused by name.

An old argument takes effect wherever it still has a meaning; a `FutureWarning` names its
replacement.
"""

from __future__ import annotations

import difflib
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError, UnknownArgument
from ..profile import PROFILES, Profile

__all__ = ["OLD_NAMES", "OldNames"]

Given = dict[str, Any]
"""Keyword arguments of a caller; the functions of old names change them in place."""


class OldNames(type):
    """The metaclass of argument classes: translates old keywords, then calls the class.

    A metaclass, since each dataclass among the subclasses has its own constructor.
    """

    def __call__(cls, *positional: Any, **given: Any) -> Any:
        positional, given = _by_name(cls, positional, given)
        own = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        for name in [name for name in OLD_NAMES if name in given and name not in own]:
            value = given.pop(name)
            replacement, apply = OLD_NAMES[name]
            apply(name, value, given)
            warnings.warn(
                f"the argument {name} was removed after transformers 4.47: {replacement}",
                FutureWarning,
                stacklevel=2,
            )
        _refuse_unknown(cls, given)
        profile = PROFILES.get(given.get("profile", ""), Profile())
        for name, default in profile.defaults.items():
            given.setdefault(name, default)
        if profile.names_run_by_folder:
            given.setdefault("run_name", given.get("output_dir"))
        made = super().__call__(*positional, **given)
        made._start_library_state()
        return made

    @property
    def __signature__(cls) -> inspect.Signature:
        whole = inspect.signature(cls.__init__)  # type: ignore[misc]
        return whole.replace(parameters=list(whole.parameters.values())[1:])


def _by_name(cls: type, positional: tuple[Any, ...], given: Given) -> tuple[tuple[Any, ...], Given]:
    """Convert positional arguments to keywords, if they can be matched to fields."""
    parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    plain = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD][1:]
    named = dict(zip(plain, positional, strict=False))
    if len(named) < len(positional) or named.keys() & given.keys():
        return positional, given
    return (), {**named, **given}


def _refuse_unknown(cls: type, given: Given) -> None:
    parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters][1:]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *OLD_NAMES], n=1)
            hint = f"did you mean {near[0]}?" if near else "the class lists its fields"
            raise UnknownArgument(f"{cls.__name__} has no argument {name!r}; {hint}")


# --- what became of each ---------------------------------------------------------------------

Apply = Callable[[str, Any, Given], None]


def _put(given: Given, name: str, value: Any, source: str) -> None:
    """Set an argument; refuse it if it is also given with another value."""
    if given.get(name, value) != value:
        raise ArgumentError(
            f"{source} asks for {name}={value!r}, and {name} is given as {given[name]!r}; "
            f"remove {source}"
        )
    given[name] = value


def _renamed(new: str) -> tuple[str, Apply]:
    def apply(name: str, value: Any, given: Given) -> None:
        if value is not None:
            _put(given, new, value, name)

    return f"write {new}", apply


def _switch(new: str, word: Any) -> tuple[str, Apply]:
    """Map True to one value of another argument, and False to nothing."""

    def apply(name: str, value: Any, given: Given) -> None:
        if value:
            _put(given, new, word, name)

    return f"write {new}={word!r}", apply


def _entry(holder: str, key: str) -> tuple[str, Apply]:
    """Map to an entry in the dict of another argument."""

    def apply(name: str, value: Any, given: Given) -> None:
        if not value and value is not False:
            return
        inner = given.get(holder) or {}
        if not isinstance(inner, dict):
            raise ArgumentError(f"{name} and {holder}={inner!r}: write {key} into the latter")
        given[holder] = {**inner}
        _put(given[holder], key, value, name)

    return f"write {holder}={{{key!r}: ...}}", apply


def _appended(holder: str, word: str) -> tuple[str, Apply]:
    def apply(name: str, value: Any, given: Given) -> None:
        words = given.get(holder) or []
        words = words.split() if isinstance(words, str) else list(words)
        if value and word not in words:
            given[holder] = [*words, word]

    return f"write {holder}=[{word!r}]", apply


def _environment(variable: str) -> tuple[str, Apply]:
    """Map to an environment variable, which other libraries' callbacks read."""

    def apply(name: str, value: Any, given: Given) -> None:
        if value is not None:
            os.environ[variable] = str(value)

    return f"set {variable} in the environment", apply


def _refused(reason: str, *harmless: Any) -> tuple[str, Apply]:
    """Refuse an argument without a meaning here; values without effect are accepted."""

    def apply(name: str, value: Any, given: Given) -> None:
        if value not in (None, *harmless):
            raise UnknownArgument(f"{name}={value!r} is refused: {reason}")

    return reason, apply


def _nothing(name: str, value: Any, given: Given) -> None:
    """Ignore an argument that was never read."""


def _warmup_ratio(name: str, value: Any, given: Given) -> None:
    if value and not given.get("warmup_steps"):  # warmup_steps took precedence over the ratio
        if not 0 < value < 1:
            raise ArgumentError(f"warmup_ratio is {value}; it must be at least 0 and below 1")
        given["warmup_steps"] = value


def _hub_owner(name: str, value: Any, given: Given) -> None:
    if value is not None:
        model = given.get("hub_model_id") or given.get("output_dir") or "trainer_output"
        given["hub_model_id"] = f"{value}/{os.path.basename(model)}"


_APEX = "NVIDIA's Apex is no longer maintained; bf16 and fp16 use PyTorch's own mixed precision"

OLD_NAMES: dict[str, tuple[str, Apply]] = {
    "adafactor": _switch("optim", "adafactor"),
    "dispatch_batches": _entry("accelerator_config", "dispatch_batches"),
    "evaluation_strategy": _renamed("eval_strategy"),
    "fp16_backend": _refused(_APEX, "auto", "amp", "cuda_amp", "cpu_amp"),
    "fp16_opt_level": _refused(_APEX, "O1"),
    "fsdp_min_num_params": _entry("fsdp_config", "min_num_params"),
    "fsdp_transformer_layer_cls_to_wrap": _entry("fsdp_config", "transformer_layer_cls_to_wrap"),
    "group_by_length": _switch("train_sampling_strategy", "group_by_length"),
    "half_precision_backend": _refused(_APEX, "auto", "amp", "cuda_amp", "cpu_amp"),
    "include_inputs_for_metrics": _appended("include_for_metrics", "inputs"),
    "include_tokens_per_second": _switch("include_num_input_tokens_seen", "all"),
    "jit_mode_eval": _refused("TorchScript is deprecated; write torch_compile=True", False),
    "logging_dir": _environment("TENSORBOARD_LOGGING_DIR"),
    "mp_parameters": _refused("SageMaker's model parallelism is not driven; use fsdp", ""),
    "no_cuda": _switch("use_cpu", True),
    "overwrite_output_dir": (
        "Trainer never read it: scripts did, and it changes nothing here",
        _nothing,
    ),
    "past_index": _refused("only models such as Transformer-XL fed outputs back", -1),
    "per_gpu_eval_batch_size": _renamed("per_device_eval_batch_size"),
    "per_gpu_train_batch_size": _renamed("per_device_train_batch_size"),
    "push_to_hub_model_id": _renamed("hub_model_id"),
    "push_to_hub_organization": ("write hub_model_id='organization/model'", _hub_owner),
    "push_to_hub_token": _renamed("hub_token"),
    "ray_scope": _environment("RAY_SCOPE"),
    "save_safetensors": _refused("models are always saved as safetensors, never pickled", True),
    "sharded_ddp": _refused("fairscale is no longer maintained; use fsdp", "", False),
    "split_batches": _entry("accelerator_config", "split_batches"),
    "torchdynamo": _renamed("torch_compile_backend"),
    "tpu_metrics_debug": _appended("debug", "tpu_metrics_debug"),
    "tpu_num_cores": _switch("backend", "xla"),
    "use_ipex": _switch("backend", "ipex"),
    "use_legacy_prediction_loop": _refused("there is one evaluation loop", False),
    "use_mps_device": _refused("an Apple GPU is taken if there is one; or use_cpu=True", False),
    "warmup_ratio": ("write warmup_steps with a number below 1", _warmup_ratio),
}
"""Old name -> what to write instead, and the function that does it."""
