"""Learning-rate schedules: a function of the updates that were applied, so that resuming needs no
state of it."""

from dataclasses import replace

from base import recipe, settings

from drivetrain import ScheduleSettings, fit
from drivetrain.kernel.events import Logged

rates = []
warm = ScheduleSettings(name="warmup_stable_decay", warmup=10, final=0.0, decay=0.25)
fit(
    recipe,
    replace(settings, schedule=warm, log_every=5),
    backend="cpu",
    observers=[lambda e: rates.append(e.learning_rate) if isinstance(e, Logged) else None],
)
print([f"{rate:.4f}" for rate in rates])
