"""The daemon: one pool, shared by the engine processes of a host. ``kvstore serve`` is its command."""
