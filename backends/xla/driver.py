"""XLA through torch_xla: TPUs, and any other PJRT device; one process feeds all of its devices.

On several devices it is single-program multi-data (GSPMD, https://arxiv.org/abs/2105.04663): each
batch is split along its first dimension, each parameter and its optimizer state along one of its
dimensions, and the compiler puts the collectives in.

Operations are recorded and run when the graph is cut, so the cuts decide what is compiled. There
are four programs: forward and backward of a first microbatch, of a further one, clipping, and the
update. The first two are compiled once for each batch shape; the update twice, since its first run
makes the state.
`placing.py` holds what torch_xla needs; a native TPU backend of PyTorch can replace torch_xla in
that module and in this one.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from ...checkpoint.optimizer_entries import AVERAGE, dtype_of
from ...data.nested import map_tensors, tensors_of
from ...data.random_state import seed_generators
from ...data.ranges import Range, check_ranges
from ...kernel.contract import Outcome, World
from ...kernel.errors import BackendUnavailable, CheckpointDamaged, DataError
from ...kernel.plan import Capabilities, Layout, Plan, Probe
from ...kernel.recipe import Batch, Recipe
from ...kernel.shards import Piece, Reader
from ..common import attached, fork_gc, layouts, model_state, models, random_state, stepping
from ..common.extra_state import ExtraState
from ..common.module_hooks import ModuleHooks
from ..common.optimizer_state import OptimizerState
from ..common.registered import Registered
from ..common.shown import ShowsWholeWeights
from ..common.single_process import SingleProcess
from ..common.update_random import UpdateRandom
from . import placing

__all__ = ["driver"]

_HOST_BYTES = 2**28
"""The most bytes copied to the host at once while saving."""


@dataclass(frozen=True)
class XlaOptions:
    """The driver's own arguments. The first three are fixed by the first run of a process."""

    platform: str | None = None
    """PJRT's name of the device type, such as TPU or CPU; by default `PJRT_DEVICE`, or what
    torch_xla finds."""
    devices: Annotated[int, Range(1, of_machine=True, unit="devices")] | None = None
    """On the CPU: the number of virtual devices; by default `CPU_NUM_DEVICES`, or one."""
    spmd: bool | None = None
    """Spread over all devices; by default where there is more than one. False takes the first."""
    max_batch_shapes: Annotated[int, Range(1)] = 16
    """Most batch shapes, each of which costs a compilation; more of them end the run."""

    def __post_init__(self) -> None:
        check_ranges(self, "backend.")


class XlaDriver:
    """One process, all devices."""

    name = "xla"
    options_type = XlaOptions

    def probe(self) -> Probe:
        install = "pip install 'drivetrain[xla]'"
        if importlib.util.find_spec("torch_xla") is None:
            return Probe(False, "torch_xla is not installed", install)
        ours, theirs = torch.__version__, metadata.version("torch_xla")
        versions = {"torch": ours, "torch_xla": theirs}
        if ours.split(".")[:2] != theirs.split(".")[:2]:
            reason = f"torch_xla {theirs} needs the torch of the same version, this is {ours}"
            return Probe(False, reason, install, versions)
        platform = placing.default_platform()
        count = os.environ.get("CPU_NUM_DEVICES", "1") if platform == "CPU" else "all"
        return Probe(
            usable=True,
            reason=f"PJRT on {platform}, {count} device{'' if count == '1' else 's'}",
            versions=versions,
            devices=(platform,),
            preference=-1 if platform == "CPU" else 30,
        )

    def capabilities(self, plan: Plan) -> Capabilities:
        return Capabilities(
            precisions=frozenset({"fp32", "bf16"}),
            multi_process=False,
            sharded=False,  # the one process reads any parameter whole
            compile=False,  # XLA compiles all of it anyway
            activation_checkpointing=True,
            max_grad_value=True,
            feeds_ahead=False,
            static_shapes=True,
            costly_reads=True,
            saves_memory="on several devices the weights are sharded over them (backend.spmd)",
        )

    def layout(
        self, plan: Plan, model: nn.Module, state_bytes: Mapping[str, int], world_size: int
    ) -> Layout:
        note = (
            "sharded over all devices of the one process; an update holds old and new for a while"
        )
        whole = layouts.replicated_layout(plan, model, state_bytes, notes=(note,))
        held = whole.gradient_bytes + whole.optimizer_bytes
        return replace(whole, transient_bytes=max(whole.transient_bytes, held))

    @contextmanager
    def open(self, plan: Plan) -> Iterator[XlaSession]:
        probe = self.probe()
        if not probe.usable:
            raise BackendUnavailable(f"{probe.reason}; {probe.install}")
        options = plan.options or XlaOptions()
        fork_gc.leave_the_parents_garbage()
        placement = placing.start(options.platform, options.devices, options.spmd)
        yield XlaSession(plan, placement, options.max_batch_shapes)


class XlaSession(SingleProcess):
    """One feeder, whatever the number of devices."""

    def __init__(self, plan: Plan, placement: placing.Placement, max_batch_shapes: int) -> None:
        self.plan, self.placement = plan, placement
        self.world = World(0, 1, placement.device, feeder_index=0, num_feeders=1)
        self._max_shapes = max_batch_shapes
        self._shapes: set[tuple[tuple[int, ...], ...]] = set()

    def seed(self, value: int) -> None:
        import torch_xla

        seed_generators(value, devices=True)
        torch_xla.manual_seed(value)  # torch.manual_seed does not reach it

    def prepare(self, recipe: Recipe) -> XlaEngine:
        return XlaEngine(recipe, self.plan, self.placement)

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        place = self.placement
        for batch in batches:
            self._check(batch)
            placing.cut_graph()  # what was done with the last batch is a program of its own
            yield map_tensors(lambda t: place.put(t, place.batch_dim(t)), batch)

    def _check(self, batch: Batch) -> None:
        self._shapes.add(tuple(tuple(t.shape) for t in tensors_of(batch)))
        if len(self._shapes) > self._max_shapes:
            shown = "; ".join(str(shapes) for shapes in sorted(self._shapes)[:8])
            raise DataError(
                f"more than {self._max_shapes} shapes of batches, and XLA compiles for each shape: "
                f"{shown} ... Let collate pad to one length, or to a few, and choose a micro_batch "
                "with many divisors; or raise backend.max_batch_shapes"
            )

    def rng_state(self) -> dict[str, Tensor]:
        import torch_xla.core.xla_model as xm

        # an unsigned 64-bit number
        state = torch.tensor(xm.get_rng_state() - 2**63, dtype=torch.int64)
        return {**random_state.rng_state(torch.device("cpu")), "xla": state}

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        import torch_xla.core.xla_model as xm

        own = state.get("xla")
        if own is not None and (own.dim() or own.dtype != torch.int64):
            raise CheckpointDamaged(f"random state 'xla' is {own!r:.200}, which is no number")
        of_host = {name: tensor for name, tensor in state.items() if name != "xla"}
        random_state.set_rng_state(torch.device("cpu"), of_host)
        if own is not None:
            xm.set_rng_state(int(own) + 2**63)


class XlaEngine(ShowsWholeWeights):
    """The user's own module, its parameters moved to the device."""

    def __init__(self, recipe: Recipe, plan: Plan, placement: placing.Placement) -> None:
        self.plan, self.placement = plan, placement
        host = replace(plan, activation_checkpointing=())
        self.own = self.module = models.build_model(recipe, host, None)
        self.tied = models.tied_groups(self.module)
        self.num_parameters = sum(p.numel() for p in self.module.parameters())
        world = World(0, 1, placement.device, feeder_index=0, num_feeders=1)
        attached.refuse_inexact_hooks(dict(self.module.named_parameters()), plan, world)
        self.module_hooks = ModuleHooks(self.module, plan, world)
        placing.move(self.module, placement)
        placing.count_variances_as_torch(self.module)
        for pattern in plan.activation_checkpointing:
            models.recompute_activations(self.module, pattern, placing.recompute)
        self.optimizer = models.build_optimizer(recipe, self.module)
        for group in self.optimizer.param_groups:
            if group.get("fused"):
                group["fused"] = False  # torch has no such kernel here, and XLA fuses all of it
        self.state = OptimizerState(self.optimizer, self.module)
        self.extra = ExtraState(self.module, placement.device)
        self.draws = UpdateRandom(plan.seed, [placing.random_source()])
        self.number_update = self.draws.begin
        self.registered = Registered(self.module)
        self.autocast = models.autocast(plan, placement.device)
        self._pending_outcome: placing.ConditionalUpdate | None = None
        placing.cut_graph()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are trained now."""
        return [p for p in self.module.parameters() if p.requires_grad]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups  # `load_state_dict` makes a new list

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        self.registered.refuse("xla")
        placing.cut_graph()
        with self.module_hooks.watching(last):
            yield
        for parameter in self.parameters:
            if parameter.grad is not None:
                self.placement.keep(parameter.grad, self.placement.sharded_dim(parameter))
        placing.cut_graph()

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        stepping.backward(loss, weight)

    def unused(self) -> Sequence[str]:
        return models.without_gradient(self.module)

    def update(self) -> Outcome:
        self._resolve_pending_outcome()
        if self._observer is not None:
            self._show_update()
            placing.cut_graph()  # the update stays the program that it is in other steps
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = stepping.global_norm(grads)
        if self.plan.max_grad_norm is not None:
            factor = (self.plan.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(grads, factor)
        if self.plan.max_grad_value is not None:
            stepping.limit_values(grads, self.plan.max_grad_value)
        if (self.plan.max_grad_norm, self.plan.max_grad_value) != (None, None):
            # An optimizer that looks at values in its step, as Adafactor does, runs part after part
            # of the graph. Parts that differ in nothing but which of several tensors of one shape
            # they take are one program to torch_xla 2.8, given the same tensors each time.
            placing.cut_graph()
        held = self._pending_outcome = placing.ConditionalUpdate(self.optimizer, norm)
        with self.draws.update(self.optimizer):
            self.optimizer.step()
        stepping.forget_gradients(self.parameters)
        held.choose()
        for parameter in self.parameters:
            dim = self.placement.sharded_dim(parameter)
            for tensor in (parameter, *self.optimizer.state.get(parameter, {}).values()):
                if isinstance(tensor, Tensor) and tensor.shape == parameter.shape:
                    self.placement.keep(tensor, dim)
        placing.cut_graph()
        return Outcome(norm, held.applied)

    def _resolve_pending_outcome(self) -> None:
        if self._pending_outcome is not None:
            self._pending_outcome.applied()
            self._pending_outcome = None

    def shards(self) -> Iterator[Piece]:
        self._resolve_pending_outcome()
        yield from self.extra.pieces()
        waiting: list[Piece] = []
        for piece in model_state.replicated_pieces(self.module, self.state, None, 0, 1):
            if piece.tensor.device != self.placement.device:
                yield piece
            elif self.placement.is_sharded(piece.tensor):
                for box, part in self.placement.parts(piece.tensor):
                    yield replace(piece, tensor=part, region=box)
            else:
                waiting.append(piece)
                if sum(piece.tensor.nbytes for piece in waiting) > _HOST_BYTES:
                    yield from placing.fetch(waiting)
                    waiting = []
        yield from placing.fetch(waiting)

    def restore(self, reader: Reader) -> None:
        self._resolve_pending_outcome()
        place, sharded_dim = self.placement.put, self.placement.sharded_dim
        weights = model_state.named_state(self.module)
        model_state.check_same_model(reader, *model_state.shapes_and_dtypes(weights))
        state, extra = self.state.read(reader, self._read_entry), self.extra.read(reader)
        parameters = dict(self.module.named_parameters())
        with model_state.overwriting():
            self.state.load(state)
            for name, old in weights.items():
                new = reader.read("weights", name).to(old.dtype)
                if name in parameters:
                    parameters[name].data = place(new, sharded_dim(new))
                else:
                    old.copy_(new)
        self.extra.load(extra)
        if extra:
            self._keep_sharded()
        placing.cut_graph()

    def _read_entry(self, reader: Reader, name: str, parameter: nn.Parameter) -> Tensor:
        """Read an entry; a tensor of the parameter's shape is placed like the parameter, and a
        large one is never whole on a device."""
        value = reader.read("optimizer", name)
        if value.shape != parameter.shape or not value.dim():
            return value
        if value.is_floating_point() and not name.endswith(f"/{AVERAGE}"):
            value = value.to(dtype_of(name) or parameter.dtype)
        return self.placement.put(value, self.placement.sharded_dim(value))

    def average(self, weight: float) -> None:
        self._resolve_pending_outcome()
        self.state.averages.move(self.state.trained, weight)
        for average in self.state.averages.of.values():
            self.placement.keep(average, self.placement.sharded_dim(average))
        placing.cut_graph()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        self._resolve_pending_outcome()
        with self.state.averages.shown_in(self.state.trained):
            self._keep_sharded()
            yield
        self._keep_sharded()

    def _keep_sharded(self) -> None:
        """Restore the partition of weights that were written to."""
        for parameter in self.parameters:
            self.placement.keep(parameter, self.placement.sharded_dim(parameter))
        placing.cut_graph()

    def change_weights(self, change: Callable[[Mapping[str, Any]], None]) -> None:
        self._resolve_pending_outcome()
        change(self.own_parts())
        self._keep_sharded()

    def full_params(self, names: Sequence[str] | None = None) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.module)


driver = XlaDriver()
