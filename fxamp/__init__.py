"""Mixed-precision training as a compiler pass over torch.fx."""

from fxamp import data
from fxamp.convert import convert
from fxamp.errors import (
    CaptureError,
    CheckpointError,
    FxampError,
    InputError,
    InvariantError,
    OpListError,
    OptionError,
    ScaleCollapseError,
    ShardedParameterError,
)
from fxamp.instruments import audit, profile
from fxamp.lists import OpLists
from fxamp.numerics.bisect import DenySet, find_deny
from fxamp.numerics.compare import Comparison, compare
from fxamp.numerics.find import find_nan
from fxamp.numerics.kernels import kernels
from fxamp.numerics.nan import BadNode
from fxamp.numerics.ranges import Ranges
from fxamp.numerics.watch import watch_nan
from fxamp.review.audit import Audit
from fxamp.review.dump import dump
from fxamp.review.explain import explain
from fxamp.review.report import Report, report
from fxamp.review.what_if import what_if
from fxamp.runtime import (
    GraphedStep,
    LossScaler,
    MasterWeightOptimizer,
    NoOpLossScaler,
    StaticLossScaler,
    StepResult,
    choose_scale,
    initialize,
    load_checkpoint,
    master_params,
    reduce_gradients_in,
    save_checkpoint,
    scale_loss,
    scaler_for,
    set_tf32,
    tf32_state,
)

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "BadNode",
    "CaptureError",
    "CheckpointError",
    "Comparison",
    "DenySet",
    "FxampError",
    "GraphedStep",
    "InputError",
    "InvariantError",
    "LossScaler",
    "MasterWeightOptimizer",
    "NoOpLossScaler",
    "OpListError",
    "OpLists",
    "OptionError",
    "Ranges",
    "Report",
    "ScaleCollapseError",
    "ShardedParameterError",
    "StaticLossScaler",
    "StepResult",
    "__version__",
    "audit",
    "choose_scale",
    "compare",
    "convert",
    "data",
    "dump",
    "explain",
    "find_deny",
    "find_nan",
    "initialize",
    "kernels",
    "load_checkpoint",
    "master_params",
    "profile",
    "reduce_gradients_in",
    "report",
    "save_checkpoint",
    "scale_loss",
    "scaler_for",
    "set_tf32",
    "tf32_state",
    "watch_nan",
    "what_if",
]
