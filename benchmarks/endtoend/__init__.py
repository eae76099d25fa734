"""The parts of benchmarks/endtoend_model.py."""
