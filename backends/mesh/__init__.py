"""The driver `mesh`: ranks in several dimensions."""
