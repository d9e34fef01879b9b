"""The contracts step, evaluate and save, and the loop that runs them. It names no backend.

Read `recipe.py` (what a user writes), `contract.py` (what a driver implements), `step.py`,
`evaluate.py` and `loop.py`, in this order.
"""
