"""Training steps per second on two threads, alone and on a busy machine, if waiting threads sleep or spin.

python benchmarks/busy_cpu.py [--append]
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.company import Others, said_of
from benchmarks.record import publish, record_runs
from trainer.distributed.launch import WAIT_VARIABLES, let_waiting_threads_sleep

_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with its parent
_THREADS, _ROWS, _PIXELS = 2, 128, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="digits_cnn")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--load", type=int, default=4, help="busy processes beside the training")
    parser.add_argument("--append", action="store_true", help="append the lines to results/busy_cpu.jsonl")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(train(arguments.model, arguments.steps)))
        return
    lines = []
    for load in (0, arguments.load):
        rates: dict[str, list[float]] = {"sleep": [], "spin": []}
        weights, shares = set(), []
        for _ in range(arguments.runs):
            for policy in rates:  # in alternation
                others = Others()
                found = measure(arguments, policy, load)
                shares.append(others.share())  # our own busy processes are children, and do not count
                rates[policy].append(found["steps_per_s"])
                weights.add(found["weights"])
                print(f"{load} busy processes, threads {policy}: {found['steps_per_s']:.2f} steps/s", file=sys.stderr)
        assert len(weights) == 1, "the policy has changed the weights"
        note = (
            f"{arguments.model}, {_ROWS} rows of {_PIXELS} pixels, {_THREADS} threads, {load} own busy processes; "
            f"the weights after {arguments.steps} steps are bitwise the same; {said_of(shares)}"
        )
        lines.append(record_runs(f"busy_cpu_load_{load}", *rates.values(), unit="steps/s", note=note))
    publish(lines, "busy_cpu.jsonl" if arguments.append else None)


def measure(arguments: argparse.Namespace, policy: str, load: int) -> dict[str, object]:
    """Train in a process of its own, whose OpenMP reads the policy when it is loaded."""
    environ = {name: value for name, value in os.environ.items() if name not in (*WAIT_VARIABLES, "OMP_NUM_THREADS")}
    if policy == "sleep":
        let_waiting_threads_sleep(environ)
    command = [sys.executable, __file__, "--child", "--model", arguments.model, "--steps", str(arguments.steps)]
    with busy_processes(load):
        done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def train(model: str, steps: int) -> dict[str, object]:
    """Train on random images; returns the rate, after a tenth of the steps to warm up, and a hash of the weights."""
    import torch

    from trainer.models.factory import create_model

    torch.set_num_threads(_THREADS)
    torch.manual_seed(0)
    network = create_model(model, 10, 0).train()
    optimizer = torch.optim.Adam(network.parameters())
    images = torch.randn(_ROWS, 3, _PIXELS, _PIXELS)
    labels = torch.arange(_ROWS) % 10
    warm_up, began = steps // 10, 0.0
    for step in range(steps + warm_up):
        if step == warm_up:
            began = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - began
    digest = hashlib.sha256()
    for tensor in network.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return {"steps_per_s": steps / seconds, "weights": digest.hexdigest()}


if __name__ == "__main__":
    main()
