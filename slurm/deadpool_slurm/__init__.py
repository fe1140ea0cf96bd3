"""Everything DEADPOOL knows about Slurm: its environment variables, commands, output and versions.

Pure text in and text out, except ``client.py``, which runs Slurm's commands. Nothing here imports
the launcher.
"""
