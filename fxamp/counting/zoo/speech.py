"""Jasper and Tacotron 2."""

# mypy: disable-error-code="no-any-return"

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

State = tuple[torch.Tensor, torch.Tensor]


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    padding = dilation * (kernel // 2)
    conv = nn.Conv1d(inputs, outputs, kernel, stride, padding, dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm1d(outputs, eps=1e-3))


class JasperBlock(nn.Module):
    """Convolutions in a row; what comes in is added before the last activation."""

    def __init__(self, inputs: int, outputs: int, kernel: int, repeat: int) -> None:
        super().__init__()
        widths = [inputs] + [outputs] * repeat
        self.layers = nn.ModuleList(conv_bn(a, b, kernel) for a, b in itertools.pairwise(widths))
        self.residual, self.act = conv_bn(inputs, outputs, 1), nn.Sequential(nn.ReLU(), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for layer in self.layers[:-1]:
            h = self.act(layer(h))
        return self.act(self.layers[-1](h) + self.residual(x))


class Jasper(nn.Module):
    """Li et al. 2019; `blocks` are pairs of width and kernel, `tail` widths of the last two convolutions."""

    def __init__(
        self,
        features: int,
        width: int,
        blocks: Sequence[tuple[int, int]],
        repeat: int,
        tail: tuple[int, int],
        letters: int,
    ) -> None:
        super().__init__()
        self.start = nn.Sequential(conv_bn(features, width, 11, 2), nn.ReLU())
        widths = [width, *(outputs for outputs, _ in blocks)]
        self.blocks = nn.Sequential(
            *[JasperBlock(a, b, kernel, repeat) for a, (b, kernel) in zip(widths, blocks, strict=False)]
        )
        wide, last = tail
        self.tail = nn.Sequential(
            conv_bn(widths[-1], wide, 29, dilation=2), nn.ReLU(), conv_bn(wide, last, 1), nn.ReLU()
        )
        self.head = nn.Conv1d(last, letters, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.head(self.tail(self.blocks(self.start(x)))).transpose(1, 2), -1)


class LocationAttention(nn.Module):
    """Attention that sees where it has been."""

    def __init__(self, width: int, inner: int, memory: int, filters: int, kernel: int) -> None:
        super().__init__()
        self.query, self.memory = nn.Linear(width, inner, bias=False), nn.Linear(memory, inner, bias=False)
        self.place = nn.Conv1d(2, filters, kernel, padding=kernel // 2, bias=False)
        self.place_out, self.score = nn.Linear(filters, inner, bias=False), nn.Linear(inner, 1, bias=False)

    def forward(
        self,
        query: torch.Tensor,
        memory: torch.Tensor,
        processed: torch.Tensor,
        weights: torch.Tensor,
        total: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = self.place_out(self.place(torch.stack((weights, total), 1)).transpose(1, 2))
        energy = self.score(torch.tanh(self.query(query)[:, None] + places + processed)).squeeze(-1)
        found = F.softmax(energy, 1)
        return torch.bmm(found[:, None], memory).squeeze(1), found


class Tacotron2(nn.Module):
    """Shen et al. 2017, with the true frames as the decoder's input; one loop per frame.

    Args:
        symbols, mels: letters of the text, and numbers of a frame.
        width: of the encoder and the postnet.
        prenet, inner: of the decoder's input, and of the attention.
        cell: of the decoder's two LSTM cells.
        filters, kernel: of the attention's convolution over its own past.
    """

    def __init__(
        self,
        symbols: int,
        mels: int,
        width: int,
        prenet: int,
        inner: int,
        cell: int,
        filters: int = 32,
        kernel: int = 31,
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(symbols, width)
        self.convolutions = nn.ModuleList(self._conv(width, width) for _ in range(3))
        self.encoder = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.prenet = nn.ModuleList([nn.Linear(mels, prenet), nn.Linear(prenet, prenet)])
        self.attention = LocationAttention(cell, inner, width, filters, kernel)
        self.attention_cell, self.decoder_cell = nn.LSTMCell(prenet + width, cell), nn.LSTMCell(cell + width, cell)
        self.mel, self.stop = nn.Linear(cell + width, mels), nn.Linear(cell + width, 1)
        self.postnet = nn.Sequential(
            self._conv(mels, width), nn.Tanh(), nn.Dropout(0.5), self._conv(width, width), nn.Tanh(), nn.Dropout(0.5),
            self._conv(width, mels),
        )  # fmt: skip

    @staticmethod
    def _conv(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv1d(inputs, outputs, 5, padding=2), nn.BatchNorm1d(outputs))

    def encode(self, text: torch.Tensor) -> torch.Tensor:
        h = self.table(text).transpose(1, 2)
        for layer in self.convolutions:
            h = F.dropout(F.relu(layer(h)), 0.5, self.training)
        return self.encoder(h.transpose(1, 2))[0]

    def forward(self, text: torch.Tensor, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        memory = self.encode(text)
        processed = self.attention.memory(memory)
        h = F.pad(frames, (0, 0, 1, 0))[:, :-1]
        for layer in self.prenet:
            h = F.dropout(F.relu(layer(h)), 0.5, self.training)
        attended: State | None = None
        decoded: State | None = None
        context, weights = torch.zeros_like(memory[:, 0]), torch.zeros_like(memory[:, :, 0])
        total = weights
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
