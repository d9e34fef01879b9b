"""Fully sharded data parallelism; `driver.py` is the driver."""
