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


class Experts(nn.Module):
    """Rows go to the expert that a router chooses: Dynamo makes no graph of the loop, and experts may be of one graph.

    What none is given is not called.
    """

    def __init__(self, width=16, number=4):
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.norm, self.router = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, number)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(number)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.norm(self.inside(x))
        weights = self.router(x).softmax(-1)
        chosen, result = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if rows.numel():
                given = expert(x[rows]) * weights[rows, number, None]
                result = result.index_add(0, rows, given.to(result.dtype))
        return self.head(result)
