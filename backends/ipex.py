"""Intel's extension for PyTorch on the CPU: its kernels, layouts and fused optimizer steps.

Upstream ended its development with 2.8. In fp32 the weights stay where they are. In bf16 the
layers hold bfloat16 weights in blocked layouts and the optimizer the other half of their bits, so
everything that is saved or restored goes through the plain `state_dict` of both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, Any, Literal, cast

import torch
from torch import Tensor, nn

from ..checkpoint.extra_state import extra_state, weight_names
from ..data.ranges import Range, check_ranges
from ..kernel.contract import Outcome, World
from ..kernel.errors import BackendUnavailable, CapabilityRefused, RecipeError
from ..kernel.plan import Capabilities, Plan, Probe
from ..kernel.recipe import Recipe
from ..kernel.shards import Piece, Reader
from .common import layouts, model_state, models
from .common.data_writes import noting_writes
from .common.masters import ExactMasters
from .common.optimizer_state import OptimizerState
from .common.plain_engine import PlainEngine
from .common.registered import Registered
from .common.single_process import HostSession, threads_of_one_operation
from .common.writes import AFTER_UPDATE, Writes, each_of

__all__ = ["driver"]

_REPLACEMENT = (
    "upstream ended it with 2.8; use backend cpu instead (stock PyTorch has its CPU kernels), and "
    "for Intel GPUs backend xpu"
)


@dataclass(frozen=True)
class IpexOptions:
    """Arguments of `intel_extension_for_pytorch.optimize`."""

    level: Literal["O0", "O1"] = "O1"
    """O0 changes nothing."""
    weights_prepack: bool | None = None
    """Keep weights in the blocked layouts of oneDNN; by default where the processor has kernels for
    the precision (bf16 needs AVX-512), for the optimizers that have a kernel of the extension:
    others may keep a state that does not fit a blocked weight. Not for models with transposed
    convolutions, which do not take their weights from a checkpoint then."""
    fuse_update_step: bool | None = None
    """Step with the extension's own kernel where it has one; by default the level decides."""
    threads: Annotated[int, Range(1, of_machine=True, unit="threads")] | None = None
    """Threads of one operation; torch's own choice by default."""

    def __post_init__(self) -> None:
        check_ranges(self, "backend.")


class IpexDriver:
    """One process on an Intel CPU."""

    name = "ipex"
    options_type = IpexOptions
    layout = staticmethod(layouts.replicated_layout)

    def probe(self) -> Probe:
        install = "pip install 'drivetrain[ipex]'"
        if importlib.util.find_spec("intel_extension_for_pytorch") is None:
            reason = f"intel-extension-for-pytorch is not installed ({_REPLACEMENT})"
            return Probe(False, reason, install)
        ours, theirs = torch.__version__, metadata.version("intel-extension-for-pytorch")
        versions = {"torch": ours, "intel-extension-for-pytorch": theirs}
        if ours.split(".")[:2] != theirs.split(".")[:2]:
            reason = f"version {theirs} needs the torch of the same version, this is {ours}"
            return Probe(False, f"{reason} ({_REPLACEMENT})", install, versions)
        return Probe(
            usable=True,
            reason=f"{torch.get_num_threads()} threads ({_REPLACEMENT})",
            versions=versions,
            devices=("cpu",),
            preference=-1,
        )

    def capabilities(self, plan: Plan) -> Capabilities:
        return Capabilities(
            precisions=frozenset({"fp32", "bf16"}),
            multi_process=False,
            sharded=False,
            compile=False,
            activation_checkpointing=True,
            max_grad_value=True,
            feeds_ahead=False,
        )

    @contextmanager
    def open(self, plan: Plan) -> Iterator[HostSession]:
        probe = self.probe()
        if not probe.usable:
            raise BackendUnavailable(f"{probe.reason}; {probe.install}")
        options = plan.options or IpexOptions()
        with threads_of_one_operation(options.threads):
            yield HostSession(plan, IpexEngine)


_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class IpexEngine(PlainEngine):
    """The user's own module, optimized in place; some layers are replaced by the extension's."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World) -> None:
        super().__init__(recipe, plan, world)
        recomputed = [name for name, part in self.own.named_modules() if "forward" in vars(part)]
        # afterwards parameters and layers may be others: what the user calls them is noted here
        self._names = weight_names(self.own)
        self._shapes = {name: t.shape for name, t in model_state.named_state(self.own).items()}
        self.state = _IpexState(self.optimizer, self.own)
        self._optimize(plan.options or IpexOptions())
        _mend_state_dict(self.own)
        for name in recomputed:
            if "forward" not in vars(self.own.get_submodule(name)):  # the layer was replaced
                models.recompute_activations(self.own, name)
        self.parameters = list(self.own.parameters())
        self.registered = Registered(self.own)
        self._changed = _ChangedWeights(self.own, self.optimizer)
        is_low = plan.precision.compute != plan.precision.params
        # without masters a weight is all that there is, and each write lasts
        begin = each_of(self.own) if is_low else None
        self._writes = Writes("ipex", self.own, begin, plan.compile, world.size)

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        return self._writes.watching(super().microbatch(last))

    def update(self) -> Outcome:
        self._writes.updated()
        self._changed.updated()
        return super().update()

    def open_to_writes(self, where: str) -> AbstractContextManager[Any]:
        """See `KeepsWrites`."""
        return self._changed.open(where, self._writes)

    def follow(self, registered: Mapping[str, nn.Parameter]) -> None:
        self.registered.new.extend(registered.values())
        self.registered.refuse("ipex")

    def _optimize(self, options: IpexOptions) -> None:
        import intel_extension_for_pytorch as ipex
        from intel_extension_for_pytorch._C import onednn_has_bf16_support
        from intel_extension_for_pytorch.optim import _optimizer_utils as known

        prepack = options.weights_prepack
        compute = self.plan.precision.compute
        low = compute != self.plan.precision.params
        transposed = any(isinstance(part, _TRANSPOSED) for part in self.own.modules())
        if prepack and transposed:
            raise CapabilityRefused(
                "backend.weights_prepack=true",
                "ipex",
                "transposed convolutions in blocks do not take weights from a checkpoint; leave it "
                "out",
            )
        fused = type(self.optimizer) in known.IPEX_FUSED_OPTIMIZER_LIST_CPU
        if prepack is None and (not fused or transposed or (low and not onednn_has_bf16_support())):
            prepack = False
        self.own.train()  # it refuses an optimizer in evaluation mode
        ipex.optimize(
            self.own,
            dtype=compute if low else None,
            optimizer=self.optimizer,
            level=options.level,
            inplace=True,
            weights_prepack=prepack,
            fuse_update_step=options.fuse_update_step,
        )

    def shards(self) -> Iterator[Piece]:
        yield from self.extra.pieces()
        weights = self.own.state_dict()
        yield from model_state.partitioned_pieces(
            {
                "weights": {name: weights[name].detach() for name in self._shapes},
                "optimizer": self.state.tensors(),
            },
            0,
            1,
        )

    def restore(self, reader: Reader) -> None:
        model_state.check_same_model(reader, self._shapes)
        state, extra = self.state.read(reader), self.extra.read(reader)
        weights = {name: reader.read("weights", name) for name in self._shapes}
        for first, *others in self.tied:
            weights |= dict.fromkeys(others, weights[first])
        self._load(weights)
        self.state.load(state)
        self.extra.load(extra)

    def average(self, weight: float) -> None:
        self.state.averages.move(self._plain_weights(), weight)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Weights in blocked layouts, or in halves, are written by `load_state_dict` alone."""
        kept = {name: tensor.detach().clone() for name, tensor in self._all_weights().items()}
        shown = {**kept, **self.state.averages.of}
        for first, *others in self.tied:
            shown |= dict.fromkeys(others, shown[first])
        self._load(shown)
        try:
            yield
        finally:
            self._load(kept)

    def change_weights(self, change: Callable[[Mapping[str, Any]], None]) -> None:
        weights = {name: tensor.detach().clone() for name, tensor in self._all_weights().items()}
        tied = {name: group[0] for group in self.tied for name in group}
        names = [name for name, _ in self.own.named_parameters() if tied.get(name, name) == name]
        change({name: (weights[name], tuple(weights[name].shape)) for name in names})
        self._load(weights | {name: weights[first] for name, first in tied.items()})

    def show_update(self, observer: Any) -> None:
        """See `ShowsUpdates`. Raises `CapabilityRefused` if the extension keeps weights in parts,
        or with elements of its own between them."""
        remedy = ""
        if self.plan.precision.compute != self.plan.precision.params:
            remedy = "it keeps weights in two halves; set precision=fp32"
        elif blocked := self._changed.in_blocks():
            names = ", ".join(blocked[:3])
            remedy = f"it fills up the blocks of {names}; set backend.weights_prepack=false"
        if remedy:
            raise CapabilityRefused("stats.every", "ipex", f"{remedy}, or stats.every=0")
        super().show_update(observer)

    def own_parts(self) -> dict[str, Any]:
        return {name: part for name, part in super().own_parts().items() if name in self._shapes}

    def _all_weights(self) -> dict[str, Tensor]:
        """Return all weights and buffers in plain layouts, by all of their names."""
        extra = extra_state(self.own, self._names)
        packed = self.own.state_dict()
        return {name: each for name, each in packed.items() if name not in extra}

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights and buffers; other state of modules stays."""
        extra = extra_state(self.own, self._names)
        held = [(parameter, parameter.data) for parameter in self.own.parameters()]
        self.own.load_state_dict({**weights, **extra})
        # blocked layers compute with the memory of their bias, which loading replaces
        for parameter, memory in held:
            parameter.data = memory.copy_(parameter.data)

    def _plain_weights(self) -> dict[str, Tensor]:
        weights = self.own.state_dict()
        return {name: weights[name].detach() for name in self.state.trained}


class _ChangedWeights:
    """The weights that user's code writes to between forwards. In bf16 an update and a save begin
    with their masters."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._named = dict(module.named_parameters())
        kept = {id(each.parameter): each for each in getattr(optimizer, "params_attr", {}).values()}
        self._kept = {name: kept[id(p)] for name, p in self._named.items() if id(p) in kept}
        """How the extension keeps a weight, by name: its blocks, its master or lower half."""
        self._exact = ExactMasters()

    def updated(self) -> None:
        """See `ExactMasters`."""
        self._exact.updated()

    def in_blocks(self) -> list[str]:
        """Return the names of weights that lie in blocks, which have elements of their own."""
        return [name for name, kept in self._kept.items() if kept.op_ctx is not None]

    @contextmanager
    def open(self, where: str, forwards: Writes) -> Iterator[None]:
        """See `KeepsWrites`. `forwards`: watches the writes in forwards."""
        # blocked layers compute with the memory of their bias
        noting = noting_writes(self._named, keep_memory=True)
        with forwards.leaving_out():
            with noting as written:
                yield
            changed = {name: self._kept[name] for name in sorted(written & self._kept.keys())}
            if blocked := [name for name, kept in changed.items() if kept.op_ctx is not None]:
                raise RecipeError(
                    f"{where} wrote to {', '.join(blocked[:10])}, whose elements lie in blocks in "
                    "an order of the extension's own. Set backend.weights_prepack=false. Changes "
                    f"after each update belong in {AFTER_UPDATE}"
                )
            with torch.no_grad():
                for name, kept in changed.items():
                    self._carry(name, kept)

    def _carry(self, name: str, kept: Any) -> None:
        """Take over what was written to a weight, if it has a master."""
        if kept.split:
            self._exact.take_top(name, self._named[name], kept.parameter_trail)
        elif kept.split is not None:
            self._exact.take(name, self._named[name], kept.master_parameter)


def _mend_state_dict(module: nn.Module) -> None:
    """Let the extension's `state_dict` take `keep_vars`, which blocked layers refuse (entries are
    copies of theirs), and what is no tensor: it asks all entries for their addresses."""
    patched: Any = module
    if (plain := getattr(module, "_original_state_dict", None)) is None:
        return
    casting, apart = module.state_dict, {}

    def tensors(*args: Any, **kwargs: Any) -> dict[str, Any]:
        packed: dict[str, Any] = plain(*args, **kwargs)
        for key in [key for key, value in packed.items() if not isinstance(value, Tensor)]:
            apart[key] = packed.pop(key)
        return packed

    def whole(*args: Any, **kwargs: Any) -> dict[str, Any]:
        apart.clear()
        packed: dict[str, Any] = casting(*args, **kwargs | {"keep_vars": False})
        packed.update(apart)
        return packed

    patched._original_state_dict, patched.state_dict = tensors, whole


class _IpexState(OptimizerState):
    """Create it before the extension replaces parameters and lays their state out differently:
    `state_dict` gives the state in the old layout."""

    def _states(self) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        order = [name for of_group in self.names for name in of_group]
        for index, entries in self.optimizer.state_dict()["state"].items():
            yield index, cast(str, order[index]), entries

    def look_again(self) -> None:
        """Keep the names of the parameters that the extension has replaced, and take over groups
        that were added."""
        groups = self.optimizer.param_groups
        if len(groups) > len(self.names):
            now = {p: name for name, p in self.module.named_parameters()}
            self.names += [[now.get(p) for p in g["params"]] for g in groups[len(self.names) :]]
            self.numbers.renamed(self.names, groups)


driver = IpexDriver()
