"""Which host has a stand-by of which loader. Pure.

A *shadow* is a second loader of the same number on another host: it hears the same plans, holds the
same samples and sends nothing. When the host of the loader is lost, the shadow's host becomes the
loader's, and a new shadow is built where there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence


class StandbyPlan:
    """``size``: bytes of every loader that is to have a shadow; ``source_of``: of every loader."""

    def __init__(self, size: Mapping[int, float], source_of: Callable[[int], int]):
        self._size, self._source_of = dict(size), source_of
        self.where: dict[int, int] = {}  # loader -> host of its shadow

    def covers(self, loaders: Collection[int], living: Collection[int]) -> bool:
        """Whether all these loaders have a shadow that lives."""
        return all(self.where.get(loader) in living for loader in loaders)

    def promote(self, loaders: Collection[int], living: Collection[int]) -> dict[int, int]:
        """The hosts that take over these loaders, whose own is gone."""
        moved = {
            loader: self.where[loader] for loader in loaders if self.where.get(loader) in living
        }
        for loader in moved:
            del self.where[loader]
        return moved

    def forget(self, living: Collection[int]) -> None:
        """Shadows on hosts that are gone are gone."""
        self.where = {loader: h for loader, h in self.where.items() if h in living}

    def drop(self, loader: int) -> None:
        self.where.pop(loader, None)

    def fill(
        self,
        host_of: Callable[[int], int],
        held: Mapping[int, float],
        can_open: Callable[[int, int], bool],
        nodes: Mapping[int, str],
    ) -> list[int]:
        """Give a shadow to those that want one: on another host that ``can_open`` the source, the
        one that holds least, and on another of the ``nodes`` where there is one: what is on a node
        is lost with it. Loaders of a source on one host stay together, since hooks are shown them
        together. ``held``: bytes of living hosts. Returns the new ones.
        """
        load, made = dict(held), list[int]()
        for loader, h in self.where.items():
            load[h] = load.get(h, 0.0) + self._size[loader]
        for group in self._groups(host_of):
            source, home = self._source_of(group[0]), host_of(group[0])
            rooms = [h for h in held if h != home and can_open(h, source)]
            if not rooms:
                continue
            placed = {self.where[loader] for loader in group if loader in self.where}
            best = (
                min(placed)
                if placed
                else min(rooms, key=lambda h: (nodes.get(h) == nodes.get(home), load[h], h))
            )
            for loader in group:
                if loader not in self.where:
                    self.where[loader] = best
                    load[best] += self._size[loader]
                    made.append(loader)
        return made

    def _groups(self, host_of: Callable[[int], int]) -> Sequence[Sequence[int]]:
        groups: dict[tuple[int, int], list[int]] = {}
        for loader in sorted(self._size):
            groups.setdefault((self._source_of(loader), host_of(loader)), []).append(loader)
        return sorted(
            groups.values(), key=lambda g: (-sum(self._size[loader] for loader in g), g)
        )  # the largest while there is room
