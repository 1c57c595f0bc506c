#!/bin/bash
# Several nodes under Slurm: sbatch docs/recipes/slurm.sh MODEL OUT
# Both are on a disk that all nodes share. After a time limit or a lost node the same command goes on.
#SBATCH --job-name=hessquant
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# A process per accelerator; without any, one per node, with all of its cores.
processes=${SLURM_GPUS_ON_NODE:-1}
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / processes))
# Where nodes do not reach each other by the interface that their names stand for:
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0

read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000))

# Quoted, for each node has its own number.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    bash -c 'exec torchrun --node-rank "$SLURM_NODEID" "$@"' torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$processes" --master-addr "$first" --master-port "$port" \
    -m hessquant quantize "$1" "$2"
