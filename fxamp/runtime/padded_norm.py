"""Batch norm of channels that were padded; statistics and weights keep the model's own shapes."""

import torch
from torch import Tensor
from torch.nn import functional


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    batches: Tensor | None = None,
    is_tracked: bool = True,
) -> Tensor:
    """torch's batch_norm of an input that has more channels than there are weights; they come out zero.

        y = batch_norm(pad(x, channels=2), mean, var, weight, bias, True, 0.1, 1e-5)
        y[:, :-2] == torch's batch_norm(x, ...);  y[:, -2:] == 0

    Args:
        input: (N, C + extra, ...), zero in the last `extra` channels.
        running_mean, running_var, weight, bias: (C,); the statistics are updated in place when training.
        momentum: None: a cumulative average over `batches`.
        batches: BatchNorm's `num_batches_tracked`; counted up when training.
        is_tracked: BatchNorm's `track_running_stats`; False: training neither reads nor writes the statistics.
    """
    if training and not is_tracked:
        running_mean = running_var = batches = None
    if training and batches is not None:
        batches.add_(1)
        if momentum is None:
            momentum = 1.0 / float(batches)
    mean, var = _padded(input, running_mean, 0.0), _padded(input, running_var, 1.0)
    use_batch = training or mean is None
    y = functional.batch_norm(
        input,
        mean,
        var,
        _padded(input, weight, 0.0),
        _padded(input, bias, 0.0),
        use_batch,
        momentum or 0.0,
        eps,
    )
    if training:
        _write_back(running_mean, mean)
        _write_back(running_var, var)
    return y


def _padded(input: Tensor, value: Tensor | None, fill: float) -> Tensor | None:
    if value is None:
        return None
    return functional.pad(value, (0, input.shape[1] - value.shape[0]), value=fill)


def _write_back(statistic: Tensor | None, padded: Tensor | None) -> None:
    if statistic is not None and padded is not None:
        with torch.no_grad():
            statistic.copy_(padded[: statistic.shape[0]])
