"""A training script's own save: found in its source, entered in its frame, or replayed. Independent of any
framework."""

from lastcall.script.find.points import Saves
from lastcall.script.own import Script, Spot, find
from lastcall.script.source.sources import gather, provide

__all__ = ["Saves", "Script", "Spot", "find", "gather", "provide"]
