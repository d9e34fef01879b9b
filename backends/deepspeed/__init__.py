"""DeepSpeed's ZeRO stages; `driver.py` is the driver."""
