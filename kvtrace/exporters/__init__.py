"""A store, or a part of it, in the formats of other tools: Perfetto, OpenTelemetry, Parquet.

Nothing is worked out anew: every number is the one that stands in the store's tables. What is exported is read in
batches by time, so that no store has to fit into memory.
"""
