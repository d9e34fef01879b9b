"""`Trainer` and its parts, around the kernel's loop."""
