"""Tacotron-style synthesis: from symbols to frames, by attention, each step fed with the frames before it.

The frames are not sound: they are the columns of handwritten digits, as in `speech`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxamp.demo.suite.speech import BANDS, DIGITS, FRAMES, rows_of_digits
from fxamp.demo.suite.task import SuiteTask
from fxamp.demo.tasks import draw, scans_of_digits

AT_ONCE = 4
"""Frames of one decoder step, the reduction factor."""


class LocationAttention(nn.Module):
    """Attention that also sees where it has been."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.place = nn.Conv1d(2, width, 3, padding=1, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, query: Tensor, memory: Tensor, weights: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        places = self.place(torch.stack((weights, total), 1)).transpose(1, 2)
        found = self.score(torch.tanh(self.query(query)[:, None] + places + self.key(memory))).squeeze(-1).softmax(-1)
        return torch.bmm(found[:, None], memory).squeeze(1), found


class Tacotron(nn.Module):
    """Gives the frames as the decoder has them, and with the postnet's corrections."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.symbols = nn.Embedding(10, width)
        self.convolution = nn.Sequential(nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width), nn.ReLU())
        self.encoder = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.prenet = nn.Sequential(nn.Linear(AT_ONCE * BANDS, width), nn.ReLU(), nn.Dropout(0.1))
        self.attention = LocationAttention(width)
        self.attended, self.decoder = nn.LSTMCell(2 * width, width), nn.LSTMCell(2 * width, width)
        self.head = nn.Linear(2 * width, AT_ONCE * BANDS)
        self.postnet = nn.Sequential(
            nn.Conv1d(BANDS, width, 5, padding=2),
            nn.BatchNorm1d(width),
            nn.Tanh(),
            nn.Conv1d(width, BANDS, 5, padding=2),
        )

    def forward(self, digits: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.encoder(self.convolution(self.symbols(digits).transpose(1, 2)).transpose(1, 2))[0]
        before = F.pad(frames, (AT_ONCE, 0))[..., :-AT_ONCE]
        inputs = self.prenet(before.reshape(len(frames), BANDS, -1, AT_ONCE).transpose(1, 2).flatten(2))
        context, weights = torch.zeros_like(memory[:, 0]), torch.zeros_like(memory[..., 0])
        total, steps = weights, []
        first = second = (torch.zeros_like(context), torch.zeros_like(context))
        for step in range(FRAMES // AT_ONCE):
            first = self.attended(torch.cat((inputs[:, step], context), -1), first)
            context, weights = self.attention(first[0], memory, weights, total)
            total = total + weights
            second = self.decoder(torch.cat((first[0], context), -1), second)
            steps.append(self.head(torch.cat((second[0], context), -1)))
        decoded = torch.stack(steps, 1).view(len(frames), -1, BANDS, AT_ONCE).transpose(1, 2).flatten(2)
        return decoded, decoded + self.postnet(decoded)


def frame_loss(outputs: tuple[Tensor, Tensor], frames: Tensor) -> Tensor:
    """Mean squared error, before and after the postnet."""
    return F.mse_loss(outputs[0].float(), frames) + F.mse_loss(outputs[1].float(), frames)


def frame_error(outputs: tuple[Tensor, Tensor], frames: Tensor) -> float:
    """Mean squared error of the final frames."""
    return F.mse_loss(outputs[1].double(), frames.double()).item()


def spectrogram(device: torch.device, steps: int = 80, batch: int = 12) -> SuiteTask:
    """Rows of three digits, from their labels."""
    learnt, tested = scans_of_digits(torch.device("cpu"))
    frames, digits = (part.to(device) for part in rows_of_digits(learnt, 2000, 7))
    held_out_frames, held_out_digits = (part.to(device) for part in rows_of_digits(tested, 256, 8))
    return SuiteTask(
        name="spectrogram",
        title=f"Tacotron-style decoder; {DIGITS} symbols to the columns of handwritten digits (no sound)",
        model=Tacotron,
        batches=draw((digits, frames), frames, steps, batch),
        held_out=((held_out_digits, held_out_frames), held_out_frames),
        steps=steps,
        learning_rate=1e-2,
        loss=frame_loss,
        metric=frame_error,
        measures="mean squared error of a frame",
        onednn=False,
    )
