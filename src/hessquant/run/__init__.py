"""Carrying a run out: segment by segment, solving weights as their statistics come in, keeping what was solved."""
