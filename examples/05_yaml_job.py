"""A job as one YAML file: write it, read it back, run it; one error lists all mistakes of a file.

Run it: python examples/05_yaml_job.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import overlord as ov

JOB = """\
name: from-a-file
sources:
  web:  {uri: web.jsonl, weight: 0.7, transforms: [tokens]}
  code: {uri: code.jsonl, weight: 0.3, transforms: [{filter: {fn: not_tiny, rows: true}}, tokens]}
place: {dp: 2}
batch: {samples: 16, microbatches: 2, context: 128}
until: 3
seed: 11
"""
WRONG = (
    JOB.replace("weight: 0.7", "wieght: 0.7")
    .replace("context: 128", "context: zero")
    .replace("until: 3", "until: soon")
)


def not_tiny(row: dict[str, list[int]]) -> bool:
    return len(row["tokens"]) > 2


def main() -> None:
    ov.register_function("not_tiny", not_tiny)  # a file names functions, it cannot contain code
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        for name in ("web", "code"):
            rows = [{"tokens": list(range(1 + k % 40))} for k in range(200)]
            (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "job.yaml").write_text(JOB)  # paths in it are relative to the file

        job = ov.Job.from_yaml(folder / "job.yaml")
        (folder / "again.yaml").write_text(job.to_yaml())
        print(job, "- read back equal:", ov.Job.from_yaml(folder / "again.yaml") == job)
        with ov.launch(job, cache_dir=f"{tmp}/cache") as session:
            for steps in zip(session.client(0), session.client(1), strict=True):
                print(steps[0])

        (folder / "wrong.yaml").write_text(WRONG)
        try:
            ov.Job.from_yaml(folder / "wrong.yaml")
        except ov.JobError as error:
            print("\n" + str(error).replace(tmp + "/", ""))


if __name__ == "__main__":
    main()
