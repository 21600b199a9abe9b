"""Blocks on disk that a codec has made smaller, and those beside them that it has refused."""

import errno
import sqlite3
import tempfile
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kvstore.namespace import KVLayout, Namespace
from kvstore.testing import pattern
from kvstore.testing.disk import FaultySystem, identities
from kvstore.tiers.disk import slot_bytes_of
from kvstore.tiers.disk.format import check, checksum_of, encode_header
from tests.unit.disk_blocks import everything, opened

LAYOUT = KVLayout(2, 2, 64, "bfloat16", 32)
"""Blocks of 32 KiB."""
EXACT = Namespace(b"weights", LAYOUT)
CODED = replace(EXACT, codec="lz4")
LOSSY = replace(EXACT, codec="int8")
KEY = np.arange(32 * 6, dtype="<i4").tobytes()
NOISE = {1, 4, 5}
"""Places of the blocks that LZ4 cannot make smaller."""


@pytest.fixture
def path():
    """A directory that does not exist yet, on a real file system."""
    with tempfile.TemporaryDirectory(prefix="kvstore-codecs-", dir="/var/tmp") as directory:
        yield Path(directory) / "tier"


def contents(namespace=CODED):
    """Six blocks."""
    rng = np.random.default_rng(0)
    found = [pattern(namespace, KEY[: 128 * (at + 1)]).copy() for at in range(6)]
    for at in NOISE:
        found[at] = rng.integers(0, 256, LAYOUT.block_bytes, np.uint8)
    return found


def write(store, blocks, payloads):
    """Write blocks into slots of their own lengths."""
    offsets = np.array([store.allocate(block.slot_bytes, 1)[0] for block in blocks])
    return offsets, store.write(offsets, blocks, payloads)


def filled(store):
    """Store six blocks, plain those that were refused; return offsets and identities."""
    blocks, payloads = identities(CODED, KEY), contents()
    offsets, written = write(store, blocks, payloads)
    assert np.flatnonzero(written.refused).tolist() == sorted(NOISE)
    for at in sorted(NOISE):
        store.release(blocks[at].slot_bytes, offsets[[at]])
        blocks[at] = replace(blocks[at], plain=True)
        offsets[[at]], again = write(store, [blocks[at]], [payloads[at]])
        assert again.stored.all()
        assert not again.refused.any()
    return offsets, blocks


def read(store, offsets, blocks):
    targets = [np.full(LAYOUT.block_bytes, 170, np.uint8) for _ in blocks]
    return store.read(offsets, blocks, targets), targets


def flip(path, place):
    segment = min(path.glob("*.kv"))
    with segment.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def test_lengths_of_slots():
    assert slot_bytes_of(EXACT) == slot_bytes_of(CODED, plain=True) == 4096 + 32768
    assert slot_bytes_of(CODED) == 4096 + 28672
    assert slot_bytes_of(LOSSY) < slot_bytes_of(CODED)


def test_the_header_says_which_form_a_block_has():
    payload = contents()[0]
    (coded, *_), (exact, *_) = identities(CODED, KEY), identities(EXACT, KEY)
    forms = [coded, replace(coded, plain=True), exact]
    for written in forms:
        header = np.frombuffer(encode_header(written, checksum_of(payload), 7), np.uint8)
        codec, stored = (1, 28672) if written is coded else (0, 32768)
        assert header[128:140].tobytes() == stored.to_bytes(8, "little") + codec.to_bytes(
            4, "little"
        )
        for wanted in forms:
            verdict = check(header, payload, wanted, 7)
            if wanted == written:
                assert verdict == "good"
            else:
                same = wanted.namespace == written.namespace
                assert verdict == ("length" if same else "namespace")


def test_a_codec_that_saves_no_page_is_not_used(path):
    """Nor one that makes blocks longer: the length tells what is stored plain."""
    for shape in (KVLayout(1, 1, 8, "float16", 4), KVLayout(1, 1, 1, "float16", 1)):
        for codec in ("lz4", "int8"):
            namespace = Namespace(b"small", shape, codec=codec)
            assert slot_bytes_of(namespace) == slot_bytes_of(replace(namespace, codec=None))
            (block,) = identities(namespace, bytes(4 * shape.block_tokens))
            assert block.codec.number == 0
            assert block.is_exact
    store = opened(path)
    namespace = Namespace(b"small", KVLayout(1, 1, 8, "float16", 4), codec="int8")
    payload = np.full(namespace.layout.block_bytes, 0x7C, np.uint8)  # not finite, nor need it be
    offsets, written = write(store, identities(namespace, bytes(16)), [payload])
    assert written.stored.all()
    store.close()
    store = opened(path)
    offsets, blocks = everything(store)
    target = np.empty_like(payload)
    assert store.read(offsets, blocks, [target]) == ["good"]
    assert (target == payload).all()
    store.close()


def test_what_is_refused_does_not_keep_its_neighbours_from_being_stored(path):
    system = FaultySystem()
    store = opened(path, system)
    blocks, payloads = identities(CODED, KEY), contents()
    offsets = store.allocate(slot_bytes_of(CODED), 6)
    before = system.calls.count("write")
    stored, refused = store.write(offsets, blocks, payloads)
    assert np.flatnonzero(stored).tolist() == [0, 2, 3]
    assert np.flatnonzero(refused).tolist() == [1, 4, 5]
    assert system.calls.count("write") == before + 2, "one call for those between two refused ones"
    assert store.off == {"read": "", "write": ""}
    assert store.counts["written_blocks",] == store.counts["uncoded_blocks",] == 3
    assert store.counts["unwritten_blocks",] == 0
    assert read(store, offsets, blocks)[0] == [
        "missing" if at in NOISE else "good" for at in range(6)
    ]
    store.close()


def test_what_is_refused_is_so_too_where_a_call_failed_once(path):
    system = FaultySystem()
    store = opened(path, system)
    blocks, payloads = identities(CODED, KEY), contents()
    offsets = store.allocate(slot_bytes_of(CODED), 6)
    failures = iter([1])

    def fault(name, number):
        if name == "write" and next(failures, 0):
            raise OSError(errno.EIO, "as the test wants")

    system.fault = fault
    stored, refused = store.write(offsets, blocks, payloads)
    assert np.flatnonzero(stored).tolist() == [0, 2, 3]
    assert np.flatnonzero(refused).tolist() == [1, 4, 5]
    assert store.slots.bad_bytes == 0
    assert store.off["write"] == ""
    store.close()


def test_both_forms_come_back_to_the_bit_also_after_a_restart(path):
    store = opened(path)
    offsets, blocks = filled(store)
    verdicts, targets = read(store, offsets, blocks)
    assert verdicts == ["good"] * 6
    assert all(map(np.array_equal, targets, contents()))
    coded, plain = slot_bytes_of(CODED), slot_bytes_of(CODED, plain=True)
    assert store.slots.used_bytes == 3 * coded + 3 * plain
    store.close()
    store = opened(path)
    assert store.slots.used_bytes == 3 * coded + 3 * plain
    (found,) = store.recover()
    names = [found.identity(index) for index in range(6)]
    assert [name.plain for name in names] == [at in NOISE for at in range(6)]
    assert found.slot_sizes.tolist() == [name.slot_bytes for name in names]
    assert [name.checksum for name in names] == list(map(checksum_of, contents()))
    verdicts, targets = read(store, found.offsets, names)
    assert verdicts == ["good"] * 6
    assert all(map(np.array_equal, targets, contents()))
    for offset, name in zip(found.offsets, names, strict=True):
        store.release(name.slot_bytes, np.array([offset]))
    assert store.slots.used_bytes == 0
    store.check_invariants()
    store.close()


def test_a_reader_gets_the_form_that_it_expects_or_nothing(path):
    store = opened(path)
    offsets, blocks = filled(store)
    others = [replace(block, plain=not block.plain) for block in blocks]
    assert read(store, offsets[:4], others[:4])[0] == ["length"] * 4
    store.close()


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (4096, "payload"),  # a length of a plane
        (4096 + 100, "payload"),
        (4096 + 28671, "payload"),  # the last of the zeros that fill it up
        (136, "header"),
    ],
)
def test_damage_is_a_verdict(path, place, reason):
    store = opened(path)
    offsets, blocks = filled(store)
    flip(path, int(offsets[2]) + place)
    verdicts, targets = read(store, offsets, blocks)
    assert verdicts == ["good", "good", reason, "good", "good", "good"]
    assert (targets[3] == contents()[3]).all()
    store.close()


def test_what_codecs_cannot_read_is_a_verdict_also_under_a_good_header(path):
    """As when other bytes were written than the header promises."""
    store = opened(path)
    for namespace in (CODED, LOSSY):
        blocks = identities(namespace, KEY)[:1]
        offsets, written = write(store, blocks, [np.zeros(LAYOUT.block_bytes, np.uint8)])
        assert written.stored.all()
        segment = min(path.glob("*.kv"))
        with segment.open("r+b") as file:
            file.seek(int(offsets[0]) + 4096)
            file.write(b"\xff" * (blocks[0].slot_bytes - 4096))
        assert read(store, offsets, blocks)[0] == ["payload"]
    store.close()


@pytest.mark.parametrize("stored_bytes", [0, 28671, 32767, 12288, 1 << 40, -1])
def test_a_row_of_another_length_is_dropped(path, stored_bytes):
    store = opened(path)
    filled(store)
    store.close()
    with sqlite3.connect(path / "manifest.db") as connection:
        connection.execute(f"UPDATE blocks SET stored_bytes = {stored_bytes} WHERE position = 3")
    connection.close()
    store = opened(path)
    (found,) = store.recover()
    assert found.positions.tolist() == [0, 1, 2]
    assert store.slots.used_bytes == int(found.slot_sizes.sum())
    store.close()


def test_a_row_that_lies_about_the_form_never_gives_wrong_bytes(path):
    store = opened(path)
    filled(store)
    store.close()
    with sqlite3.connect(path / "manifest.db") as connection:
        connection.execute("UPDATE blocks SET stored_bytes = 28672 WHERE position = 1")
    connection.close()
    store = opened(path)
    offsets, blocks = everything(store)
    verdicts, targets = read(store, offsets, blocks)
    assert verdicts == ["good", "length", "good", "good", "good", "good"]
    assert not (targets[1] == contents()[1]).all()
    store.close()


def test_bytes_with_a_loss_are_never_offered_where_none_is_allowed(path):
    """Not even when the slot, key and lengths are the same."""
    store = opened(path)
    numbers = np.random.default_rng(0).normal(size=LAYOUT.block_bytes // 2)
    payload = numbers.astype(ml_dtypes.bfloat16).view(np.uint8)
    blocks = identities(LOSSY, KEY)[:1]
    offsets, written = write(store, blocks, [payload])
    assert written.stored.all()
    for other in (EXACT, CODED, replace(EXACT, codec="fp8")):
        for plain in (False, True):
            wanted = [replace(identities(other, KEY)[0], plain=plain)]
            assert read(store, offsets, wanted)[0] == ["namespace"]
            store.release(blocks[0].slot_bytes, offsets)
            offsets, _ = write(store, blocks, [payload])
    assert read(store, offsets, [replace(blocks[0], plain=True)])[0] == ["length"]
    store.close()
