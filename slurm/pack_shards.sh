#!/bin/bash
# Pack a data set with an array job, whose tasks share one output folder, then merge. Takes the arguments of
# `incv shards pack`.
#
#   sbatch --array=0-15 slurm/pack_shards.sh webvision --root /data/webvision --out /data/shards/train --resize 256
#
# Number the array from 0. Its first task also submits this script as a single job that waits for all tasks and merges
# their output. If compute nodes may not submit jobs, submit the same line without --array yourself. After a stop, a
# time limit or a node failure, submit the same line again: finished shards are kept.
#
# INCV_SETUP=FILE   sourced first (modules, the environment that provides `incv`)
# INCV_TASKS=N      total number of tasks; needed to rerun only some of them: INCV_TASKS=16 sbatch --array=3,7 ...
# INCV_MERGE=no     do not submit the merge job (used by slurm/pipeline.sh, which submits its own)
#
#SBATCH --job-name=incv-pack
#SBATCH --cpus-per-task=8
#SBATCH --mem-per-cpu=2G
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR2@120
set -euo pipefail

if [[ $# -eq 0 ]]; then
  echo "usage: sbatch --array=0-15 $0 SOURCE --root ROOT --out OUT [options of incv shards pack]" >&2
  exit 2
fi
if [[ -n ${INCV_SETUP:-} ]]; then
  # shellcheck disable=SC1090  # a file of the user
  source "$INCV_SETUP"
fi
options=()
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
  options+=(--workers "$SLURM_CPUS_PER_TASK")
fi

# As a single job: pack any shards that are still missing, and merge.
if [[ -z ${SLURM_ARRAY_TASK_ID:-} ]]; then
  exec incv shards pack "${options[@]}" "$@"
fi

tasks=${INCV_TASKS:-$SLURM_ARRAY_TASK_COUNT}
is_first=$((SLURM_ARRAY_TASK_ID == ${SLURM_ARRAY_TASK_MIN:-0}))
if ((is_first && ${SLURM_RESTART_COUNT:-0} == 0)) && [[ ${INCV_MERGE:-} != no ]]; then
  # sbatch passes on the environment; without the array variables the merge job runs as a single job
  env -u SLURM_ARRAY_TASK_ID -u SLURM_ARRAY_TASK_COUNT -u SLURM_ARRAY_TASK_MIN -u SLURM_ARRAY_TASK_MAX \
    -u SLURM_ARRAY_TASK_STEP -u SLURM_ARRAY_JOB_ID \
    sbatch --dependency="afterok:$SLURM_ARRAY_JOB_ID" --kill-on-invalid-dep=yes --job-name=incv-merge \
    ${SLURM_JOB_PARTITION:+"--partition=$SLURM_JOB_PARTITION"} ${SLURM_JOB_ACCOUNT:+"--account=$SLURM_JOB_ACCOUNT"} \
    "$0" "$@" ||
    echo "cannot submit the merge job: when all tasks are done, submit the same line without --array" >&2
fi
exec incv shards pack "${options[@]}" "$@" --task "$SLURM_ARRAY_TASK_ID/$tasks"
