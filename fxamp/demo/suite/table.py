"""The suite's tables and its claims."""

import dataclasses
from collections.abc import Iterable, Sequence
from statistics import fmean

from tabulate import tabulate

from fxamp.demo.suite.guide import MODELS
from fxamp.demo.suite.modes import MODES
from fxamp.demo.suite.records import Record, Store, TaskFacts

HEAD = """\
# Accuracy: fp32, autocast and fxamp side by side

Written by `{command}` from `docs/{base}.json` ({machine}).
Every task is real data that comes with Python or scikit-learn and a small model. {seeds} decide the
first weights and the batches, which are the same in every mode.

**The claim**, for each row of fxamp: the mean of its metric over the seeds lies between the lowest and the highest of
fp32's seeds (the ends included). Autocast's rows are held against the same, for comparison. Where it does not hold the
row says by how much, and in which direction.

Modes: autocast with `torch.amp.GradScaler` (bf16 without a scaler); fxamp `O1` at each `level` with
`fxamp.LossScaler` (bf16 without); `O2` at level balanced, with `fxamp.MasterWeightOptimizer`. What has no number was
not run.

Loss curves of all runs: [{base}.png]({base}.png).
"""

FEWEST_SEEDS = 2
"""Of fp32, for a spread."""
LEGEND = """\
Metric: on held-out data, the mean over the seeds and the lowest and highest of them. test loss: on the same data. final
loss: of training, over the last tenth of the steps. low / nodes: of fxamp's graphs. casts: calls in a step that convert
between floating dtypes. skipped: steps that the scaler left out, of all seeds together.
"""


@dataclasses.dataclass(frozen=True)
class Summary:
    """The runs of one task in one mode.

    Attributes:
        metrics: of the seeds that did not fail.
        errors: of those that did.
    """

    records: tuple[Record, ...]

    @property
    def metrics(self) -> list[float]:
        return [one.metric for one in self.records if one.metric is not None]

    @property
    def errors(self) -> list[str]:
        return [one.error for one in self.records if one.error is not None]

    @property
    def trained(self) -> set[tuple[int, int]]:
        """(seed, steps) of those that did not fail: the same ones saw the same batches."""
        return {(one.seed, one.steps) for one in self.records if one.metric is not None}

    def of(self, name: str) -> list[float]:
        """A number of each run."""
        return [value for one in self.records if (value := getattr(one, name)) is not None]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a mode of a task is held against, and what was found; `holds` None where there is no spread."""

    task: str
    mode: str
    holds: bool | None
    text: str

    @property
    def is_claim(self) -> bool:
        """fxamp's rows are claims; the others are shown beside them."""
        return MODES[self.mode].engine == "fxamp"


def summaries(store: Store, task: str) -> dict[str, Summary]:
    """By mode, those that were run."""
    found = {mode: tuple(one for one in store.records if (one.task, one.mode) == (task, mode)) for mode in MODES}
    return {mode: Summary(records) for mode, records in found.items() if records}


def verdict(task: str, mode: str, ours: Summary, fp32: Summary | None, facts: TaskFacts) -> Verdict:
    """Whether the mean is in fp32's spread."""
    if ours.errors:
        return Verdict(task, mode, False, f"NO: failed, {ours.errors[0]}")
    if fp32 is None or not fp32.metrics:
        return Verdict(task, mode, False, "NO: no fp32 runs")
    if ours.trained < fp32.trained:
        return Verdict(task, mode, False, f"NO: {len(ours.trained)} of {len(fp32.trained)} seeds so far")
    if ours.trained != fp32.trained:
        return Verdict(task, mode, False, f"NO: {_seeds(ours.trained)}; fp32: {_seeds(fp32.trained)}")
    if len(fp32.metrics) < FEWEST_SEEDS:
        return Verdict(task, mode, None, f"needs {FEWEST_SEEDS} seeds")
    mean, low, high = fmean(ours.metrics), min(fp32.metrics), max(fp32.metrics)
    if low <= mean <= high:
        return Verdict(task, mode, True, "yes")
    if mean != mean:
        return Verdict(task, mode, False, "NO: not a number")
    beyond = mean - high if mean > high else mean - low
    side = "better" if (beyond > 0) == facts.higher_is_better else "worse"
    return Verdict(task, mode, False, f"NO: {side} by {abs(beyond):.2g}")


def _seeds(trained: set[tuple[int, int]]) -> str:
    """_seeds({(1, 10), (2, 10)}) == "seeds 1, 2 of 10 steps"."""
    of = {steps: sorted(seed for seed, each in trained if each == steps) for _, steps in sorted(trained)}
    return " and ".join(f"seeds {', '.join(map(str, seeds))} of {steps} steps" for steps, seeds in of.items())


def verdicts(store: Store) -> list[Verdict]:
    """Of autocast's and fxamp's rows."""
    found = []
    for task, facts in store.facts():
        modes = summaries(store, task)
        for mode, ours in modes.items():
            if MODES[mode].engine:
                found.append(verdict(task, mode, ours, modes.get("fp32"), facts))
    return found


def page(store: Store, base: str) -> str:
    """All of it, as markdown."""
    seeds = sorted({one.seed for one in store.records})
    command = "tools/accuracy" + ("" if base == "accuracy" else f" --device {base.removeprefix('accuracy-')}")
    machine = ", ".join(f"{name} {value}" for name, value in store.machine.items())
    head = HEAD.format(command=command, base=base, machine=machine, seeds=f"Seeds {', '.join(map(str, seeds))}")
    parts = [head, count(verdicts(store)), same_as_autocast(store), "## All tasks\n", overview(store)]
    for task, _ in store.facts():
        parts += [f"## {task}\n", task_table(store, task)]
    parts += [LEGEND, "## The models of the guide\n", guide_table(store)]
    return "\n".join(parts)


def count(found: Sequence[Verdict]) -> str:
    """How many claims hold, and which do not."""
    judged = [one for one in found if one.holds is not None]
    if found and not judged:
        return f"**No row can be held against fp32's spread: it needs {FEWEST_SEEDS} seeds.**\n"
    claims, others = [one for one in judged if one.is_claim], [one for one in judged if not one.is_claim]
    lines = [
        f"**{sum(one.holds is True for one in claims)} of {len(claims)} rows of fxamp are within fp32's spread; "
        f"of autocast's, {sum(one.holds is True for one in others)} of {len(others)}.**"
    ]
    missed = [f"- {one.task}, {one.mode}: {one.text}" for one in found if one.is_claim and not one.holds]
    lines += ["", *missed] if missed else []
    return "\n".join(lines) + "\n"


def same_as_autocast(store: Store) -> str:
    """How many of fxamp's rows have autocast's numbers."""
    rows = same = 0
    for task, _ in store.facts():
        modes = summaries(store, task)
        for mode, ours in modes.items():
            theirs = modes.get(f"autocast {mode.split()[-1]}")
            if MODES[mode].engine == "fxamp" and theirs:
                rows += 1
                same += [(one.seed, one.metric) for one in ours.records] == [
                    (one.seed, one.metric) for one in theirs.records
                ]
    return f"{same} of {rows} rows of fxamp have exactly the metrics of autocast in that dtype, seed by seed.\n"


def overview(store: Store, only: Sequence[str] = tuple(MODES)) -> str:
    """A row for each task, a column for each of these modes that ran: the mean metric, marked where it is outside."""
    columns = [mode for mode in _modes(store) if mode in only]
    outside = {(one.task, one.mode) for one in verdicts(store) if one.holds is False}
    rows = []
    for task, facts in store.facts():
        modes = summaries(store, task)
        cells = [
            _mean(modes[mode].metrics) + "\\*" * ((task, mode) in outside) if mode in modes else "" for mode in columns
        ]
        fp32 = modes["fp32"].metrics if "fp32" in modes else []
        rows.append([task, f"{facts.measures} ({'up' if facts.higher_is_better else 'down'})", _spread(fp32), *cells])
    return _markdown(rows, ["task", "metric (better)", "fp32's spread", *columns]) + "\n\n\\* outside fp32's spread\n"


def task_table(store: Store, task: str) -> str:
    """A row for each mode of one task."""
    facts, modes = store.tasks[task], summaries(store, task)
    held = {one.mode: one.text for one in verdicts(store) if one.task == task}
    rows = [
        [
            mode,
            _mean(ours.metrics), _spread(ours.metrics),
            _mean(ours.of("held_out_loss")), _mean(ours.of("loss")), _spread(ours.of("loss")),
            _nodes(ours.records[0]), _mean(ours.of("casts")), str(int(sum(ours.of("skipped")))),
            held.get(mode, "-"),
        ]
        for mode, ours in modes.items()
    ]  # fmt: skip
    heads = ["mode", facts.measures, "spread", "test loss", "final loss", "spread", "low / nodes", "casts"]
    text = f"{facts.title}; {facts.parameters:,} parameters, {facts.steps} steps.\n\n"
    return text + _markdown(rows, [*heads, "skipped", "within fp32's spread"]) + "\n"


def guide_table(store: Store) -> str:
    """A row for each model that the guide names."""
    rows = []
    for model in MODELS:
        sizes = [f"{task}: {store.tasks[task].parameters:,} parameters" for task in model.tasks if task in store.tasks]
        rows.append([model.name, model.where, "; ".join(sizes) or "-", model.run, model.not_run])
    return _markdown(rows, ["model", "in the guide", "task", "what was run", "what was not, and why"]) + "\n"


def _modes(store: Store) -> list[str]:
    ran = {one.mode for one in store.records}
    return [mode for mode in MODES if mode in ran]


def _mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.4g}" if values else "failed"


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.4g}..{max(values):.4g}" if values else "-"


def _nodes(record: Record) -> str:
    return "-" if record.nodes is None else f"{record.low} / {record.nodes}"


def _markdown(rows: Iterable[Sequence[str]], heads: Sequence[str]) -> str:
    return tabulate(rows, headers=heads, tablefmt="pipe", disable_numparse=True)
