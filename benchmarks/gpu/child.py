"""A measuring process: ``python -m benchmarks.gpu.child JOB``, started by ``processes.py``."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

from benchmarks.gpu.job import Job


def main() -> None:
    job = Job.from_json(sys.argv[1])
    try:
        import torch

        torch.set_num_threads(1)
        if job.device == "cuda":
            torch.cuda.set_device(0)
        job.keep(importlib.import_module(f"benchmarks.gpu.{job.module}").measure(job))
    except BaseException as error:
        traceback.print_exc()
        job.error_path.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        sys.stderr.flush()
        os._exit(1)  # another process may have stopped answering, and a broken device may hang at exit
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
