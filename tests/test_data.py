"""pad_to_multiple: sequences padded to a multiple, with their lengths and mask."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxamp.data import pad_to_multiple
from fxamp.errors import OptionError


@given(length=st.integers(1, 40), multiple=st.integers(1, 17), dim=st.sampled_from((1, -2)))
def test_the_length_is_the_smallest_multiple_and_the_data_stand_first(length, multiple, dim):
    batch = torch.arange(2 * length * 3).view(2, length, 3)
    padded = pad_to_multiple(batch, multiple, dim=dim, value=-7)
    total = padded.values.shape[1]
    assert total % multiple == 0 and 0 <= total - length < multiple
    assert torch.equal(padded.values[:, :length], batch)
    assert (padded.values[:, length:] == -7).all()
    assert padded.lengths.tolist() == [length, length]
    assert padded.mask.tolist() == [[at < length for at in range(total)]] * 2


def test_sequences_of_different_lengths_are_stacked():
    sequences = [torch.ones(3, 2), torch.ones(9, 2), torch.ones(8, 2)]
    padded = pad_to_multiple(sequences, 8, dim=0)
    assert padded.values.shape == (3, 16, 2)
    assert padded.lengths.tolist() == [3, 9, 8]
    assert padded.mask.sum(1).tolist() == [3, 9, 8]
    assert padded.values[padded.mask].eq(1).all() and padded.values[~padded.mask].eq(0).all()


def test_what_fits_is_not_copied():
    batch = torch.zeros(2, 16)
    assert pad_to_multiple(batch).values is batch


def test_one_sequence_without_a_batch():
    padded = pad_to_multiple(torch.arange(5))
    assert padded.values.shape == (8,) and padded.lengths.item() == 5 and padded.mask.sum() == 5


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((torch.zeros(2, 3), 0), "multiple=0"),
        ((torch.zeros(2, 3), True), "multiple=True"),
        ((torch.zeros(2, 3), 8, 2), "dim=2"),
        (([],), "no sequences"),
        (([torch.zeros(2, 3), torch.zeros(2, 4)], 8, 0), r"\(2, 4\)"),
    ],
)
def test_bad_input_is_named(arguments, named):
    with pytest.raises(OptionError, match=named):
        pad_to_multiple(*arguments)
