"""Listeners: classes whose methods Run calls around the steps of a run, in the order of its
list.
"""

from shardwright.run.listeners.checkpoints import Checkpoints
from shardwright.run.listeners.listener import Ending, Listener, Listeners, Training
from shardwright.run.listeners.profile import Profile
from shardwright.run.listeners.standard import Picture, Report, Skips, Statistics, Summary
from shardwright.run.listeners.validation import Validation

__all__ = [
    "Checkpoints",
    "Ending",
    "Listener",
    "Listeners",
    "Picture",
    "Profile",
    "Report",
    "Skips",
    "Statistics",
    "Summary",
    "Training",
    "Validation",
]
