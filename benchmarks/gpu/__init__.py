"""Measurements that want a GPU: the training loop, plans run rank after rank, an encoder beside a
backbone.

These programs need torch, numpy, pyarrow and msgspec, and nothing else: a machine with a GPU often
has no more.
"""
