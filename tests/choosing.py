"""Models whose blocks graphs hold, and whose own forward none does: it decides on what a block gives."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, 2 * width),
            nn.LayerNorm(2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        return x + self.down(F.gelu(self.norm(self.up(x))))


class Choosing(nn.Module):
    """Which block runs depends on what the first gives."""

    def __init__(self, make=Block):
        super().__init__()
        self.stem, self.left, self.right, self.head = make(), make(), make(), nn.Linear(16, 3)

    def forward(self, x):
        h = self.stem(x)
        return self.head(self.left(h) if h.sum().item() > 0 else self.right(h))


def batch(seed, rows=8):
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))


def trained(model, optimizer, count=4, scaler=None, autocast=None, **call):
    """The losses of so many steps."""
    losses = []
    for step in range(count):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            out = model(batch(step), **call)
        loss = out.float().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)
