"""Names of version 0.1 for the contents of shardwright.modeling.masks, for models that import them from here."""

import warnings
from typing import Any

from shardwright.modeling.masks import CAUSAL, AttentionMask, SoftCap, Window, causal, same_document

__all__ = ["CAUSAL", "Rule", "SoftCap", "Window", "causal", "same_document"]


def Rule(visible: Any = CAUSAL.mask_mod, score: Any = None, *rest: Any, **options: Any) -> AttentionMask:
    """Makes an AttentionMask from the names that its parts had."""
    warnings.warn(
        "rules.Rule(visible=…, score=…) is now masks.AttentionMask(mask_mod=…, score_mod=…).", FutureWarning, 2
    )
    return AttentionMask(visible, score, *rest, **options)
