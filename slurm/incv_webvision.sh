#!/bin/bash
# Run a recipe, or one stage of it, on all nodes and GPUs of a job. Takes the arguments of `incv run` or `incv STAGE`.
#
#   sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=64 --time=24:00:00 --account=me slurm/incv_webvision.sh
#   sbatch --nodes=2 --gpus-per-node=8 ... slurm/incv_webvision.sh coteaching_incv -c webvision1000 --run-dir /data/r
#
# The default recipe is webvision50. Before its time limit the job saves the run and requeues itself. The run resumes
# after a preemption or a node failure, or if the same line is submitted again after a scancel: see slurm/README.md.
#
# INCV_SETUP=FILE          sourced on each node (modules, environment); default: .venv/bin/activate, if it exists
# INCV_CONTAINER=IMAGE     run in this image (srun --container-image, from the pyxis plugin with enroot)
# INCV_MOUNTS=A:B,...      more folders to mount in the container; the current folder is always mounted
# INCV_STAGE=/local/path   copy the shards to this path on each node first, and read them from there
# INCV_PROCS_PER_NODE=N    processes per node if Slurm grants no GPUs; default: 1
#
#SBATCH --job-name=incv
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --signal=B:USR2@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

MAX_STARTS=3      # consecutive starts without durable progress before the job gives up
SAVE_SECONDS=270  # time for a run to save after a stop request; the signal comes 300 s before the time limit
EXIT_STOPPED=75

asked="" run_dir="" code=0
trap 'stop USR2' USR2
trap 'stop TERM' TERM

main() {
  if [[ -z ${SLURM_JOB_ID:-} ]]; then
    echo "usage: sbatch [sbatch options] $0 [STAGE] [arguments of incv run]" >&2
    exit 2
  fi
  INCV_LAUNCHED=$(date +%s) # this start ignores an older STOP file
  export INCV_LAUNCHED
  choose_place
  choose_command "$@"
  count_processes
  run_dir=$(on_head python -m trainer "${command[@]}" --print-run-dir)
  record=$run_dir/logs/slurm-starts.txt
  before=$(progress)
  earlier=$(starts_from "$before")
  ((earlier < MAX_STARTS)) || end_chain
  if [[ -e $run_dir/manifest.json ]]; then # not before the first start, which refuses a folder that is not empty
    mkdir -p "$run_dir/logs"
    echo "$(date +%FT%T) job $SLURM_JOB_ID: $before" >>"$record"
  fi
  old_marker=$(identity stopped.json)
  old_manifest=$(identity manifest.json)
  [[ -z ${INCV_STAGE:-} ]] || stage_shards
  ((code)) || [[ -n $asked ]] || train
  end
}

# Choose where commands run: in a container, or in the environment that INCV_SETUP sets up.
choose_place() {
  place=()
  if [[ -n ${INCV_CONTAINER:-} ]]; then
    place=(--container-image="$INCV_CONTAINER" --container-mounts="$PWD:$PWD${INCV_MOUNTS:+,$INCV_MOUNTS}"
      --container-workdir="$PWD")
  elif [[ -z ${INCV_SETUP:-} && -e .venv/bin/activate ]]; then
    INCV_SETUP=$PWD/.venv/bin/activate
  fi
  export INCV_SETUP=${INCV_SETUP:-}
  if [[ -n $INCV_SETUP && -z ${INCV_CONTAINER:-} ]]; then
    set +u # setup scripts are rarely written for set -u
    # shellcheck disable=SC1090  # a file of the user
    source "$INCV_SETUP" >&2
    set -u
  fi
}

# Build the command: `run` or a stage, the recipe and its overrides.
choose_command() {
  command=(run)
  case ${1:-} in
    "" | -* | *=*) ;;
    *) command=("$1") && shift ;;
  esac
  case " $*" in
    *" -c"* | *" --rec"*) command+=("$@") ;;
    *) command+=(-c webvision50 "$@") ;;
  esac
}

# Set the number of nodes, the processes per node and the addresses of the nodes.
count_processes() {
  nodes=$SLURM_JOB_NUM_NODES
  local gpus=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-0}} all=${SLURM_GPUS:-}
  gpus=${gpus##*:} # drop the type, as in a100:4
  all=${all##*:}
  processes=${INCV_PROCS_PER_NODE:-1}
  ((gpus == 0)) || processes=$gpus
  if [[ -n $all ]] && ((all != nodes * processes)); then
    echo "$all GPUs on $nodes nodes, but $processes on this one: request the same number on each, --gpus-per-node=N" >&2
    exit 2
  fi
  local name
  addresses=()
  for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    addresses+=("$(scontrol show node --oneliner "$name" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)")
  done
}

# Run one command on the first node.
on_head() {
  if [[ -n ${INCV_CONTAINER:-} ]]; then
    srun --nodes=1 --ntasks=1 --overlap --export=ALL "${place[@]}" bash -c "$ON_NODE"' exec "$@"' head "$@"
  else
    "$@"
  fi
}

# Run a program once per node, in the background, so that this shell can handle signals. Sets `code`.
#   on_nodes SECONDS PROGRAM ARGUMENT...   srun kills the other nodes SECONDS after the first one ends; 0: never
on_nodes() {
  local grace=$1 program=$2 step interrupted
  shift 2
  srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none --export=ALL --wait="$grace" \
    "${place[@]}" bash -c "$ON_NODE $program" node "$@" &
  step=$!
  while true; do
    code=0
    wait "$step" || code=$?
    kill -0 "$step" 2>/dev/null || break
    while [[ -n $asked ]] && kill -0 "$step" 2>/dev/null; do # a trap interrupted the wait
      leave_stop_file
      sleep 2
    done
  done
  interrupted=$code
  code=0
  wait "$step" 2>/dev/null || code=$?
  ((code != 127)) || code=$interrupted # 127: the first wait had already collected its status
}

# Ignore USR2, which would kill this shell before the program handles it.
# shellcheck disable=SC2016  # expanded by the shell on the node
ON_NODE='
trap "" USR2
if [[ -n $INCV_SETUP ]]; then source "$INCV_SETUP" >&2; fi
'

stage_shards() {
  local line words folders=() from to
  while IFS= read -r line; do
    eval "words=($line)" # incv has quoted the words for the shell
    from=$(realpath -m "${words[1]}")
    to=$INCV_STAGE$from
    folders+=("$from" "$to")
    command+=("${words[0]}='${to//\'/\'\'}'")
  done < <(on_head python -m trainer "${command[@]}" --print-splits)
  # shellcheck disable=SC2016
  on_nodes 0 'while (($#)); do python -m trainer shards stage "$1" "$2" || exit; shift 2; done' "${folders[@]}"
}

# Run one torchrun per node, which starts the processes and restarts them if one dies.
train() {
  local restart=${SLURM_RESTART_COUNT:-0}
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$SAVE_SECONDS # how long torchrun waits for its processes after a signal
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # with a shared store, restarts with gloo often fail
  # shellcheck disable=SC2016
  local launcher='
    addresses=($1)
    shift
    meeting=is_host=$((SLURM_NODEID == 0)),read_timeout=300
    exec python -m torch.distributed.run --local-addr="${addresses[SLURM_NODEID]}" --rdzv-conf="$meeting" "$@"'
  on_nodes 60 "$launcher" "${addresses[*]}" --nnodes="$nodes" --nproc-per-node="$processes" --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID.$restart" \
    --rdzv-endpoint="${addresses[0]}:$((20000 + (SLURM_JOB_ID + 31 * restart) % 10000))" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 \
    -m trainer "${command[@]}" "execution.world=$((nodes * processes))"
}

# shellcheck disable=SC2317  # the traps above call it
# Create the STOP file, which cannot get lost, then send the signal, which is faster and needs no run directory.
stop() {
  [[ -z $asked ]] || return 0
  asked=$1
  echo "$(date +%FT%T) got $1: asking the run to save and stop" >&2
  leave_stop_file
  # If Slurm ends the job, it has already signalled the steps; on a third signal torchrun would abandon its workers.
  [[ $(job_state) != RUNNING ]] || scancel --signal=USR2 "$SLURM_JOB_ID" || true
}

leave_stop_file() {
  if [[ -n $run_dir && -e $run_dir/manifest.json && ! -e $run_dir/STOP ]] && ! stopped_anew; then
    touch "$run_dir/STOP" || true
  fi
}

job_state() {
  scontrol show job --oneliner "$SLURM_JOB_ID" | grep -o 'JobState=[A-Z_]*' | cut -d= -f2 || true
}

# Print inode and mtime of a file, to tell whether this start has replaced it; a refused start does not.
identity() {
  stat -c '%i %y' "$run_dir/$1" 2>/dev/null || true
}

stopped_anew() {
  [[ -e $run_dir/stopped.json && $(identity stopped.json) != "${old_marker:-}" ]]
}

finished() {
  [[ $(identity manifest.json) != "$old_manifest" ]] &&
    on_head python -c 'import json, sys
sys.exit(json.load(open(sys.argv[1]))["starts"][-1]["ended"] != "finished")' "$run_dir/manifest.json"
}

# Print a line that changes whenever the run has saved more progress.
progress() {
  on_head python -m trainer doctor --run-dir "$run_dir" --progress || echo unknown
}

# Count the latest consecutive starts that began with this line of progress.
starts_from() {
  local count=0 line
  if [[ ! -e $run_dir/manifest.json ]]; then # nothing is recorded yet; use Slurm's count
    echo "${SLURM_RESTART_COUNT:-0}"
    return
  fi
  if [[ -e $record ]]; then
    while IFS= read -r line; do
      if [[ ${line#*: } == "$1" ]]; then count=$((count + 1)); else count=0; fi
    done <"$record"
  fi
  echo "$count"
}

end_chain() {
  echo "$MAX_STARTS starts in a row made no progress beyond: $before" >&2
  echo "see the log above for the cause; to try up to $MAX_STARTS more starts, submit the same line again" >&2
  [[ ! -e $record ]] || mv -f "$record" "$record.ended"
  exit 1
}

# Decide by stopped.json and the manifest: torchrun's exit code is ambiguous (1 after a stop by signal).
end() {
  ls "$run_dir" >/dev/null 2>&1 || true # refreshes the cache of a network file system
  if ! stopped_anew && finished; then
    rm -f "$record"
    exit 0
  fi
  # If the stop came while shards were copied or packed, there is no stopped.json, because the run had not begun.
  if ! stopped_anew && [[ -z $asked ]]; then
    ((code)) || echo "all processes exited with 0, but $run_dir/manifest.json does not record a finished run" >&2
    exit "$((code ? code : 1))"
  fi
  if ((earlier + 1 >= MAX_STARTS)) && [[ $(progress) == "$before" ]]; then
    end_chain
  fi
  if [[ $(job_state) != RUNNING ]]; then # preempted or cancelled: Slurm requeues or ends the job
    exit "$EXIT_STOPPED"
  fi
  if scontrol requeue "$SLURM_JOB_ID"; then
    echo "$(date +%FT%T) stopped and requeued" >&2
  else
    echo "stopped, but this job cannot be requeued: submit the same line again to resume the run" >&2
  fi
  exit "$EXIT_STOPPED"
}

main "$@"
