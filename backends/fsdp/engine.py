"""The engine of the driver `fsdp`, which `mesh` uses with partitions of its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...kernel.contract import Outcome, World
from ...kernel.plan import Plan
from ...kernel.recipe import Recipe
from ...kernel.shards import Kind, Piece, Reader
from ..common import model_state, models, stepping
from ..common.averages import Averages
from ..common.entered import Entered, refuse_second_derivatives
from ..common.optimizer_state import OptimizerState
from ..common.registered import Registered
from ..common.unwrapping import unwrapped
from ..process_group.buffers import Buffers
from ..process_group.collectives import naming_collectives, refusing_together
from ..process_group.copies import Copies
from ..process_group.peers import Peers
from ..process_group.replicated_parameters import ReplicatedParameters
from ..process_group.used_layers import UsedLayers
from . import dtensor, hooks, meta_init, norms, sharding, step_strategy, whole, wrap_units
from .partition import Partition
from .shard_writes import ShardWrites, refusing_writes
from .shown import show_update

__all__ = ["FsdpEngine"]


class FsdpEngine:
    """The user's module, sharded in place: names stay, parameters become `DTensor`s.

    Order matters: activations are recomputed inside of what is compiled, and that inside of the
    hooks that gather; the optimizer is built last, over this rank's parts.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        world: World,
        name: str = "fsdp",
        partitions: Sequence[Partition] = (),
        mesh: Any = None,
        peers: Peers | None = None,
    ) -> None:
        """`name`: of the driver. `partitions`: innermost first. `mesh`: to shard units over; None:
        as the options say. `peers`: the ranks that hold the same layers; None: all.
        """
        self.options = options = sharding.options_of(plan)
        self.plan, self.world, self.driver_name = plan, world, name
        self._named = functools.partial(naming_collectives, rank=world.rank)
        self.peers, self.partitions = peers or Peers(world.rank, world.size), partitions
        self.home = torch.device("cpu") if options.cpu_offload else world.device
        with meta_init.parameters_on_meta() if options.meta else models.NO_CONTEXT:
            self.module = models.with_synced_batch_norm(
                self._build_model(recipe), options.sync_batch_norm, world.device, "fsdp"
            )
        models.make_contiguous(self.module.parameters())
        models.refuse_sparse(self.module, name)
        self.given = hooks.UserHooks(self.module, plan, world)
        models.hold(self.module)
        if options.from_rank_0:
            with self._named("taking over the weights of rank 0"):
                meta_init.take_from_rank_0(self.module)
        self.uninitialised = any(p.is_meta for p in self.module.parameters())
        self.tied = models.tied_groups(self.module)
        self.num_parameters = sum(p.numel() for p in self.module.parameters())
        units = wrap_units.choose_units(self.module, options.wrap, options.min_unit_params)
        for partition in partitions:
            units = partition.choose_units(self.module, units)
        if plan.compile:
            self._compile(units or [self.module])
        for partition in reversed(partitions):
            partition.partition_layers(self)
        self.elsewhere = {key: self.module.get_parameter(key) for key in self.elsewhere}
        self.given.refuse_partitioned(self.module)
        replicated = sharding.replicated_parameters(self.module, units)
        ignored = {*replicated.values(), *self.elsewhere.values()}
        mesh = sharding.mesh_of(options, world) if mesh is None else mesh
        self.units = [self._shard(unit, mesh, ignored) for unit in (*units, self.module)]
        if self.uninitialised:
            meta_init.materialise(self.module, self.home)
        self.replicas = [self.num_replicas(*named) for named in self.module.named_parameters()]
        """Number of ranks that hold this rank's shard of each parameter; 0: all hold it whole."""
        kept_whole = sharding.moved(self.module, replicated, world.device)
        self.replicated_parameters = ReplicatedParameters(kept_whole, self.peers, world.device)
        self.buffers = Buffers(self.module, self.peers, world.device, options.sync_buffers)
        self.buffers.take_before_forward(self.module)
        self.layers = UsedLayers(world, world.size // self.peers.size)
        self._watch_layers()
        self.given.attach_to(self.module, self.units)
        self.optimizer = models.build_optimizer(recipe, self.module)
        self.state = OptimizerState(self.optimizer, self.module, Averages(dtensor.own_part))
        self.state.elsewhere = self.elsewhere.keys()
        self.stepper, self.draws = step_strategy.choose(
            self.optimizer, plan, self.module, world.device, self.peers
        )
        self.number_update = self.draws.begin
        self.loss_scale = stepping.LossScale(self.home) if plan.precision.loss_scaling else None
        self._autocast = models.autocast(plan, world.device)
        self._last: bool | None = None
        self._entered = Entered(self.module, functools.partial(refuse_second_derivatives, name))
        self._registered = Registered(self.module)
        self._watch = hooks.watched_writes(self.module, self.units, plan, world)
        self.open_to_writes = ShardWrites(self).open
        """See `KeepsWrites`."""
        self.copies = Copies(lambda: dtensor.held(self.module, self.elsewhere), world)
        self.loss_hooks: list[Callable[[Tensor], None]] = []
        """Called with the loss of each microbatch before its backward."""
        self.audit_hooks: list[Callable[[], None]] = []
        """Called by `audit`."""
        for partition in partitions:
            partition.attach(self)

    _observer: Any = None  # of the next update; see `show_update`
    elsewhere: Mapping[str, nn.Parameter] = MappingProxyType({})
    """FQN -> placeholder of a weight that none of `peers` holds."""
    step: Callable[..., Any] | None = None
    """Forward and backward of a microbatch, in the form of `Recipe.step`; None: the kernel's."""
    deferred_backward: Callable[[Tensor, Tensor], None] | None = None
    """Takes a loss and its scaled weight while something else runs the backward."""

    def _build_model(self, recipe: Recipe) -> nn.Module:
        """Build the whole module, where the recipe puts it."""
        plan = dataclasses.replace(self.plan, activation_checkpointing=())
        module = models.build_model(recipe, plan, None)
        for partition in self.partitions:
            partition.replace_forwards(module)
        recompute = next((p.recompute for p in self.partitions if p.recompute), None)
        for pattern in self.plan.activation_checkpointing:
            models.recompute_activations(module, pattern, recompute)
        return module

    def _compile(self, parts: Sequence[nn.Module]) -> None:
        """Compile a unit at its first call, when its layers are partitioned."""
        for partition in reversed(self.partitions):
            parts = [each for part in parts for each in partition.to_compile(part)]
        for part in parts:  # not `part.compile()`, which would trace the hooks too
            part.forward = torch.compile(part.forward, **self.plan.compile_options)

    def _shard(self, unit: nn.Module, mesh: Any, ignored: set[nn.Parameter]) -> Any:
        others = (partition.sharding_of(unit) for partition in self.partitions)
        mesh, placement = next(filter(None, others), (mesh, None))
        return sharding.shard(unit, self.plan, mesh, ignored, placement)

    def num_replicas(self, name: str, parameter: nn.Parameter) -> int:
        """Number of ranks that hold this rank's part of a parameter; 0: all hold the whole."""
        found = (partition.num_holders(name) for partition in self.partitions)
        ranks = next(filter(None, found), None)
        if isinstance(parameter, DTensor):
            return dtensor.num_replicas(parameter, ranks or self.world.size)
        return ranks or 0

    def _watch_layers(self) -> None:
        """Note the use of units and, without compilation, of layers with weights to train."""
        units = set(self.units) - {self.module}
        for name, part in self.module.named_modules():
            own = part.parameters(recurse=False)
            if part in units:
                self.layers.watch_gathered(name, part, bool(self.options.reshard_after_forward))
            elif not self.plan.compile and name and any(p.requires_grad for p in own):
                self.layers.watch_inside(name, part)
        others = {id(p) for p in (*self.replicated_parameters.parameters, *self.elsewhere.values())}
        self._absent = [
            self.layers.kind(f"no gradient of {name!r}")
            if parameter.requires_grad and id(parameter) not in others
            else None
            for name, parameter in self.module.named_parameters()
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups  # `load_state_dict` makes a new list

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        self._registered.refuse(self.driver_name)
        sends = last or self.options.sync_each_microbatch
        self._entered.begin(sends and self.world.size > 1)
        if last is not self._last:  # each of these walks over all modules
            self._last, root = last, self.units[-1]
            root.set_requires_gradient_sync(sends)
            root.set_reshard_after_backward(last or self.options.reshard_after_backward)
            root.set_is_last_backward(last)
        watching = self._watch.watching(self.given.of_modules.watching(last))
        with refusing_writes(self.module, "fsdp and mesh"), watching, ExitStack() as stack:
            for partition in self.partitions:
                stack.enter_context(partition.microbatch())
            yield

    def without_update(self) -> AbstractContextManager[None]:
        """Enclose forward and backward of a microbatch whose gradients nobody keeps: where none is
        kept, FSDP reduces none."""
        return self.microbatch(last=True)

    def autocast(self) -> AbstractContextManager[Any]:
        self._registered.refuse(self.driver_name)
        self._initialise()
        inside = self._autocast()
        for partition in self.partitions:
            inside = partition.forward(inside)
        return self._named("gathering weights in a forward", inside=inside)

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        for hook in self.loss_hooks:
            hook(loss)
        if self.deferred_backward is not None:
            self.deferred_backward(loss, stepping.scaled(weight, self.loss_scale))
            return
        call = "gathering weights or averaging gradients in a backward"
        with self._entered.backward(loss), self._named(call):
            self.layers.backward(self._last is not False or self.options.sync_each_microbatch)
            stepping.backward(loss, weight, self.loss_scale)

    def unused(self) -> Sequence[str]:
        names: Sequence[str] = models.without_gradient(self.module)
        names = [name for name in names if name not in self.elsewhere]
        for partition in self.partitions:
            names = partition.unused(names)
        return names

    def update(self) -> Outcome:
        parameters = list(self.module.parameters())
        self.state.follow_groups(self.driver_name)
        self._compare_layers(parameters)
        self.complete_gradients()
        parts = [dtensor.own_part(p.grad) for p in parameters if p.grad is not None]
        if self.loss_scale is not None:
            self.loss_scale.unscale(parts)
        if self._observer is not None:
            show_update(self, self._observer)
            self._observer = None
        with self._named("adding up the gradient norm"):
            norm = norms.global_norm(parameters, self.replicas, self.home)
        with self._named("updating the weights"), self.draws.update(self.optimizer):
            plan = self.plan
            outcome = stepping.step_if_finite(
                self.stepper, parts, norm, plan.max_grad_norm, self.loss_scale, plan.max_grad_value
            )
        stepping.forget_gradients(parameters)
        self._watch.updated()
        return outcome

    @property
    def runs_all_modules(self) -> bool:
        """See `ShowsUpdates`."""
        return not self.elsewhere

    def show_update(self, observer: Any) -> None:
        """See `ShowsUpdates`."""
        self._observer = observer

    def complete_gradients(self) -> None:
        """Average gradients that no library averages, after the last backward of an update."""
        for partition in reversed(self.partitions):
            partition.complete_gradients()
        self.replicated_parameters.average(self.plan.precision.reduce)

    def audit(self) -> None:
        self._initialise()
        self.copies.compare()
        for hook in self.audit_hooks:
            hook()

    def _compare_layers(self, parameters: Sequence[nn.Parameter]) -> None:
        for kind, parameter in zip(self._absent, parameters, strict=True):
            if kind is not None and parameter.grad is None:
                self.layers.note(kind)
        with self._named("comparing which layers were used"):
            self.layers.compare()

    def shards(self) -> Iterator[Piece]:
        self.ready()
        pieces = self._own_pieces()
        for partition in self.partitions:
            pieces = partition.pieces(pieces)
        yield from pieces

    def _own_pieces(self) -> Iterator[Piece]:
        yield from self.buffers.pieces()
        yield from dtensor.pieces(self.tensors(), self.peers.rank, self.peers.size)

    def tensors(self) -> Mapping[Kind, Mapping[str, Tensor]]:
        """Return all that is saved but for buffers and extra state, by kind and name."""
        return {
            "weights": dict(self.module.named_parameters()),
            "optimizer": self.state.tensors(),
            "state": model_state.scale_tensors(self.loss_scale),
        }

    def restore(self, reader: Reader) -> None:
        self._reshard()
        for partition in self.partitions:
            reader = partition.reader(reader)
        weights = model_state.named_state(self.module)
        model_state.check_same_model(reader, *model_state.shapes_and_dtypes(weights))
        with refusing_together(self.world.rank, self.world.size):
            state = self.state.read(reader, dtensor.read_optimizer_entry)
            scale = model_state.read_scale(reader, self.loss_scale)
            extra = self.buffers.extra.read(reader)
        with model_state.overwriting():
            self.state.load(state)
            for name in weights.keys() - self.elsewhere.keys():
                tensor = weights[name]
                dtensor.own_part(tensor).copy_(dtensor.read_weight(reader, name, tensor))
        model_state.load_scale(scale, self.loss_scale)
        self.buffers.restore_own(reader)
        self.buffers.extra.load(extra)
        self.uninitialised = False

    def average(self, weight: float) -> None:
        self.state.averages.move(self.state.trained, weight)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        self._initialise()
        self._reshard()  # weights gathered before and within are gathered again after
        with self.state.averages.shown_in(self.state.trained):
            try:
                yield
            finally:
                self._reshard()

    def change_weights(self, change: Callable[[Mapping[str, Any]], None]) -> None:
        self._reshard()
        change(self.own_parts())

    def own_parts(self) -> Mapping[str, Any]:
        """Return this rank's part of each parameter, and which elements these are."""
        parts: Mapping[str, Any] = dtensor.own_parts(self.module, self.elsewhere)
        for partition in self.partitions:
            parts = partition.own_parts(parts)
        return parts

    @contextmanager
    def full_params(self, names: Sequence[str] | None = None) -> Iterator[nn.Module]:
        self.ready()
        full = whole.stand_ins(self, self.given, names, self.world.device)
        with (
            self.buffers.of_rank_0(),
            meta_init.replaced(self.module, full),
            unwrapped(self.module, sharding.LIBRARIES, sharding.mixed_in()),
            ExitStack() as stack,
        ):
            for partition in self.partitions:
                stack.enter_context(partition.full_params(self.module))
            yield self.module

    def ready(self) -> None:
        """Initialise weights that have no values yet, and free gathered ones."""
        self._initialise()
        self._reshard()

    def give_back(self) -> bool:
        """See `GivesBack`."""
        return all(each.can_be_undone for each in self.partitions) and whole.give_back(self)

    def whole(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Return the whole parameter, as the recipe's model knows it, on every rank."""
        if name in self.elsewhere:
            found = torch.empty(parameter.shape, dtype=parameter.dtype)
        else:
            found = dtensor.whole(parameter, self.world.device)
        for partition in self.partitions:
            found = partition.whole(name, found)
        return found

    def own_of(self, name: str, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return this rank's part of what `whole` returns."""
        for partition in self.partitions:
            whole = partition.as_held(name, whole)
        return dtensor.take_own(whole, parameter)

    def _reshard(self) -> None:
        """Shard all units again: after an evaluation the root still has its whole weights."""
        for unit in self.units:
            unit.reshard()

    def _initialise(self) -> None:
        """Initialise weights without values; late, since a checkpoint may be restored first."""
        if self.uninitialised:
            meta_init.fill(self.module, self.plan.seed, self._take_own)
            self.uninitialised = False

    def _take_own(self, name: str, parameter: nn.Parameter, whole: Tensor) -> None:
        if name not in self.elsewhere:
            dtensor.own_part(parameter).copy_(self.own_of(name, parameter, whole))
