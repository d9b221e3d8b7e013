"""A report as JUnit XML: one test case a fault class, failing with its findings."""

from xml.etree import ElementTree

from k3quant.report import EXIT_ORDER, Report, Severity


def to_junit(report: Report) -> str:
    """Return a report as a JUnit test suite.

    Each class of fault is a test case; errors make it fail, warnings and notes are its output.
    """
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", name=f"k3quant {report.command}")
    failures = 0
    for fault, code in EXIT_ORDER:
        found = [finding for finding in report.findings if finding.fault is fault]
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"k3quant.{report.command}", name=fault.value, time="0"
        )
        errors = [finding for finding in found if finding.severity is Severity.ERROR]
        if errors:
            failures += 1
            failure = ElementTree.SubElement(
                case, "failure", message=_clean(errors[0].message), type=f"exit {int(code)}"
            )
            failure.text = _clean("\n".join(finding.message for finding in errors))
        others = [finding for finding in found if finding.severity is not Severity.ERROR]
        if others:
            output = ElementTree.SubElement(case, "system-out")
            output.text = _clean("\n".join(f"{f.severity}: {f.message}" for f in others))
    suite.attrib |= {
        "tests": str(len(EXIT_ORDER)), "failures": str(failures), "errors": "0", "time": "0",
    }  # fmt: skip
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode", xml_declaration=False)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _clean(text: str) -> str:
    """Replace the control characters that XML 1.0 cannot hold."""
    return "".join(
        c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text
    )
