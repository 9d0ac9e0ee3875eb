"""fxamp.dump: a diff that applies, a page that holds every cast, and nothing half-written."""

import builtins
import html
import importlib.util
import json
import logging
import re
import shutil
import subprocess

import pytest
import torch
from review_cases import FP16, Language, Two, tokens
from torch import nn

import fxamp
from fxamp.errors import OptionError
from fxamp.review import dump as dump_module
from fxamp.review.diff import unified_diff
from fxamp.review.dump import dump
from fxamp.review.report import report

X = torch.linspace(-1, 1, 32).reshape(4, 8)
FILES = {"before.txt", "after.txt", "graph.diff", "report.json", "report.html", "graph.dot"}


@pytest.fixture(scope="module")
def language():
    torch.manual_seed(0)
    return fxamp.convert(Language().eval(), FP16, (tokens(),), level="strict")


@pytest.fixture(scope="module")
def folder(language, tmp_path_factory):
    return dump(language, tmp_path_factory.mktemp("dump") / "language")


def apply_patch(before: str, diff: str) -> str:
    """A strict reading of unified diffs: every line of context must be there."""
    old, new, at = before.splitlines(), [], 0
    for line in diff.splitlines()[2:]:
        if match := re.match(r"@@ -(\d+),(\d+) ", line):
            start = int(match[1]) - (int(match[2]) > 0)
            new += old[at:start]
            at = start
            continue
        if line[0] != "+":
            assert old[at] == line[1:]
            at += 1
        if line[0] != "-":
            new.append(line[1:])
    return "\n".join([*new, *old[at:]]) + "\n"


def test_every_file_is_there(folder):
    assert set(dump_module.FILES) >= {file.name for file in folder.iterdir()} >= FILES, "what the next dump replaces"
    assert [file for file in folder.parent.iterdir() if file.name.startswith(".")] == []


def test_the_diff_applied_to_before_gives_after(folder):
    before, after = (folder / "before.txt").read_text(), (folder / "after.txt").read_text()
    assert before != after
    assert apply_patch(before, (folder / "graph.diff").read_text()) == after


@pytest.mark.skipif(shutil.which("patch") is None, reason="the patch program is not installed")
def test_patch_itself_takes_the_diff(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    done = subprocess.run(["patch", "before.txt", "graph.diff"], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "offset" not in done.stdout and "fuzz" not in done.stdout
    assert (copy / "before.txt").read_text() == (folder / "after.txt").read_text()


@pytest.mark.parametrize(
    "before, after",
    [
        ("a = 1\nb = 2\n", "a = 1\nb = 3\n"),
        ("a = 1\n", "z = 0\na = 1\n"),
        ("a = 1\nb = 2\n", "b = 2\n"),
        (
            "\n".join(f"v{i} = {i}" for i in range(40)) + "\n",
            "\n".join(f"v{i} = {i * (i != 20)}" for i in range(40)) + "\n",
        ),
        ("a\n", "b\n"),
        ("", "b\n"),
        ("a\n", ""),
    ],
)
def test_diffs_of_small_texts(before, after):
    patched = apply_patch(before, unified_diff(before, after))
    assert patched.strip("\n") == after.strip("\n")


def test_an_unchanged_text_has_no_diff():
    assert unified_diff("a = 1\n", "a = 1\n") == ""


def test_a_changed_line_stands_under_its_old_form():
    diff = unified_diff("a = f(x)\nb = g(a)\n", "a = f(x.half())\nb = g(a, 1)\n")
    assert diff.splitlines()[3:] == ["-a = f(x)", "+a = f(x.half())", "-b = g(a)", "+b = g(a, 1)"]


def test_before_and_after_name_every_operation(language, folder):
    before, after = (folder / "before.txt").read_text(), (folder / "after.txt").read_text()
    for row in report(language).rows:
        if row.is_source or row.op == "output" or row.role == "weight cast":
            continue
        assert (f"    {row.name} = " in before) is (not row.role), row.name
        assert f"    {row.name} = " in after, row.name
    assert "self.blocks[1].qkv.weight" in before and ".half" not in before and "float16" not in before


def test_the_json_is_the_report(language, folder):
    assert json.loads((folder / "report.json").read_text()) == json.loads(report(language).to_json())


def page_rows(text: str) -> list[tuple[str, str, str]]:
    """(classes, node, badge) of every line of the page."""
    found = re.findall(r'<div class="row (\w+)"[^>]*data-node="(\w+)".*?<span class="badge">(.*?)</span>', text, re.S)
    return [(kind, node, html.unescape(badge)) for kind, node, badge in found]


def test_the_page_holds_every_node_and_every_cast(language, folder):
    built = report(language)
    rows = page_rows((folder / "report.html").read_text())
    assert [node for _, node, _ in rows] == [row.name for row in built.rows]
    casts = [badge for kind, _, badge in rows if kind == "cast"]
    assert len(casts) == built.casts > 5
    assert sum(badge == "↓ float16" for badge in casts) == built.casts_to_low
    for row, (kind, _, _) in zip(built.rows, rows, strict=True):
        if not row.role and row.op not in ("parameter", "buffer"):
            assert kind == row.precision


def test_a_module_stands_once_where_its_lines_stand_together(language, folder):
    """Parameters, which the page hides at first, part no module."""
    built = report(language)
    runs, last = [], None
    for row in built.rows:
        if row.role == "weight cast" or row.op in ("parameter", "buffer"):
            continue
        if row.module != last and row.module.startswith("blocks.0.ff."):
            runs.append(row.module)
        last = row.module
    page = (folder / "report.html").read_text()
    assert len(runs) == len(set(runs))
    for path in runs:
        assert page.count(f'title="{path}"') == 1, path
    assert re.search(r'title="blocks.0.ff"><span class="path">ff</span><span class="class">Sequential</span>', page)


def test_the_page_says_each_thing_once(language, folder):
    page = (folder / "report.html").read_text()
    for region in report(language).regions:
        assert page.count(f'<code style="display:inline">{region.cause}</code>') == 1
    assert "of float32 values in" not in page


def test_the_page_asks_nothing_from_the_network(folder):
    text = (folder / "report.html").read_text()
    assert not re.search(r"""(src|href|action)\s*=|url\(|@import|https?://|fetch\(|XMLHttp""", text)


def test_the_page_escapes_what_the_user_wrote():
    def forward(m, x):
        return torch.where(x > 0, m.a(x), "<script>".__len__())

    model = fxamp.convert(Two(forward), FP16, (X,), overrides={"*": "infer", "a": "deny"})
    model._fxamp_engine.all_variants()[0].captured.root.__class__.__name__ = "Two"
    from fxamp.review.html import as_html

    built = report(model)
    object.__setattr__(built, "advice", ("<b>bold</b> & more",))
    text = as_html(built, model._fxamp_engine.all_variants())
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; more" in text and "<b>bold" not in text


def test_the_dot_file_has_every_operation(language, folder):
    text = (folder / "graph.dot").read_text()
    for row in report(language).rows:
        if row.op not in ("parameter", "buffer") and row.role != "weight cast":
            assert f"g0_{row.name} [" in text
    assert text.count("{") == text.count("}")


def test_an_existing_folder_keeps_its_other_files(language, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "before.txt").write_text("old")
    dump(language, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert "embedding" in (tmp_path / "before.txt").read_text()


def test_without_jinja2_the_rest_is_written_and_it_says_so(language, tmp_path, monkeypatch, caplog):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "jinja2" else real(name, *more)
    )
    with caplog.at_level(logging.WARNING, "fxamp"):
        dump(language, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} >= FILES - {"report.html"}
    assert not (tmp_path / "out" / "report.html").exists()
    assert "it needs jinja2. Run: pip install 'fxamp[review]'" in caplog.text


def test_a_failure_in_the_middle_leaves_nothing(language, tmp_path, monkeypatch):
    def full(path, text):
        if path.name == "report.json":
            raise OSError(28, "No space left on device")
        with builtins.open(path, "w") as file:
            file.write(text)

    monkeypatch.setattr(dump_module, "_write", full)
    with pytest.raises(OptionError, match=r"cannot be written to .*out.*No space left on device"):
        dump(language, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_folder_is_named(language, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(OptionError, match=r"cannot be written to .*taken"):
        dump(language, tmp_path / "taken")
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


def test_a_model_that_was_not_converted_is_named(tmp_path):
    with pytest.raises(OptionError, match="this Two was not converted"):
        dump(Two(lambda m, x: x), tmp_path)


def test_computed_weights_stand_by_their_casts_behind_the_copy_that_makes_them(tmp_path):
    norm = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(norm(nn.Linear(4, 8, bias=False)), nn.ReLU(), norm(nn.Linear(8, 4, bias=False)))
    folder = dump(fxamp.convert(model, torch.bfloat16, (torch.randn(2, 4),)), tmp_path / "normed")
    lines = [line.strip().partition("  #")[0] for line in (folder / "after.txt").read_text().splitlines()]
    assert "packed_cast = 2 weights cast by one copy" in lines
    assert {"getitem = _weight_norm.to(bfloat16)", "getitem_1 = _weight_norm_1.to(bfloat16)"} <= set(lines)
