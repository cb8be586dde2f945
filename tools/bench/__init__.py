"""Benchmarks against peers: `python -m tools.bench.NAME --help` describes each."""
