"""The table of the zoo, as a command: `tools/zoo`."""

import pytest

from tests.zoo import table


@pytest.mark.parametrize(("name", "nearest"), [("gpt22", "gpt2"), ("hf:gpt22", "hf:gpt2"), ("resnet5", "resnet50")])
def test_a_wrong_name_is_refused_before_the_work_and_the_nearest_is_named(name, nearest, monkeypatch, capsys):
    monkeypatch.setattr(table, "measured", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as ended:
        table.main(["bert", name])
    assert ended.value.code == 2
    assert f"{name!r} is none of the models. Did you mean {nearest!r}?" in capsys.readouterr().err


def test_models_of_transformers_have_two_names(monkeypatch, capsys):
    asked = []

    def measured(name, *_):
        asked.append(name)
        raise RuntimeError("not now")

    monkeypatch.setattr(table, "measured", measured)
    table.main(["bert", "hf:bert", "gpt2"])
    assert asked == ["bert", "hf:bert", "gpt2"]
    assert "FAILED gpt2: RuntimeError: not now" in capsys.readouterr().out
