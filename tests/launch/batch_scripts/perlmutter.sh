#!/bin/bash
#SBATCH --job-name=train
#SBATCH --account=m1234_g
#SBATCH --qos=regular
#SBATCH --constraint=gpu
#SBATCH --nodes=18
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=1-00:00:00
#SBATCH --no-kill
#SBATCH --signal=B:USR1@120
#SBATCH --output=deadpool-%j.out

# Site perlmutter: 16 active nodes and 2 spares in one allocation.
# exec, so that the signal before the time limit reaches the launcher.
exec /opt/env/bin/deadpool-launch --site=perlmutter --nodes=16 --spares=2 train.py
