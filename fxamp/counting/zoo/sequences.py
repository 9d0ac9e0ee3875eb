"""Steps of the recurrent models: GNMT, Tacotron 2, Jasper, the multiplicative LSTM."""

from typing import Any

import torch
from torch.nn import functional as F

from fxamp.counting.zoo.gnmt import GNMT
from fxamp.counting.zoo.mlstm import Sentiment
from fxamp.counting.zoo.speech import Jasper, Tacotron2
from fxamp.counting.zoo.step import MakeStep, Step, classify

# (width, kernel) of Jasper's blocks of five convolutions.
_JASPER = ((256, 11), (384, 13), (512, 17), (640, 21), (768, 25))


def gnmt(tiny: bool) -> Step:
    words, width, layers, batch, length = (32, 16, 2, 2, 6) if tiny else (32320, 1024, 4, 64, 50)
    tokens = [torch.randint(1, words, (batch, length)) for _ in range(2)]
    return Step(GNMT(words, width, layers), tuple(tokens), classify(words, batch, length))


def tacotron2(tiny: bool) -> Step:
    batch, letters, frames, mels = (2, 6, 4, 8) if tiny else (32, 100, 50, 80)
    model = Tacotron2(20, mels, 16, 16, 16, 16, 4, 5) if tiny else Tacotron2(148, mels, 512, 256, 128, 1024)
    wanted, is_last = torch.randn(batch, frames, mels), torch.zeros(batch, frames)

    def loss_of(result: Any) -> torch.Tensor:
        first, second, stop = result
        distance = F.mse_loss(first, wanted) + F.mse_loss(second, wanted)
        return distance + F.binary_cross_entropy_with_logits(stop, is_last)

    return Step(model, (torch.randint(0, 20, (batch, letters)), torch.randn(batch, frames, mels)), loss_of)


def jasper(tiny: bool) -> Step:
    batch, length, letters = (2, 24, 10) if tiny else (16, 1400, 29)
    if tiny:
        model = Jasper(12, 16, ((16, 5), (32, 7)), 2, (32, 32), letters)
    else:
        model = Jasper(64, 256, _JASPER, 5, (896, 1024), letters)
    features = torch.randn(batch, 12 if tiny else 64, length)
    labels = torch.randint(0, letters, (batch * length // 2,))
    return Step(model, (features,), lambda result: F.nll_loss(result.flatten(0, 1), labels))


def mlstm(tiny: bool) -> Step:
    letters, embedding, width, batch, length = (32, 16, 16, 2, 4) if tiny else (256, 64, 4096, 32, 64)
    loss_of = classify(letters, batch, length)
    text = torch.randint(0, letters, (batch, length))
    return Step(Sentiment(letters, embedding, width), (text,), lambda result: loss_of(result[0]))


SEQUENCES: dict[str, MakeStep] = {"gnmt": gnmt, "tacotron2": tacotron2, "jasper": jasper, "mlstm": mlstm}
