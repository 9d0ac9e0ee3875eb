"""No step asks a GPU for a number, on machines without one: the ways of CUDA's optimizers, on fake tensors.

What runs here is what runs on a GPU, branch by branch: fused kernels, steps that are selected back on the device,
masters. That nothing waits there either is `tools/gpu_runtime`'s to show.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fake_cuda_steps.py")

CONTROLS = {
    "clipped_by_hand": "_local_scalar_dense",
    "read_as_a_list": "_local_scalar_dense",
    "copied_to_the_host": "waits for the device",
}
"""What asks the device, and how it is told of."""


@pytest.fixture(scope="module")
def asked() -> dict[str, str]:
    """What each step asked of the device, in a process of its own: fake CUDA changes a process for good."""
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_step_asks_the_device_for_nothing(asked):
    steps = {name: what for name, what in asked.items() if name not in CONTROLS}
    assert len(steps) == 148
    assert not {name: what for name, what in steps.items() if what}


@pytest.mark.parametrize("control", CONTROLS)
def test_what_does_ask_is_told(control, asked):
    assert CONTROLS[control] in asked[control]
