"""The loss curves of the suite."""

from pathlib import Path
from typing import Any

from fxamp.demo.suite.modes import MODES, TF32_NAME
from fxamp.demo.suite.records import Store
from fxamp.demo.tasks import load

COLUMNS = 4
STYLES = {"fp32": "k:", TF32_NAME: "C2:", "autocast": "C1-", "fxamp": "C0-"}


def plot(store: Store, path: Path) -> None:
    """One panel a task: every run's training loss; fp32 and TF32 dotted, autocast in orange, fxamp in blue."""
    load("matplotlib").use("Agg")
    names = [name for name, _ in store.facts() if any(one.task == name and one.curve for one in store.records)]
    rows = max(1, -(-len(names) // COLUMNS))
    figure, axes = load("matplotlib.pyplot").subplots(rows, COLUMNS, figsize=(4 * COLUMNS, 2.8 * rows), squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        _panel(axis, store, name)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    load("matplotlib.pyplot").close(figure)


def _panel(axis: Any, store: Store, name: str) -> None:
    drawn = set()
    for one in sorted((one for one in store.records if one.task == name), key=lambda one: one.mode == "fp32"):
        engine = MODES[one.mode].engine or one.mode
        places = [(point + 0.5) * one.steps / len(one.curve) for point in range(len(one.curve))]
        alpha = 0.5 if MODES[one.mode].engine else 1
        axis.plot(places, one.curve, STYLES[engine], alpha=alpha, lw=1, label=None if engine in drawn else engine)
        drawn.add(engine)
    axis.set_title(name)
    axis.set_xlabel("step")
    axis.set_ylabel("training loss")
    axis.legend(fontsize=7)
