"""Two gloo processes on this machine, started by torchrun; one launch serves all checks."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from distributed_worker import CHECKS

from fxamp.errors import OptionError
from fxamp.runtime.distributed import reduce_gradients_in

WORKER = pathlib.Path(__file__).with_name("distributed_worker.py")


@pytest.fixture(scope="module")
def outcomes():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(WORKER)]
    # Without GPUs: FSDP would take one for each rank.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    root = str(WORKER.parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("rank "):
            head, _, outcome = line.partition(": ")
            _, rank, name = head.split()
            found[name, int(rank)] = outcome
    return found, done.stderr


@pytest.mark.parametrize("name", CHECKS)
def test_both_ranks(name, outcomes):
    found, stderr = outcomes
    for rank in (0, 1):
        assert found.get((name, rank), f"no outcome\n{stderr[-2000:]}") == "ok"


def test_reduction_is_checked():
    with pytest.raises(OptionError, match=r"got a Linear.*MixedPrecisionPolicy\(reduce_dtype"):
        reduce_gradients_in(torch.nn.Linear(1, 1), torch.float32)
