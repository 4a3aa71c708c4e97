"""Logits -> token ids. Pure functions of a row, so that neighbours never matter."""
