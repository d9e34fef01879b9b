"""Building what ZeRO takes: a model sharded while it is made, with the weights of one process."""

from __future__ import annotations

import copy
import functools
import os
import sys
import time
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...data.nested import tensors_of
from ...kernel.errors import BackendUnavailable, CapabilityRefused, RecipeError
from ...kernel.plan import Plan
from ...kernel.recipe import Recipe
from ..common import models
from . import zero_config
from .zero_state import shape_of

_ATTRIBUTES = ("data", "shape")  # of a parameter, that tell of its elements
LONGEST_BUILD_SECONDS = 900.0
"""A lock on a folder in which nothing has changed for that long is stale."""
_LARGEST_UNSHARDED = 2**28  # elements that a rank may hold whole while a constructor is at work


def import_deepspeed(device: torch.device) -> None:
    """DeepSpeed for that device, which it chooses once for the life of the process."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")  # it reads them even in a single process
    # compiled operators of one environment crash in another, and their folder is shared by default
    folder = Path.home() / ".cache" / "torch_extensions" / Path(sys.prefix).as_posix().strip("/")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder))
    hidden = sys.modules.setdefault("mlflow", cast(Any, None)) is None
    try:  # only its tuner knows of mlflow, which takes a rank a second to import
        import deepspeed
    finally:
        if hidden:
            del sys.modules["mlflow"]
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != device.type:
        raise BackendUnavailable(
            f"DeepSpeed was set to {get_accelerator().device_name()!r} in this process, or by "
            f"DS_ACCELERATOR, and {device.type!r} is asked for; start another process"
        )
    # as if no operator could be compiled: else it compiles one for the host's shared memory that
    # is not needed; delete when 0.19 is no longer supported and `shm_comm` can be switched off
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    from deepspeed.runtime import compiler

    compiler.compile = lambda: _compiled_when_called


def _compiled_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` for what DeepSpeed decorates while it is imported, such as its Muon, which
    every engine imports: torch's compiler alone takes a rank more than a second to import."""
    compiled = functools.cache(lambda: torch.compile(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if torch.compiler.is_compiling() else compiled())(*args, **kwargs)

    return call


def refuse_unsupported(dtype: torch.dtype | None) -> None:
    """`CapabilityRefused` for weights of a dtype that DeepSpeed does not compute with here."""
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    supported = {
        torch.float16: device.is_fp16_supported,
        torch.bfloat16: device.is_bf16_supported,
    }
    if dtype is not None and not supported[dtype]():
        name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
        raise CapabilityRefused(
            f"{name}.enabled=true",
            "deepspeed",
            f"this {device.device_name()} has no arithmetic of {dtype}. Take precision=bf16, or "
            f"leave the section {name!r} out: weights stay float32 then, and autocast is used",
        )


def model(recipe: Recipe, plan: Plan, config: Mapping[str, Any], construct: str) -> nn.Module:
    """The recipe's model; at stage 3 each rank keeps its part of every parameter.

    The weights are those of one process under the same seed. Raises `RecipeError` when a model
    that is to be sharded while it is made was made before.
    """
    from deepspeed.accelerator import get_accelerator

    device = torch.device(get_accelerator().current_device_name())
    if config["zero_optimization"]["stage"] < 3:
        return models.build_model(recipe, plan, device)
    from deepspeed.runtime.zero.partition_parameters import Init

    if construct == "whole":
        module = models.build_model(recipe, plan, None)
    else:
        with _sharding(config) as made:
            module = models.build_model(recipe, plan, None)
        if id(module) not in made:
            raise RecipeError(
                "recipe.model returned a model that was made before it was called (or a copy of "
                "one), so every rank holds all of it. Make the model inside recipe.model; or set "
                "backend.construct=whole if each rank's host memory is enough for it"
            )
    with _with_a_dimension(module.parameters()):
        Init(module=module, config_dict_or_path=dict(config))
    dtype = zero_config.low_precision(config)
    for parameter in module.parameters():
        if dtype is not None and parameter.is_floating_point():
            # not earlier: random numbers that are drawn in 16 bits are others
            for tensor in (parameter, cast(Any, parameter).ds_tensor):
                tensor.data = tensor.data.to(dtype)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)
    return module


@contextmanager
def _with_a_dimension(parameters: Iterable[Any]) -> Iterator[None]:
    """While it is open, parameters of no dimension have one, without which DeepSpeed cannot
    broadcast them."""
    scalars = [p for p in parameters if not p.dim()]
    for parameter in scalars:
        parameter.data = parameter.data.reshape(1)
    try:
        yield
    finally:
        for parameter in scalars:
            if hasattr(parameter, "ds_shape"):
                parameter.ds_shape = torch.Size()
            if parameter.numel():  # else it was cut meanwhile, and lies elsewhere
                parameter.data = parameter.data.reshape(())


@contextmanager
def broadcasting_scalars() -> Iterator[None]:
    """While it is open, engines that are built can broadcast parameters of no dimension. They have
    one for no longer than that: what autograd knows of them stays."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    broadcast = DeepSpeedEngine._broadcast_model

    def with_scalars(self: Any) -> None:
        with _with_a_dimension(self.module.parameters()):
            broadcast(self)

    DeepSpeedEngine._broadcast_model = with_scalars
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = broadcast


@contextmanager
def _sharding(config: Mapping[str, Any]) -> Iterator[set[int]]:
    """While it is open, each module is sharded when its constructor ends; gives their ids.

    DeepSpeed's own `zero.Init` draws weights on the accelerator, and lets whatever a constructor
    does to parameters of submodules that are sharded by then pass without effect (it knows of
    `Module.apply` alone). Here modules are made on the host, and parameters that are used again
    are made whole until the constructors are done.
    """
    from deepspeed.runtime.zero.partition_parameters import Init

    made: set[int] = set()

    class Sharding(Init):  # type: ignore[misc]
        def _post_init_method(self, module: nn.Module) -> None:
            with torch._C.DisableTorchFunction():
                made.add(id(module))
                kept.append(module)  # so that no other object takes its id
                with _with_a_dimension(module.parameters(recurse=False)):
                    super()._post_init_method(module)

    kept: list[nn.Module] = []
    touched = _TouchedParameters()
    context = Sharding(config_dict_or_path=dict(config), tensor_overrides=[])
    overrides_apply, Init.override_module_apply = Init.override_module_apply, False
    try:
        with context, touched:
            yield made
            touched.shard_again()
    finally:
        Init.override_module_apply = overrides_apply


class _TouchedParameters(TorchFunctionMode):
    """Makes sharded parameters whole, on the host, when something looks at their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: list[Any] = []
        self.passing = {
            getattr(getattr(Tensor, name), accessor)
            for name, value in vars(torch._C.TensorBase).items()
            if name not in _ATTRIBUTES and hasattr(value, "__set__")
            for accessor in ("__get__", "__set__", "__delete__")
        }

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function not in self.passing:
            value: Any
            for value in tensors_of((args, kwargs or {})):
                if hasattr(value, "ds_status") and not value.numel() and value.ds_numel:
                    self._make_whole(value)
        return function(*args, **(kwargs or {}))

    def _make_whole(self, parameter: Any) -> None:
        if sum(other.ds_numel for other in self.whole) > _LARGEST_UNSHARDED:
            self.shard_again()
        parameter.all_gather()
        parameter.data = parameter.data.cpu()  # what is drawn into it is drawn as on the host
        self.whole.append(parameter)

    def shard_again(self) -> None:
        with torch._C.DisableTorchFunction():
            for parameter in self.whole:
                parameter.data = parameter.data.to(parameter.ds_tensor.device)
                dist.broadcast(parameter.data, 0)
                parameter.partition(has_been_updated=True)
            self.whole.clear()


def optimizer(recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer. It sees whole shapes even of sharded parameters: recipes sort
    parameters by their number of dimensions.
    """
    if not any(hasattr(parameter, "ds_shape") for parameter in module.parameters()):
        return models.build_optimizer(recipe, module)
    behind: dict[int, nn.Parameter] = {}
    stand_in: Any = nn.Module()
    stand_in.named_parameters = lambda: _stand_ins(module, behind)
    built = models.build_optimizer(recipe, stand_in)
    for group in built.param_groups:
        group["params"] = [behind.get(id(chosen), chosen) for chosen in group["params"]]
    built.state.clear()  # some hold zeros from the beginning, in the shapes of the stand-ins
    return built


def _stand_ins(
    module: nn.Module, behind: dict[int, nn.Parameter]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of the whole shape that take no memory, and what each stands for by its id."""
    for name, parameter in module.named_parameters():
        one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        shown = nn.Parameter(one.expand(shape_of(parameter)), parameter.requires_grad)
        behind[id(shown)] = parameter
        yield name, shown


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Raises `CapabilityRefused` for an optimizer to which more than each element matters.

    ZeRO gives that of each rank a stretch of a flat tensor, so an Adafactor, or one that sums over
    all parameters as Prodigy does, would silently become another algorithm. It is tried on a matrix
    and, twice, on stretches of the same numbers.
    """
    kinds = models.kinds_of(optimizer)
    if any(isinstance(k, torch.optim.Adagrad) for k in kinds) and len(optimizer.param_groups) > 1:
        raise CapabilityRefused(
            "Adagrad with more than one group of parameters",
            "deepspeed",
            "DeepSpeed makes it anew with the settings of one; put all parameters into one group",
        )
    for kind in kinds:
        _refuse_unless_elementwise(kind, device)


def _refuse_unless_elementwise(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    reason = "it updates a matrix differently from the same numbers in parts, each by itself"
    numbers = torch.linspace(-1.0, 2.0, 24)
    try:
        whole = _tried(optimizer, device, numbers.reshape(4, 6))
        cut = torch.cat([_tried(optimizer, device, part) for part in (numbers[:10], numbers[10:])])
        same = torch.allclose(whole, cut, rtol=1e-4, atol=1e-6)
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError) as error:
        same, reason = False, f"it fails on flat tensors ({error})"
    if not same:
        raise CapabilityRefused(
            f"the optimizer {type(optimizer).__name__}",
            "deepspeed",
            f"{reason}, which is what ZeRO shards. Take an optimizer like torch.optim.AdamW or "
            "SGD, or the backend fsdp or ddp",
        )


def _tried(optimizer: torch.optim.Optimizer, device: torch.device, numbers: Tensor) -> Tensor:
    """These numbers after two updates, with gradients that follow from them."""
    parameter = nn.Parameter(numbers.to(device, copy=True))
    twin = _twin(optimizer, [parameter])
    for turn in (1.0, 2.0):
        parameter.grad = (numbers * -turn + turn).to(device)
        twin.step()
    return parameter.detach().reshape(-1)


def _twin(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """One of the same kind, with the settings of its first group, that has not stepped."""
    given = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    settings = {**copy.deepcopy(given), "lr": 0.1}
    if type(optimizer) is torch.optim.Adagrad:  # in torch 2.8 its state is made when it is
        return torch.optim.Adagrad(parameters, **settings)
    twin = object.__new__(type(optimizer))
    groups = [{**settings, "params": parameters}]
    twin.__dict__.update(vars(optimizer), state=defaultdict(dict), param_groups=groups)
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return twin


def refuse_if_it_counts_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raises `CapabilityRefused` for an optimizer that counts its steps in its groups, where ZeRO
    makes many of one: all groups are there in each."""
    for kind in models.kinds_of(optimizer):
        _refuse_if_it_counts_steps(kind)


def _refuse_if_it_counts_steps(optimizer: torch.optim.Optimizer) -> None:
    twin = _twin(optimizer, [])
    before = {**twin.param_groups[0]}
    twin.step()
    if changed := [key for key, value in twin.param_groups[0].items() if value != before.get(key)]:
        raise CapabilityRefused(
            f"the optimizer {type(optimizer).__name__}",
            "deepspeed",
            f"it counts {', '.join(changed)} in its groups, and stage 3 calls it once for each "
            "group of weights. Take one group, backend.stage=2, or the backend fsdp or ddp",
        )


def refuse_stale_locks() -> None:
    """Raises `BackendUnavailable` when a stale lock keeps DeepSpeed's operators from being
    compiled. A build that is killed leaves its lock, on which every later run would wait for ever.
    """
    from torch.utils import cpp_extension

    if not hasattr(cpp_extension, "FileBaton"):
        return  # later versions of torch lock by the system, which lets go of what is dead
    told = False
    while locks := list(Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock")):
        with suppress(FileNotFoundError):  # done while we looked
            newest = max(path.stat().st_mtime for path in locks[0].parent.iterdir())
            if time.time() - newest > LONGEST_BUILD_SECONDS:
                raise BackendUnavailable(
                    f"a build of DeepSpeed's operators that never ended left {locks[0]} behind, "
                    "and every run waits for it. Delete that file, unless a build is running now"
                )
        if not told:
            warnings.warn(f"waiting for the build that holds {locks[0]}", stacklevel=2)
        told = True
        time.sleep(0.5)


def compile_file_operator() -> None:
    """Compile the operator that NVMe offload needs, once an environment: on the first rank, while
    the others wait. Raises `BackendUnavailable` where it cannot be compiled."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    refuse_stale_locks()
    builder = AsyncIOBuilder()
    if not builder.is_compatible():
        raise BackendUnavailable(
            "NVMe offload needs libaio with its headers, and a C++ compiler: install libaio-dev "
            "(libaio-devel where packages are RPMs), or name their folders in CPATH and "
            "LIBRARY_PATH; or offload to 'cpu'"
        )
    builder.load(verbose=False)


__all__ = [
    "broadcasting_scalars",
    "compile_file_operator",
    "import_deepspeed",
    "model",
    "optimizer",
    "refuse_if_it_counts_steps",
    "refuse_stale_locks",
    "refuse_unless_elementwise",
]
