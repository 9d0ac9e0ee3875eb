"""What a conversion says: few lines, each node at DEBUG, and the folder of FXAMP_LOG_PATH."""

import errno
import logging

import pytest
import torch
from review_cases import FP16, Language, Two, tokens

import fxamp
from fxamp.review import announce as module
from fxamp.review import dump as dump_module
from fxamp.review.announce import MAX_LINES, announce
from fxamp.review.report import report
from fxamp.review.table import overview

X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture
def language():
    return fxamp.convert(Language().eval(), FP16, (tokens(),), level="strict")


def test_the_summary_comes_first_and_the_rest_is_short(language, caplog):
    with caplog.at_level(logging.INFO, "fxamp"):
        announce(language)
    assert caplog.messages[0] == report(language).summary()
    assert 2 < len(caplog.messages) <= MAX_LINES


def test_nothing_is_said_unless_somebody_listens(language, caplog):
    with caplog.at_level(logging.WARNING, "fxamp"):
        announce(language)
    assert caplog.messages == []


class Residual(torch.nn.Module):
    """Parts that advice and float32 regions are told of, once as a ResNet has them and once as a language model has."""

    def __init__(self, branches=False):
        super().__init__()
        self.branches = branches
        self.stem, self.norm = torch.nn.Conv2d(3, 12, 3, padding=1), torch.nn.BatchNorm2d(12)
        self.body, self.head = torch.nn.Conv2d(12, 12, 3, padding=1), torch.nn.Linear(12, 10)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = (x + self.body(x)).mean((2, 3)).exp()
        if self.branches and x.sum() < 0:
            x = -x
        return self.head(x).log_softmax(-1)


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (Residual, {}),
        (Residual, {"capture": "dynamo"}),
        (lambda: Residual(branches=True), {}),
        (lambda: torch.nn.Sequential(Residual(), torch.nn.Linear(10, 10)), {"boundaries": "0"}),
    ],
    ids=["one graph", "dynamo", "a graph break", "boundaries"],
)
def test_training_and_evaluation_say_each_line_once_and_few(made, options, caplog):
    torch._dynamo.reset()
    x = torch.rand(2, 3, 8, 8)
    with caplog.at_level(logging.INFO, "fxamp"):
        model = fxamp.convert(made(), torch.bfloat16, (x,), **options)
        for _ in range(3):
            model(x).sum().backward()
        model.eval()(x)
    assert any(text.startswith("Converted") for text in caplog.messages)
    assert len(caplog.messages) == len(set(caplog.messages)) <= 20, caplog.messages


def test_what_is_left_out_is_said_at_debug(language, caplog, monkeypatch):
    monkeypatch.setattr(module, "MAX_LINES", 4)
    with caplog.at_level(logging.DEBUG, "fxamp"):
        announce(language)
        announce(language)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    every = list(overview(report(language)))
    assert said == [*every[:3], "there is more: print(fxamp.report(model)), or FXAMP_LOG_LEVEL=DEBUG"]
    assert all(caplog.messages.count(line) == 1 for line in every)


def test_a_later_graph_is_told_with_what_is_new(caplog):
    with caplog.at_level(logging.INFO, "fxamp"):
        model = fxamp.convert(Residual(), torch.bfloat16, (torch.rand(2, 3, 8, 8),))
        caplog.clear()
        model.eval()(torch.rand(2, 3, 8, 8))
    assert caplog.messages[0] == report(model).summary()
    assert "captured: 2 graphs (symbolic)" in caplog.messages
    assert not [text for text in caplog.messages if text.startswith(("advice", "float32 region"))]


def test_every_decision_is_said_at_debug(language, caplog):
    with caplog.at_level(logging.DEBUG, "fxamp"):
        announce(language)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    rows = report(language).rows
    assert len(said) == len(rows)
    assert all(row.name in text and row.reason in text for row, text in zip(rows, said, strict=True))


def test_each_model_has_a_folder_and_keeps_it(language, tmp_path, monkeypatch):
    monkeypatch.setenv("FXAMP_LOG_PATH", str(tmp_path / "log"))
    announce(language)
    other = fxamp.convert(Language().eval(), FP16, (tokens(),))
    announce(other)
    before = (tmp_path / "log" / "Language-2" / "after.txt").read_text()
    other(tokens()[0])
    announce(other)
    assert sorted(folder.name for folder in (tmp_path / "log").iterdir()) == ["Language-1", "Language-2"]
    assert (tmp_path / "log" / "Language-2" / "after.txt").read_text().count("# graph") == before.count("# graph") + 1


def test_a_path_that_cannot_be_written_is_a_warning(language, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FXAMP_LOG_PATH", str(tmp_path / "file"))
    announce(language)
    announce(language)
    (told,) = [record.message for record in caplog.records if "FXAMP_LOG_PATH" in record.message]
    assert "file: nothing is dumped: " in told and told.endswith("Name a folder that can be written.")


def test_a_full_disk_has_one_remedy_and_leaves_no_empty_folder(language, tmp_path, monkeypatch, caplog):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dump_module, "_write", full)
    monkeypatch.setenv("FXAMP_LOG_PATH", str(tmp_path / "a" / "log"))
    announce(language)
    announce(language)
    (told,) = [record.message for record in caplog.records if "FXAMP_LOG_PATH" in record.message]
    assert "log: nothing is dumped: " in told and "No space left on device. " in told
    assert told.endswith("nothing was left half-written.") and told.count("folder that can be written") == 1
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("FXAMP_LOG_PATH", str(tmp_path / "mine"))
    announce(language)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"], "a folder that was there stays"
    monkeypatch.undo()
    monkeypatch.setenv("FXAMP_LOG_PATH", str(tmp_path / "mine"))
    announce(language)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["Language-1"], "there is room again"


def test_convert_and_the_first_call_write_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FXAMP_LOG_PATH", str(tmp_path))
    model = fxamp.convert(Two(lambda m, x: m.a(x)), FP16)
    assert "preview" in (tmp_path / "Two-1" / "before.txt").read_text()
    model(X)
    assert "float32 tensor of 2 dimensions" in (tmp_path / "Two-1" / "before.txt").read_text()
    assert [folder.name for folder in tmp_path.iterdir()] == ["Two-1"]


def test_a_preview_is_announced_as_one(caplog):
    with caplog.at_level(logging.INFO, "fxamp"):
        announce(fxamp.convert(Two(lambda m, x: m.a(x)), FP16))
    assert "preview" in caplog.text


def halved():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).to(torch.bfloat16)


@pytest.mark.parametrize(
    "look",
    [lambda model, x: fxamp.audit(model, (x,)), lambda model, x: fxamp.profile(model, [x], progress=False)],
    ids=["audit", "profile"],
)
@pytest.mark.parametrize("follows", ["the tracer", "dynamo"])
def test_who_only_looks_at_a_low_model_is_not_told_how_to_convert_it(look, follows, caplog):
    class Decides(torch.nn.Sequential):
        def forward(self, x):
            return super().forward(x if x.sum() > -1e9 else -x)

    model = Decides(*halved()) if follows == "dynamo" else halved()
    with caplog.at_level(logging.WARNING, "fxamp"):
        look(model, torch.ones(4, 8, dtype=torch.bfloat16))
    assert [text for text in caplog.messages if "nothing is left to convert" in text] == []
    with caplog.at_level(logging.WARNING, "fxamp"):
        fxamp.convert(model, torch.bfloat16, (torch.ones(4, 8, dtype=torch.bfloat16),))(X.bfloat16())
    assert len([text for text in caplog.messages if "nothing is left to convert" in text]) == 1
