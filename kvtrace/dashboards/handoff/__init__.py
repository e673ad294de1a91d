"""The board Hand-off, row by row."""
