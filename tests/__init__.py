"""Tests, and the doubles, goldens and benches beside them."""
