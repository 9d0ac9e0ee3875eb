"""One thread: the tests run many tiny ops, and starting threads costs more than they do."""

import pytest
import torch

from fxamp import errors
from fxamp.options import warn_of_untested_torch

torch.set_num_threads(1)


@pytest.fixture
def fresh_dynamo():
    """One seed, and nothing that Dynamo has compiled before."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def nothing_was_warned_of(monkeypatch):
    """What is said once a process is said once a test; that a torch is newer than those tested, before the test."""
    warn_of_untested_torch(torch.__version__)
    monkeypatch.setattr(errors, "_warned", set())
