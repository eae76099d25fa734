"""When a step's payload has come to everyone: every node sends one message after another, and
receives one after another. Pure.
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
    """``nbytes[h, r]`` go from sender h, which begins at ``start[h]``, to receiver r on node
    ``node_of[r]``, which receives nothing else from ``free[node]`` on.

    Returns when the last of it has come to each receiver (-inf: nothing goes there), when each
    sender is done, and when each node is free again. Senders begin with different receivers, or all
    would wait for the same one. What waits at a node is taken as it came.
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
    got, busy = _taken(at, cost, node, free)
    last = np.full(receivers, -np.inf)
    np.maximum.at(last, to, got)
    return last, done, busy


def _taken(
    at: np.ndarray, cost: np.ndarray, node: np.ndarray, free: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """When each message has been taken: a node takes them in order, while others are on their way
    to it.

    The first byte is there before the last: a message that finds its node idle is taken when it has
    come. So message k of a node is taken at the latest of (come_j + cost of those behind it up to
    k) over all j up to k: a running maximum, over all nodes at once.
    """
    busy = free.copy()
    if not len(at):
        return at, busy
    first = np.concatenate([[True], node[1:] != node[:-1]])
    starts = np.flatnonzero(first)
    sums = np.cumsum(cost)
    behind = sums - np.repeat(
        sums[starts] - cost[starts], np.diff(np.append(starts, len(at)))
    )  # cost up to and with each, in its node
    # taken_k = max_j<=k (at_j - cost_j + cost of j..k) = behind_k + max_j (at_j - behind_j); the
    # first waits for the node too.
    lead = at - behind
    lead[starts] = np.maximum(lead[starts], free[node[starts]])
    span = float(lead.max() - lead.min()) + 1.0
    raised = lead + span * np.cumsum(
        first
    )  # nodes one above the other, so that one maximum runs over all
    got = behind + np.maximum.accumulate(raised) - span * np.cumsum(first)
    last = np.append(starts[1:], len(at)) - 1
    busy[node[last]] = got[last]
    return got, busy
