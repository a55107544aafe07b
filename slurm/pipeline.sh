#!/bin/bash
# Submit a recipe as a chain of jobs, each of which starts after the previous one has succeeded: packing (an array job
# for each split that is not packed yet), labels, INCV, each training method, then evaluation, export and report. Run
# this script directly; do not submit it with sbatch.
#
#   slurm/pipeline.sh [sbatch options for the training jobs] [-- arguments of incv run]
#   slurm/pipeline.sh --nodes=2 --gpus-per-node=8 --time=24:00:00 --account=me -- -c webvision50 seed=1
#
# The default recipe is webvision50. If a job fails, Slurm cancels the jobs that depend on it; run the same line again
# to run the missing stages. Uses INCV_SETUP, INCV_STAGE and the other variables of incv_webvision.sh, and:
#
# INCV_PACK_TASKS=N         number of tasks that pack one split; default: 16
# INCV_PACK_OPTIONS="..."   sbatch options for these tasks, such as --partition=cpu; options may not contain spaces
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

main() {
  options=()
  while (($#)) && [[ $1 != -- ]]; do
    options+=("$1")
    shift
  done
  (($# == 0)) || shift
  arguments=("$@")
  case " $*" in
    *" -c"* | *" --rec"*) ;;
    *) arguments=(-c webvision50 "$@") ;;
  esac
  if [[ -z ${INCV_SETUP:-} && -e .venv/bin/activate ]]; then
    INCV_SETUP=$PWD/.venv/bin/activate
  fi
  if [[ -n ${INCV_SETUP:-} ]]; then
    export INCV_SETUP
    set +u # setup scripts are rarely written for set -u
    # shellcheck disable=SC1090  # a file of the user
    source "$INCV_SETUP" >&2
    set -u
  fi
  stages=$(incv run "${arguments[@]}" --print-stages)
  splits=$(incv run "${arguments[@]}" --print-splits)
  dependency=""
  submit_packing
  submit_stages
}

# Submit the packing jobs, and set `dependency` to their merge jobs.
submit_packing() {
  local line words array merge pack_options=() submitted=" "
  read -ra pack_options <<<"${INCV_PACK_OPTIONS:-}"
  while IFS= read -r line; do
    eval "words=($line)" # incv has quoted the words for the shell
    if [[ -e ${words[1]}/dataset.json || $submitted == *" ${words[1]} "* ]]; then
      continue
    fi
    submitted+="${words[1]} "
    array=$(INCV_MERGE=no submit "${pack_options[@]}" --array="0-$((${INCV_PACK_TASKS:-16} - 1))" \
      "$here/pack_shards.sh" "${words[@]:2}")
    merge=$(submit "${pack_options[@]}" --dependency="afterok:$array" --job-name=incv-merge \
      "$here/pack_shards.sh" "${words[@]:2}")
    echo "$array packs ${words[1]}, $merge merges it"
    dependency+=:$merge
  done <<<"$splits"
  dependency=${dependency:+afterok$dependency}
}

submit_stages() {
  local stage job few=(--nodes=1)
  for stage in $stages; do
    case $stage in
      evaluate | export | report) continue ;; # quick stages: the last job runs all three
    esac
    job=$(submit "${options[@]}" "${few[@]}" ${dependency:+"--dependency=$dependency"} --job-name="incv-$stage" \
      "$here/incv_webvision.sh" "$stage" "${arguments[@]}")
    echo "$job runs $stage"
    dependency=afterok:$job
    few=() # only the first stage, labels, needs a single node
  done
  job=$(submit "${options[@]}" --dependency="$dependency" --job-name=incv-report \
    "$here/incv_webvision.sh" run "${arguments[@]}")
  echo "$job evaluates, exports and reports; run directory: $(incv run "${arguments[@]}" --print-run-dir)"
}

# Submit a job and print its id. With several clusters, sbatch appends the cluster name, which is removed.
submit() {
  local output
  output=$(sbatch --parsable --kill-on-invalid-dep=yes "$@")
  echo "${output%%;*}"
}

main "$@"
