"""Benchmarks: each prints a table, or with ``--output json`` one JSON object."""
