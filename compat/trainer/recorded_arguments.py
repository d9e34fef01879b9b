"""The arguments of a run, as its records hold them."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...run.run_folder import TRAINER
from ...run.run_folder_writer import configuration
from ...run.where_shown import script_command
from ..arguments.reports import REPORTS

__all__ = ["arguments_as_config"]

_NO_CONDITIONS = frozenset(
    {"output_dir", "logging_dir", "run_name", "local_rank", "disable_tqdm", "report_to"}
    | {*REPORTS, "preemption_notice", "stats_activations"}
)
"""Arguments that change nothing in a run's numbers, and are not recorded."""


def arguments_as_config(args: Any, name: str) -> dict[str, Any]:
    """Return the content of `config.json` for a run by these arguments."""
    defaults = {each.name: each.default for each in dataclasses.fields(args)}
    values = {key: each for key, each in args.to_dict().items() if key not in _NO_CONDITIONS}
    given = {key: each for key, each in values.items() if each != defaults.get(key)}
    config = configuration(
        name=name,
        recipe=None,
        command=script_command("trainer.train()"),
        given=given,
        values=values,
        sources={key: "TrainingArguments" if key in given else "default" for key in values},
        track=(),
    )
    return {**config, "started_by": TRAINER}
