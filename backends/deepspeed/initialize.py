"""Building what ZeRO takes: a model sharded while it is made, with the weights of one process."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections import defaultdict
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
from ..common import attached, models
from . import zero_config
from .zero_state import shape_of

_ATTRIBUTES = ("data", "shape")  # attributes of a parameter that need its elements
_LARGEST_UNSHARDED = 2**28  # elements that a rank may hold whole while a constructor is at work


def import_deepspeed(device: torch.device) -> None:
    """DeepSpeed for that device, which it chooses once for the life of the process."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
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


@contextmanager
def local_rank_set() -> Iterator[None]:
    """Set LOCAL_RANK, which DeepSpeed reads even in a single process. Afterwards it is gone:
    accelerate, for one, takes a process that has it for one of several."""
    if "LOCAL_RANK" in os.environ:
        yield
        return
    os.environ["LOCAL_RANK"] = "0"
    try:
        yield
    finally:
        os.environ.pop("LOCAL_RANK", None)


def destroy_process_group() -> None:
    """Destroy the process group through DeepSpeed, which then drops its handles of groups; through
    torch where DeepSpeed has not used it."""
    import deepspeed

    own = deepspeed.comm if deepspeed.comm.is_initialized() else dist
    own.destroy_process_group()


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


def refuse_parameters(module: nn.Module, config: Mapping[str, Any]) -> None:
    """Raise `CapabilityRefused` for parameters that DeepSpeed would silently hold, save and compute
    with in float32: at stage 3 all, at lower stages those that are trained. Parameters of 16 bits
    are allowed if `config` asks for them. At stage 3 refuse parameters without elements, too."""
    allowed = {torch.float32, zero_config.low_precision(config)}
    every = config["zero_optimization"]["stage"] == 3
    empty = [name for name, p in module.named_parameters() if 0 in shape_of(p)]
    if every and empty:
        raise CapabilityRefused(
            f"parameters without elements ({', '.join(empty[:5])}) at ZeRO stage 3",
            "deepspeed",
            "DeepSpeed waits for their parts for ever. Leave them out (None), or take stage 2",
        )
    found = {
        name: parameter.dtype
        for name, parameter in module.named_parameters()
        if (parameter.requires_grad or every)
        and (parameter.is_floating_point() or parameter.is_complex())
        and parameter.dtype not in allowed
    }
    if not found:
        return
    short = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    dtypes = {*found.values()}
    in_float32 = "make them float32 (model.float())"
    if any(dtype.is_complex for dtype in dtypes):
        in_float32 = "hold their real and imaginary parts in float32 (torch.view_as_real)"
    remedy = f"Take the backend ddp or fsdp, or {in_float32}"
    if len(dtypes) == 1 and (name := short.get(*dtypes)):
        remedy += (
            f'; or set precision={name} and backend.config={{"{name}": {{"enabled": "auto"}}}}, '
            f"which holds the weights in {name} and updates float32 copies of them"
        )
    raise CapabilityRefused(
        f"parameters of {' and '.join(sorted(map(str, dtypes)))} ({', '.join(list(found)[:5])})",
        "deepspeed",
        f"ZeRO holds, updates and saves float32 values, and other numbers come out. {remedy}",
    )


def model(recipe: Recipe, plan: Plan, config: Mapping[str, Any], construct: str) -> nn.Module:
    """The recipe's model; at stage 3 each rank keeps its part of every parameter.

    The weights are those of one process under the same seed. Raises `RecipeError` when a model
    that is to be sharded while it is made was made before.
    """
    from deepspeed.accelerator import get_accelerator

    device = torch.device(get_accelerator().current_device_name())
    from deepspeed.runtime.zero.partition_parameters import Init

    is_partitioned = config["zero_optimization"]["stage"] == 3
    if construct == "whole" or not is_partitioned:
        module = models.build_model(recipe, plan, None if is_partitioned else device)
        refuse_parameters(module, config)
        models.make_contiguous(module.parameters())
    else:
        with _sharding(config) as made:
            module = models.build_model(recipe, plan, None)
        if id(module) not in made:
            raise RecipeError(
                "recipe.model returned a model that was made before it was called (or a copy of "
                "one), so every rank holds all of it. Make the model inside recipe.model; or set "
                "backend.construct=whole if each rank's host memory is enough for it"
            )
    if not is_partitioned:
        return module
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
            if parameter.numel():  # else it was partitioned meanwhile, and lies elsewhere
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
                refuse_parameters(module, config)
                models.make_contiguous(module.parameters(recurse=False))
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
                parameter.data = parameter.data.to(parameter.ds_tensor.device).contiguous()
                dist.broadcast(parameter.data, 0)
                parameter.partition(has_been_updated=True)
            self.whole.clear()


def optimizer(recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer. It sees whole shapes even of sharded parameters: recipes sort
    parameters by their number of dimensions.
    """
    if not any(hasattr(parameter, "ds_shape") for parameter in module.parameters()):
        return models.build_optimizer(recipe, module)
    originals: dict[int, nn.Parameter] = {}
    stand_in: Any = nn.Module()
    stand_in.named_parameters = lambda: _stand_ins(module, originals)
    built = models.build_optimizer(recipe, stand_in)
    for group in built.param_groups:
        group["params"] = [originals.get(id(chosen), chosen) for chosen in group["params"]]
    built.state.clear()  # some hold zeros from the beginning, in the shapes of the stand-ins
    return built


def refuse_added_groups(optimizer: torch.optim.Optimizer) -> None:
    """Have `add_param_group` raise `CapabilityRefused` from now on: DeepSpeed has laid out the
    present parameters, and cannot add others."""

    def add_param_group(group: Any) -> None:
        raise CapabilityRefused(
            "optimizer.add_param_group during a run",
            "deepspeed",
            "DeepSpeed has laid out the parameters of the groups that existed when the run "
            "began, and would not train others. Give the optimizer all parameters from the start, "
            "those that learn later with a learning rate of 0 in a group of their own; or take "
            "the backend ddp or fsdp",
        )

    vars(optimizer)["add_param_group"] = add_param_group


def destroy(engine: Any, own: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take DeepSpeed's hooks off the module `own`, and its references to it."""
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

    vars(optimizer).pop("add_param_group", None)
    engine.destroy()
    with suppress(ValueError):
        parameter_offload.FWD_MODULE_STACK.remove(own)
    # stage 3 caches a method by its object and module, for all engines of the process: the model
    # would stay in memory, and the process group with its threads, sockets and store
    for method in vars(partitioned_param_coordinator.PartitionedParameterCoordinator).values():
        inside = inspect.getclosurevars(method).nonlocals if inspect.isfunction(method) else {}
        for function in (method, *inside.values()):
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def _stand_ins(
    module: nn.Module, originals: dict[int, nn.Parameter]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of the whole shape that take no memory, and what each stands for by its id."""
    for name, parameter in module.named_parameters():
        one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        shown = attached.in_place_of(parameter, one.expand(shape_of(parameter)))
        originals[id(shown)] = parameter
        yield name, shown


__all__ = [
    "broadcasting_scalars",
    "destroy",
    "import_deepspeed",
    "local_rank_set",
    "model",
    "optimizer",
    "refuse_added_groups",
    "refuse_parameters",
]
