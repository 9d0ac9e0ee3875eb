"""Tacotron 2: characters to mel frames by attention on a recurrent decoder (Shen et al., arXiv:1712.05884)."""

import torch
from torch import nn
from torch.nn import functional as F


class LocationAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.memory = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.place = nn.Sequential(nn.Conv1d(2, 4, 5, padding=2, bias=False))
        self.place_out, self.score = nn.Linear(4, width, bias=False), nn.Linear(width, 1, bias=False)

    def forward(self, query, memory, processed, weights, total):
        places = self.place_out(self.place(torch.stack((weights, total), 1)).transpose(1, 2))
        energy = self.score(torch.tanh(self.query(query)[:, None] + places + processed)).squeeze(-1)
        found = F.softmax(energy, 1)
        return torch.bmm(found[:, None], memory).squeeze(1), found


class Tacotron2(nn.Module):
    def __init__(self, symbols: int = 20, width: int = 16, mels: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(symbols, width)
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv1d(width, width, 5, padding=2), nn.BatchNorm1d(width)) for _ in range(2)
        )
        self.encoder = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.prenet = nn.ModuleList([nn.Linear(mels, width), nn.Linear(width, width)])
        self.attention = LocationAttention(width)
        self.attention_cell, self.decoder_cell = nn.LSTMCell(2 * width, width), nn.LSTMCell(2 * width, width)
        self.mel, self.stop = nn.Linear(2 * width, mels), nn.Linear(2 * width, 1)
        self.postnet = nn.Sequential(
            nn.Conv1d(mels, width, 5, padding=2), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.5),
            nn.Conv1d(width, mels, 5, padding=2), nn.BatchNorm1d(mels),
        )  # fmt: skip

    def encode(self, text: torch.Tensor) -> torch.Tensor:
        h = self.table(text).transpose(1, 2)
        for layer in self.convolutions:
            h = F.dropout(F.relu(layer(h)), 0.5, self.training)
        return self.encoder(h.transpose(1, 2))[0]

    def forward(self, text: torch.Tensor, frames: torch.Tensor) -> tuple[torch.Tensor, ...]:
        memory = self.encode(text)
        processed = self.attention.memory(memory)
        h = F.pad(frames, (0, 0, 1, 0))[:, :-1]
        for layer in self.prenet:
            h = F.dropout(F.relu(layer(h)), 0.5, self.training)
        context, attended, decoded = torch.zeros_like(memory[:, 0]), None, None
        weights = total = torch.zeros_like(memory[:, :, 0])
        mels, stops = [], []
        for step in range(frames.size(1)):
            attended = self.attention_cell(torch.cat((h[:, step], context), -1), attended)
            context, weights = self.attention(attended[0], memory, processed, weights, total)
            total = total + weights
            decoded = self.decoder_cell(torch.cat((attended[0], context), -1), decoded)
            joined = torch.cat((decoded[0], context), -1)
            mels.append(self.mel(joined))
            stops.append(self.stop(joined))
        mel = torch.stack(mels, 1)
        return mel, mel + self.postnet(mel.transpose(1, 2)).transpose(1, 2), torch.cat(stops, 1)


def make() -> nn.Module:
    return Tacotron2()


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 20, (2, 9)), torch.randn(2, 5, 8)
