"""The documentation's tables are what the generator makes of the committed results, and of made-up ones."""

import dataclasses
import datetime
import json
import re
from pathlib import Path

import pytest
import torch

from fxamp import demo
from fxamp.counting import ranks, regions, results
from fxamp.counting.counts import Counts
from fxamp.demo.loop import FP32, Mode, Result
from fxamp.errors import OptionError

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / results.FOLDER


@pytest.mark.parametrize("page", regions.PAGES)
def test_the_pages_say_what_the_committed_results_say(page):
    text = (ROOT / page).read_text()
    assert regions.rewrite(text, RESULTS) == text, f"{page} is stale: run tools/tables"


def test_every_region_is_closed_and_every_result_is_shown_somewhere():
    texts = [(ROOT / page).read_text() for page in regions.PAGES]
    shown = [match[2] for text in texts for match in regions.REGION.finditer(text)]
    assert sum(text.count("<!-- table: ") for text in texts) == len(shown) > 0
    files = {regions.TABLES[name][0] for name in shown if name != regions.ACCURACY}
    for path in RESULTS.glob("*.json"):
        assert path.stem in files, f"{path.name} is in no table"


def test_results_say_where_they_come_from():
    for path in RESULTS.glob("*.json"):
        record = results.load(path)
        assert record["command"].startswith("tools/") and (ROOT / record["command"].split()[0]).exists()
        assert record["machine"] and record["versions"]["torch"] and record["seconds"] > 0


def record(tmp_path, name, data):
    results.save(results.make(f"tools/{name}", ["--save"], data, 12.3), tmp_path / f"{name}.json")


def region(tmp_path, name):
    """A page after the rewrite, runs of spaces as one."""
    page = regions.rewrite(f"before\n<!-- table: {name} -->\nold\n<!-- end -->\nafter\n", tmp_path)
    return re.sub(" +", " ", page)


def test_results_say_of_which_day_they_are():
    made = results.make("tools/zoo", [], {}, 1.0)
    day = made.pop("date")
    assert day == datetime.date.today().isoformat()
    assert regions.source({**made, "date": day}) == f"{regions.source(made)[:-1]}; {day})", "older results have none"


def test_a_region_is_replaced_and_the_rest_stays(tmp_path):
    missing = region(tmp_path, "count")
    assert missing.startswith("before\n<!-- table: count -->\n") and missing.endswith("<!-- end -->\nafter\n")
    assert "Not measured yet: `tools/count --save`." in missing and "old" not in missing
    assert regions.rewrite(missing, tmp_path) == missing, "a second time changes nothing"
    with pytest.raises(OptionError, match=r"cuont --> is no table. Did you mean 'count'"):
        region(tmp_path, "cuont")


def test_counts(tmp_path):
    costs = {"fp32": 10, "autocast": 20, "O1 balanced": 15, "O2": 21, "half": 5}
    row = {
        way: dataclasses.asdict(Counts(launches=cost, casts=cost, nbytes=cost, saved_nbytes=cost))
        for way, cost in costs.items()
    }
    record(tmp_path, "count", {"gpt2_small": row})
    text = region(tmp_path, "count")
    assert "| against autocast, 1 models | O1 balanced | goal | O2 | goal | pure half |" in text
    assert "| kernel launches | 0.750 | 0.76 | 1.050 | 0.74 | 0.250 |" in text
    said = " ".join(text.split())
    assert "Missed: O1 balanced, cast launches: 0.750, goal 0.15; above it gpt2_small 0.750. O2, cast" in said
    assert "O2, bytes moved: 1.050, goal 0.88; above it gpt2_small 1.050." in said
    assert "O1 balanced, kernel launches" not in said and "O1 balanced, bytes moved" not in said, "goals that are met"
    assert "Worse than autocast, O2: gpt2_small cast launches 1.050, gpt2_small kernel launches 1.050" in text
    assert "`tools/count` (CPU with" in text and "python 3." in text


def test_training_runs(tmp_path):
    run = {"mode": "fp32", "seed": 1, "loss": 0.05, "accuracy": 0.979, "casts": 0, "tensors_cast": 0, "skipped": 0}
    other = {**run, "seed": 2, "loss": 0.06, "accuracy": 0.974}
    ours = {**run, "mode": "fxamp fp16", "casts": 7, "tensors_cast": 15, "skipped": 2}
    record(tmp_path, "train", {"digits": [run, other, ours]})
    text = region(tmp_path, "train")
    assert "| fp32 | 1 / 2 | 0.0500 / 0.0600 | 97.90% / 97.40% | 0 | 0 | 0 |" in text
    assert "| fxamp fp16 | 1 | 0.0500 | 97.90% | 7 | 15 | 2 |" in text


def test_the_zoo_says_who_is_far_who_lacks_and_who_failed(tmp_path):
    near = {"outputs": [1e-3, 1e-3]}
    rows = [
        {"name": "near", "errors": near, "low_share": 1.0, "autocast_low_share": 1.0},
        {"name": "far", "errors": {"outputs": [3e-3, 1e-3]}, "low_share": 1.0, "autocast_low_share": 1.0},
        {"name": "high", "errors": near, "low_share": 0.5, "autocast_low_share": 1.0},
    ]
    record(
        tmp_path, "zoo", {"rows": rows, "failures": ["broken: CaptureError"], "headers": ["model"], "cells": [["near"]]}
    )
    text = region(tmp_path, "zoo")
    assert "3 of 4 models convert and train; 1 of them stay" in text
    assert "| far | outputs 3.0e-03 / 1.0e-03" in text and "| 50% / 100%" in text and "| near" not in text
    assert "Failed: broken: CaptureError." in text
    assert "| near" in region(tmp_path, "zoo-rows")


def test_the_zoo_says_who_is_further_at_every_seed(tmp_path):
    def row(name, *ours):
        pairs = [[each * 1e-3, 1e-3] for each in ours]
        errors = {"outputs": pairs[0], "gradients": pairs[0]}
        return {"name": name, "errors": errors, "low_share": 1.0, "autocast_low_share": 1.0,
                "seeds": {"outputs": pairs, "gradients": [[1e-3, 1e-3]] * 3}}  # fmt: skip

    rows = [row("further", 1.2, 1.1, 1.3), row("noise", 1.5, 0.9, 1.5), row("hardly", 1.01, 1.02, 1.03)]
    rows += [row("nearer", 0.5, 0.9, 0.8), row("worst", 1.6, 1.6, 1.6)]
    data = {"rows": rows, "failures": [], "headers": ["model"], "cells": [["near"]]}
    record(tmp_path, "zoo", data)
    text = " ".join(region(tmp_path, "zoo").split())
    assert "outputs from fp32, of autocast's: 1.12 (geomean of all models, 3 seeds each)" in text
    assert "5% or more in the mean, 2 are further (worst 1.60, further 1.20) and 1 nearer." in text
    assert "gradients from fp32, of autocast's: 1.00" in text and "0 are further and 0 nearer" in text
    for each in rows:
        each["seeds"] = {what: pairs[:1] for what, pairs in each["seeds"].items()}
    record(tmp_path, "zoo", data)
    assert "geomean" not in region(tmp_path, "zoo")


def test_a_saved_record_leaves_out_where_it_was_saved(tmp_path):
    def command(*typed):
        return results.make("tools/count", typed, {}, 1.0)["command"]

    assert command("--save") == command("--save", "a.json") == "tools/count"
    assert command("ncf", "--save", "a.json", "--tiny") == "tools/count ncf --tiny"
    assert command("--save", "--ways", "fp32,O1 strict") == "tools/count --ways 'fp32,O1 strict'"
    path = tmp_path / "new" / "a.json"
    results.save({"data": 1}, path)
    assert json.loads(path.read_text()) == {"data": 1} and [*path.parent.iterdir()] == [path]


def test_the_command_writes_pages_and_checks_them(tmp_path, capsys):
    page = tmp_path / "README.md"
    page.write_text("<!-- table: count -->\n<!-- end -->\n")
    assert regions.main(["--check", "--root", str(tmp_path)]) == 1
    assert page.read_text() == "<!-- table: count -->\n<!-- end -->\n"
    assert regions.main(["--root", str(tmp_path)]) == 0 and "Not measured yet" in page.read_text()
    assert regions.main(["--check", "--root", str(tmp_path)]) == 0
    assert "would change" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ tools/ranks


def test_memory_a_parameter_by_level_and_optimizer():
    """Weight + gradient + masters + state: 4 + 4 + 0 + 8; 2 + 2 + 4 + 8; kahan 2 for 4, stochastic 0."""
    found = ranks.memory()
    expected = {
        "fp32, or autocast": (12, 16), "O1": (12, 16), "O2, fp32 masters": (12, 16), 'O2, masters="kahan"': (10, 14),
        'O2, masters="stochastic"': (8, 12), "O3": (6, 8),
    }  # fmt: skip
    for way, (sgd, adamw) in expected.items():
        small = 0.02  # inputs, step counters, seeds: some kB in half a million parameters
        assert found[way]["SGD, momentum"] == pytest.approx(sgd, abs=small), way
        assert found[way]["AdamW"] == pytest.approx(adamw, abs=small), way


def test_what_ranks_send_a_parameter():
    found = ranks.traffic(2)
    payloads = {way: tuple(round(row[name], 2) for name in ranks.COLLECTIVES) for way, row in found.items()}
    assert payloads == {
        "DDP, O1": (4, 0, 0),
        "DDP, O1, reduce_gradients_in(bfloat16)": (2, 0, 0),
        "DDP, O2": (2, 0, 0),
        "DDP, O2, reduce_gradients_in(float32)": (4, 0, 0),
        "FSDP2, O1 by block": (0, 8, 4),
        "FSDP2, O1 by block, reduce_dtype=bfloat16": (0, 8, 2),
        "FSDP2, O1 by block, param_dtype=bfloat16": (0, 4, 4),
        "FSDP2, O1 by block, both": (0, 4, 2),
    }
    ring = {"all-reduce": 4.0, "all-gather": 8.0, "reduce-scatter": 4.0}
    assert ranks.per_rank(ring, 2) == (8 + 8 + 4) / 2


def test_a_run_of_the_demo_is_saved_as_the_table_needs_it(tmp_path):
    mode = Mode("fxamp", torch.float16)
    run = Result(mode, 1, 0.05, 0.1, 0.979, 10, 20, 7.0, 15.0, 2, 5.0, 9.0)
    record(tmp_path, "train", {"digits": [demo.facts(dataclasses.replace(run, mode=FP32)), demo.facts(run)]})
    assert "| fxamp fp16 | 1 | 0.0500 | 97.90% | 7 | 15 | 2 |" in region(tmp_path, "train")
