"""`Trainer`: what it is made of, and how it runs the kernel's loop."""
