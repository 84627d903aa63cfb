"""Gangs as steps of one SLURM allocation, in which the service itself runs."""
