"""The fields that are read of each record, with checks: an untrusted or damaged record may hold
anything.

A record that does not fit is skipped as a whole, and counted. A field that is not named here is
never read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

__all__ = ["SYSTEM_FIGURES", "Group", "Record", "fits", "fitting", "grouped"]

Record = dict[str, Any]

SYSTEM_FIGURES = (
    "process_bytes",
    "process_peak_bytes",
    "processor_cores",
    "device_bytes",
    "device_peak_bytes",
)
"""Figures of the system in a logged record (`system_figures`); each may be missing."""

_LARGEST = 1e290
"""Largest number that is accepted; larger ones cannot be drawn, summed or converted."""
_LARGEST_INT = 1 << 63
_MAX_LENGTH = 200
_MAX_TEXT = 2000
_MAX_NAMES = 1000
_MAX_PARAMETERS = 20_000


@dataclass
class Group:
    """Records of one event that follow each other."""

    event: str
    records: list[Record]
    columns: Mapping[str, Sequence[Any]] | None = None
    """The values of each field, if all records have the same fields."""

    def column(self, name: str) -> Sequence[Any]:
        """Return the value of a field in each record; None where it is missing."""
        if self.columns is None:
            return [record.get(name) for record in self.records]
        return self.columns.get(name) or [None] * len(self.records)

    def points(self, name: str) -> tuple[Sequence[int], Sequence[Any]]:
        """Return the steps of the records that have a field, and its values."""
        if self.columns is None:
            has = [record for record in self.records if name in record]
            return [record["step"] for record in has], [record[name] for record in has]
        return (self.columns["step"], self.columns[name]) if name in self.columns else ((), ())


def grouped(records: Iterable[Record]) -> list[Group]:
    """Return groups of records that fit the schema."""
    return [Group(event, list(found)) for event, found in groupby(records, key=_event)]


_event = itemgetter("event")


def fitting(values: Sequence[Any]) -> list[Group]:
    """Return the values that are valid records, in groups. Neighbours that are alike, as the logs
    of a long run are, are checked together, field by field.
    """
    found: list[Group] = []
    for kind, of_kind in groupby(values, key=type):
        for names, alike in groupby(of_kind, key=tuple) if kind is dict else ():
            for group in _fitting_alike(names, list(alike)):
                if found and found[-1].event == group.event:
                    found[-1].records += group.records
                    found[-1].columns = None
                else:
                    found.append(group)
    return found


def _fitting_alike(names: tuple[str, ...], records: list[Any]) -> list[Group]:
    """Return the valid ones of records with the same fields."""
    if "event" in names and len(records) > 1:
        columns = dict(zip(names, zip(*map(dict.values, records), strict=True), strict=True))
        events = columns["event"]
        if type(events[0]) is str and events.count(events[0]) == len(events):
            fields = _FIELDS.get(events[0])
            if fields and all(_all_fit(check, columns.get(name)) for name, check in fields):
                return [Group(events[0], records, columns)]
    return grouped(record for record in records if fits(record))


def _all_fit(check: Callable[[Any], bool], column: Sequence[Any] | None) -> bool:
    """True if a field is valid in all records, which have the same fields; None: none has it."""
    if column is None:
        return check(_MISSING)
    kinds = set(map(type, column))
    if kinds == {float} and check in _OF_NUMBERS:
        return _all_in_range(column)
    if kinds == {int}:  # each check of integers is one of a range
        return check(min(column)) and check(max(column))
    if kinds == {str}:
        return all(map(check, set(column)))
    if kinds == {dict} and not any(column):
        return check({})
    if kinds == {dict} and check in _OF_NAMED_NUMBERS and max(map(len, column)) <= _MAX_NAMES:
        names = set(chain.from_iterable(column))
        numbers = list(chain.from_iterable(map(dict.values, column)))
        if not set(map(type, numbers)) - {float}:
            return all(map(_text, names)) and _all_in_range(numbers)
    return all(map(check, column))


def _all_in_range(numbers: Sequence[float]) -> bool:
    return math.hypot(*numbers) < _LARGEST or all(map(_number, numbers))


def fits(record: Any) -> bool:
    """True if all known fields of the record are valid."""
    if type(record) is not dict:
        return False
    event = record.get("event")
    if type(event) is not str:
        return False
    get = record.get
    for name, check in _FIELDS.get(event, _ANY):
        value = get(name, _MISSING)
        kind = type(value)  # the most frequent records of a long file come first
        if kind is float:
            if not -_LARGEST < value < _LARGEST or check not in _OF_NUMBERS:
                return False
        elif not check(value):
            return False
    return True


_MISSING = object()


def _step(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST_INT


def _number(value: Any) -> bool:
    """Check a number or null, which stands for a number that was not finite, or is unknown."""
    kind = type(value)
    return value is None or (
        (kind is float or kind is int) and -_LARGEST < value < _LARGEST  # false for NaN
    )


def _text(value: Any) -> bool:
    return type(value) is str and len(value) <= _MAX_LENGTH


def _long_text(value: Any) -> bool:
    return type(value) is str and len(value) <= _MAX_TEXT


def _numbers(value: Any) -> bool:
    if type(value) is not dict or len(value) > _MAX_NAMES:
        return False
    return all(_text(name) and _number(part) for name, part in value.items())


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Make a check that also accepts a missing value and null."""
    return lambda value: value is _MISSING or value is None or check(value)


def _is_verdict(value: Any) -> bool:
    return (
        type(value) is dict
        and _number(value.get("share", _MISSING))
        and type(value.get("kind")) is str
        and _long_text(value.get("text"))
    )


def _verdicts(value: Any) -> bool:
    return type(value) is list and len(value) <= _MAX_NAMES and all(map(_is_verdict, value))


def _numbers_by_name(value: Any) -> bool:
    """Check the statistics of parameters, of which there may be many."""
    if type(value) is not dict or len(value) > _MAX_PARAMETERS:
        return False
    return all(_text(name) and _numbers(part) for name, part in value.items())


def _texts(value: Any) -> bool:
    return (
        type(value) is dict
        and len(value) <= _MAX_NAMES
        and all(
            _text(name) and type(part) is str and len(part) <= _MAX_TEXT
            for name, part in value.items()
        )
    )


def _names(value: Any) -> bool:
    return type(value) is list and len(value) <= _MAX_NAMES and all(map(_text, value))


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(map(check, value))


def _packed(value: Any) -> bool:
    """Check digests, whose text is as long as the model has tensors."""
    return type(value) is str


_number_or_none = _or_none(_number)
_numbers_or_none = _or_none(_numbers)
_OF_NUMBERS, _OF_NAMED_NUMBERS = (_number, _number_or_none), (_numbers, _numbers_or_none)
_MAY_HAVE_STEP = ("step", _or_none(_step))
_MAY_HAVE_TIME = ("time", _number_or_none)
_ANY = (_MAY_HAVE_STEP, _MAY_HAVE_TIME)
_FIELDS: dict[str, tuple[tuple[str, Callable[[Any], bool]], ...]] = {
    "run_started": (
        ("first_step", _or_none(_step)),
        ("num_parameters", _number),
        ("began", _number_or_none),
        ("starting_seconds", _number_or_none),
        _MAY_HAVE_STEP,
        _MAY_HAVE_TIME,
    ),
    "logged": (
        ("step", _step),
        ("total_steps", _or_none(_step)),
        ("loss", _number),
        ("learning_rate", _number),
        ("grad_norm", _number),
        ("items_per_second", _number),
        ("item_name", _text),
        ("mfu", _number_or_none),
        ("losses", _numbers_or_none),
        ("seconds_left", _number_or_none),
        ("parts", _numbers_or_none),
        _MAY_HAVE_TIME,
        *((name, _number_or_none) for name in SYSTEM_FIGURES),
    ),
    "evaluated": (
        ("step", _step),
        ("name", _text),
        ("metrics", _numbers),
        ("seconds", _number_or_none),
        _MAY_HAVE_TIME,
    ),
    "reformed": (
        ("step", _step),
        ("seconds", _number_or_none),
        ("steps_back", _or_none(_step)),
        _MAY_HAVE_TIME,
    ),
    "non_finite_found": (("step", _step), ("text", _long_text), _MAY_HAVE_TIME),
    "saved": (("step", _step), ("seconds", _number_or_none), _MAY_HAVE_TIME),
    "memory_counted": (
        ("step", _step),
        ("rank", _step),
        ("parts", _numbers),
        ("estimated", _names),
        ("modules", _numbers),
        ("remedies", _texts),
        ("device_peak_bytes", _number_or_none),
        _MAY_HAVE_TIME,
    ),
    "time_spent": (
        ("step", _step),
        ("rest", _numbers_or_none),
        ("verdicts", _verdicts),
        _MAY_HAVE_TIME,
    ),
    "stats": (
        ("step", _step),
        ("parameters", _numbers_by_name),
        ("activations", _numbers_by_name),
        _MAY_HAVE_TIME,
    ),
    "step_digests": (
        ("step", _step),
        ("losses", _list_of(_number)),
        ("epoch", _step),
        ("first_sample", _step),
        ("samples", _step),
        ("batch", _packed),
        ("random", _text),
        ("weights", _packed),
        ("names", _list_of(_packed)),
        ("gradients", _or_none(_packed)),
        ("gradient_names", _or_none(_list_of(_packed))),
        ("ranks", _or_none(_packed)),
        _MAY_HAVE_TIME,
    ),
    "run_ended": (("step", _step), ("reason", _text), ("seconds", _number), _MAY_HAVE_TIME),
}
"""The checked fields by event; of any other event only the step is read."""
