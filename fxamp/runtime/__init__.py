"""What runs beside the converted model: loss scaler, master weights, whole-step graphs, checkpoints.

The names for users; `fxamp.runtime.apex` is apex.amp's interface as a module.
"""

from fxamp.runtime.apex import initialize, master_params, scale_loss
from fxamp.runtime.checkpoint import load_checkpoint, save_checkpoint
from fxamp.runtime.distributed import reduce_gradients_in
from fxamp.runtime.fixed_scalers import NoOpLossScaler, StaticLossScaler, scaler_for
from fxamp.runtime.graphed_step import GraphedStep
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scale_rule import choose_scale
from fxamp.runtime.scaler import LossScaler
from fxamp.runtime.step_result import StepResult
from fxamp.runtime.tf32 import set_tf32, tf32_state

__all__ = [
    "GraphedStep",
    "LossScaler",
    "MasterWeightOptimizer",
    "NoOpLossScaler",
    "StaticLossScaler",
    "StepResult",
    "choose_scale",
    "initialize",
    "load_checkpoint",
    "master_params",
    "reduce_gradients_in",
    "save_checkpoint",
    "scale_loss",
    "scaler_for",
    "set_tf32",
    "tf32_state",
]
