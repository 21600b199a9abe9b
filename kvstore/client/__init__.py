"""Clients of a daemon: the same store as an embedded one, in another process.

``core`` has everything but input and output: addresses, deadlines, the breaker, requests and what
their answers mean. ``dial`` opens a connection. ``blocking`` and ``aio`` are the two faces.
"""
