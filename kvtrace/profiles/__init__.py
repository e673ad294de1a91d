"""Profiles beside a run: a folder that keeps them without a server, merging them, and where to look at them.

Engine processes send profiles themselves (`kvtrace.profiler`); nothing here runs in them.
"""
