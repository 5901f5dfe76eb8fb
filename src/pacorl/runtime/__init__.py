"""Processes and devices of a run: ranks, heartbeats, worker threads, logs."""
