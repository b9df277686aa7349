#!/bin/bash
# One grid on one Ray cluster over all nodes of a SLURM job, which starts again by itself at its time limit.
#
#     sbatch cluster/slurm/symmetric_run.sh paper --only task=kermany --set kermany.data.root=/data/OCT2017
#
# RUNS is a folder that the head can write, on a shared file system; VENV an environment with fedsir on all nodes.
#SBATCH --job-name=fedsir
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
# Alone on the nodes: at its end `ray symmetric-run` stops every Ray of this user there.
#SBATCH --exclusive
#SBATCH --time=24:00:00
# To this script alone, while there is time for the runs to be recorded as interrupted.
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=fedsir-%j.log
set -euo pipefail

GRID=${1:?"usage: sbatch symmetric_run.sh GRID [options of fedsir sweep run]"}
shift
VENV=${VENV:-$HOME/fedsir/.venv}
RUNS=${RUNS:-$HOME/fedsir/runs}
TRACKING_URI=${TRACKING_URI:-sqlite:///$RUNS/mlflow.db}
PORT=${PORT:-6379}

export PATH="$VENV/bin:$PATH"
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600
# In the home folder, which the nodes share; made once.
(umask 077 && ray get-auth-token --generate > /dev/null)
mkdir -p "$RUNS"

# Not by `head`, which would end scontrol with SIGPIPE, and this script with it.
read -r HEAD < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# This script runs on the head.
export DRIVER="$RUNS/driver-$SLURM_JOB_ID.pid"
rm -f "$DRIVER"

# shellcheck disable=SC2317 # called by the trap
interrupt() {
    echo "time is up: stopping the grid and queueing the job again"
    if [ -s "$DRIVER" ]; then
        kill -TERM "$(cat "$DRIVER")" || true
    fi
    wait "$STEP" || true
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}

# No dashboard: nobody submits anything to this cluster.
# shellcheck disable=SC2016 # expanded by the inner shell
srun --kill-on-bad-exit=0 ray symmetric-run --address "$HEAD:$PORT" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus "${SLURM_GPUS_ON_NODE:-0}" --include-dashboard false \
    -- bash -c 'echo $$ > "$DRIVER"; exec fedsir sweep run "$@"' fedsir \
    "$GRID" --quiet --set execution.ray_address=auto \
    --set work_dir="$RUNS" --set tracking.uri="$TRACKING_URI" "$@" &
STEP=$!
trap interrupt USR1
CODE=0
wait "$STEP" || CODE=$?
rm -f "$DRIVER"
exit "$CODE"
