"""The ways to train that the suite compares."""

import torch

from fxamp.demo.loop import FP32, Mode

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LEVELS = ("strict", "balanced", "aggressive")

TF32_NAME = "tf32"
MODES: dict[str, Mode] = {
    "fp32": FP32,
    TF32_NAME: FP32,
    **{f"autocast {half}": Mode("autocast", dtype) for half, dtype in HALVES.items()},
    **{f"O1 {level} {half}": Mode("fxamp", dtype, level) for half, dtype in HALVES.items() for level in LEVELS},
    **{f"O2 {half}": Mode("fxamp", dtype, opt_level="O2") for half, dtype in HALVES.items()},
}
"""By name; those of fxamp begin with their `opt_level`, and O2 is at level balanced. TF32 needs a GPU."""


def modes_of(device: torch.device) -> list[str]:
    """The names of those that run there."""
    return [name for name in MODES if name != TF32_NAME or device.type == "cuda"]
