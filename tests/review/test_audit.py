"""fxamp.audit: each pattern is found with its line, its values and a remedy; nothing is changed."""

import json
import re

import pytest
import torch
from review_cases import Two
from torch.nn import functional as F

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


EDGES = [
    (lambda y: y.sigmoid().log(), "`log` (log), which must not round to 0 or below it"),
    (lambda y: (y + 1).rsqrt(), "`rsqrt` (rsqrt), which must not round to 0 or below it"),
    (lambda y: 1 / y.sigmoid(), "`rtruediv` (truediv), which must not round to 0"),
    (lambda y: y.exp() / y.sigmoid(), "`div` (truediv), which must not round to 0"),
    (lambda y: y.tanh().acos(), "`acos` (acos), which must not round to 1 or past it"),
    (lambda y: (y.sigmoid() + 1).acosh(), "`acosh` (acosh), which must not round to 1 or below it"),
    (lambda y: y.tanh().log1p(), "`log1p` (log1p), which must not round to -1 or below it"),
    (
        lambda y: F.binary_cross_entropy(y.sigmoid(), y.sigmoid().detach()),
        "`binary_cross_entropy` (binary_cross_entropy), which must not round to 0 or 1",
    ),
]


@pytest.mark.parametrize("function, told", EDGES, ids=[told.split("`")[1] for _, told in EDGES])
def test_the_edge_of_a_domain_is_the_ops_own(function, told):
    found = [finding for finding in audit(Two(lambda m, x: function(m.a(x))), (X,)).findings]
    assert any(finding.evidence == f"feeds the argument of {told}" for finding in found), found


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


CAST, CUDA_KEEPS, KEPT = "torch.autocast runs it in float16", "keeps it in float32 on CUDA", "keeps it in float32, "
"""What is told of torch.autocast: it overflows there, on the CPU only, or not at all."""
OVERFLOWS = {
    "square": ("square", "error", CUDA_KEEPS, lambda y: y.square() * 1e-6),
    "pow": ("square", "error", CUDA_KEEPS, lambda y: y**2),
    "cubed": ("square", "error", CUDA_KEEPS, lambda y: torch.pow(y, 3)),
    "exp": ("overflow", "error", CUDA_KEEPS, lambda y: (y.abs() / 80).exp()),
    "sum": ("overflow", "error", CUDA_KEEPS, lambda y: (y.abs() * 50).sum(-1)),
    "norm": ("overflow", "error", CUDA_KEEPS, lambda y: (y * 50).norm(dim=-1)),
    "sinh": ("overflow", "error", CUDA_KEEPS, lambda y: (y.abs() / 80).sinh()),
    "addcmul": ("overflow", "error", CAST, lambda y: torch.addcmul(y, y, y)),
    "matmul": ("overflow", "error", CAST, lambda y: y @ y.T),
    "mul": ("overflow", "error", CAST, lambda y: (y * 100) + 1),
    "mse_loss": ("overflow", "warning", KEPT, lambda y: torch.nn.functional.mse_loss(y, torch.zeros_like(y))),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_what_overflows_float16_on_the_inputs_is_found(name):
    pattern, severity, told, function = OVERFLOWS[name]

    def forward(m, x):
        return function(m.a(x) * 1000.0)

    torch.manual_seed(0)
    model = Two(forward)
    with torch.autocast("cpu", torch.float16):
        is_finite_under_autocast = bool(model(X).isfinite().all())
    found = [finding for finding in audit(model, (X,)).findings if finding.pattern == pattern]
    assert [(finding.op, finding.severity) for finding in found] == [("pow" if name == "cubed" else name, severity)]
    assert told in found[0].evidence and "/test_audit.py:" in found[0].source, found[0].evidence
    assert is_finite_under_autocast == (severity == "warning") and bool(model(X).isfinite().all())
    assert not bool(model.half()(X.half()).isfinite().all())


def test_a_float32_value_that_autocast_casts_for_a_gemm_is_told_with_that_gemm():
    found = audit(Two(lambda m, x: m.b((m.a(x) * 0 + 12).exp()[:, :])), (X,)).findings
    (finding,) = (finding for finding in found if finding.pattern == "overflow")
    assert (finding.op, finding.severity) == ("exp", "error")
    assert "torch.autocast casts it to float16 for linear_1" in finding.evidence, finding.evidence


def test_an_input_that_a_gemm_reads_overflows_and_one_that_none_reads_does_not():
    found = audit(Two(lambda m, x: m.a(x)), (X * 1e5,)).findings
    assert next(finding.op for finding in found if finding.pattern == "overflow") == "input"
    found = audit(Two(lambda m, x: m.a(x / 1e6)), (X * 1e5,)).findings
    assert [finding for finding in found if finding.pattern == "overflow"] == []


@pytest.mark.parametrize(("low", "ops"), [(torch.float16, ["mul", "pow"]), (torch.bfloat16, [])])
def test_a_model_that_is_float16_itself_overflows_and_a_bfloat16_one_does_not(low, ops):
    def forward(m, x):
        y = m.a(x) * 100.0
        return (y * 5000.0).tanh(), (y * 10.0) ** 2, (y.float() * 5000.0).tanh()

    torch.manual_seed(0)
    every = audit(Two(forward).to(low), (X.to(low),)).findings
    found = [finding for finding in every if finding.pattern in ("overflow", "square")]
    assert [finding.op for finding in found] == ops
    assert all("the model itself runs it in float16" in finding.evidence for finding in found)


UNHARMED = {
    "float32 by the user": lambda m, x: m.b((m.a(x).float() * 1e3 * 1e3).tanh()),
    "65519 rounds down": lambda m, x: (m.a(x) * 0 + 13.1038) * 5000.0,
    "an additive mask": lambda m, x: (m.a(x) + torch.zeros(8).masked_fill(x[0] > 1, -1e9)).softmax(-1),
    "a root": lambda m, x: m.a(x).abs() ** 0.5,
}


@pytest.mark.parametrize("name", UNHARMED)
def test_what_float16_holds_or_nobody_casts_is_no_overflow(name):
    found = audit(Two(UNHARMED[name]), (X,)).findings
    assert not {"overflow", "square"} & {finding.pattern for finding in found}, found


def test_what_only_passes_on_too_large_numbers_is_not_told_again():
    found = audit(Two(lambda m, x: (m.a(x) * 1000.0 * 1000.0).relu().reshape(-1) + 1), (X,)).findings
    assert len([finding for finding in found if finding.pattern == "overflow"]) == 1


@pytest.mark.parametrize(("function", "severity"), [(lambda y: y**2, "warning"), (lambda y: y.var(-1), "warning")])
def test_squares_that_do_not_overflow_on_these_inputs_are_warnings(function, severity):
    found = audit(Two(lambda m, x: function(m.a(x))), (X,)).findings
    assert [finding.severity for finding in found if finding.pattern == "square"] == [severity]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_named(number):
    with pytest.raises(OptionError, match=r"audit was given NaN or infinite inputs \(float32 \[4, 8\] \[0.5, "):
        audit(Two(lambda m, x: m.a(x)), (X.clone().index_fill_(0, torch.tensor([3]), number),))
