"""Copies of each rank's state in host memory, on its own node and on another."""
