"""The order in which weights are gathered, and gradients added up, over ranks: the same on all.

DeepSpeed puts gradients into its buckets as autograd yields them, and ranks' buckets are matched by
this order alone. Within one layer it may follow from the data: an LSTM yields those of its two
directions in another order for sequences of one length than for packed ones of several.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..process_group.used_layers import UsedLayers


class GradientOrder:
    """Holds the gradients of a layer until all of them have arrived, and gives them to DeepSpeed in
    the layer's own order; at the end of a backward those that are left. Each is noted before:
    ranks that use different layers end by an error that names the layers, instead of waiting in
    DeepSpeed."""

    def __init__(self, zero: Any, module: nn.Module, layers: UsedLayers) -> None:
        self.layers = layers
        self._layer_of: dict[Tensor, list[nn.Parameter]] = {}
        for part in module.modules():
            own = [p for p in part.parameters(recurse=False) if p not in self._layer_of]
            self._layer_of |= dict.fromkeys(own, own)
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._kinds: dict[Tensor, int] = {
            p: layers.kind(f"the gradient of {name!r}") for p, name in names.items()
        }
        self._end = layers.kind("the end of the backward")
        self._ended = True
        self._arrived: dict[Tensor, None] = {}
        self._held: dict[Tensor, tuple[Any, ...]] = {}
        self._take = zero.reduce_ready_partitions_and_remove_grads
        self._take_all = zero.overlapping_partition_gradients_reduce_epilogue
        zero.reduce_ready_partitions_and_remove_grads = self._hold
        zero.overlapping_partition_gradients_reduce_epilogue = self._release_all

    def begin(self) -> None:
        """Note that a backward begins."""
        self._ended = False
        self._arrived.clear()
        self.layers.backward()

    def arrives(self, parameter: nn.Parameter) -> None:
        """Called when autograd has the gradient, right before DeepSpeed is given it."""
        self._arrived[parameter] = None
        for each in self._whole(parameter, self._arrived):
            self._note(each)

    def end(self) -> None:
        """Note the end of the backward, once, before ranks add up the gradients that are left."""
        if not self._ended:
            self._ended = True
            for parameter in [p for p in self._layer_of if p in self._arrived]:
                self._note(parameter)
            self.layers.note(self._end)
            self.layers.check()

    def _note(self, parameter: Tensor) -> None:
        del self._arrived[parameter]
        self.layers.note(self._kinds[parameter])

    def _hold(self, parameter: nn.Parameter, *index: Any) -> None:
        self._held[parameter] = index
        if whole := self._whole(parameter, self._held):
            self.layers.check()
            self._release(whole)

    def _release_all(self) -> None:
        self.end()
        self._release([parameter for parameter in self._layer_of if parameter in self._held])
        self._take_all()

    def _release(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            self._take(parameter, *self._held.pop(parameter))

    def _whole(self, parameter: Tensor, here: Collection[Tensor]) -> list[nn.Parameter]:
        """Return the trained parameters of its layer once all are in `here`; else an empty list."""
        trained = [each for each in self._layer_of[parameter] if each.requires_grad]
        return trained if all(each in here for each in trained) else []


def note_gathered_weights(module: nn.Module, layers: UsedLayers) -> None:
    """Note, where weights are partitioned, each layer that has some of its own, and each weight
    that is gathered by itself, since it is used without a call of its layer. Small ones stay whole
    once they are gathered, which may be in any step."""
    for name, part in module.named_modules():
        if part._parameters:
            own = part.parameters(recurse=False)
            again = not all(getattr(p, "ds_persist", True) for p in own)
            layers.watch_gathered(name, part, again)
    for name, parameter in module.named_parameters():
        gathers: Any = parameter
        kind = layers.kind(f"the weight {name!r}")
        gathers.all_gather = partial(_gather, layers, kind, gathers.all_gather)


def _gather(
    layers: UsedLayers, kind: int, gather: Any, param_list: Any = None, **options: Any
) -> Any:
    """Replace `all_gather` of a parameter. With a list, all ranks gather other parameters."""
    if param_list is None:
        layers.note(kind)
        layers.check()
    return gather(param_list, **options)
