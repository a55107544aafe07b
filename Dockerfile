# An image with incv and every version of constraints.txt. The image itself has not been built here; a test runs its
# install steps in a fresh environment (tests/test_dockerfile.py).
#
#   docker build -t incv .
#   docker run --rm --gpus all --ipc host -v "$PWD:/workspace" incv run -c demo
#
# CUDA's libraries come with torch's wheels; the host needs the NVIDIA driver and the NVIDIA Container Toolkit.
FROM python:3.12-slim

# torch.compile builds small C files at run time.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/incv PATH=/opt/incv/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python3 -m venv "$VIRTUAL_ENV"

COPY . /src
RUN python -m pip install --constraint /src/constraints.txt "/src[demo,dali,deepspeed,s3,gs,http,tensorboard,wandb]"
RUN incv --version && incv validate -c webvision50

# Recipes' paths (data/, runs/) are relative to the folder that is mounted here.
WORKDIR /workspace
ENTRYPOINT ["incv"]
