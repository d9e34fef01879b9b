"""A loss far above the usual: the run goes back to the newest checkpoint, and leaves out the
samples of that step and of the one before."""

from dataclasses import replace

from base import inputs, labels, recipe, settings
from torch.utils.data import TensorDataset

from drivetrain import CheckpointSettings, DataSettings, SpikeSettings, fit
from drivetrain.kernel.events import LossSpiked, RolledBack

broken = inputs[:300].clone()
broken[250:252] = 1e4  # two samples that are alike,
labels[250], labels[251] = 0, 1  # and not of one class
events = []
result = fit(
    replace(recipe, train_data=TensorDataset(broken, labels[:300])),
    replace(
        settings,
        epochs=1,
        global_batch=5,
        log_every=1,
        data=DataSettings(shuffle=False),  # they come in step 51
        spikes=SpikeSettings(factor=20, roll_back=True),
        checkpoint=CheckpointSettings(every=10),
    ),
    backend="cpu",
    out="runs/spikes",
    observers=[lambda e: events.append(e) if isinstance(e, LossSpiked | RolledBack) else None],
)
print(f"{[type(event).__name__ for event in events]}, then {result.reason} at {result.step}")
