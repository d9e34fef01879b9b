"""The Hugging Face surface: names, signatures and numbers of its Trainer, on drivetrain's kernel."""

__all__: list[str] = []
