"""The multiplicative-LSTM byte model behind the sentiment neuron (Krause et al. 2016)."""

# mypy: disable-error-code="no-any-return"

import torch
from torch import nn


class MultiplicativeLSTM(nn.Module):
    """An LSTM cell whose state is multiplied by a function of its input before the gates."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.input_gate, self.state_gate = nn.Linear(inputs, width, bias=False), nn.Linear(width, width, bias=False)
        self.from_input, self.from_state = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        m = self.input_gate(x) * self.state_gate(h)
        i, f, o, u = (self.from_input(x) + self.from_state(m)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
        return torch.sigmoid(o) * torch.tanh(c), c


class Sentiment(nn.Module):
    """Predicts the next byte, and a feeling from the last state."""

    def __init__(self, letters: int, embedding: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(letters, embedding)
        self.cell = MultiplicativeLSTM(embedding, width)
        self.next, self.feeling = nn.Linear(width, letters), nn.Linear(width, 1)
        self.width = width

    def forward(self, letters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table(letters)
        h = c = x.new_zeros(letters.size(0), self.width)
        states = []
        for step in range(letters.size(1)):
            h, c = self.cell(x[:, step], h, c)
            states.append(h)
        return self.next(torch.stack(states, 1)), self.feeling(h)
