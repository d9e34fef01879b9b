"""The outputs of a trained model, for each sample in order, on any driver. With `receive=` they
come in chunks, and memory does not grow."""

from base import held_out, recipe, settings

from drivetrain import fit, predict

trained = fit(recipe, settings, backend="cpu", out="runs/predict")
outputs = predict(
    recipe,
    held_out,
    trained.checkpoint,
    backend="cpu",
    forward=lambda module, batch: module(batch[0]),
)
print(outputs.shape)
