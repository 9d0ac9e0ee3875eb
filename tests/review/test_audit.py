"""fxamp.audit: each pattern is found with its line, its values and a remedy; nothing is changed."""

import json
import re

import pytest
import torch
from review_cases import Two

from fxamp.cli import main
from fxamp.errors import OptionError
from fxamp.instruments import audit

X = torch.linspace(0.5, 1.5, 32).reshape(4, 8)


def switched_off(m, x):
    with torch.autocast("cpu", enabled=False):
        return m.b(m.a(x))


PATTERNS = [
    ("mask", "error", lambda m, x: m.a(x).masked_fill(x > 1, -1e9).softmax(-1)),
    ("mask", "note", lambda m, x: m.a(x).masked_fill(x > 1, torch.finfo(x.dtype).min).softmax(-1)),
    ("literal", "error", lambda m, x: m.a(x) * 1e6),
    ("epsilon", "warning", lambda m, x: m.a(x) + 1e-6),
    ("square", "warning", lambda m, x: m.a(x) * m.a(x) if False else (lambda y: y * y)(m.a(x))),
    ("square", "error", lambda m, x: (lambda y: y * y)(m.a(x) * 1000.0)),
    ("integers", "warning", lambda m, x: m.a(x) * torch.arange(8).float()),
    ("integers", "error", lambda m, x: m.a(x) * torch.arange(3000, 3008).float()),
    ("domain", "warning", lambda m, x: m.a(x).sigmoid().log()),
    ("domain", "warning", lambda m, x: (1 - m.a(x).tanh() ** 2).sqrt()),
    ("protected", "note", switched_off),
    ("taint", "warning", lambda m, x: (m.a(x) * 1e6) + 1.0),
]


@pytest.mark.parametrize("pattern, severity, function", PATTERNS, ids=[f"{p}-{s}" for p, s, _ in PATTERNS])
def test_every_pattern_is_found_at_its_line(pattern, severity, function):
    torch.manual_seed(0)
    found = [finding for finding in audit(Two(function), (X,)).findings if finding.pattern == pattern]
    assert found and found[0].severity == severity
    assert "/test_audit.py:" in found[0].source and found[0].remedy
    assert found[0].values.startswith("float32 [")


def test_unaligned_gemms_and_large_regions_are_notes():
    model = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.Tanh())

    class Large(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x).exp()

    found = audit(Large(), (torch.zeros(16384, 8),)).findings
    assert {finding.pattern for finding in found} == {"gemm", "region"}
    assert any("n = 30 (out_features)" in finding.evidence for finding in found)
    assert all(finding.severity == "note" for finding in found)


def test_a_clean_model_has_no_finding_and_is_not_changed():
    model = Two(lambda m, x: m.b(m.a(x).relu()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert audit(model, (torch.ones(8, 8),)).findings == ()
    assert type(model) is Two and "_fxamp_engine" not in model.__dict__
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_gravest_come_first():
    def function(m, x):
        return m.b(m.a(x) + 1e-6).masked_fill(x > 1, -1e9)

    severities = [finding.severity for finding in audit(Two(function), (X,)).findings]
    assert severities == sorted(severities, key=("error", "warning", "note").index) and severities[0] == "error"


def test_json_and_sarif_hold_every_finding():
    found = audit(Two(PATTERNS[0][2]), (X,))
    assert len(json.loads(found.to_json())["findings"]) == len(found.findings)
    run = json.loads(found.to_sarif())["runs"][0]
    assert len(run["results"]) == len(found.findings)
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"].endswith("test_audit.py") and place["region"]["startLine"] > 20
    assert run["results"][0]["level"] == "error"


def everything(m, x):
    y = m.a(x).masked_fill(x > 1, -1e9).softmax(-1) + 1e-7
    return y, switched_off(m, x), m.a(x).sigmoid().log()


ABSOLUTE = re.compile(r"(file://)?/|[A-Za-z]:")


def test_sarif_keeps_the_rules_of_its_format(tmp_path, monkeypatch):
    """The constraints of SARIF 2.1.0 on what is written, and those that GitHub adds for an upload."""
    log = json.loads(audit(Two(everything), (X,)).to_sarif())
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules) and run["tool"]["driver"]["name"]
    for rule in rules:
        assert all(rule[key]["text"].endswith(".") for key in ("shortDescription", "fullDescription", "help"))
        assert rule["help"]["text"] != rule["shortDescription"]["text"]
    assert {result["ruleId"] for result in run["results"]} >= {"mask", "epsilon", "domain", "protected"}
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error") and result["message"]["text"]
        assert all(isinstance(text, str) for text in result["partialFingerprints"].values())
        (location,) = result["locations"]
        assert location["logicalLocations"][0]["fullyQualifiedName"]
        place = location["physicalLocation"]
        assert place["region"]["startLine"] >= 1
        assert not ABSOLUTE.match(place["artifactLocation"]["uri"]), "relative to the working directory"
    monkeypatch.chdir(tmp_path)
    log = json.loads(audit(Two(everything), (X,)).to_sarif())
    uri = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri.startswith("file:///") and " " not in uri


MODEL = """
import torch
def make():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(8, 8)
        def forward(self, x):
            return self.a(x) * 1e6
    return Net(), (torch.zeros(8, 8),)
"""


def test_audit_on_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "audited.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "audited.py:make"]) == 1
    assert "audited.py:9: error: literal: mul: the literal 1000000.0" in capsys.readouterr().out
    assert main(["audit", "audited.py:make", "--fail-on", "never", "--sarif"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == "2.1.0"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_named(number):
    with pytest.raises(OptionError, match=r"audit was given NaN or infinite inputs \(float32 \[4, 8\] \[0.5, "):
        audit(Two(lambda m, x: m.a(x)), (X.clone().index_fill_(0, torch.tensor([3]), number),))
