"""Every exception of the product.

    KVStoreError
    ├── ConfigError             a setting is wrong: names the key, the value and what to do
    ├── UsageError              the caller broke a contract (also a ValueError)
    ├── CodecError              a block cannot be encoded, or stored bytes are not what it has encoded
    ├── TooLargeError           the request can never fit: refused at once, with both sizes
    ├── UnavailableError        the daemon cannot be reached, or does not answer in time
    └── LeaseError
        ├── LeaseExpiredError   the deadline passed while the holder was reading: throw the bytes away
        └── LeaseNotHeldError   released before, or never granted by this store

A miss is never an exception: lookups return fewer blocks. Clients of a daemon turn
:class:`UnavailableError` into a counted miss unless they were told to raise it.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of everything that kvstore raises on purpose."""


class ConfigError(KVStoreError):
    """A setting cannot be used; the message names it, its value and the remedy."""


class UsageError(KVStoreError, ValueError):
    """The caller broke the contract of a public function."""


class CodecError(KVStoreError):
    """A block cannot be encoded within the codec's bound, or stored bytes are not what it has encoded."""


class TooLargeError(KVStoreError):
    """The request is larger than the whole pool, so waiting would never help."""


class UnavailableError(KVStoreError):
    """The daemon gave no answer; ``reason`` is the word under which clients count it.

    ``unreachable``: nobody listens. ``timeout``: no answer within the deadline. ``lost``: the
    connection ended. ``breaker``: it failed a moment ago, and was not asked again yet. ``refused``:
    the daemon does not want to talk to this client. ``protocol``: what it said makes no sense.
    ``closed``, ``interrupted``: the caller ended it.
    """

    def __init__(self, reason: str, message: str) -> None:
        """Keep ``reason``; say ``message``."""
        super().__init__(message)
        self.reason = reason


class LeaseError(KVStoreError):
    """A lease or reservation cannot be used."""


class LeaseExpiredError(LeaseError):
    """The lease ran out before it was released: what was read under it is not trustworthy."""


class LeaseNotHeldError(LeaseError):
    """The lease or reservation was ended before, or belongs to another store."""
