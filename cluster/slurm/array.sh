#!/bin/bash
# One grid as an array of jobs of one node each, every one of them with a part of the grid and a Ray of its own.
#
#     sbatch --array=1-8 cluster/slurm/array.sh paper --only task=kermany --set kermany.data.root=/data/OCT2017
#
# Without TRACKING_URI (a tracking server) each part has a record of its own below RUNS, since SQLite on a shared
# file system bears one writer; bring them together with `fedsir tracking export` and `fedsir tracking import`.
# Keep the size of the array: the same part of a grid of the same number of parts is the same runs.
#SBATCH --job-name=fedsir
#SBATCH --array=1-4
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=fedsir-%A-%a.log
set -euo pipefail

GRID=${1:?"usage: sbatch --array=1-N array.sh GRID [options of fedsir sweep run]"}
shift
VENV=${VENV:-$HOME/fedsir/.venv}
RUNS=${RUNS:-$HOME/fedsir/runs}
PART="$RUNS/part-$SLURM_ARRAY_TASK_ID-of-$SLURM_ARRAY_TASK_COUNT"
TRACKING_URI=${TRACKING_URI:-sqlite:///$PART/mlflow.db}

export PATH="$VENV/bin:$PATH" RAY_USAGE_STATS_ENABLED=0
mkdir -p "$PART"

# shellcheck disable=SC2317 # called by the trap
interrupt() {
    echo "time is up: stopping this part and queueing it again"
    kill -TERM "$SWEEP" || true
    wait "$SWEEP" || true
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
    exit 0
}

# The local Ray of the session listens on the loopback address alone.
fedsir sweep run "$GRID" --quiet --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" \
    --set work_dir="$PART" --set tracking.uri="$TRACKING_URI" "$@" &
SWEEP=$!
trap interrupt USR1
CODE=0
wait "$SWEEP" || CODE=$?
exit "$CODE"
