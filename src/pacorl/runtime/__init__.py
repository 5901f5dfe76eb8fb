"""Processes and devices of a run: ranks, stop signals, worker threads, logs."""
