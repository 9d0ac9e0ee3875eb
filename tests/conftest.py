"""One thread: the tests run many tiny ops, and starting threads costs more than they do."""

import torch

torch.set_num_threads(1)
