"""Kernel tables, paired timings, peers. Figures come from device events of one interleaved run, never from two."""
