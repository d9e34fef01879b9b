"""`drivetrain launch`: files by which a scheduler starts a training, and restarts it.

`job` holds what all schedulers share. `slurm`, `kubernetes` and `ray` write the files.
`ray_workers` runs on the cluster.
"""
