"""Batch scripts: written from a command line and a site file, and given to sbatch."""
