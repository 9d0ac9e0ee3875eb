"""What the suite knows of a task besides how to train it."""

import dataclasses

from fxamp.demo.loop import Run
from fxamp.demo.tasks import Task


@dataclasses.dataclass(frozen=True)
class SuiteTask(Task):
    """A task of the suite.

    Attributes:
        measures: what the metric is, in words.
        higher_is_better: which way the metric should go.
        onednn: whether its kernels come from oneDNN on a CPU. Autocast asks oneDNN for LSTMs in half precision, and
            on a CPU without units for it there are none: a task with LSTMs runs without oneDNN, in every mode.
        run: its training loop.
    """

    measures: str = ""
    higher_is_better: bool = False
    onednn: bool = True
    run: type[Run] = Run
