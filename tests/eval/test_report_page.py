import json
import re
from html.parser import HTMLParser

import pytest

from k3quant.errors import IncompleteError, RefusedError, SchemaError, StructureError
from k3quant.eval.perplexity import evaluate
from k3quant.eval.report_page import eval_page
from k3quant.eval.report_table import compare_page, read_reports
from k3quant.eval.settings import EvalSettings
from k3quant.report import Report

O_PROJ = "language_model.model.layers.3.self_attn.o_proj.weight"
OUTSIDE = re.compile(r"""(src|href)\s*=|url\(|@import|<script|https?://(?!www\.w3\.org/2000/svg)""")


class _Balanced(HTMLParser):
    """Refuses elements that are not closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def _seen(text):
    parser = _Balanced()
    parser.feed(text)
    assert parser.open == []
    return parser.seen


@pytest.fixture
def report(oracle, copy_of, edit_tensor, write_ids, some_ids):
    """Return the report of a damaged checkpoint against its original."""
    folder = copy_of(oracle)
    edit_tensor(folder, O_PROJ, lambda weight: 1.5 * weight)
    settings = EvalSettings(ctx=24, noise_floor=True)
    path = write_ids(some_ids(60).tolist())
    result = evaluate(folder, tokens=path, reference=oracle, settings=settings)
    return Report(command="eval", summary=result.to_json()).to_json()


def test_a_comparison_has_all_charts_and_needs_nothing_else(report):
    text = eval_page(json.loads(json.dumps(report)))
    assert _seen(text).count("svg") == 6
    assert not OUTSIDE.search(text)
    for words in (
        "free running", "on the reference&#x27;s input", "noise floor", "KL of the scored tokens",
        "Busiest expert", "worst layer", "mean KL, nats", "copy against ckpt_k3",
    ):  # fmt: skip
        assert words in text
    assert f"{report['summary']['kld_mean']:.3g}" in text
    assert f"{report['summary']['noise_floor']['kld_mean']:.3g}" in text


def test_without_a_reference_there_is_a_table_alone(oracle, write_ids):
    result = evaluate(oracle, tokens=write_ids([1, 2, 3]))
    text = eval_page(Report(command="eval", summary=result.to_json()).to_json())
    assert _seen(text).count("svg") == 0
    assert f"{result.ppl:.4f}" in text


def test_without_teacher_forcing_and_floor_their_lines_are_left_out(report):
    summary = report["summary"]
    del summary["noise_floor"]
    for entry in summary["layers"]:
        for part in (entry, entry["attention"], entry["mlp"]):
            for name in [name for name in part if name.startswith("forced_")]:
                del part[name]
    text = eval_page(report)
    assert _seen(text).count("svg") == 5
    assert "reference&#x27;s input" not in text


def test_names_are_escaped(report):
    report["summary"]["checkpoint"] = "<script>alert(1)</script>"
    text = eval_page(report)
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text


@pytest.fixture
def files(report, tmp_path):
    """Return three reports on the disk, the last of a checkpoint without error."""
    paths = []
    for name, size, kld in (("a", 4e9, 0.1), ("<b>", 8e9, 0.01), ("c", 16e9, 0.0)):
        facts = {"checkpoint": name, "checkpoint_bytes": int(size), "kld_mean": kld}
        path = tmp_path / f"{len(paths)}.json"
        path.write_text(json.dumps(report | {"summary": report["summary"] | facts}))
        paths.append(path)
    return paths


def test_reports_side_by_side(files):
    rows = read_reports(files)
    assert [row.label for row in rows] == ["a", "<b>", "c"]
    ppl = f"{rows[1].summary['ppl']:.4f}"
    assert rows[1].cells()[:5] == ["<b>", "8.00 GB", "float32", ppl, "0.01"]
    text = compare_page(rows)
    assert _seen(text).count("svg") == 1
    assert _seen(text).count("tr") == 4
    assert not OUTSIDE.search(text)
    assert "size of the checkpoint, GB" in text
    assert "<b>" not in text


def test_reports_of_other_tokens_are_refused(files):
    document = json.loads(files[1].read_text())
    document["summary"]["tokens_sha256"] = "0" * 64
    files[1].write_text(json.dumps(document))
    with pytest.raises(RefusedError, match=r"1\.json: expected tokens_sha256 .* as in 0\.json"):
        read_reports(files)


@pytest.mark.parametrize(
    ("text", "error"),
    [(None, IncompleteError), ("{", StructureError), ("[]", SchemaError),
     ('{"summary": {"ppl": 1}}', SchemaError)],
    ids=["gone", "no-json", "no-report", "another-command"],
)  # fmt: skip
def test_what_is_no_report_is_refused(files, text, error):
    if text is None:
        files[1].unlink()
    else:
        files[1].write_text(text)
    with pytest.raises(error, match=r"1\.json"):
        read_reports(files)


@pytest.mark.parametrize(
    ("key", "value"),
    [("ppl", "<b>1</b>"), ("kld_mean", "0.1"), ("kld_p99", -1.0), ("checkpoint_bytes", "8 GB"),
     ("noise_floor", {}), ("noise_floor", 0.1), ("tokens_scored", None)],
    ids=["ppl-text", "kl-text", "kl-negative", "bytes-text", "floor-empty", "floor-number",
         "tokens-none"],
)  # fmt: skip
def test_a_summary_of_other_types_is_refused(files, key, value):
    document = json.loads(files[1].read_text())
    document["summary"][key] = value
    files[1].write_text(json.dumps(document))
    with pytest.raises(SchemaError, match=r"1\.json: expected the numbers of `k3quant eval`"):
        read_reports(files)
