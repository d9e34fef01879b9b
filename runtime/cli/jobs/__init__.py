"""`drivetrain launch`: what a scheduler is given to start a training, and to start it again.

`job` says what is common to all, `slurm`, `kubernetes` and `ray` write the files; `ray_workers`
runs on the cluster.
"""
