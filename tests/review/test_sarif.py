"""SARIF of fxamp.audit against the structure that the schema of SARIF 2.1.0 asks for: no key it does not know, every
key it requires, the types and the words it allows.

The whole schema was run once, with its formats, over the logs of
every pattern below, from inside and outside the working directory: no error. What it says of the objects that are
written stands here, so that the test needs no copy of it.
"""

import json
import re
from urllib.parse import urlsplit

import pytest
import torch
from review_cases import Two

from fxamp.instruments import audit
from fxamp.review.sarif import sarif_log

X = torch.linspace(0.5, 1.5, 32).reshape(4, 8)
TEXT = {"text!": str, "markdown": str}

# A key with `!` is required; a list holds one kind of thing; a set holds the words that are allowed.
RULE = {"id!": str, "name": str, "shortDescription": TEXT, "fullDescription": TEXT, "help": TEXT, "helpUri": str}
PLACE = {"artifactLocation!": {"uri": str}, "region": {"startLine": int, "startColumn": int}}
NAME = {"name": str, "fullyQualifiedName": str, "kind": str}
RESULT = {
    "ruleId": str,
    "ruleIndex": int,
    "level": {"none", "note", "warning", "error"},
    "message!": TEXT,
    "locations": [{"physicalLocation": PLACE, "logicalLocations": [NAME]}],
    "partialFingerprints": dict,
}
RUN = {
    "tool!": {"driver!": {"name!": str, "rules": [RULE]}},
    "columnKind": {"utf16CodeUnits", "unicodeCodePoints"},
    "results": [RESULT],
}
LOG = {"$schema": str, "version!": {"2.1.0"}, "runs!": [RUN]}


def wrong(value, shape, path="log"):
    """What of `value` is not of the shape, each with its path."""
    if isinstance(shape, dict):
        keys = {key.rstrip("!"): part for key, part in shape.items()}
        missing = [key[:-1] for key in shape if key.endswith("!") and key[:-1] not in value]
        unknown = [key for key in value if key not in keys]
        inner = [text for key in value if key in keys for text in wrong(value[key], keys[key], f"{path}.{key}")]
        return [*(f"{path} lacks {key}" for key in missing), *(f"{path} has {key}" for key in unknown), *inner]
    if isinstance(shape, list):
        return [text for number, part in enumerate(value) for text in wrong(part, shape[0], f"{path}[{number}]")]
    if isinstance(shape, set):
        return [] if value in shape else [f"{path} is {value!r}"]
    return [] if type(value) is shape else [f"{path} is a {type(value).__name__}"]


def everything(m, x):
    y = m.a(x).masked_fill(x > 1, -1e9).softmax(-1) + 1e-7
    with torch.autocast("cpu", enabled=False):
        z = m.b(m.a(x))
    scaled = m.a(x) * 1e6
    return y, z, m.a(x).sigmoid().log(), scaled + 1.0, z * z, m.a(x) * torch.arange(8).float()


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_log_has_the_structure_of_the_schema(is_inside, tmp_path, monkeypatch):
    if not is_inside:
        monkeypatch.chdir(tmp_path)
    log = json.loads(audit(Two(everything), (X,)).to_sarif())
    assert wrong(log, LOG) == []
    (run,) = log["runs"]
    found = {result["ruleId"] for result in run["results"]}
    assert found >= {"mask", "epsilon", "protected", "domain", "literal", "taint", "integers", "square", "gemm"}
    for result in run["results"]:
        assert 0 <= result["ruleIndex"] < len(run["tool"]["driver"]["rules"])
        assert all(type(text) is str for text in result["partialFingerprints"].values())
        for location in result["locations"]:
            place = location["physicalLocation"]
            assert place["region"]["startLine"] >= 1
            assert is_uri_reference(place["artifactLocation"]["uri"])


def is_uri_reference(text):
    return bool(re.fullmatch(r"[\w.~:/?#\[\]@!$&'()*+,;=%-]+", text, re.A)) and urlsplit(text).scheme in ("", "file")


@pytest.mark.parametrize("source", ["a b/model [1].py:3", "<string>:1", "/srv/ünter/net.py:12", "", "nowhere"])
def test_any_source_gives_a_valid_place_or_none(source):
    class Finding:
        pattern, severity, node, op, module = "mask", "error", "add", "add", ""
        evidence, values, remedy = "why", "", "what"

    Finding.source = source
    log = sarif_log([Finding()], {"mask": "a mask"}, {"mask": "fill it"})
    assert wrong(log, LOG) == []
    (location,) = log["runs"][0]["results"][0]["locations"]
    place = location.get("physicalLocation")
    assert (place is None) == (source in ("", "nowhere"))
    assert place is None or is_uri_reference(place["artifactLocation"]["uri"])


@pytest.mark.parametrize(
    "broken, said",
    [
        ({"version": "2.1.0"}, ["log lacks runs"]),
        ({"version": "2.0.0", "runs": []}, ["log.version is '2.0.0'"]),
        ({"version": "2.1.0", "runs": [{"tool": {}}]}, ["log.runs[0].tool lacks driver"]),
        ({"version": "2.1.0", "runs": [], "date": 1}, ["log has date"]),
        (
            {"version": "2.1.0", "runs": [{"tool": {"driver": {"name": 3}}}]},
            ["log.runs[0].tool.driver.name is a int"],
        ),
    ],
)
def test_the_check_sees_what_is_wrong(broken, said):
    assert wrong(broken, LOG) == said


def test_a_healthy_model_gives_a_valid_log_without_results():
    log = json.loads(audit(Two(lambda m, x: m.b(m.a(x).relu())), (torch.ones(8, 8),)).to_sarif())
    assert wrong(log, LOG) == [] and log["runs"][0]["results"] == []


def fingerprints(model, x):
    return [
        result["partialFingerprints"]["node/v1"]
        for result in json.loads(audit(model, (x,)).to_sarif())["runs"][0]["results"]
    ]


def test_fingerprints_tell_results_apart_and_stay_over_runs():
    """The products of one attention are one node with several findings."""
    attention = torch.nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
    found = fingerprints(attention, torch.ones(2, 5, 12))
    assert len(found) > len({each.partition(":gemm")[0] for each in found}) > 1
    assert len(set(found)) == len(found)
    assert fingerprints(attention, torch.ones(2, 5, 12)) == found


def test_the_first_of_equal_results_has_no_number():
    class Finding:
        pattern, severity, node, op, module = "mask", "error", "add", "add", "a"
        source, evidence, values, remedy = "", "why", "", "what"

    results = sarif_log([Finding()] * 3, {"mask": "a mask"}, {"mask": "fill it"})["runs"][0]["results"]
    assert [each["partialFingerprints"]["node/v1"] for each in results] == [
        "a:add:mask",
        "a:add:mask:2",
        "a:add:mask:3",
    ]
