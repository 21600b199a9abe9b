"""The disk tier's bytes: see :mod:`kvstore.tiers.disk.store`."""

from kvstore.tiers.disk.directory import DiskOptions
from kvstore.tiers.disk.format import BlockIdentity, slot_bytes_of
from kvstore.tiers.disk.recovery import RecoveredNamespace
from kvstore.tiers.disk.store import DiskStore

__all__ = [
    "BlockIdentity",
    "DiskOptions",
    "DiskStore",
    "RecoveredNamespace",
    "slot_bytes_of",
]
