"""The times at which the payload of a step arrives at its receivers.

The functions are pure. Every sender sends one message after another, and every node receives one
after another.
"""

from __future__ import annotations

import numpy as np


def arrivals(
    start: np.ndarray,
    nbytes: np.ndarray,
    node_of: np.ndarray,
    *,
    free: np.ndarray,
    link_s: float,
    bandwidth: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arrival times of a step's payload, in seconds.

    Sender h sends ``nbytes[h, r]`` to receiver r on node ``node_of[r]``. Sender h starts at
    ``start[h]``; a node has received all earlier messages at ``free[node]``. A message takes
    ``link_s`` plus its bytes over ``bandwidth``.

    The result has three arrays: when each receiver has its payload, when each sender is done, and
    when each node is free again. A receiver to which nothing is sent has -inf. Senders start with
    different receivers, because otherwise all would wait for the same one. A node receives messages
    in the order of arrival.
    """
    senders, receivers = nbytes.shape
    turn = (
        np.arange(receivers)[None, :] + (np.arange(senders)[:, None] * receivers) // max(1, senders)
    ) % max(1, receivers)
    sizes = np.take_along_axis(nbytes, turn, axis=1)
    takes = np.where(sizes > 0, link_s + sizes / bandwidth, 0.0)
    sent = start[:, None] + np.cumsum(takes, axis=1)
    done = sent[:, -1] if receivers else start.copy()
    some = sizes > 0
    to, at, cost = turn[some], sent[some], takes[some]
    node = node_of[to]
    order = np.lexsort((at, node))
    to, at, cost, node = to[order], at[order], cost[order], node[order]
    received, busy = _received(at, cost, node, free)
    last = np.full(receivers, -np.inf)
    np.maximum.at(last, to, received)
    return last, done, busy


def _received(
    at: np.ndarray, cost: np.ndarray, node: np.ndarray, free: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return when each message has been received, and when each node is free again.

    Messages are sorted by node, then by arrival ``at``; a node receives one after another. The
    first byte arrives before the last, so an idle node has received a message as soon as it has
    arrived. Let t(j, k) be the arrival of message j plus the cost of the messages after j up to k.
    Message k of a node is received at the maximum of t(j, k) over all j up to k. One running
    maximum computes it for all nodes at once.
    """
    busy = free.copy()
    if not len(at):
        return at, busy
    first = np.concatenate([[True], node[1:] != node[:-1]])
    starts = np.flatnonzero(first)
    sums = np.cumsum(cost)
    # Cost of the messages of the same node up to and including each message.
    total = sums - np.repeat(sums[starts] - cost[starts], np.diff(np.append(starts, len(at))))
    # received_k = max_j<=k (at_j - cost_j + cost of j..k) = total_k + max_j (at_j - total_j); the
    # first also waits for the node.
    lead = at - total
    lead[starts] = np.maximum(lead[starts], free[node[starts]])
    span = float(lead.max() - lead.min()) + 1.0
    # Each node is shifted above the one before, so that one running maximum serves all nodes.
    raised = lead + span * np.cumsum(first)
    received = total + np.maximum.accumulate(raised) - span * np.cumsum(first)
    last = np.append(starts[1:], len(at)) - 1
    busy[node[last]] = received[last]
    return received, busy
