"""Clients of a daemon: the same store as an embedded one, in another process.

``core`` has everything but input and output: requests and what their answers mean; ``rules`` has
addresses, deadlines and the breaker. ``dial`` opens a connection. ``blocking``, with ``line``, and
``aio`` are the two faces.
"""
