"""The benchmarks, beside their peers: `python -m tools.bench.NAME --help` tells about each."""
