#!/bin/bash
# A run, or one stage of it, over all nodes and GPUs of a job. Arguments: those of `incv run`, or of `incv STAGE`.
#
#   sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=64 --time=24:00:00 --account=me slurm/incv_webvision.sh
#   sbatch --nodes=2 --gpus-per-node=8 ... slurm/incv_webvision.sh coteaching_incv -c webvision1000 --run-dir /data/r
#
# Without -c the recipe is webvision50. The job saves and requeues itself before its time is over, and goes on after a
# preemption, a dead node or a scancel followed by the same line: slurm/README.md says how.
#
# INCV_SETUP=FILE          sourced on each node: modules, the environment; default: .venv/bin/activate, if it is there
# INCV_CONTAINER=IMAGE     run inside this image (srun --container-image, which the plugin pyxis with enroot brings)
# INCV_MOUNTS=A:B,...      further folders the container sees; the current one it sees anyway
# INCV_STAGE=/local/path   copy the shards there first, on each node, and read them from there
# INCV_PROCS_PER_NODE=N    processes a node where Slurm grants no GPUs; default: 1
#
#SBATCH --job-name=incv
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --signal=B:USR2@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

MOST_STARTS=3   # in a row without a later durable step: then something is wrong that another start does not mend
SAVING=270      # seconds a run has to save once it is asked to; the signal comes 300 s before the end
EXIT_STOPPED=75

asked="" run_dir="" code=0
trap 'stop USR2' USR2
trap 'stop TERM' TERM

main() {
  if [[ -z ${SLURM_JOB_ID:-} ]]; then
    echo "usage: sbatch [options of sbatch] $0 [STAGE] [arguments of incv run]" >&2
    exit 2
  fi
  INCV_LAUNCHED=$(date +%s) # a STOP file that is older was not meant for this start
  export INCV_LAUNCHED
  choose_place
  choose_command "$@"
  count_processes
  run_dir=$(on_head python -m trainer "${command[@]}" --print-run-dir)
  record=$run_dir/logs/slurm-starts.txt
  before=$(progress)
  earlier=$(starts_from "$before")
  ((earlier < MOST_STARTS)) || end_chain
  if [[ -e $run_dir/manifest.json ]]; then # a folder with anything else in it would be refused by the first start
    mkdir -p "$run_dir/logs"
    echo "$(date +%FT%T) job $SLURM_JOB_ID: $before" >>"$record"
  fi
  old_marker=$(identity stopped.json)
  old_manifest=$(identity manifest.json)
  [[ -z ${INCV_STAGE:-} ]] || stage_shards
  ((code)) || [[ -n $asked ]] || train
  end
}

# Where commands run: in the environment of INCV_SETUP, or in a container.
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
    set +u # what people source there is seldom written for it
    # shellcheck disable=SC1090  # the user's own file
    source "$INCV_SETUP" >&2
    set -u
  fi
}

# `run` or a stage, the recipe and its overrides.
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

# Nodes, processes on each, and the addresses by which nodes find each other.
count_processes() {
  nodes=$SLURM_JOB_NUM_NODES
  local gpus=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-0}} all=${SLURM_GPUS:-}
  gpus=${gpus##*:} # a100:4
  all=${all##*:}
  processes=${INCV_PROCS_PER_NODE:-1}
  ((gpus == 0)) || processes=$gpus
  if [[ -n $all ]] && ((all != nodes * processes)); then
    echo "$all GPUs on $nodes nodes, $processes of them here: ask for as many on each node, --gpus-per-node=N" >&2
    exit 2
  fi
  local name
  addresses=()
  for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    addresses+=("$(scontrol show node --oneliner "$name" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)")
  done
}

# One command on the first node.
on_head() {
  if [[ -n ${INCV_CONTAINER:-} ]]; then
    srun --nodes=1 --ntasks=1 --overlap --export=ALL "${place[@]}" bash -c "$ON_NODE"' exec "$@"' head "$@"
  else
    "$@"
  fi
}

# Once on each node, in the background: the shell must be free to take signals. Sets `code`.
#   on_nodes SECONDS PROGRAM ARGUMENT...   SECONDS after the first node has ended, the others are ended too; 0: never
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
    while [[ -n $asked ]] && kill -0 "$step" 2>/dev/null; do # a trap has interrupted the wait
      leave_stop_file
      sleep 2
    done
  done
  interrupted=$code
  code=0
  wait "$step" 2>/dev/null || code=$?
  ((code != 127)) || code=$interrupted # it was the true one: a second wait finds nothing
}

# Ignored until a program is there that takes it: it would end this shell.
# shellcheck disable=SC2016  # for the shell of the node
ON_NODE='
trap "" USR2
if [[ -n $INCV_SETUP ]]; then source "$INCV_SETUP" >&2; fi
'

stage_shards() {
  local line words folders=() from to
  while IFS= read -r line; do
    eval "words=($line)" # words that incv has quoted for a shell
    from=$(realpath -m "${words[1]}")
    to=$INCV_STAGE$from
    folders+=("$from" "$to")
    command+=("${words[0]}='${to//\'/\'\'}'")
  done < <(on_head python -m trainer "${command[@]}" --print-splits)
  # shellcheck disable=SC2016
  on_nodes 0 'while (($#)); do python -m trainer shards stage "$1" "$2" || exit; shift 2; done' "${folders[@]}"
}

# One torchrun a node; it starts the processes, and starts them again where one dies.
train() {
  local restart=${SLURM_RESTART_COUNT:-0}
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$SAVING # how long torchrun lets its processes save after a signal
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # with a shared store restarts over gloo often fail
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
# The file first: it cannot get lost. Then the signal, which is faster, and reaches a run that has no directory yet.
stop() {
  [[ -z $asked ]] || return 0
  asked=$1
  echo "$(date +%FT%T) got $1: the run is asked to save and stop" >&2
  leave_stop_file
  # Where Slurm itself ends the job, the steps have their signal already: told thrice, torchrun leaves its workers.
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

# Which file lies there now: a start that is refused leaves the old ones alone.
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

# A line that changes whenever a later point is durable.
progress() {
  on_head python -m trainer doctor --run-dir "$run_dir" --progress || echo unknown
}

# How many starts in a row, the last ones, began at this point.
starts_from() {
  local count=0 line
  if [[ ! -e $run_dir/manifest.json ]]; then # nothing can be recorded there; Slurm counts too
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
  echo "$MOST_STARTS starts in a row have come no further than: $before" >&2
  echo "look for the reason above; then submit the same line again, which has $MOST_STARTS more" >&2
  [[ ! -e $record ]] || mv -f "$record" "$record.ended"
  exit 1
}

# torchrun's own exit code says little: 1 after a stop by a signal. Marker and manifest say what happened.
end() {
  ls "$run_dir" >/dev/null 2>&1 || true # a network file system looks again at a folder that is listed
  if ! stopped_anew && finished; then
    rm -f "$record"
    exit 0
  fi
  # Asked to stop while shards were copied or packed: there is no run yet that could leave a marker.
  if ! stopped_anew && [[ -z $asked ]]; then
    ((code)) || echo "all processes ended well, and $run_dir/manifest.json does not say that the run is finished" >&2
    exit "$((code ? code : 1))"
  fi
  if ((earlier + 1 >= MOST_STARTS)) && [[ $(progress) == "$before" ]]; then
    end_chain
  fi
  if [[ $(job_state) != RUNNING ]]; then # preempted or cancelled: Slurm knows what comes next
    exit "$EXIT_STOPPED"
  fi
  if scontrol requeue "$SLURM_JOB_ID"; then
    echo "$(date +%FT%T) stopped and requeued" >&2
  else
    echo "stopped, and this job cannot be requeued: submit the same line again, and the run goes on" >&2
  fi
  exit "$EXIT_STOPPED"
}

main "$@"
