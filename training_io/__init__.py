"""What a run writes and says: checkpoints, metrics, progress, the profile, the picture of the compiled step."""

from .checkpoint import Checkpointer, config_differences
from .flops import ModelFlops, PeakFlops, model_flops_per_token, peak_flops
from .hlo import compile_with_hlo_dump, render_svg, start_rendering
from .metrics import RunLog
from .profile import StepProfiler

__all__ = [
    "Checkpointer",
    "ModelFlops",
    "PeakFlops",
    "RunLog",
    "StepProfiler",
    "compile_with_hlo_dump",
    "config_differences",
    "model_flops_per_token",
    "peak_flops",
    "render_svg",
    "start_rendering",
]
