"""A stream: a function that makes an iterable of samples for each epoch. It has no length, so the
run is given its steps; it resumes at the sample where it was."""

from dataclasses import replace

from base import inputs, labels, recipe, settings

from drivetrain import fit


def samples():
    """Yield samples, here from memory; a stream could also read lines of files or messages of a
    queue.
    """
    yield from zip(inputs, labels, strict=True)


streaming = replace(recipe, train_data=samples)
first = fit(streaming, replace(settings, steps=7), backend="cpu", out="runs/stream")
more = fit(streaming, replace(settings, steps=20), backend="cpu", out="runs/stream", resume="auto")
print(f"{first.step} steps, then on to {more.step}")
