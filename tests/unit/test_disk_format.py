"""Headers of blocks on disk: golden bytes, and every difference is found and named."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from kvstore.blocks import FIRST_CHECKSUM
from kvstore.namespace import KVLayout, Namespace
from kvstore.testing.disk import identities
from kvstore.tiers.disk.format import (
    block_digest,
    check,
    checksum_of,
    encode_header,
    header_bytes,
    root_digest,
    slot_bytes_of,
)

NAMESPACE = Namespace(b"model", KVLayout(2, 1, 8, "float16", block_tokens=4), tenant="a")
KEYS = np.arange(12, dtype="<i4").tobytes()
PAYLOAD = (np.arange(NAMESPACE.layout.block_bytes) % 251).astype(np.uint8)
GENERATION = (3 << 32) + 7


def block(index=1, **changes):
    made = replace(identities(NAMESPACE, KEYS)[index], checksum=checksum_of(PAYLOAD))
    return replace(made, **changes)


def stored(index=1):
    return bytearray(encode_header(block(index), checksum_of(PAYLOAD), GENERATION))


def verdict(header, wanted=None, payload=PAYLOAD, generation=GENERATION):
    return check(np.frombuffer(bytes(header), np.uint8), payload, wanted or block(), generation)


def test_header_is_what_the_format_says():
    header = stored()
    assert len(header) == 4096
    assert header[:16] == b"kvblock\0" + (1).to_bytes(4, "little") + (4096).to_bytes(4, "little")
    assert header[16:48] == NAMESPACE.digest
    assert header[48:80] == NAMESPACE.layout.fingerprint
    assert header[80:96] == block(0).digest
    assert header[96:112] == block(1).digest
    numbers = np.frombuffer(bytes(header[112:136]), "<u8").tolist()
    assert numbers == [1, NAMESPACE.layout.block_bytes, NAMESPACE.layout.block_bytes]
    assert np.frombuffer(bytes(header[136:144]), "<u4").tolist() == [0, 16]
    assert np.frombuffer(bytes(header[144:160]), "<u8").tolist() == [
        GENERATION,
        checksum_of(PAYLOAD),
    ]
    assert header[168:184] == KEYS[16:32]
    assert not any(header[184:])
    golden = "e46a550c44134eb21a1292a6329b864c"
    assert hashlib.blake2b(header, digest_size=16).hexdigest() == golden, "the format has changed"


def test_a_block_is_good_for_itself_alone():
    assert verdict(stored()) == "good"
    assert verdict(stored(), block(checksum=0)) == "good"
    other_tenant = replace(NAMESPACE, tenant="b")
    other_layout = replace(NAMESPACE, layout=replace(NAMESPACE.layout, dtype="bfloat16"))
    theirs = identities(other_tenant, KEYS)[1]
    assert verdict(stored(), theirs) == "namespace"
    assert verdict(stored(), identities(other_layout, KEYS)[1]) == "namespace"
    assert verdict(stored(), block(0)) == "identity"
    assert verdict(stored(), block(position=2)) == "identity"
    assert verdict(stored(), block(key=KEYS[:16])) == "key"
    assert verdict(stored(), generation=GENERATION + 1) == "generation"
    assert verdict(stored(), block(checksum=FIRST_CHECKSUM)) == "checksum"


@pytest.mark.parametrize(
    ("start", "reason"),
    [(0, "magic"), (8, "version"), (16, "header"), (160, "header"), (4000, "header")],
)
def test_changed_bytes_are_named(start, reason):
    header = stored()
    header[start] ^= 1
    assert verdict(header) == reason


def test_every_flipped_bit_is_found():
    header = stored()
    rng = np.random.default_rng(1)
    for place in [*range(200), *rng.integers(200, len(header), 100).tolist()]:
        header[place] ^= 1 << int(rng.integers(8))
        assert verdict(header) != "good", place
        assert verdict(header, block(checksum=0)) != "good", place
        header = stored()
    for place in range(len(PAYLOAD)):
        payload = PAYLOAD.copy()
        payload[place] ^= 1 << int(rng.integers(8))
        assert verdict(header, payload=payload) == "payload"
        assert verdict(header, block(checksum=0), payload) == "payload"


def test_a_digest_binds_all_blocks_before_it():
    digests = {name.digest for name in identities(NAMESPACE, KEYS)}
    digests |= {name.digest for name in identities(NAMESPACE, KEYS[16:])}
    digests |= {name.digest for name in identities(replace(NAMESPACE, salt="s"), KEYS)}
    assert len(digests) == 8
    assert identities(NAMESPACE, KEYS, 2) == identities(NAMESPACE, KEYS)[2:]
    assert block_digest(root_digest(NAMESPACE), 0, KEYS[:16]) == block(0).digest


def test_long_keys_take_more_pages():
    assert header_bytes(4096 - 168) == 4096
    assert header_bytes(4096 - 167) == 8192
    small, large = KVLayout(1, 1, 1, "uint8"), KVLayout(1, 1, 2, "uint8", 4096)
    assert slot_bytes_of(Namespace(b"w", small)) == 8192
    assert slot_bytes_of(Namespace(b"w", large)) == 20480 + 16384


def test_a_lossy_codec_makes_slots_smaller_and_stands_in_the_header():
    layout = KVLayout(2, 2, 64, "float32", 16)
    plain, lossy = Namespace(b"w", layout), Namespace(b"w", layout, codec="int8")
    assert slot_bytes_of(plain) == 4096 + 32768
    assert slot_bytes_of(lossy) == 4096 + 12288
    (name,) = identities(lossy, bytes(64))
    header = np.frombuffer(encode_header(name, 1 << 40, 7), np.uint8)
    (other,) = identities(replace(lossy, codec="fp8"), bytes(64))
    assert check(header, np.zeros(layout.block_bytes, np.uint8), other, 7) == "namespace"
