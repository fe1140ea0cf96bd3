#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=01:30:00
#SBATCH --no-kill
#SBATCH --signal=B:USR1@120
#SBATCH --output=deadpool-%j.out

# Site generic: 4 active nodes and 1 spare in one allocation.
# exec, so that the signal before the time limit reaches the launcher.
exec /opt/env/bin/deadpool-launch --site=generic --nodes=4 --spares=1 train.py -- --lr 3e-4
