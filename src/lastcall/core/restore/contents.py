"""What a committed checkpoint holds for one rank, and which bytes of which files it has to read for that.

In a checkpoint of many ranks a rank takes the document that the rank of its number left, or rank 0's where
there is none (the world has grown), with the tensors that were that rank's own. Their shared tensors are
assembled from the pieces that the manifest names, for any number of ranks and any sharding; only the pieces
that overlap a live region are opened.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from lastcall import errors
from lastcall.core.checkpoint import filenames
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Entry
from lastcall.core.engine import digest, writer
from lastcall.core.restore import regions
from lastcall.core.subject import Targets
from lastcall.formats import manifest, safetensors
from lastcall.storage import errnos
from lastcall.types import FileRecord, Region, Target


@dataclass
class Wanted:
    """What has to be read of a file."""

    file: FileRecord
    chunks: set[int] = field(default_factory=set)
    # by the place in the file where their bytes begin
    targets: dict[int, list[Target]] = field(default_factory=dict)

    @property
    def pieces(self) -> list[writer.FilePiece]:
        return [
            writer.FilePiece(offset, found[0] if len(found) == 1 else regions.FanOut(found))
            for offset, found in sorted(self.targets.items())
        ]

    def read(self, begin: int, end: int) -> None:
        """These bytes are needed."""
        if begin < end:
            self.chunks.update(range(begin // self.file.chunk, (end - 1) // self.file.chunk + 1))


class Contents:
    """The document and the tensors, read and checked, as far as that goes without reading the tensors
    themselves."""

    def __init__(self, entry: Entry, rank: int) -> None:
        self._entry = entry
        self._function = digest.named(entry.record.algorithm)
        self._files = {file.name: file for file in entry.record.files}
        self._headers: dict[str, dict[str, safetensors.Stored]] = {}
        many = manifest.NAME in self._files
        self.shared: manifest.Manifest = manifest.parse(self._bytes(manifest.NAME)) if many else {}
        found = rank if filenames.document(rank) in self._files else 0
        self.rank = found if many else None  # the rank whose document it is; None: there was one process
        self.document = self._document(filenames.document(self.rank))
        self._own = {
            group: file
            for file in self._files
            for group in [filenames.group_of(file, self.rank)]
            if group is not None
        }
        self.stored = self._stored()

    def plan(self, targets: Targets) -> list[Wanted]:
        """What has to be read for these targets. Nothing live is touched; CheckpointError where manifest and
        files disagree."""
        wanted: dict[str, Wanted] = {}
        for group, named in targets.items():
            for name, target in named.items():
                for one in _each(target):
                    for file, stored, offset, whole in self._pieces(group, name, one):
                        if file not in wanted:
                            wanted[file] = self._opening(file)
                        _aim(wanted[file], stored, offset, whole, one)
        return list(wanted.values())

    def headers(self) -> list[Wanted]:
        """The headers that have been read so far, to have their digests checked."""
        return [self._opening(file) for file in self._headers]

    def _stored(self) -> dict[str, dict[str, safetensors.Stored]]:
        stored: dict[str, dict[str, safetensors.Stored]] = {
            group: {
                name: safetensors.Stored(tensor.dtype, tensor.shape, 0, tensor.nbytes)
                for name, tensor in tensors.items()
            }
            for group, tensors in self.shared.items()
        }
        for group, file in self._own.items():
            parts = {
                piece.key
                for tensor in self.shared.get(group, {}).values()
                for piece in tensor.pieces
                if piece.file == file
            }
            own = {key: found for key, found in self._header(file).items() if key not in parts}
            # a name in a rank's document means its own tensor, if it has one of that name
            stored.setdefault(group, {}).update(own)
        return stored

    def _pieces(
        self, group: str, name: str, one: object
    ) -> Iterator[tuple[str, safetensors.Stored, tuple[int, ...], tuple[int, ...]]]:
        """Where the bytes for a target are: file, place in it, offset in the whole, the shape of the
        whole."""
        known = self.stored[group][name]
        tensor = self.shared.get(group, {}).get(name)
        # in a file, a header comes first: only what is put together begins at 0
        if tensor is None or known.begin:
            yield self._own[group], known, (0,) * len(known.shape), known.shape
            return
        for piece in tensor.pieces:
            if (
                isinstance(one, Region)
                and regions.meet((piece.offset, piece.shape), (one.offset, one.shape)) is None
            ):
                continue
            found = self._header(piece.file).get(piece.key)
            if found is None or (found.dtype, found.shape) != (tensor.dtype, piece.shape):
                what = "is not in it" if found is None else f"is {found.dtype} {list(found.shape)} in it"
                raise errors.CheckpointError(
                    f"{manifest.NAME} refers to {piece.key!r:.100} in {piece.file} of {tensor.dtype} "
                    f"{list(piece.shape)}, which {what}"
                )
            yield piece.file, found, piece.offset, tensor.shape

    def _opening(self, file: str) -> Wanted:
        """A file that something is read from: the header is too, since nothing has checked its digest yet."""
        wanted = Wanted(self._files[file])
        wanted.read(0, min((found.begin for found in self._header(file).values()), default=wanted.file.size))
        return wanted

    def _header(self, name: str) -> dict[str, safetensors.Stored]:
        if name not in self._headers:
            if name not in self._files:
                raise errors.CheckpointError(f"{manifest.NAME} names {name}, which the record does not")
            try:
                path = self._entry.path / name
                data = errnos.reading(
                    functools.partial(safetensors.read_header, path), f"{name} cannot be opened"
                )
                self._headers[name] = safetensors.parse(data, self._files[name].size)[0]
            except errors.UncheckedError:
                raise
            except errors.CheckpointError as error:
                raise errors.CheckpointError(f"{name}: {error}") from None
        return self._headers[name]

    def _document(self, name: str) -> dict[str, object]:
        data = self._bytes(name)
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise errors.CheckpointError(f"{name} is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise errors.CheckpointError(f"{name} is not an object")
        return document

    def _bytes(self, name: str) -> bytes:
        return small_file(self._entry, name)


def small_file(entry: Entry, name: str) -> bytes:
    """A small file of a checkpoint, checked against its digest."""
    file, function = entry.record.file(name), digest.named(entry.record.algorithm)
    if file is None:
        raise errors.CheckpointError(f"the record names no {name}")
    # before a byte of it is read: a huge sparse file costs an attacker nothing
    if file.size > (most := records.LARGEST):
        raise errors.CheckpointError(f"{name} has {file.size} bytes, more than the {most} that are read")
    data = records.read_regular(entry.path / name, file.size)
    if (
        tuple(function(data[begin : begin + file.chunk]) for begin in range(0, len(data), file.chunk))
        != file.chunks
    ):
        raise errors.CheckpointError(f"{name} does not match its digest")
    return data


def _each(target: object) -> Iterator[object]:
    several = getattr(target, "targets", None)
    if several is None:
        yield target
    else:
        for one in several:
            yield from _each(one)


def _aim(
    wanted: Wanted, stored: safetensors.Stored, offset: tuple[int, ...], whole: tuple[int, ...], one: object
) -> None:
    """Copy the bytes of a stored piece to a target, as far as it wants them."""
    if stored.begin == stored.end:  # it begins where its neighbour does
        return
    place = one if isinstance(one, Region) else Region((0,) * len(whole), whole, one)  # type: ignore[arg-type]
    if (place.offset, place.shape) == (offset, stored.shape):
        wanted.targets.setdefault(stored.begin, []).append(place.target)
        wanted.read(stored.begin, stored.end)
        return
    scatter = regions.Scatter(offset, stored.shape, place, safetensors.DTYPES[stored.dtype])
    if scatter.span[0] < scatter.span[1]:
        wanted.targets.setdefault(stored.begin, []).append(scatter)
        wanted.read(stored.begin + scatter.span[0], stored.begin + scatter.span[1])
