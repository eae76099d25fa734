"""The parts of benchmarks/balance.py."""
