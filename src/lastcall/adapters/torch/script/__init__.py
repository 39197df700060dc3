"""The save that a training script has of its own: found in its source, entered in its frame, or replayed. Knows no framework."""

from lastcall.adapters.torch.script.own import Script, find
from lastcall.adapters.torch.script.points import Point, Saves

__all__ = ["Point", "Saves", "Script", "find"]
