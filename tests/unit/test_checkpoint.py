"""Equal content gives equal digests wherever it lies; a remembered digest is used only while it is true."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import pytest
import xxhash

from engine_plugin import checkpoint
from engine_plugin.checkpoint import adapter_digest, weight_files, weights_digest
from kvstore.errors import UsageError
from kvstore.namespace import framed_digest

SHARDS = {
    "model-00001-of-00002.safetensors": b"first shard",
    "model-00002-of-00002.safetensors": b"second shard",
}
LORA = {
    "base_model_name_or_path": "/models/base",
    "inference_mode": True,
    "lora_alpha": 16,
    "r": 8,
    "revision": None,
    "target_modules": ["q_proj", "v_proj"],
}


@pytest.fixture
def make(tmp_path):
    """Return a function that writes files, and gives their directory."""

    def write(directory: str, files: dict[str, bytes]):
        for name, content in files.items():
            path = tmp_path / directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        (tmp_path / directory).mkdir(exist_ok=True)
        return tmp_path / directory

    return write


def later():
    """A clock for which every file was written long ago."""
    return time.time_ns() + 3600 * 10**9


def rewrite(file, content):
    """Write until the file system's coarse clock shows it."""
    before = file.stat().st_ctime_ns
    while file.stat().st_ctime_ns == before:
        file.write_bytes(content)


def names(path):
    return [file.name for file in weight_files(path)]


def index(*files: str) -> bytes:
    return json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(files)}}).encode()


@pytest.fixture
def hashed(monkeypatch):
    """Contents that were hashed, in the order in which they ended."""
    contents = []

    class Recorder:
        digest_size = 16

        def __init__(self):
            self.content = b""

        def update(self, piece):
            self.content += bytes(piece)

        def hexdigest(self):
            contents.append(self.content)
            return xxhash.xxh3_128_hexdigest(self.content)

    monkeypatch.setattr(checkpoint, "xxhash", SimpleNamespace(xxh3_128=Recorder))
    return contents


class TestWeightFiles:
    def test_prefers_safetensors_then_torch_then_gguf(self, make):
        torch_files = {"b.pt": b"", "c.pth": b"", "a.bin": b""}
        assert names(make("gguf", {"b.gguf": b"", "a.gguf": b""})) == ["a.gguf", "b.gguf"]
        assert names(make("torch", {"z.gguf": b""} | torch_files)) == ["a.bin", "b.pt", "c.pth"]
        everything = SHARDS | torch_files | {"z.gguf": b""}
        assert names(make("all", dict(reversed(everything.items())))) == list(SHARDS)

    def test_a_file_is_its_own(self, make):
        path = make("model", {"a.gguf": b"", "b.gguf": b""}) / "b.gguf"
        assert weight_files(path) == [path]

    def test_what_holds_no_weights_is_left_out(self, make):
        path = make("model", {"pytorch_model.bin": b"", "training_args.bin": b"", "._x.bin": b""})
        (path / "directory.safetensors").mkdir()
        assert names(path) == ["pytorch_model.bin"]

    def test_index_chooses(self, make):
        files = {checkpoint.INDEX: index(*reversed(SHARDS)), "consolidated.safetensors": b"other"}
        assert names(make("model", SHARDS | files)) == list(SHARDS)

    def test_file_that_the_index_names_must_be_there(self, make):
        path = make("model", SHARDS | {checkpoint.INDEX: index(*SHARDS, "gone.safetensors")})
        with pytest.raises(
            UsageError, match=r"lacks 1 of the 3 files .* gone.safetensors: complete"
        ):
            weight_files(path)

    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b"[]", b"\xff", b"{}", b'{"weight_map": {}}', b'{"weight_map": {"w": 1}}'],
    )
    def test_unreadable_index_is_refused(self, make, content):
        path = make("model", SHARDS | {"a.bin": b"", checkpoint.INDEX: content})
        with pytest.raises(UsageError, match=checkpoint.INDEX):
            weight_files(path)

    def test_error_says_what_to_do(self, make):
        path = make("model", {"config.json": b"{}", "optimizer.pt": b""})
        for nothing in (path, path / "missing"):
            with pytest.raises(
                UsageError, match=rf"no weights .* in {nothing} .* give model_digest"
            ):
                weight_files(nothing)


class TestWeightsDigest:
    def test_is_of_the_content_of_each_file(self, make):
        content = [xxhash.xxh3_128_digest(content) for content in SHARDS.values()]
        expected = framed_digest("weights files", *content)
        assert weights_digest(make("model", SHARDS), None) == expected

    def test_names_and_places_take_no_part(self, make):
        renamed = dict(
            zip(("other-1.safetensors", "other-2.safetensors"), SHARDS.values(), strict=True)
        )
        here, there = make("here", SHARDS | {"config.json": b"{}"}), make("there", renamed)
        assert weights_digest(here, None) == weights_digest(there, None)

    def test_links_are_followed(self, make):
        blobs, path = (
            make("blobs", {"9f": b"first shard", "12": b"second shard"}),
            make("model", {}),
        )
        for name, blob in zip(SHARDS, ("9f", "12"), strict=True):
            (path / name).symlink_to(blobs / blob)
        assert weights_digest(path, None) == weights_digest(make("plain", SHARDS), None)

    def test_files_that_change_places_change_it(self, make):
        swapped = dict(zip(SHARDS, reversed(SHARDS.values()), strict=True))
        digests = {weights_digest(make(name, files), None) for name, files in
                   (("here", SHARDS), ("swapped", swapped))}  # fmt: skip
        assert len(digests) == 2

    def test_bytes_that_move_from_one_file_to_the_next_change_it(self, make):
        moved = dict(zip(SHARDS, (b"first shards", b"econd shard"), strict=True))
        merged = {"model.safetensors": b"".join(SHARDS.values())}
        paths = [make("a", SHARDS), make("b", moved), make("c", merged)]
        paths.append(make("d", SHARDS | {"model-00003.safetensors": b""}))
        assert len({weights_digest(path, None) for path in paths}) == 4

    def test_every_byte_counts(self, make, monkeypatch):
        monkeypatch.setattr(checkpoint, "PIECE_BYTES", 8)
        content = bytes(range(20))  # two whole pieces and a part
        versions = [content, content[:-1], content + b"\0"]
        for position in range(len(content)):
            flipped = bytearray(content)
            flipped[position] ^= 1
            versions.append(bytes(flipped))
        path = make("model", SHARDS)
        digests = set()
        for version in versions:
            (path / "model-00002-of-00002.safetensors").write_bytes(version)
            digests.add(weights_digest(path, None))
        assert len(digests) == len(versions)

    def test_many_files_keep_their_order(self, make):
        files = {f"model-{i:05}.safetensors": bytes([i]) * (40 - i) for i in range(40)}
        content = [xxhash.xxh3_128_digest(content) for content in files.values()]
        expected = framed_digest("weights files", *content)
        assert weights_digest(make("model", files), None) == expected

    def test_unreadable_file_is_refused(self, make):
        path = make("model", SHARDS)
        (path / "model-00003.safetensors").symlink_to(path / "missing")
        with pytest.raises(UsageError, match=r"cannot read .*model-00003"):
            weights_digest(path, None)
        (path / "model-00003.safetensors").unlink()
        (path / "model-00003.safetensors").symlink_to("model-00003.safetensors")
        with pytest.raises(UsageError, match=r"cannot read .*model-00003"):
            weights_digest(path, None)

    @pytest.mark.parametrize("changes", [1, 2])
    def test_file_that_changes_while_it_is_read(self, make, monkeypatch, changes):
        path = make("model", {"model.safetensors": b"old"})
        left = list(range(changes))
        read = checkpoint._read

        def read_and_change(file):
            digest = read(file)
            if left:
                file.write_bytes(b"new" * (2 + left.pop()))
            return digest

        monkeypatch.setattr(checkpoint, "_read", read_and_change)
        if changes == 1:
            expected = framed_digest("weights files", xxhash.xxh3_128_digest(b"newnew"))
            assert weights_digest(path, None) == expected
        else:
            with pytest.raises(UsageError, match="changes while it is read"):
                weights_digest(path, None)


class TestRememberedDigests:
    @pytest.fixture
    def cache(self, tmp_path):
        return tmp_path / "cache" / "kvstore" / "weights.json"

    def test_second_call_reads_nothing(self, make, cache, hashed):
        path = make("model", SHARDS)
        first = weights_digest(path, cache, now_ns=later)
        assert sorted(hashed) == sorted(SHARDS.values())
        hashed.clear()
        assert weights_digest(path, cache, now_ns=later) == first == weights_digest(path, cache)
        assert hashed == []

    def test_only_what_changed_is_read_again(self, make, cache, hashed):
        path = make("model", SHARDS)
        before = weights_digest(path, cache, now_ns=later)
        hashed.clear()
        rewrite(path / "model-00002-of-00002.safetensors", b"SECOND shard")  # of the same size
        after = weights_digest(path, cache, now_ns=later)
        assert hashed == [b"SECOND shard"]
        assert before != after == weights_digest(path, None)

    def test_times_that_were_set_back_do_not_deceive(self, make, cache):
        file = make("model", {"model.safetensors": b"old"}) / "model.safetensors"
        before, times = weights_digest(file, cache, now_ns=later), file.stat()
        rewrite(file, b"new")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert file.stat().st_mtime_ns == times.st_mtime_ns
        assert before != weights_digest(file, cache, now_ns=later) == weights_digest(file, None)

    @pytest.mark.parametrize("field", ["size", "mtime_ns", "inode", "device", "ctime_ns", None])
    def test_not_used_if_anything_differs(self, make, cache, field):
        path = make("model", {"model.safetensors": b"content"})
        weights_digest(path, cache, now_ns=later)
        [(where, entry)] = json.loads(cache.read_text()).items()
        forged = xxhash.xxh3_128_digest(b"forged")
        if field:
            entry[["size", "mtime_ns", "inode", "device", "ctime_ns"].index(field)] += 1
        cache.write_text(json.dumps({where: [*entry[:-1], forged.hex()]}))
        used = weights_digest(path, cache) == framed_digest("weights files", forged)
        assert used == (field is None)

    def test_not_used_for_another_path(self, make, cache):
        weights_digest(make("model", {"model.safetensors": b"content"}), cache, now_ns=later)
        other = make("other", {"model.safetensors": b"another"})
        assert weights_digest(other, cache, now_ns=later) == weights_digest(other, None)

    def test_file_that_changed_just_now_is_not_remembered(self, make, cache):
        path = make("model", {"model.safetensors": b"content"})
        ctime_ns = (path / "model.safetensors").stat().st_ctime_ns
        weights_digest(path, cache, now_ns=lambda: ctime_ns + checkpoint.SETTLED_NS)
        assert not cache.exists()
        weights_digest(path, cache, now_ns=lambda: ctime_ns + checkpoint.SETTLED_NS + 1)
        assert len(json.loads(cache.read_text())) == 1

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\xff\xfe",
            b"{",
            b"[]",
            b"[" * 100_000,
            b'{"PATH": null}',
            b'{"PATH": []}',
            b'{"PATH": ["00"]}',
            b'{"PATH": [STAMP, 1]}',
            b'{"PATH": [STAMP, "00"]}',
            b'{"PATH": [STAMP, "not a hexadecimal number of 32"]}',
        ],
    )
    def test_corrupt_cache_is_replaced(self, make, cache, content, hashed):
        path = make("model", {"model.safetensors": b"content"})
        file = path / "model.safetensors"
        stamp = ", ".join(map(str, checkpoint._stamp(file)))
        content = content.replace(b"PATH", str(file.resolve()).encode())
        cache.parent.mkdir(parents=True)
        cache.write_bytes(content.replace(b"STAMP", stamp.encode()))
        digest = weights_digest(path, cache, now_ns=later)
        assert hashed == [b"content"]
        assert weights_digest(path, cache, now_ns=later) == digest == weights_digest(path, None)
        assert hashed == [b"content"] * 2  # the second by the call without a cache

    def test_unwritable_cache_is_ignored(self, make, tmp_path):
        path, blocker = make("model", SHARDS), make("blocker", {"file": b"", "directory/file": b""})
        expected = weights_digest(path, None)
        before = sorted(blocker.rglob("*"))
        for cache in (blocker / "file" / "weights.json", blocker / "directory"):
            assert weights_digest(path, cache, now_ns=later) == expected
        assert sorted(blocker.rglob("*")) == before

    def test_newest_stay(self, make, cache, monkeypatch):
        monkeypatch.setattr(checkpoint, "MAX_REMEMBERED", 3)
        a, b, c, d = (make(name, {"model.gguf": name.encode()}) / "model.gguf" for name in "abcd")
        for path in (a, b, c, d):
            weights_digest(path, cache, now_ns=later)
        assert list(json.loads(cache.read_text())) == [str(path.resolve()) for path in (b, c, d)]
        b.write_bytes(b"another b")
        weights_digest(b, cache, now_ns=later)
        assert list(json.loads(cache.read_text())) == [str(path.resolve()) for path in (c, d, b)]

    def test_what_others_added_meanwhile_stays(self, make, cache, monkeypatch):
        here, there = make("here", SHARDS), make("there", SHARDS)
        read = checkpoint._read

        def other_process_first(file):
            monkeypatch.setattr(checkpoint, "_read", read)
            weights_digest(there, cache, now_ns=later)
            return read(file)

        monkeypatch.setattr(checkpoint, "_read", other_process_first)
        weights_digest(here / next(iter(SHARDS)), cache, now_ns=later)
        assert len(json.loads(cache.read_text())) == 3

    def test_nothing_lies_about(self, make, cache):
        weights_digest(make("model", SHARDS), cache, now_ns=later)
        assert list(cache.parent.iterdir()) == [cache]


class TestAdapterDigest:
    def digest(self, make, directory, weights=b"weights", name="safetensors", **changes):
        config = json.dumps(LORA | changes).encode()
        files = {f"adapter_model.{name}": weights, checkpoint.ADAPTER_CONFIG: config}
        return adapter_digest(make(directory, files))

    def test_same_wherever_it_lies_and_however_it_is_written(self, make):
        here = self.digest(make, "here")
        base = {"base_model_name_or_path": "elsewhere", "revision": "main", "inference_mode": False}
        assert self.digest(make, "there", **base) == here
        spaced = json.dumps(dict(reversed(LORA.items())), indent=4).encode()
        assert adapter_digest(make("there", {checkpoint.ADAPTER_CONFIG: spaced})) == here

    def test_weights_and_settings_count(self, make):
        digests = {
            self.digest(make, "a"),
            self.digest(make, "b", weights=b"Weights"),
            self.digest(make, "c", lora_alpha=32),
            self.digest(make, "d", use_rslora=True),
        }
        assert len(digests) == 4

    def test_safetensors_before_bin(self, make):
        old = self.digest(make, "model", weights=b"old", name="bin")
        new = self.digest(make, "model", weights=b"new")
        assert new != old == self.digest(make, "other", weights=b"old", name="bin")
        assert new == self.digest(make, "third", weights=b"new")

    def test_format_stays(self, make):
        settings = '{"lora_alpha":16,"r":8,"target_modules":["q_proj","v_proj"]}'
        content = xxhash.xxh3_128_digest(b"weights")
        assert self.digest(make, "model") == framed_digest("adapter files", settings, content)

    def test_incomplete_adapter_is_refused(self, make):
        with pytest.raises(UsageError, match=r"no adapter in .*/empty: it needs adapter_model\."):
            adapter_digest(make("empty", {checkpoint.ADAPTER_CONFIG: b"{}"}))
        path = make("model", {"adapter_model.bin": b""})
        for content in (None, b"{", b"[]"):
            if content is not None:
                make("model", {checkpoint.ADAPTER_CONFIG: content})
            with pytest.raises(UsageError, match=checkpoint.ADAPTER_CONFIG):
                adapter_digest(path)
