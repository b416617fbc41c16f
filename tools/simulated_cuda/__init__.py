"""A CUDA device that is simulated in host memory, for tests: `tools/dev.py test --device simulated`.

Problem.  The users of these packages have GPUs, and most people who change them do not.  What a GPU adds to a CPU is
the order of work: kernels and copies run later than the host believes, on streams that nothing orders unless somebody
waits.  A missing wait shows no error, only a wrong bit once a week.

Design.  The C++ library (csrc/) gives torch's CPU wheel a device `cuda:0`.  Its tensors are ordinary tensors with
storages in host memory; its operators run the CPU kernels on that memory (csrc/operators.cpp).  Every operator, copy,
allocation and event passes through one machine (csrc/machine.h), which checks with vector clocks that each access is
ordered after those that it conflicts with.  So one run proves the order for all schedules.  As evidence of another
kind, the machine also runs schedules: work as early, or as late as the waits allow, or at random times.  Freed memory
is poisoned and handed out again.

    csrc/machine.*        streams, events, memory, clocks, graphs
    csrc/device.*         guard, hooks, allocators, generators
    csrc/operators.cpp    one boxed fallback for all operators; copies; what the host does to pinned memory
    csrc/collectives.cpp  NCCL's place: Gloo over host memory, on a stream of its own
    build.py              compiles them once for each torch and source
    site/sitecustomize.py loads the library before torch, in every process
    library.py            the library as Python sees it
    torch_cuda.py         torch.cuda on top of it
    fake_cupy.py          CuPy over the CPU shim of the kernels' tests
    plugin.py             pytest: the schedule, and a violation fails its test

What it does not show: speed, NCCL, cuDNN's and cuBLAS's bits, the driver's errors.

Rejected: PrivateUse1 (may not be called "cuda", so no branch on the device's type is reached); tensor subclasses (no
storage); running the streams on threads (a race shows once in a thousand runs).
"""
