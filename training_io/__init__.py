"""What a run writes and says: checkpoints, metrics, progress, the profile, the picture of the compiled step."""

from .checkpoint import Checkpointer, config_differences
from .flops import ModelFlops, PeakFlops, model_flops_per_token, peak_flops
from .hlo import compile_with_hlo_dump, render_svg, start_rendering
from .initial_weights import find_checkpoint, read_weights
from .memory import peak_memory
from .metrics import RunLog, has_event
from .profile import StepProfiler
from .stopping import StopRequest
from .sweeps import PickledByName

__all__ = [
    "Checkpointer",
    "ModelFlops",
    "PeakFlops",
    "PickledByName",
    "RunLog",
    "StepProfiler",
    "StopRequest",
    "compile_with_hlo_dump",
    "config_differences",
    "find_checkpoint",
    "has_event",
    "model_flops_per_token",
    "peak_flops",
    "peak_memory",
    "read_weights",
    "render_svg",
    "start_rendering",
]
