#!/bin/bash
#SBATCH --job-name=train-20260101-000000
#SBATCH --partition=gh
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=1
#SBATCH --time=2-00:00:00
#SBATCH --no-kill
#SBATCH --signal=B:USR1@120
#SBATCH --dependency=singleton
#SBATCH --no-requeue
#SBATCH --output=deadpool-%j.out

# Site vista: 60 active nodes and 4 spares in one allocation.
# exec, so that the signal before the time limit reaches the launcher.
exec /opt/env/bin/deadpool-launch --site=vista --nodes=60 --spares=4 --chain-name=train-20260101-000000 --checkpoint-dir=/scratch/ckpt --checkpoint-every=500 train.py
