"""Where nodes come from, behind one interface: a Slurm allocation, or this machine's processes."""
