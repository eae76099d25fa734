"""The parts of benchmarks/delivery.py."""
