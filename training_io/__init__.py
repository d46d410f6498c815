"""A run: its configuration, start, checkpoints, metrics, profile and stages."""

from cluster.watch import watched_batches
from cluster.stopping import StopRequest
from cluster.watch import Watch
from configuration.differences import config_differences

from .checkpoint import Checkpointer
from .evaluation import check_finite, evaluate
from .flops import ModelFlops, PeakFlops, flops_of_model, model_flops_per_token, peak_flops
from .hlo import compile_with_hlo_dump, render_svg, start_rendering
from .initial_weights import find_checkpoint, read_weights
from .memory import peak_memory
from .metrics import RunLog, has_event
from .profile import StepProfiler
from .report import save_config, say_end, say_start
from .sweeps import PickledByName

__all__ = [
    "Checkpointer",
    "ModelFlops",
    "PeakFlops",
    "PickledByName",
    "RunLog",
    "StepProfiler",
    "StopRequest",
    "Watch",
    "check_finite",
    "compile_with_hlo_dump",
    "config_differences",
    "evaluate",
    "find_checkpoint",
    "flops_of_model",
    "has_event",
    "model_flops_per_token",
    "peak_flops",
    "peak_memory",
    "read_weights",
    "render_svg",
    "save_config",
    "say_end",
    "say_start",
    "start_rendering",
    "watched_batches",
]
