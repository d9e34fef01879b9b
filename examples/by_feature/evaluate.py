"""The metrics of a checkpoint, later or elsewhere; `drivetrain evaluate RUN --follow` does it for
each checkpoint as it comes."""

from base import recipe, settings

from drivetrain import evaluate, fit

trained = fit(recipe, settings, backend="cpu", out="runs/evaluate")
again = evaluate(recipe, "runs/evaluate", settings=settings, backend="cpu")
print(f"{trained.metrics} then, {again} now")
