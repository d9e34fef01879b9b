"""Results of evaluation, and functions on nested outputs."""
