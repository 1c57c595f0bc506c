"""Carrying a run out: solving weights as their statistics come in, and keeping what was solved."""
