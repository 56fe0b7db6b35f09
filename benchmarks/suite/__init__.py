"""Benchmarks of recur alone, in the layout of airspeed velocity (asv); `run.py` needs no asv."""
