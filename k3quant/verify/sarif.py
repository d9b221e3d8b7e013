"""A report as SARIF 2.1.0, which code-scanning pages show beside a pull request.

Source: OASIS, Static Analysis Results Interchange Format version 2.1.0.
"""

import json
from typing import Any

from k3quant.report import Finding, Report, Severity

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}


def to_sarif(report: Report) -> str:
    """Return a report as a SARIF document, one rule a finding code."""
    rules = {finding.code: finding for finding in report.findings}
    document = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "k3quant",
                        "version": report.to_json()["version"],
                        "rules": [_rule(finding) for finding in rules.values()],
                    }
                },
                "invocations": [{"executionSuccessful": True, "exitCode": int(report.exit_code)}],
                "results": [_result(finding) for finding in report.findings],
            }
        ],
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _rule(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.code,
        "shortDescription": {"text": f"{finding.fault} fault: {finding.code}"},
        "defaultConfiguration": {"level": _LEVEL[finding.severity]},
        "properties": {"class": finding.fault.value},
    }


def _result(finding: Finding) -> dict[str, Any]:
    is_file = "." in finding.subject.rpartition("/")[2] and " " not in finding.subject
    location: dict[str, Any] = {"logicalLocations": [{"name": finding.subject}]}
    if is_file and finding.subject.endswith((".json", ".safetensors")):
        location["physicalLocation"] = {"artifactLocation": {"uri": finding.subject}}
    text = f"{finding.message}. {finding.hint}" if finding.hint else finding.message
    return {
        "ruleId": finding.code,
        "level": _LEVEL[finding.severity],
        "message": {"text": text},
        "locations": [location],
        "properties": {"expected": finding.expected, "got": finding.got},
    }
