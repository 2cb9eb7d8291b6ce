"""Benchmarks on real services, each a ratio of two things measured in turn in one run; one module a benchmark."""
