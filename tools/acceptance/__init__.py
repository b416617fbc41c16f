"""Acceptance on one GPU: `python tools/gpu_acceptance.py`.

Problem.  The users of these packages have GPUs, and their tests run on machines without one.  The first person with a
GPU should need one command, and its result should be a page that everybody can read and no one can misread.

Design.  A table of pieces (table.py).  Each piece runs in a process of its own with a time limit of at most eight
minutes, so a crash or a hang is one failed piece with its output kept.  A state file holds the verdicts (runner.py);
a piece that has passed for the same sources, device and versions is not repeated, so a run may be cut anywhere.  A
piece collects checks, of bits and order, and figures (bench.py).  A verdict is passed, failed or not run, with the
reason (verdict.py); report.py writes Markdown and JSON into bench/results/gpu, and readme.py writes from these
reports what the READMEs say about GPUs.

The pieces themselves are tested on the simulated device of tools/simulated_cuda, `--device simulated`: there bits and
order are checked, under a schedule as late as the waits allow, and every figure is "not measured".  Planted faults (a
flipped bit, a removed wait; plants.py) must turn their piece red, there and on a GPU.

Order on a GPU.  A profiler's trace has launches, records and waits, but no addresses, so it cannot tell which of them
are needed.  trace.py records both from the host's side: each operation with its stream and the memory that it reads
and writes, each record and wait.  replay.py checks that record with vector clocks, for every schedule that a GPU
could choose.  torch.profiler adds the kernels' times, which say how much of the copies is hidden.

Rejected: pytest (a hang or a crash ends the session, figures have no place, and nothing resumes); one process for all
pieces (a sticky CUDA error fails all that follow); nsys (often not installed, and torch.profiler reads the same
counters through CUPTI).
"""
