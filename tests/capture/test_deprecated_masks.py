"""Masks of bytes, which torch takes with a warning and its fake tensors refuse."""

import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import OptionError

WHERE = {
    "a function": lambda mask, y: torch.where(mask, y, torch.zeros(4)),
    "a condition by name": lambda mask, y: torch.where(condition=mask, input=y, other=torch.zeros(4)),
    "a method": lambda mask, y: y.where(mask, torch.zeros(4)),
}


class Masks(nn.Module):
    def __init__(self, where) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.where = where

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.where(mask, self.fc(x))


@pytest.mark.filterwarnings("ignore:where received a uint8")
@pytest.mark.parametrize("capture", ["auto", "symbolic"])
@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
def test_where_with_a_mask_of_bytes_runs_as_unconverted(where, capture: str) -> None:
    model, x = Masks(where), torch.randn(2, 8)
    mask = torch.tensor([[1], [0]], dtype=torch.uint8)
    converted = fxamp.convert(model, dtype=torch.bfloat16, capture=capture)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x, mask)
    assert torch.equal(converted(x, mask), expected)
    assert fxamp.report(converted).low_precision_nodes > 0


def test_a_mask_that_torch_refuses_is_still_refused() -> None:
    model = Masks(WHERE["a function"])
    with pytest.raises(OptionError, match=r"(?s)where.*Where it runs with these.*capture='dynamo'.*boundaries="):
        fxamp.convert(model, dtype=torch.bfloat16)(torch.randn(2, 8), torch.ones(3, 1, dtype=torch.bool))
