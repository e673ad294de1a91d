"""The lab: real vLLM engines, a router and load on this machine, for demonstrations, tests and benchmarks."""
