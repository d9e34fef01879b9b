"""accelerate's `Accelerator` and configuration files, on drivetrain's drivers."""
