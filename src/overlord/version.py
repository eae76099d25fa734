"""The version of the distribution, also written into journals."""

__version__ = "0.1.0"
