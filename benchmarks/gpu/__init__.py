"""Measurements that need a GPU: a training loop, plans executed rank after rank, an encoder.

The programs need only torch, numpy, pyarrow and msgspec, since a GPU machine often has no more.
"""
