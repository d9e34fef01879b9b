"""The Hugging Face surface: its Trainer's names, signatures and numbers, on drivetrain's kernel."""

__all__: list[str] = []
