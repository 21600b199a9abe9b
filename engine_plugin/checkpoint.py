"""What a model's weights are, by the content of its files: never their names or where they lie.

Every rank of a model gets the same digest, as it is of the whole checkpoint and not of what one rank
holds. A file's content is digested with XXH3-128, which tells apart files that differ by accident or
by training; it is no defence against files that were forged to collide.

Digests may be remembered in a file, under everything by which the file system shows a change: path,
size, inode, device, and the times of the last change of content (mtime) and of inode (ctime). A file
that was changed less than :data:`SETTLED_NS` before it was read is not remembered, because a file
system with coarse times might not show that it changes again.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from kvstore.errors import UsageError
from kvstore.namespace import framed_digest

if TYPE_CHECKING:
    from collections.abc import Callable

INDEX = "model.safetensors.index.json"
FORMATS = (("*.safetensors",), ("*.bin", "*.pt", "*.pth"), ("*.gguf",))
"""Patterns of weights files, the preferred format first; a model is read from one format."""

TRAINING_STATE = frozenset(
    {
        "training_args.bin",
        "optimizer.bin",
        "optimizer.pt",
        "scheduler.pt",
        "scaler.pt",
        "rng_state.pth",
    }
)
"""Files that trainers leave beside the weights, in the same format."""

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
ADAPTER_CONFIG = "adapter_config.json"
IRRELEVANT_ADAPTER_KEYS = frozenset({"base_model_name_or_path", "revision", "inference_mode"})
"""Keys of an adapter's configuration that do not change what it computes on a given model."""

PIECE_BYTES = 4 << 20
"""Bytes that are read and hashed at a time, both without the interpreter's lock."""
MAX_THREADS = 4
MAX_REMEMBERED = 4096
SETTLED_NS = 2_000_000_000
"""Coarsest file times that are expected (FAT has 2 s)."""


class _File(NamedTuple):
    """A file's content, and where and when it was that."""

    path: str
    stamp: tuple[int, ...]
    digest: str
    settled: bool
    """Whether every later change will change ``stamp``."""


def weight_files(path: Path) -> list[Path]:
    """Return the files that hold the weights of the model in directory ``path``, sorted by name.

    They are the ``*.safetensors`` (those that ``model.safetensors.index.json`` names, if it is
    there), else ``*.bin``, ``*.pt`` and ``*.pth``, else ``*.gguf``. A file is its own only one.

    Raises:
        UsageError: there is none, or the index is unreadable or names one that is missing.
    """
    if path.is_file():
        return [path]
    for patterns in FORMATS:
        found = [file for pattern in patterns for file in path.glob(pattern) if _is_weights(file)]
        if found and "*.safetensors" in patterns and (path / INDEX).exists():
            found = _indexed(path)
        if found:
            return sorted(found)
    kinds = ", ".join(pattern for patterns in FORMATS for pattern in patterns)
    raise UsageError(
        f"no weights ({kinds}) in {path} on this host: give model_digest, a name of the weights in hex"
    )


def weights_digest(
    path: Path, cache: Path | None, *, now_ns: Callable[[], int] = time.time_ns
) -> bytes:
    """Return the 32-byte digest of the content of :func:`weight_files`, in their order.

    Names take no part, so that copies and renamed files have the same digest. Reads every file
    once, several at a time, but for those that ``cache`` remembers.

    Args:
        path: a model's directory, or its only file.
        cache: a JSON file that remembers the digests of single files between calls and processes;
            made with its directory, and ignored if it cannot be read or written. None: there is none.
        now_ns: wall clock, in nanoseconds since 1970: the one that file systems use.

    Raises:
        UsageError: as :func:`weight_files`; or a file cannot be read, or changes while it is.
    """
    files = weight_files(path)
    known = {} if cache is None else _remembered(cache)
    look = partial(_look, known=known, now_ns=now_ns)
    with ThreadPoolExecutor(min(MAX_THREADS, len(files)), "kvstore-weights") as threads:
        seen = list(threads.map(look, files))
    if cache is not None:
        _remember(cache, known, seen)
    return framed_digest("weights files", *(bytes.fromhex(file.digest) for file in seen))


def adapter_digest(path: Path) -> bytes:
    """Return the 32-byte digest of the LoRA adapter in directory ``path``.

    It covers the content of ``adapter_model.safetensors`` (else ``.bin``) and the values in
    ``adapter_config.json``, without :data:`IRRELEVANT_ADAPTER_KEYS`.

    Raises:
        UsageError: one of the two is missing or unreadable, or changes while it is read.
    """
    weights = next((path / name for name in ADAPTER_WEIGHTS if (path / name).exists()), None)
    if weights is None:
        raise UsageError(f"no adapter in {path}: it needs {' or '.join(ADAPTER_WEIGHTS)}")
    config = _read_object(path / ADAPTER_CONFIG)
    relevant = {key: value for key, value in config.items() if key not in IRRELEVANT_ADAPTER_KEYS}
    text = json.dumps(relevant, sort_keys=True, separators=(",", ":"))
    return framed_digest("adapter files", text, bytes.fromhex(_hash(weights)[1]))


def _is_weights(file: Path) -> bool:
    """Whether a file in a known format is one of weights; a broken link is, and fails when read."""
    return not (file.name.startswith(".") or file.name in TRAINING_STATE or file.is_dir())


def _indexed(path: Path) -> list[Path]:
    """Return the files that the index of ``path`` names."""
    names = _read_object(path / INDEX).get("weight_map")
    if not (names and isinstance(names, dict) and all(isinstance(n, str) for n in names.values())):
        raise UsageError(f"{path / INDEX} has no weight_map from names of tensors to files")
    files = {path / name for name in names.values()}
    missing = sorted(file.name for file in files if not file.is_file())
    if missing:
        raise UsageError(
            f"{path} lacks {len(missing)} of the {len(files)} files that {INDEX} names, the first is"
            f" {missing[0]}: complete it, or give model_digest"
        )
    return list(files)


def _read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in ``file``."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file} must be a JSON object, not {type(found).__name__}")
    return found


# ---------------------------------------------------------------------------- content


def _look(file: Path, known: dict[str, list[Any]], now_ns: Callable[[], int]) -> _File:
    """Return ``file`` as ``known`` has it, or else as it is read."""
    started_ns = now_ns()
    try:
        where, stamp = str(file.resolve()), _stamp(file)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise UsageError(f"cannot read {file}: {error}") from error
    entry = known.get(where)
    if entry is not None and entry[:-1] == list(stamp):
        return _File(where, stamp, entry[-1], settled=True)
    stamp, digest = _hash(file)
    return _File(where, stamp, digest, settled=stamp[-1] + SETTLED_NS < started_ns)


def _stamp(file: Path) -> tuple[int, ...]:
    """Return all by which a change of ``file`` shows; the last is when its inode changed."""
    found = file.stat()
    return (found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev, found.st_ctime_ns)


def _hash(file: Path) -> tuple[tuple[int, ...], str]:
    """Return the stamp of ``file`` and its content's digest in hex; the two belong together."""
    try:
        for _ in range(2):
            before = _stamp(file)
            digest = _read(file)
            if _stamp(file) == before:
                return before, digest
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    raise UsageError(f"{file} changes while it is read: start again when it is complete")


def _read(file: Path) -> str:
    """Return XXH3-128 of the content of ``file``, in hex.

    It is read and not mapped: a mapped file that somebody truncates kills the process.
    """
    digest = xxhash.xxh3_128()
    piece = memoryview(bytearray(PIECE_BYTES))
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()


# ---------------------------------------------------------------------------- remembered digests


def _remembered(cache: Path) -> dict[str, list[Any]]:
    """Return ``path -> [*stamp, digest]``, the oldest first; leave out what makes no sense."""
    try:
        found = _read_object(cache)
    except UsageError:
        return {}
    return {path: entry for path, entry in found.items() if _is_entry(entry)}


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or not entry or not isinstance(entry[-1], str):
        return False
    try:
        return len(bytes.fromhex(entry[-1])) == xxhash.xxh3_128().digest_size
    except ValueError:
        return False


def _remember(cache: Path, known: dict[str, list[Any]], seen: list[_File]) -> None:
    """Add to ``cache`` what was read and will show every change; forget the oldest beyond the limit."""
    used = {file.path: [*file.stamp, file.digest] for file in seen if file.settled}
    if all(known.get(path) == entry for path, entry in used.items()):
        return
    others = _remembered(cache)  # again, as other processes may have added to it by now
    entries = {path: entry for path, entry in others.items() if path not in used} | used
    newest = dict(list(entries.items())[-MAX_REMEMBERED:])
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{cache.name}-", dir=cache.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(newest, file)
            Path(temporary).replace(cache)
        finally:
            Path(temporary).unlink(missing_ok=True)
