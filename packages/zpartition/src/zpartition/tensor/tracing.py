"""What flows from which linear layer into which, seen while a small input runs through a model.

Every tensor that is computed carries the names of the linear layers that it was computed from, back to the nearest
ones: a linear layer starts anew.  Operations are seen where Python calls them (torch's function mode), so any model
that runs can be traced, on the meta device too; what cannot be seen (a custom autograd function) carries no names,
and layers behind it stay whole.  No graph is built and nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from zpartition.tensor.placing import kind_of
