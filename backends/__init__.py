"""The drivers that ship with drivetrain, one file each; `drivetrain.registry` finds them."""

__all__: list[str] = []
