"""DeepSpeed's ZeRO: optimizer state (1), gradients (2) and weights (3) sharded over ranks.

NCCL where there is CUDA, gloo on the CPU. Rajbhandari et al., https://arxiv.org/abs/1910.02054
"""

from __future__ import annotations

import atexit
import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...kernel.contract import Outcome, World
from ...kernel.errors import BackendUnavailable
from ...kernel.plan import Capabilities, Layout, Plan, Probe
from ...kernel.recipe import Recipe
from ...kernel.shards import Piece, Reader
from ..common import layouts, model_state, models, stepping
from ..common.optimizer_state import GroupNumbers
from ..process_group.buffers import Buffers
from ..process_group.collectives import naming_collectives, refusing_together
from ..process_group.layers_used import LayersUsed
from ..process_group.peers import Peers
from ..process_group.session import (
    ProcessGroupSession,
    choose_device,
    joined_ranks,
    num_launched,
    probe_devices,
    process_group,
)
from . import initialize, loss_scaler, zero_absent, zero_config, zero_state
from .zero_averages import ZeroAverages

__all__ = ["driver"]


@dataclass(frozen=True)
class DeepspeedOptions:
    """The driver's own arguments; all others of DeepSpeed go into `config`."""

    stage: int | None = None
    """1 shards the optimizer's state, 2 gradients too, 3 weights too; 2 by default."""
    config: Any = None
    """DeepSpeed's JSON: its path, or a dict. `auto` is filled in; what contradicts the plan is
    refused. `"bf16": {"enabled": "auto"}` holds the module's weights in 16 bits; without it
    torch.autocast computes in them. An `optimizer` section replaces the recipe's optimizer."""
    construct: Literal["sharded", "whole"] = "sharded"
    """At stage 3: shard each submodule when it is made, or the whole model when all is made (each
    rank needs host memory for all of it then, and the model may come from outside the recipe)."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`cuda` or `cpu`; `auto` takes CUDA where there is a device for every local rank."""


_LOG = logging.getLogger(__name__)

_kept = ExitStack()  # DeepSpeed keeps handles of the process group for as long as the process lives


class DeepspeedDriver:
    """One process for each device; what is sharded is up to the ZeRO stage."""

    name = "deepspeed"
    options_type = DeepspeedOptions

    def probe(self) -> Probe:
        if find_spec("deepspeed") is None:
            return Probe(False, "deepspeed is not installed", "pip install 'drivetrain[deepspeed]'")
        return probe_devices(-2, deepspeed=version("deepspeed"))

    def capabilities(self, plan: Plan) -> Capabilities:
        options = plan.options or DeepspeedOptions()
        stage = zero_config.stage_of(options)
        return Capabilities(
            precisions=frozenset({"fp32", "bf16", "fp16"}),
            multi_process=True,
            timeout_seconds=True,
            stall_seconds=True,
            sharded=stage == 3,
            compile=stage < 3,
            activation_checkpointing=True,
            uneven_gradients=False,
            feeds_ahead=choose_device(options.device).type != "cpu",
            saves_memory="set backend.stage=3, which cuts the weights over ranks too, or "
            'offload_optimizer in backend.config, {"zero_optimization": {"offload_optimizer": '
            '{"device": "cpu"}}}, which keeps the optimizer\'s state in host memory',
        )

    def layout(
        self, plan: Plan, model: nn.Module, state_bytes: Mapping[str, int], world_size: int
    ) -> Layout:
        config = zero_config.resolve(plan.options or DeepspeedOptions(), plan, world_size)
        whole = layouts.replicated_layout(plan, model, state_bytes)
        return zero_config.layout(config, plan, model, whole, world_size)

    @contextmanager
    def open(self, plan: Plan) -> Iterator[ProcessGroupSession]:
        options = plan.options or DeepspeedOptions()
        if not (probe := self.probe()).usable:
            raise BackendUnavailable(f"{probe.reason}; {probe.install}")
        device = choose_device(options.device)
        size = dist.get_world_size() if dist.is_initialized() else num_launched()
        config = zero_config.resolve(options, plan, size)
        if size == 1:
            _LOG.warning("deepspeed in one process shards nothing; launch more, or use cpu or ddp")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        initialize.import_deepspeed(device)
        initialize.refuse_unsupported(zero_config.low_precision(config))
        if zero_config.swaps(config):
            initialize.compile_file_operator()
        if not dist.is_initialized():
            _kept.enter_context(joined_ranks(plan, device))
            atexit.register(_kept.close)
        engines: list[ZeroEngine] = []

        def build(recipe: Recipe, plan: Plan, world: World) -> ZeroEngine:
            engines.append(ZeroEngine(recipe, plan, world, copy.deepcopy(config)))
            return engines[-1]

        with process_group(plan, device) as world:
            try:
                yield ProcessGroupSession(plan, world, build)
            finally:
                for engine in engines:
                    engine.close()


class ZeroEngine:
    """The module in a DeepSpeed engine; the kernel accumulates."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World, config: dict[str, Any]) -> None:
        import deepspeed

        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        self.plan, self.world = plan, world
        construct = (plan.options or DeepspeedOptions()).construct
        self.own = initialize.model(recipe, plan, config, construct)
        self.tied = models.tied_groups(self.own)
        self.num_parameters = zero_state.num_elements(self.own)
        bucket = zero_config.bucket_elements(config, self.num_parameters)
        config["zero_optimization"]["reduce_bucket_size"] = bucket
        base = initialize.optimizer(recipe, self.own)
        of = {parameter: name for name, parameter in self.own.named_parameters()}
        names = [[of.get(p) for p in ps] for g in base.param_groups if (ps := g["params"])]
        own_optimizer, groups = None, None
        if section := config.pop("optimizer", None):
            config["optimizer"] = zero_config.fill_optimizer(section, base)
            keys = ("params", "lr", "weight_decay")
            groups = [{key: group[key] for key in keys} for group in base.param_groups]
            if not config["optimizer"]["params"].get("torch_adam"):
                initialize.refuse_stale_locks()
        else:
            own_optimizer = base
            initialize.refuse_unless_elementwise(base, world.device)
        self._autocast = models.autocast(plan, world.device)
        self._plain = [(part, _hooks(part)) for part in self.own.modules()]
        self._given_forward = self._local_forward = self.own.forward
        if plan.precision.compute != plan.precision.params:
            self.own.forward = self._computing
        if zero_config.low_precision(config):  # inputs must be cast for such weights
            self._local_forward = self.own.forward
        if plan.compile:
            self.own.compile(**plan.compile_options)
        with initialize.broadcasting_scalars():
            self.module, self.zero, *_ = deepspeed.initialize(
                model=self.own,
                optimizer=own_optimizer,
                model_parameters=groups,
                config=config,
                dist_init_required=False,
            )
        self.buffers = Buffers(self.own, Peers(world.rank, world.size))
        self.buffers.take_before_forward(self.module)
        self.numbers = GroupNumbers(names, self.zero.param_groups)
        self.averages = ZeroAverages(self.zero, self.own)
        self._built_state = zero_state.built_state(self.zero, self.own)
        if own_optimizer is not None and zero_state.num_calls(self.zero) > 1:
            initialize.refuse_if_it_counts_steps(own_optimizer)
        trained = zero_state.trained(self.zero)
        named = dict(self.own.named_parameters())
        self._trained = frozenset(name for name, p in named.items() if id(p) in trained)
        self._others = [p for name, p in named.items() if name not in self._trained]
        self._reached: set[str] = set()  # by a gradient, which DeepSpeed then takes away
        self._updated, self._said = frozenset[str](), False
        self.layers = LayersUsed(world)
        self._watch_layers()
        for name, parameter in named.items():
            if parameter.requires_grad:
                reach = partial(self._reach, name, self.layers.kind(f"the gradient of {name!r}"))
                parameter.register_hook(reach)  # type: ignore[no-untyped-call]
        self.loss_scale = None
        if plan.precision.loss_scaling and not config.get("fp16", {}).get("enabled"):
            self.loss_scale = stepping.LossScale(world.device)
            self.zero.custom_loss_scaler = True
            self.zero.external_loss_scale = float(self.loss_scale.scale)

    def _reach(self, name: str, kind: int, grad: Tensor) -> None:
        self._reached.add(name)
        self.layers.note(kind)

    def _watch_layers(self) -> None:
        """Where weights are cut, all that has some of its own. Small ones stay whole once they are
        gathered, which may be in any step."""
        for name, part in self.own.named_modules() if zero_state.cuts_weights(self.zero) else ():
            if part._parameters:
                self.layers.watch_gathered(name, part, again=_is_gathered(part))

    def _computing(self, *args: Any, **kwargs: Any) -> Any:
        # the engine turns autocast off around the forward; a cache would hold every weight, whole
        dtype = self.plan.precision.compute
        with torch.autocast(self.world.device.type, dtype, cache_enabled=False):
            return self._given_forward(*args, **kwargs)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.zero.param_groups
        return groups

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        return models.NO_CONTEXT

    def autocast(self) -> AbstractContextManager[Any]:
        return self._named("gathering weights in a forward", self._autocast())

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        with self._named("gathering weights or summing gradients in a backward"):
            self.layers.backward()
            self.module.backward(loss * weight, scale_wrt_gas=False)

    def unused(self) -> Sequence[str]:
        named = self.own.named_parameters()
        return [name for name, p in named if p.requires_grad and name not in self._reached]

    def update(self) -> Outcome:
        with self._named("comparing which layers were used"):
            self.layers.compare()
        self._say_that_counts_are_shared()
        absent, self._reached = self._trained - self._reached, set()
        left = zero_absent.left_alone(self.zero, self.own, absent)
        with self._named("updating the weights"), left if absent else models.NO_CONTEXT:
            self.module.step()
        stepping.forget_gradients(self._others)
        norm = torch.as_tensor(self.module.get_global_grad_norm(), dtype=torch.float32)
        applied = bool(self.module.was_step_applied())
        if self.loss_scale is not None:
            self.loss_scale.update(torch.full((), float(not applied), device=self.world.device))
            self.zero.external_loss_scale = float(self.loss_scale.scale)
        return Outcome(norm.to(self.world.device), lambda: applied)

    def _say_that_counts_are_shared(self) -> None:
        """Once, when parameters of one group begin to differ in how often they were updated."""
        before, now = self._updated, self._reached & self._trained
        self._updated = before | now
        parted = {
            name
            for group in map(set, self.numbers.names)
            if before & group and now & group
            for name in (before ^ now) & group
        }
        if parted and not self._said and zero_state.counts_steps(self.zero):
            self._said = True
            _LOG.warning(
                "no gradient reaches %s in some steps: these parameters and their moments are left "
                "as they were, and the optimizer's count of steps, which DeepSpeed keeps once for "
                "a group, goes on: their bias correction is that of the others",
                ", ".join(sorted(parted)[:10]),
            )

    def shards(self) -> Iterator[Piece]:
        counted = self.numbers.tensors(self.zero.param_groups)
        world, scale = self.world, self._scale()
        yield from zero_state.pieces(
            self.own, self.zero, self._trained, counted, scale, world.rank, world.size
        )
        yield from self.averages.pieces()

    def restore(self, reader: Reader) -> None:
        scale, stored = self._scale(), set(reader.names("state"))
        with refusing_together(self.world.rank, self.world.size):
            planned = zero_state.plan_restore(reader, self.own, self.zero, self.numbers)
            scale |= {
                name: model_state.read_number(reader, name) for name in scale if name in stored
            }
        trained, built = self._trained, self._built_state
        with model_state.overwriting():
            zero_state.restore(reader, self.own, self.zero, planned, trained, built)
            self.averages.restore(reader)
        self.numbers.load(self.zero.param_groups, planned.counted)
        zero_state.publish(self.zero)
        if self.loss_scale is not None:
            model_state.load_scale(scale, self.loss_scale)
            self.zero.external_loss_scale = float(self.loss_scale.scale)
        elif scale:
            loss_scaler.set_scaler(self.zero.loss_scaler, scale)

    def _scale(self) -> dict[str, Tensor]:
        if self.loss_scale is None:
            return loss_scaler.scaler_tensors(self.zero.loss_scaler)
        return model_state.scale_tensors(self.loss_scale)

    def average(self, weight: float) -> None:
        self.averages.move(weight)

    def averaged(self) -> AbstractContextManager[None]:
        return self.averages.shown()

    @contextmanager
    def full_params(self, names: Sequence[str] | None = None) -> Iterator[nn.Module]:
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        named = dict(self.own.named_parameters(remove_duplicate=False))
        if hasattr(self.zero, "_partition_all_parameters"):
            self.zero._partition_all_parameters()  # nothing half fetched is left
        chosen = list(named.values()) if names is None else [named[name] for name in names]
        with self.buffers.of_rank_0(), GatheredParameters(chosen), self._local():
            yield self.own

    @contextmanager
    def _local(self) -> Iterator[None]:
        """Without DeepSpeed's hooks, which would fetch and free weights together with all ranks."""
        theirs = [(part, _hooks(part)) for part in self.own.modules()]
        forward, self.own.forward = self.own.forward, self._local_forward
        try:
            for part, hooks in self._plain:
                vars(part).update(hooks)
            yield
        finally:
            self.own.forward = forward
            for part, hooks in theirs:
                vars(part).update(hooks)

    def _named(
        self, call: str, inside: AbstractContextManager[Any] = models.NO_CONTEXT
    ) -> AbstractContextManager[None]:
        return naming_collectives(call, self.world.rank, inside=inside)

    def close(self) -> None:
        """Take DeepSpeed's hooks off the module, and its references to it."""
        from deepspeed.runtime.zero import parameter_offload

        self.module.destroy()
        with suppress(ValueError):
            parameter_offload.FWD_MODULE_STACK.remove(self.own)


def _is_gathered(part: nn.Module) -> bool:
    """In each forward; what DeepSpeed finds small stays whole."""
    return not all(getattr(p, "ds_persist", True) for p in part.parameters(recurse=False))


def _hooks(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Copies of a module's tables of hooks, by attribute."""
    return {name: copy.copy(table) for name, table in vars(module).items() if name in _HOOK_TABLES}


_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

driver = DeepspeedDriver()
