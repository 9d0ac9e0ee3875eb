"""tools/scale: its arithmetic, what it measures, and that nothing deterministic grows faster than the graph."""

import json
import math

import pytest
import torch

from fxamp.counting import scale
from tests.work import lines

# A conversion may cost a tenth more per node in a graph ten times as large; a square would be 2.
LINEAR = 1.05


def test_fit_finds_the_exponent_and_says_how_far_the_points_are_from_it():
    exponent, residual = scale.fit([10, 100, 1000], [7 * x**1.5 for x in (10, 100, 1000)])
    assert exponent == pytest.approx(1.5) and residual == pytest.approx(0, abs=1e-9)
    # log y is off the best line by (+d, -2d, +d) with d = log(1.1) / 3
    exponent, residual = scale.fit([1, 10, 100], [1, 10 / 1.1, 100])
    assert exponent == pytest.approx(1.0)
    d = math.log(1.1) / 3
    assert residual == pytest.approx(math.expm1(math.sqrt((1 + 4 + 1) * d * d / 3)))


def test_lines_are_counted_exactly():
    def work(rounds):
        done = []
        for _ in range(rounds):
            done.append(None)

    assert lines(lambda: work(101)) - lines(lambda: work(1)) == 200, "each round is two lines"


def test_peak_of_tensors_is_exact():
    x = torch.zeros(1000)
    assert scale.tensor_peak(lambda: (x.neg(), x.abs())) == 2 * 4000
    assert scale.tensor_peak(lambda: [len(x.neg()) for _ in range(3)]) == 4000, "freed one by one"
    assert scale.tensor_peak(lambda: None) == 0


@pytest.fixture(scope="module")
def points():
    return [scale.point("transformer blocks", size) for size in (3, 6, 12)]


def test_nothing_deterministic_grows_faster_than_the_graph(points):
    found = scale.exponents("transformer blocks", points)
    for measure in ("convert_lines", "O1_lines", "kept_bytes", "peak_bytes", "fp32_tensors", "O1_tensors"):
        assert found[measure][0] <= LINEAR, (measure, found[measure])
        assert found[measure][2] <= LINEAR, (measure, found[measure])


def test_a_conversion_does_not_grow_with_the_weights_of_its_graph():
    few, many = (scale.point("width of 4 blocks", size) for size in (32, 128))
    assert many["parameters"] > 10 * few["parameters"] and many["nodes"] == few["nodes"]
    assert many["convert_lines"] == pytest.approx(few["convert_lines"], rel=0.01)
    assert many["O1_lines"] == few["O1_lines"]
    # Weights are read for the rules: 16 rows of a head, and its mask of booleans; never a copy of all.
    assert many["convert_tensors"] < 0.25 * 4 * many["parameters"]
    assert many["fp32_tensors"] >= 4 * many["parameters"], "a gradient for each"


def test_the_tables_name_every_measure_and_its_exponent(points):
    text = scale.tables({"transformer blocks": points})
    assert text.splitlines()[0].startswith("| transformer blocks: nodes")
    for measure in scale.OF_AXIS["nodes"]:
        assert scale.MEASURES[measure] in text
    quadratic = [{"nodes": n, "convert_s": n * n * 1e-6} for n in (100, 1000, 10000)]
    assert " 2.00 " in scale.tables({"transformer blocks": quadratic})


def test_numbers_are_short():
    shown = [scale._short(value) for value in (None, 0.1812, 2.92, 736, 5164, 51266, 1343361, 2.71e6, 12.6e6, 1e9)]
    assert shown == ["-", "0.181", "2.92", "736", "5,164", "51.3 k", "1,343 k", "2,710 k", "12.6 M", "1,000 M"]


def test_the_command_measures_each_point_in_its_own_process_and_saves(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(scale.AXES, "transformer blocks", ("nodes", scale._blocks, (4, 6, 8)))
    monkeypatch.setattr(scale, "point", _cheap)
    path = tmp_path / "scale.json"
    scale.main(["--axes", "transformer blocks", "--save", str(path)])
    record = json.loads(path.read_text())
    assert record["command"] == "tools/scale --axes 'transformer blocks'" and "torch" in record["versions"]
    assert [entry["size"] for entry in record["data"]["transformer blocks"]] == [4, 6, 8]
    assert "conversion, s" in capsys.readouterr().out
    record["data"]["transformer blocks"][2:] = []
    path.write_text(json.dumps(record))
    scale.main(["--axes", "transformer blocks", "--save", str(path)])
    printed = capsys.readouterr().err
    assert "blocks 6:" not in printed and "blocks 8:" in printed, "points that the file has are kept"
    assert len(json.loads(path.read_text())["data"]["transformer blocks"]) == 3


def _cheap(axis: str, size: int) -> dict[str, float]:
    return {"size": size, "nodes": 30 * size, "parameters": size, "convert_s": 0.1 * size}
