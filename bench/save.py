"""From the boundary to durable: the 4 GB state, 5,000 small tensors, and a LoRA run whose frozen weights need
not be written again."""

from __future__ import annotations

from pathlib import Path

from bench import disk, ours, peers, raw, state
from bench.measure import Kind, Method, Options, Timing, interleave
from bench.table import Comparison

# after these every file in the rotation has been written over once, as in any run that has been going for a
# while
_WARM_UPS = 6
ON_DISK = 4  # two valid checkpoints, the spare space, one under construction


class LastcallSave(Method):
    """One run that stays open, as in training. Its very first save is kept aside: it finds the spare space
    that was prepared at the start, and no pruned checkpoint yet."""

    def __init__(self, saved: state.State, folder: Path) -> None:
        super().__init__("lastcall", Kind.OURS)
        self._state = saved
        self._folder = folder / "lastcall"
        self._saver: ours.Saver | None = None
        self.first: float | None = None

    def setup(self) -> None:
        self._saver = ours.Saver(self._folder, self._state.model, self._state.optimizer)
        for _ in range(_WARM_UPS):
            self._state.touch()
            seconds = self._saver.save()
            self.first = self.first or seconds

    def run(self) -> Timing:
        assert self._saver is not None
        return Timing(self._saver.save())

    def close(self) -> None:
        if self._saver:
            self._saver.close()
            self._saver = None
        disk.clear(self._folder)


def save(folder: Path, gigabytes: float, options: Options) -> Comparison:
    return compare("save", "Save", state.gpt(gigabytes), folder, options)


def small(folder: Path, gigabytes: float, options: Options) -> Comparison:
    return compare("small", "Save, many small tensors", state.small(gigabytes), folder, options)


def frozen(folder: Path, gigabytes: float, options: Options) -> Comparison:
    saved = state.frozen(gigabytes)
    changing = sum(tensor.nbytes for tensor in saved.trained())
    aside = raw.RawWrite(raw.Way.NEW, folder, changing, 4)
    aside.name, aside.kind, aside.family = "raw O_DIRECT, only what changed", Kind.ASIDE, "changed"
    aside.path = folder / "raw-changed.bin"
    more = [peers.TorchSaveTrained(saved, folder), aside]
    report = compare("frozen", "Save, frozen weights", saved, folder, options, more)
    report.notes.append(
        f"{changing / 1e6:.0f} MB change between two saves; the limit is the raw write of the whole state."
    )
    return report


def compare(
    name: str,
    title: str,
    saved: state.State,
    folder: Path,
    options: Options,
    more: list[Method] | None = None,
) -> Comparison:
    nbytes = saved.nbytes
    # raw files, one checkpoint of a peer
    copies = raw.RECYCLED_FILES + 3 + (ON_DISK if options.keeps("lastcall") else 0)
    disk.require(folder, copies * nbytes)
    mine = LastcallSave(saved, folder)
    methods = [*raw.writes(folder, nbytes), mine, *peers.saves(saved, folder), *(more or [])]
    results = interleave(name, methods, options, before_each=saved.touch)
    report = Comparison(name, f"{title}: {saved.described}", nbytes, results)
    if mine.first is not None:
        report.notes.append(
            f"lastcall's first save in a new folder took {mine.first:.2f} s (once, not interleaved), into "
            "the space"
            " prepared at the start; its row recycles pruned checkpoints."
        )
    return report
