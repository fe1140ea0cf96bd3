"""What a job would cost: simulated training under faults, and what to ask Slurm for."""
