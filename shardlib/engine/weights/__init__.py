"""Weights on the move between plans, in memory."""
