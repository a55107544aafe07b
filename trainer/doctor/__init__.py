"""`incv doctor`: examines a machine, or diagnoses a run from the files in its run directory; `incv env`.

For a run, it reads heartbeats, manifest and logs, and writes nothing. It does not import torch, so it is fast and
works on any machine that can access the directory. Without a run, `machine` collects the findings of `libraries`,
`storage`, `shard_probe` and `collective`. `environment` describes the machine for a bug report, without torch.
"""
