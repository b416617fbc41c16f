"""Build the simulated device: `python -m simulated_cuda`."""

from __future__ import annotations

import sys

from simulated_cuda.build import BuildError, build

if __name__ == "__main__":
    try:
        print("\n".join(map(str, build().values())))
    except BuildError as error:
        sys.exit(str(error))
