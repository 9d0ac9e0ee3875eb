"""Source lines: the user's own, wherever their project lies."""

import importlib.util

import torch
from torch import nn

import fxamp
from fxamp.capture.locations import is_library_file

SOURCE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x).relu()
"""


def test_a_package_beside_torch_whose_name_begins_with_its_name_is_not_torchs():
    """torchvision, torchaudio, torch_geometric."""
    for package in (torch, fxamp):
        (folder,) = package.__path__
        assert is_library_file(f"{folder}/part.py") and not is_library_file(f"{folder}vision/part.py")
        assert not is_library_file(f"{folder}_geometric/nn/part.py")
    assert not is_library_file(f"{fxamp.__path__[0]}/demo/models.py") and is_library_file("<string>")


def test_a_project_in_a_folder_named_like_a_library_keeps_its_lines(tmp_path):
    folder = tmp_path / "torch" / "fxamp"
    folder.mkdir(parents=True)
    path = folder / "model.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("users_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    converted = fxamp.convert(module.Net(), example_inputs=(torch.zeros(2, 4),))
    lines = {row.op: row.source for row in fxamp.report(converted).rows}
    assert lines["linear"].endswith("torch/fxamp/model.py:10")
    assert lines["relu"].endswith("torch/fxamp/model.py:10")


def test_a_model_without_code_of_its_own_has_no_line():
    converted = fxamp.convert(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), example_inputs=(torch.zeros(2, 4),))
    assert {row.source for row in fxamp.report(converted).rows if row.op in ("linear", "softmax")} == {""}
