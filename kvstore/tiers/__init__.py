"""Tiers: where the bytes are. Arenas hand out slots, stores move bytes, the mover runs the moves."""
