"""Findings as SARIF 2.1.0, the form that code review on GitHub and elsewhere reads.

Source: Static Analysis Results Interchange Format 2.1.0, OASIS, sections 3.13 (log), 3.27 (result), 3.49 (rule).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


class Found(Protocol):
    """What a finding must tell."""

    @property
    def pattern(self) -> str: ...
    @property
    def severity(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def evidence(self) -> str: ...
    @property
    def values(self) -> str: ...
    @property
    def remedy(self) -> str: ...


def sarif_log(findings: Iterable[Found], patterns: Mapping[str, str], remedies: Mapping[str, str]) -> dict[str, Any]:
    """A whole log, of one run.

    Args:
        patterns: what each pattern is; each is a rule.
        remedies: what to do about it.
    """
    numbers = {pattern: number for number, pattern in enumerate(patterns)}
    found = list(findings)
    rules = [_rule(pattern, text, remedies[pattern]) for pattern, text in patterns.items()]
    run = {
        "tool": {"driver": {"name": "fxamp audit", "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "results": [
            _result(finding, numbers[finding.pattern], fingerprint)
            for finding, fingerprint in zip(found, _fingerprints(found), strict=True)
        ],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(pattern: str, text: str, remedy: str) -> dict[str, Any]:
    sentence = f"{text[0].upper()}{text[1:]}."
    return {
        "id": pattern,
        "shortDescription": {"text": sentence},
        "fullDescription": {"text": sentence},
        "help": {"text": f"{remedy[0].upper()}{remedy[1:]}."},
    }


def _fingerprints(findings: Sequence[Found]) -> Iterator[str]:
    """One for each, the same in every run; where a node has several of a pattern, they are numbered from the second."""
    seen: Counter[str] = Counter()
    for finding in findings:
        stem = f"{finding.module}:{finding.node}:{finding.pattern}"
        seen[stem] += 1
        yield stem if seen[stem] == 1 else f"{stem}:{seen[stem]}"


def _result(finding: Found, rule: int, fingerprint: str) -> dict[str, Any]:
    seen = f" Seen: {finding.values}." if finding.values else ""
    return {
        "ruleId": finding.pattern,
        "ruleIndex": rule,
        "level": finding.severity,
        "message": {"text": f"{finding.node} ({finding.op}): {finding.evidence}.{seen} {finding.remedy}."},
        "locations": [_location(finding)],
        "partialFingerprints": {"node/v1": fingerprint},
    }


def _location(finding: Found) -> dict[str, Any]:
    """The node, and the user's line where it is known."""
    name = f"{finding.module}.{finding.node}".strip(".")
    found: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": name, "kind": "member"}]}
    file, _, line = finding.source.rpartition(":")
    if file and line.isdigit() and int(line) > 0:
        place = {"artifactLocation": {"uri": _uri(file)}, "region": {"startLine": int(line)}}
        found["physicalLocation"] = place
    return found


def _uri(file: str) -> str:
    """Relative to the working directory where the file is below it, as code review asks; else absolute."""
    path = Path(file)
    if not path.is_absolute():
        return quote(path.as_posix())
    try:
        return quote(path.relative_to(Path.cwd()).as_posix())
    except ValueError:
        return path.as_uri()
