"""Print the commands that measure what constructors save (the Overlord paper's appendix B).

    python benchmarks/constructors.py

The measurement compared loader workers that send to one constructor per data-parallel group with
loader workers that send to every client. The second mode, ``launch(constructors=False)``, is
removed from the package, so this commit cannot run the comparison. The commit below can.
``benchmarks/scale_sim.py`` models both modes at 1k to 4k GPUs (the paper's Figure 18).
"""

from __future__ import annotations

COMMIT = "ceed7048c0e1ad30e77445c6af46af7f42493fe6"  # the last one that has both modes
COMMANDS = f"""\
git worktree add ../overlord-constructors {COMMIT}
cd ../overlord-constructors
PYTHONPATH=src python benchmarks/constructors.py --rounds 5 --save
"""


def main() -> None:
    print("This commit has no mode without constructors. Reproduce the comparison with:\n")
    print(COMMANDS, end="")


if __name__ == "__main__":
    main()
