"""Launcher, controller and node agents; never imports torch or MPI."""
