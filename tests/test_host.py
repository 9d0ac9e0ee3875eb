"""tools/host: that each way is what it is called, its arithmetic, and what the table says of goals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.counting import host, results

ROOT = Path(__file__).resolve().parent.parent
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")


class Calls(TorchDispatchMode):
    """The ops of a step, and the dtypes that its products read."""

    def __init__(self):
        super().__init__()
        self.products, self.ops = set(), []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        self.ops.append(name)
        if name in PRODUCTS:
            self.products |= {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["resnet", "lstm cells"])
def test_each_way_is_what_it_is_called(name):
    timed = host.steps(name)
    assert tuple(timed) == host.WAYS
    found = {}
    for way, step in timed.items():
        for _ in range(2):
            step()
        with Calls() as found[way]:
            step()
    assert found.pop("fp32").products == {torch.float32}
    assert {way: calls.products for way, calls in found.items()} == {way: {torch.bfloat16} for way in found}
    casts = {way: calls.ops.count("_to_copy") for way, calls in found.items()}
    assert found["O1"].ops.count("_foreach_copy_") > 0 and found["O2"].ops.count("_foreach_copy_") == 0
    assert casts["half"] <= 2, "the loss alone is float32"
    assert casts["O2"] < casts["autocast"] and casts["O1"] < casts["autocast"]


def test_every_step_makes_its_gradients_anew():
    for way, step in host.steps("mlp").items():
        step()
        with Calls() as calls:
            step()
        assert not {"add_", "zero_"} & set(calls.ops), way


def a_run(o1, o2):
    """Times of two models, as shares of autocast's 10 us in the first and 20 us in the second."""
    return {
        name: {"fp32": 1 * unit, "autocast": 1 * unit, "O1": each * unit, "O2": o2 * unit, "half": 0.5 * unit}
        for name, unit, each in (("first", 1e-5, o1[0]), ("second", 2e-5, o1[1]))
    }


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_middles_leave_out_the_first_rounds():
    assert host.middles({"O1": [100.0] * host.WARM_UP + [3.0, 1.0, 2.0]}) == {"O1": 2.0}


def test_a_mean_is_geometric_and_of_autocasts_time():
    run = a_run((0.5, 2.0), 0.7)
    assert host.mean_share(run, "O1") == pytest.approx(1.0) and host.mean_share(run, "O2") == pytest.approx(0.7)
    assert ["first", "1.000", "1.000", "0.500", "0.700", "0.500", "10"] in cells(host.text(run))


def test_the_table_names_what_misses_a_goal():
    met, missed = a_run((0.8, 0.8), 0.7), a_run((0.84, 0.98), 0.7)
    table = host.table({"A": [met], "B": [missed, missed, met]})
    assert "Missed: O1 on a B: 0.91, goal 0.85; above it second." in table
    assert ["B, 3 runs", "1.00", "0.80 to 0.91", "0.70", "0.50"] in cells(table)
    assert ["goal", "", "0.85", "0.75", ""] in cells(table)
    assert host.table({"A": [met, met, missed]}).endswith("Every goal is met."), "of the middle run"


def test_the_command_saves_its_machine_beside_others(tmp_path):
    file = tmp_path / "host.json"
    file.write_text(json.dumps({"data": {"another": [a_run((0.8, 0.8), 0.7)], results.machine(): []}}))
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "host", "--rounds", "1", "--save", file], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    record = results.load(file)
    assert list(record["data"]) == ["another", results.machine()] and record["command"] == "tools/host --rounds 1"
    (run,) = record["data"][results.machine()]
    assert list(run) == list(host.MODELS) and all(tuple(row) == host.WAYS for row in run.values())
    assert all(seconds > 0 for row in run.values() for seconds in row.values())
    assert host.text(run).rstrip() == done.stdout.rstrip()


def test_counts_of_nothing_are_refused(capsys):
    with pytest.raises(SystemExit):
        host.main(["--runs", "0"])
    assert "1 or more" in capsys.readouterr().err
