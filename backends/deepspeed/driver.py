"""DeepSpeed's ZeRO: optimizer state (1), gradients (2) and weights (3) sharded over ranks.

NCCL where there is CUDA, gloo on the CPU. Rajbhandari et al., https://arxiv.org/abs/1910.02054
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...kernel.contract import Outcome, World
from ...kernel.errors import BackendUnavailable
from ...kernel.plan import Capabilities, Layout, Plan, Probe
from ...kernel.recipe import Recipe
from ...kernel.shards import Piece, Reader
from ...launched import world_size
from ..common import attached, layouts, model_state, models, stepping
from ..common.entered import Entered, refuse_gradients
from ..common.frozen import Frozen
from ..common.module_hooks import ModuleHooks
from ..common.optimizer_state import GroupNumbers
from ..common.registered import Registered
from ..common.update_random import UpdateRandom, of_device
from ..common.writes import Writes, each_of
from ..process_group.buffers import Buffers
from ..process_group.collectives import naming_collectives, refusing_together
from ..process_group.copies import Copies, Held
from ..process_group.devices import choose_device, probe_devices
from ..process_group.peers import Peers
from ..process_group.session import ProcessGroupSession, process_group
from ..process_group.used_layers import UsedLayers
from . import (
    initialize,
    loss_scaler,
    operators,
    twins,
    zero_absent,
    zero_change,
    zero_config,
    zero_shown,
    zero_state,
)
from .gradient_order import GradientOrder, note_gathered_weights
from .limit_values import limit_values
from .options import DeepspeedOptions
from .original import OriginalModule, without_hooks
from .updated_parameters import UpdatedParameters
from .zero_averages import ZeroAverages
from .zero_writes import WeightWrites

__all__ = ["driver"]

_LOG = logging.getLogger(__name__)

_ACCELERATOR = "cuda"
"""The type of accelerator on which deepspeed's engine is driven."""


class DeepspeedDriver:
    """One process for each device; what is sharded is up to the ZeRO stage."""

    name = "deepspeed"
    options_type = DeepspeedOptions

    def probe(self) -> Probe:
        if find_spec("deepspeed") is None:
            return Probe(False, "deepspeed is not installed", "pip install 'drivetrain[deepspeed]'")
        return probe_devices(-2, only=_ACCELERATOR, deepspeed=version("deepspeed"))

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
            max_grad_value=True,
            uneven_gradients=False,
            feeds_ahead=choose_device(options.device, _ACCELERATOR).type != "cpu",
            saves_memory="set backend.stage=3, which partitions the weights over ranks too, or "
            'offload_optimizer in backend.config, {"zero_optimization": {"offload_optimizer": '
            '{"device": "cpu"}}}, which keeps the optimizer\'s state in host memory',
        )

    def list_options(self, recipe: Recipe, world_size: int) -> Iterator[Mapping[str, Any]]:
        """See `ListsOptions`."""
        return iter([{"stage": stage} for stage in (1, 2, 3)])

    def layout(
        self, plan: Plan, model: nn.Module, state_bytes: Mapping[str, int], world_size: int
    ) -> Layout:
        config = zero_config.resolve(plan.options or DeepspeedOptions(), plan, world_size)
        whole = layouts.replicated_layout(plan, model, state_bytes)
        return zero_config.layout(config, plan, model, whole, world_size)

    def check_model(self, model: nn.Module, recipe: Recipe, plan: Plan) -> None:
        """See `ChecksModels`: what only float32 can be."""
        options = plan.options or DeepspeedOptions()
        initialize.refuse_parameters(model, zero_config.resolve(options, plan, world_size()))

    @contextmanager
    def open(self, plan: Plan) -> Iterator[ProcessGroupSession]:
        options = plan.options or DeepspeedOptions()
        if not (probe := self.probe()).usable:
            raise BackendUnavailable(f"{probe.reason}; {probe.install}")
        device = choose_device(options.device, _ACCELERATOR)
        size = dist.get_world_size() if dist.is_initialized() else world_size()
        config = zero_config.resolve(options, plan, size)
        if size == 1:
            _LOG.warning("deepspeed in one process shards nothing; launch more, or use cpu or ddp")
        initialize.import_deepspeed(device)
        initialize.refuse_unsupported(zero_config.low_precision(config))
        if zero_config.swaps(config):
            operators.compile_file_operator()
        engines: WeakSet[ZeroEngine] = WeakSet()

        def build(recipe: Recipe, plan: Plan, world: World) -> ZeroEngine:
            engines.add(engine := ZeroEngine(recipe, plan, world, copy.deepcopy(config)))
            return engine

        destroy = initialize.destroy_process_group
        with initialize.local_rank_set(), process_group(plan, device, destroy) as world:
            try:
                yield ProcessGroupSession(plan, world, build)
            finally:
                for engine in [*engines]:
                    engine.close()


class ZeroEngine:
    """The module in a DeepSpeed engine; the kernel accumulates."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World, config: dict[str, Any]) -> None:
        import deepspeed

        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        self.plan, self.world = plan, world
        construct = (plan.options or DeepspeedOptions()).construct
        self.own = initialize.model(recipe, plan, config, construct)
        models.refuse_sparse(self.own, "deepspeed")
        self.tied = models.tied_groups(self.own)
        self.num_parameters = zero_state.num_elements(self.own)
        bucket = zero_config.bucket_elements(config, self.num_parameters)
        config["zero_optimization"]["reduce_bucket_size"] = bucket
        self._original = OriginalModule(self.own)
        models.hold(self.own)
        base = initialize.optimizer(recipe, self.own)
        named = dict(self.own.named_parameters())
        attached.refuse_inexact_hooks(named, plan, world, takes_gradients=True)
        of = {parameter: name for name, parameter in self.own.named_parameters()}
        names = [[of.get(p) for p in ps] for g in base.param_groups if (ps := g["params"])]
        own_optimizer, groups = None, None
        if section := config.pop("optimizer", None):
            config["optimizer"] = zero_config.fill_optimizer(section, base)
            keys = ("params", "lr", "weight_decay")
            groups = [{key: group[key] for key in keys} for group in base.param_groups]
            if not config["optimizer"]["params"].get("torch_adam"):
                operators.refuse_stale_locks()
        else:
            own_optimizer = base
            twins.refuse_unless_elementwise(base, world.device)
        if recipe.after_update is not None:
            zero_change.refuse_where_not_plain(config)
        self._autocast = models.autocast(plan, world.device)
        self._original_forward = self._local_forward = self.own.forward
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
        self.buffers = Buffers(self.own, Peers(world.rank, world.size), world.device)
        self.buffers.take_before_forward(self.module)
        self.numbers = GroupNumbers(names, self.zero.param_groups)
        self.averages = ZeroAverages(self.zero, self.own)
        self._built_state = zero_state.built_state(self.zero, self.own)
        if own_optimizer is not None and zero_state.num_calls(self.zero) > 1:
            twins.refuse_if_it_counts_steps(own_optimizer)
        trained = zero_state.trained(self.zero)
        named = dict(self.own.named_parameters())
        self._trained = frozenset(name for name, p in named.items() if id(p) in trained)
        self._others = [p for name, p in named.items() if name not in self._trained]
        self._frozen = Frozen(self.own)
        self._entered = Entered(self.module, partial(refuse_gradients, "deepspeed"))
        self._writes = Writes("deepspeed", self.own, each_of(self.own), plan.compile, world.size)
        self._module_hooks = ModuleHooks(self.own, plan, world)
        self.layers = UsedLayers(world)
        self._changed = WeightWrites(self.zero, self.own, config, self._writes, self.layers)
        self.open_to_writes = self._changed.open
        """See `KeepsWrites`."""
        self._is_closed = False
        self._registered, self._base = Registered(self.own), base
        self.draws = UpdateRandom(plan.seed, of_device(world.device), world.rank)
        self.number_update = self.draws.begin
        initialize.refuse_added_groups(base)
        self._reached: set[str] = set()  # by a gradient, which DeepSpeed then takes away
        in_groups = [self._trained.intersection(of_group) for of_group in self.numbers.names]
        self._updated = UpdatedParameters(self.zero, in_groups, own_optimizer, world.device)
        if zero_state.partitions_weights(self.zero):
            note_gathered_weights(self.own, self.layers)
        self._order = GradientOrder(self.zero, self.own, self.layers)
        if plan.max_grad_value is not None:
            limit_values(self.zero, plan.max_grad_value)
        for name, parameter in named.items():
            if parameter.requires_grad:
                reach = partial(self._reach, name, parameter)
                parameter.register_hook(reach)  # type: ignore[no-untyped-call]
        whole = {} if zero_state.partitions_weights(self.zero) else named
        self._copies = Copies(lambda: (Held(name, "", p) for name, p in whole.items()), world)
        self.loss_scale = None
        if plan.precision.loss_scaling and not config.get("fp16", {}).get("enabled"):
            self.loss_scale = stepping.LossScale(world.device)
            self.zero.custom_loss_scaler = True
            self.zero.external_loss_scale = float(self.loss_scale.scale)

    def _reach(self, name: str, parameter: nn.Parameter, grad: Tensor) -> None:
        self._reached.add(name)
        self._order.arrives(parameter)

    def _computing(self, *args: Any, **kwargs: Any) -> Any:
        # the engine turns autocast off around the forward; a cache would hold every weight, whole
        dtype = self.plan.precision.compute
        with torch.autocast(self.world.device.type, dtype, cache_enabled=False):
            return self._original_forward(*args, **kwargs)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.zero.param_groups
        return groups

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        self._registered.refuse("deepspeed")
        self._frozen.refuse_thawed("deepspeed")
        self._entered.begin()
        return self._writes.watching(self._module_hooks.watching(last))

    def autocast(self) -> AbstractContextManager[Any]:
        return self._named("gathering weights in a forward", self._autocast())

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        call = "gathering weights or summing gradients in a backward"
        with self._entered.backward(loss), self._named(call):
            self._order.begin()
            self.module.backward(loss * weight, scale_wrt_gas=False)
            self._order.end()

    def unused(self) -> Sequence[str]:
        named = self.own.named_parameters()
        return [name for name, p in named if p.requires_grad and name not in self._reached]

    runs_all_modules = True
    _observer: Any = None
    """The observer of the next update; see `show_update`."""

    def show_update(self, observer: Any) -> None:
        """See `ShowsUpdates`."""
        zero_shown.refuse_where_unseen(self.zero)
        self._observer = observer

    def update(self) -> Outcome:
        self._frozen.refuse_thawed("deepspeed")
        with self._named("comparing which layers were used"):
            self.layers.compare()
        reached, absent = self._trained & self._reached, self._trained - self._reached
        self._updated.check(reached, absent)
        self._reached = set()
        observer, self._observer = self._observer, None
        shown = left = models.NO_CONTEXT
        if observer is not None:
            shown = zero_shown.shown(self.zero, self.own, reached, observer)
        if absent:
            left = zero_absent.left_alone(self.zero, self.own, absent)
        draws = self.draws.update(self._base)
        with self._named("updating the weights"), shown, left, draws, self._changed.updating():
            self.module.step()
        zero_absent.forget_gradients(self.zero)
        stepping.forget_gradients(self._others)
        self._writes.updated()
        norm = torch.as_tensor(self.module.get_global_grad_norm(), dtype=torch.float32)
        if applied := bool(self.module.was_step_applied()):
            self._updated.done(reached)
        if self.loss_scale is not None:
            self.loss_scale.update(torch.full((), float(not applied), device=self.world.device))
            self.zero.external_loss_scale = float(self.loss_scale.scale)
        return Outcome(norm.to(self.world.device), lambda: applied)

    def audit(self) -> None:
        self._copies.compare()

    def shards(self) -> Iterator[Piece]:
        counted = self.numbers.tensors(self.zero.param_groups)
        world, scale = self.world, self._scale()
        yield from zero_state.pieces(
            self.own, self.zero, self._trained, counted, scale, world.rank, world.size
        )
        yield from self.averages.pieces()
        yield from self.buffers.extra.pieces()

    def restore(self, reader: Reader) -> None:
        scale, stored = self._scale(), set(reader.names("state"))
        with refusing_together(self.world.rank, self.world.size):
            planned = zero_state.plan_restore(reader, self.own, self.zero, self.numbers)
            updated, extra = self._updated.read(reader), self.buffers.extra.read(reader)
            scale |= {
                name: model_state.read_number(reader, name) for name in scale if name in stored
            }
        trained, built = self._trained, self._built_state
        with model_state.overwriting():
            zero_state.restore(reader, self.own, self.zero, planned, trained, built)
            self.averages.restore(reader)
        self._updated.restored(updated)
        self.numbers.load(self.zero.param_groups, planned.counted)
        zero_state.publish(self.zero)
        self.buffers.extra.load(extra)
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

    def change_weights(self, change: Callable[[Mapping[str, Any]], None]) -> None:
        zero_change.change_weights(self.zero, self.own, change)

    def averaged(self) -> AbstractContextManager[None]:
        return self.averages.shown()

    @contextmanager
    def full_params(self, names: Sequence[str] | None = None) -> Iterator[nn.Module]:
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        named = dict(self.own.named_parameters(remove_duplicate=False))
        if hasattr(self.zero, "_partition_all_parameters"):
            self.zero._partition_all_parameters()  # nothing half fetched is left
        chosen = list(named.values()) if names is None else [named[name] for name in names]
        with self.buffers.of_rank_0(), ExitStack() as stack:
            with self._named("gathering whole weights"):
                stack.enter_context(GatheredParameters(chosen))
            stack.enter_context(without_hooks(self.own, self._local_forward))
            yield self.own

    def _named(
        self, call: str, inside: AbstractContextManager[Any] = models.NO_CONTEXT
    ) -> AbstractContextManager[None]:
        return naming_collectives(call, self.world.rank, inside=inside)

    def give_back(self) -> bool:
        """See `GivesBack`."""
        if self._is_closed:
            return False
        if hasattr(self.zero, "_partition_all_parameters"):
            self.zero._partition_all_parameters()
        self.buffers.take_for_good()
        with self._named("gathering whole weights"):
            whole = self._original.whole()
        self.close()
        self._original.give_back(whole)
        models.release(self.own)
        return True

    def close(self) -> None:
        """Take DeepSpeed's hooks off the module, and its references to it."""
        if not self._is_closed:
            self._is_closed = True
            initialize.destroy(self.module, self.own, self._base)


driver = DeepspeedDriver()
