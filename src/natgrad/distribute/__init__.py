"""Factors averaged over ranks. What communicates does no mathematics."""
