"""`Trainer`, which uses the kernel's loop, and its mixins."""
