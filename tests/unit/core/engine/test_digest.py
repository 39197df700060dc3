from __future__ import annotations

import hashlib
import importlib.util
import sys

import pytest
import xxhash

from lastcall import errors
from lastcall.core.engine import digest


def test_the_digest_is_xxh3_128_where_xxhash_is_installed() -> None:
    assert digest.ALGORITHM == "xxh3-128"
    assert digest.of(b"some bytes") == xxhash.xxh3_128_hexdigest(b"some bytes")
    assert digest.named("xxh3-128")(memoryview(b"some bytes")) == digest.of(b"some bytes")


def test_the_digest_of_a_file_is_the_one_over_its_chunks_digests() -> None:
    chunks = [digest.of(b"one"), digest.of(b"two")]
    assert digest.over(chunks) == xxhash.xxh3_128_hexdigest("".join(chunks).encode())
    assert digest.over(reversed(chunks)) != digest.over(chunks)


def test_checkpoints_of_a_machine_without_xxhash_can_be_checked_here() -> None:
    assert digest.named("blake2b-128")(b"x") == hashlib.blake2b(b"x", digest_size=16).hexdigest()


def test_an_unknown_algorithm_is_refused_by_name() -> None:
    with pytest.raises(errors.CheckpointError, match="'md5' cannot be checked here.*newer lastcall"):
        digest.named("md5")


def test_without_xxhash_blake2b_serves_and_xxh3_checkpoints_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    spec = importlib.util.spec_from_file_location("bare_digest", digest.__file__)
    assert spec is not None and spec.loader is not None
    bare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bare)
    assert bare.ALGORITHM == "blake2b-128"
    assert bare.of(b"x") == hashlib.blake2b(b"x", digest_size=16).hexdigest()
    assert bare.over(["a", "b"]) == bare.of(b"ab")
    with pytest.raises(errors.UncheckedError, match="pip install xxhash"):
        bare.named("xxh3-128")
