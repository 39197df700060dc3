"""The save that a training script has of its own: found in its source, entered in its frame, or replayed. Knows no framework."""

from lastcall.adapters.torch.script.own import Script, Spot, find
from lastcall.adapters.torch.script.points import Saves
from lastcall.adapters.torch.script.sources import gather, provide

__all__ = ["Saves", "Script", "Spot", "find", "gather", "provide"]
