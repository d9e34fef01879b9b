"""TPUs by torch_xla; `driver.py` is the driver."""
