"""What scripts expect of `trainer.accelerator`, and of accelerate's configuration."""
