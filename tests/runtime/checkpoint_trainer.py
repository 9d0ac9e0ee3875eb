"""Processes that test_checkpoint.py kills."""

import os
import random
import signal

import numpy
import torch

from fxamp.errors import CheckpointError
from fxamp.runtime.checkpoint import load_checkpoint, save_checkpoint
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scaler import LossScaler


def train(path, steps, saved):
    """Train to `steps` from the checkpoint at `path`, if there is one, and save after each step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.2), torch.nn.Linear(256, 8))
    model.bfloat16()
    optimizer = MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), 0.01, fused=True))
    scaler = LossScaler(growth_interval=3)
    start = 0
    try:
        start = load_checkpoint(path, model=model, optimizer=optimizer, scaler=scaler)["step"]
        saved.set()
    except CheckpointError as error:
        if "does not exist" not in str(error):
            raise
    for step in range(start, steps):
        inputs = torch.randn(4, 64) * (
            float("inf") if step % 7 == 3 else random.uniform(0.5, numpy.random.uniform(1, 2))
        )
        optimizer.zero_grad()
        scaler.scale(model(inputs.bfloat16()).float().square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        save_checkpoint(path, model=model, optimizer=optimizer, scaler=scaler, step=step + 1)
        saved.set()


def die_while_saving(path):
    """Save once, then stop inside torch.save with half of the next file written."""
    save_checkpoint(path, step=1)

    def dies_halfway(content, file):
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = dies_halfway
    save_checkpoint(path, step=2)
