"""The save that a training script has of its own: found in its source, entered in its frame, or replayed. Knows no framework."""

from lastcall.script.find.points import Saves
from lastcall.script.own import Script, Spot, find
from lastcall.script.source.sources import gather, provide

__all__ = ["Saves", "Script", "Spot", "find", "gather", "provide"]
