#!/bin/bash
#SBATCH --job-name=my-job
#SBATCH --account=abc
#SBATCH --partition=big
#SBATCH --qos=high
#SBATCH --nodes=6
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=1-12:00:00
#SBATCH --no-kill
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --comment='a b'
#SBATCH -Cfast
#SBATCH --output=out-%j

# Site generic: 4 active nodes and 2 spares in one allocation.
# exec, so that the signal before the time limit reaches the launcher.
exec /opt/env/bin/deadpool-launch --site=generic --nodes=4 --spares=2 --nproc-per-node=2 --heartbeat-timeout=5s --on-exhausted=shrink,stop --checkpoint-dir=/ckpt --checkpoint-every=500 --requeue-before-limit --record-final-state train.py
