#!/bin/bash
#SBATCH --job-name=train
#SBATCH --partition=gh
#SBATCH --nodes=18
#SBATCH --ntasks-per-node=1
#SBATCH --time=1-00:00:00
#SBATCH --no-kill
#SBATCH --signal=B:USR1@120
#SBATCH --output=deadpool-%j.out

# Site vista: 16 active nodes and 2 spares in one allocation.
# exec, so that the signal before the time limit reaches the launcher.
exec /opt/env/bin/deadpool-launch --site=vista --nodes=16 --spares=2 train.py
