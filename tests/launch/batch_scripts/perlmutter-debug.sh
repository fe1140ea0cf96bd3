#!/bin/bash
#SBATCH --job-name=train
#SBATCH --qos=debug
#SBATCH --constraint=gpu
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=00:10:00
#SBATCH --no-kill
#SBATCH --signal=B:USR1@120
#SBATCH --output=deadpool-%j.out

# Site perlmutter: 3 active nodes and 1 spare in one allocation.
# exec, so that the signal before the time limit reaches the launcher.
exec /opt/env/bin/deadpool-launch --site=perlmutter --nodes=3 --spares=1 train.py
