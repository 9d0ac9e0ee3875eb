"""The multiplicative-LSTM byte model behind the sentiment neuron (Krause et al., arXiv:1609.07959)."""

import torch
from torch import nn


class MultiplicativeLSTM(nn.Module):
    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.input_gate, self.state_gate = nn.Linear(inside, width, bias=False), nn.Linear(width, width, bias=False)
        self.from_input, self.from_state = nn.Linear(inside, 4 * width), nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        m = self.input_gate(x) * self.state_gate(h)
        i, f, o, u = (self.from_input(x) + self.from_state(m)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
        return torch.sigmoid(o) * torch.tanh(c), c


class Sentiment(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(64, width)
        self.cell = MultiplicativeLSTM(width, width)
        self.next, self.feeling = nn.Linear(width, 64), nn.Linear(width, 1)
        self.width = width

    def forward(self, letters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table(letters)
        h = c = x.new_zeros(letters.size(0), self.width)
        states = []
        for step in range(letters.size(1)):
            h, c = self.cell(x[:, step], h, c)
            states.append(h)
        return self.next(torch.stack(states, 1)), self.feeling(h)


def make() -> nn.Module:
    return Sentiment()


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 64, (3, 6)),)
