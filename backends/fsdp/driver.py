"""Fully sharded data parallelism: each rank keeps a part of every weight, gradient and state.

FSDP2, `torch.distributed.fsdp.fully_shard` (https://arxiv.org/abs/2304.11277); NCCL where there is
CUDA, gloo on the CPU. The model is cut into *units*: the weights of a unit are gathered when its
forward or backward begins, and freed afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...kernel.contract import Outcome, World
from ...kernel.errors import RecipeError, SettingError
from ...kernel.plan import Capabilities, Layout, Plan, Probe
from ...kernel.recipe import Recipe
from ...kernel.shards import Piece, Reader
from ..common import float8, model_state, models, stepping
from ..common.averages import Averages
from ..common.optimizer_state import OptimizerState
from ..process_group.buffers import Buffers
from ..process_group.carried import Carried
from ..process_group.collectives import keep_for_a_while, naming_collectives, refusing_together
from ..process_group.layers_used import LayersUsed
from ..process_group.peers import Peers
from ..process_group.session import (
    ProcessGroupSession,
    choose_device,
    num_launched,
    probe_devices,
)
from . import dtensor, how_to_step, meta_init, sharding, wrap_units
from .sharding import FsdpOptions

__all__ = ["FsdpOptions", "driver"]

_LOG = logging.getLogger(__name__)


class FsdpDriver:
    """One process for each device, each holding a part of the model."""

    name = "fsdp"
    options_type: type[Any] = FsdpOptions

    def probe(self) -> Probe:
        return probe_devices(10 if num_launched() > 1 else -2)

    def capabilities(self, plan: Plan) -> Capabilities:
        options = sharding.options_of(plan)
        device = choose_device(options.device)
        return Capabilities(
            **float8.promised(options, device),
            multi_process=True,
            timeout_seconds=True,
            stall_seconds=True,
            sharded=True,
            compile=True,
            activation_checkpointing=True,
            uneven_gradients=False,
            feeds_ahead=device.type != "cpu",
            saves_memory="start more ranks; or set backend.cpu_offload=true, which keeps weights "
            "and the optimizer's state in host memory",
        )

    def layout(
        self, plan: Plan, model: nn.Module, state_bytes: Mapping[str, int], world_size: int
    ) -> Layout:
        options = sharding.options_of(plan)
        units = wrap_units.choose_units(model, options.wrap, options.min_unit_params)
        where = ("host memory",) if options.cpu_offload else ()
        return wrap_units.sharded_layout(
            plan,
            model,
            units,
            state_bytes,
            num_parts=self.num_parts(options, world_size),
            gathered=sharding.gathered_dtype(plan),
            keeps_gathered=not (options.reshard_after_forward and options.reshard_after_backward),
            accumulates_whole=not options.sync_each_microbatch
            and (plan.micro_batch or plan.global_batch) * world_size < plan.global_batch,
            notes=tuple(f"weights, gradients and state in {place}" for place in where),
        )

    def num_parts(self, options: Any, world_size: int) -> int:
        """The ranks over which a weight is cut."""
        return options.shard_size or world_size

    @contextmanager
    def open(self, plan: Plan) -> Iterator[ProcessGroupSession]:
        options, size = plan.options or FsdpOptions(), num_launched()
        if options.shard_size is not None and size % max(options.shard_size, 1):
            raise SettingError(
                f"backend.shard_size is {options.shard_size}; it must divide the {size} ranks"
            )
        if size == 1:
            _LOG.warning("fsdp in one process shards nothing; launch more, or use cpu or ddp")
        with sharding.opened(plan) as world:
            yield ProcessGroupSession(plan, world, FsdpEngine)


class FsdpEngine:
    """The user's module, cut in place: its names stay, its parameters are `DTensor`s.

    Order matters: activations are recomputed inside of what is compiled, and that inside of the
    hooks that gather; the optimizer is built last, over this rank's parts.
    """

    def __init__(self, recipe: Recipe, plan: Plan, world: World) -> None:
        self.options = options = sharding.options_of(plan)
        self.plan, self.world, self.peers = plan, world, self.peers_in(world)
        self.home = torch.device("cpu") if options.cpu_offload else world.device
        with meta_init.parameters_on_meta() if options.meta else models.NO_CONTEXT:
            self.module = models.with_synced_batch_norm(
                self.build_model(recipe), options.sync_batch_norm, world.device, "fsdp"
            )
        if options.from_rank_0:
            with self._named("taking over the weights of rank 0"):
                meta_init.take_from_rank_0(self.module)
        self.uninitialised = any(p.is_meta for p in self.module.parameters())
        self.tied = models.tied_groups(self.module)
        self.num_parameters = sum(p.numel() for p in self.module.parameters())
        units = self.choose_units()
        if plan.compile:
            for unit in units or [self.module]:
                self.compile(unit)
        mesh = self.cut_layers()
        whole = sharding.carried_whole(self.module, units)
        ignored = {*whole.values(), *self.elsewhere.values()}
        self.units = [self.shard(unit, mesh, ignored) for unit in (*units, self.module)]
        if self.uninitialised:
            meta_init.materialise(self.module, self.home)
        self.replicas = [self.num_replicas(*named) for named in self.module.named_parameters()]
        """Of each parameter: how many ranks hold this part; 0: it is whole on all."""
        self.carried = Carried(self._to_device(whole), self.peers, world.device)
        self.buffers = Buffers(self.module, self.peers, options.sync_buffers)
        self.buffers.take_before_forward(self.module)
        self.layers = self.notes()
        self._watch_layers()
        self.optimizer = models.build_optimizer(recipe, self.module)
        self.state = OptimizerState(self.optimizer, self.module, Averages(dtensor.own_part))
        self.state.elsewhere = self.elsewhere.keys()
        self.stepper = how_to_step.choose(
            self.optimizer, options.optimizer_step, self.module, world.device
        )
        self.loss_scale = stepping.LossScale(self.home) if plan.precision.loss_scaling else None
        self._autocast = models.autocast(plan, world.device)
        self._last: bool | None = None

    elsewhere: Mapping[str, nn.Parameter] = MappingProxyType({})
    """By FQN what stands for weights that none of `peers` holds."""

    def peers_in(self, world: World) -> Peers:
        """The ranks that hold this part of the model together."""
        return Peers(world.rank, world.size)

    def notes(self) -> LayersUsed:
        """Of the layers that ranks use."""
        return LayersUsed(self.world)

    def num_replicas(self, name: str, parameter: nn.Parameter) -> int:
        """How many ranks hold this part of it; 0: it is whole on all."""
        size = self.world.size
        return dtensor.num_replicas(parameter, size) if isinstance(parameter, DTensor) else 0

    def build_model(self, recipe: Recipe) -> nn.Module:
        """Whole, where the recipe puts it."""
        return models.build_model(recipe, self.plan, None)

    def choose_units(self) -> list[nn.Module]:
        """Inner ones first."""
        wrap, size = self.options.wrap, self.options.min_unit_params
        return wrap_units.choose_units(self.module, wrap, size)

    def cut_layers(self) -> Any:
        """Cut what is cut before units are, and return the mesh that those are cut over."""
        assert isinstance(self.options, FsdpOptions)
        return sharding.mesh_of(self.options, self.world)

    def compile(self, unit: nn.Module) -> None:
        """Once it is first called, by when its layers are cut."""
        # not `unit.compile()`, which would trace the hooks too
        unit.forward = torch.compile(unit.forward, **self.plan.compile_options)

    def shard(self, unit: nn.Module, mesh: Any, ignored: set[nn.Parameter]) -> Any:
        """Cut a unit."""
        return sharding.shard(unit, self.plan, mesh, ignored)

    def _watch_layers(self) -> None:
        """Units, and where nothing is compiled all that has weights to train of its own."""
        units = set(self.units) - {self.module}
        for name, part in self.module.named_modules():
            own = part.parameters(recurse=False)
            if part in units:
                self.layers.watch_gathered(name, part, bool(self.options.reshard_after_forward))
            elif not self.plan.compile and name and any(p.requires_grad for p in own):
                self.layers.watch_inside(name, part)
        others = {id(p) for p in (*self.carried.parameters, *self.elsewhere.values())}
        self._absent = [
            self.layers.kind(f"no gradient of {name!r}")
            if parameter.requires_grad and id(parameter) not in others
            else None
            for name, parameter in self.module.named_parameters()
        ]

    def _to_device(self, names: Iterable[str]) -> list[nn.Parameter]:
        """These parameters of the module, which nothing else moves there."""
        parameters = [self.module.get_parameter(name) for name in names]
        for parameter in parameters:
            parameter.data = parameter.data.to(self.world.device)
        return parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups  # `load_state_dict` makes a new list

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        if last is not self._last:  # each of these walks over all modules
            self._last, root = last, self.units[-1]
            root.set_requires_gradient_sync(last or self.options.sync_each_microbatch)
            root.set_reshard_after_backward(last or self.options.reshard_after_backward)
            root.set_is_last_backward(last)
        yield

    def autocast(self) -> AbstractContextManager[Any]:
        self._initialise()
        return self._named("gathering weights in a forward", self._autocast())

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        with self._named("gathering weights or averaging gradients in a backward"):
            self.layers.backward(self._last is not False or self.options.sync_each_microbatch)
            stepping.backward(loss, weight, self.loss_scale)

    def unused(self) -> Sequence[str]:
        found = models.without_gradient(self.module)
        return [name for name in found if name not in self.elsewhere]

    def update(self) -> Outcome:
        parameters = list(self.module.parameters())
        self._compare_layers(parameters)
        self.carried.average(self.plan.precision.reduce)
        parts = [dtensor.own_part(p.grad) for p in parameters if p.grad is not None]
        if self.loss_scale is not None:
            self.loss_scale.unscale(parts)
        norm = self._norm(parameters)
        with self._named("updating the weights"):
            outcome = stepping.step_if_finite(
                self.stepper, parts, norm, self.plan.max_grad_norm, self.loss_scale
            )
        stepping.forget_gradients(parameters)
        return outcome

    def _compare_layers(self, parameters: Sequence[nn.Parameter]) -> None:
        for kind, parameter in zip(self._absent, parameters, strict=True):
            if kind is not None and parameter.grad is None:
                self.layers.note(kind)
        with self._named("comparing which layers were used"):
            self.layers.compare()

    def _norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Of the whole gradient: each rank's parts, and what every rank has."""
        whole: list[Tensor] = []
        cut: dict[int, list[Tensor]] = {}
        for parameter, replicas in zip(parameters, self.replicas, strict=True):
            if parameter.grad is not None:
                held = cut.setdefault(replicas, []) if replicas else whole
                held.append(dtensor.own_part(parameter.grad))
        square = torch.zeros((), dtype=torch.float64, device=self.home)
        for replicas, parts in cut.items():  # every replica of a part counts it once
            square += stepping.global_norm(parts).to(self.home).double().square() / replicas
        with self._named("adding up the gradient norm"):
            dist.all_reduce(keep_for_a_while(square))
        if whole:
            square += stepping.global_norm(whole).to(self.home).double().square()
        return square.sqrt().float()

    def shards(self) -> Iterator[Piece]:
        self._initialise()
        self._let_go()
        yield from self.buffers.own_pieces()
        yield from model_state.buffer_pieces(self.module, self.peers.rank)
        yield from dtensor.pieces(
            {
                "weights": model_state.named_parameters(self.module),
                "optimizer": self.state.tensors(),
                "state": model_state.scale_tensors(self.loss_scale),
            },
            self.peers.rank,
            self.peers.size,
        )

    def restore(self, reader: Reader) -> None:
        self._let_go()
        weights = model_state.named_state(self.module)
        model_state.check_same_model(reader, *model_state.shapes_and_dtypes(weights))
        with refusing_together(self.world.rank, self.world.size):
            state = self.state.read(reader, dtensor.read_optimizer_entry)
            scale = model_state.read_scale(reader, self.loss_scale)
        with model_state.overwriting():
            self.state.load(state)
            for name in weights.keys() - self.elsewhere.keys():
                tensor = weights[name]
                dtensor.own_part(tensor).copy_(dtensor.read_weight(reader, name, tensor))
        model_state.load_scale(scale, self.loss_scale)
        self.buffers.restore_own(reader)
        self.uninitialised = False

    def average(self, weight: float) -> None:
        self.state.averages.move(self.state.trained, weight)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        self._initialise()
        self._let_go()  # what is gathered before and within is gathered anew after
        with self.state.averages.shown_in(self.state.trained):
            try:
                yield
            finally:
                self._let_go()

    @contextmanager
    def full_params(self, names: Sequence[str] | None = None) -> Iterator[nn.Module]:
        self._initialise()
        self._let_go()
        tied = {name: group[0] for group in self.tied for name in group}
        wanted = None if names is None else {tied.get(name, name) for name in names}
        full: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in self.module.named_parameters():
            if wanted is None or name in wanted:
                data = self.whole(name, parameter)
                full[parameter] = nn.Parameter(data, parameter.requires_grad)
        wrappers = ("torch.distributed.fsdp", "torch.distributed.tensor")
        own_hooks = (*wrappers, __name__.removesuffix(".fsdp.driver"))
        with (
            self.buffers.of_rank_0(),
            meta_init.replaced(self.module, full),
            meta_init.unwrapped(self.module, sharding.mixed_in(), own_hooks),
        ):
            yield self.module

    def whole(self, name: str, parameter: nn.Parameter) -> Tensor:
        """As the recipe's model knows it, on every rank."""
        return dtensor.whole(parameter, self.world.device)

    def own_of(self, name: str, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's part of what `whole` gives."""
        return dtensor.take_own(whole, parameter)

    def _let_go(self) -> None:
        """Register the parts again: after an evaluation the root still has its whole weights."""
        for unit in self.units:
            unit.reshard()

    def _initialise(self) -> None:
        """Fresh weights for what was never in memory; late, since a checkpoint may come first."""
        if not self.uninitialised:
            return
        names = {parameter: name for name, parameter in self.module.named_parameters()}

        def keep(parameter: nn.Parameter, whole: Tensor) -> None:
            if (name := names[parameter]) not in self.elsewhere:
                dtensor.own_part(parameter).copy_(self.own_of(name, parameter, whole))

        missing = meta_init.initialise(self.module, self.plan.seed, keep)
        if missing:
            raise RecipeError(
                f"backend.meta is true and nothing initialises {', '.join(missing)}: give their "
                "modules reset_parameters(), resume from a checkpoint, or set backend.meta=false"
            )
        self.uninitialised = False

    def _named(
        self, call: str, inside: AbstractContextManager[Any] = models.NO_CONTEXT
    ) -> AbstractContextManager[None]:
        return naming_collectives(call, self.world.rank, inside=inside)


driver = FsdpDriver()
