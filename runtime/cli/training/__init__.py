"""Training a recipe, and evaluating and predicting with the result."""
