"""Every private interface of torch that shardlib uses, by subject. No other package touches one.

Each file has a table of the private names that it uses: what needs them, on which versions of torch they were seen,
what is lost without them. A torch that lacks one is refused in these words when shardlib is imported; where that would
import torch's compiler, its pipelines or its samples of ops, at the first use. `shardlib/_supported.py` has the
versions that shardlib runs on.
"""

from __future__ import annotations

from shardlib.engine._torch.autograd import *
from shardlib.engine._torch.collectives import *
from shardlib.engine._torch.compile import *
from shardlib.engine._torch.dispatch import *
from shardlib.engine._torch.fake import *
from shardlib.engine._torch.foreign import *
from shardlib.engine._torch.groups import *
from shardlib.engine._torch.meshes import *
from shardlib.engine._torch.modules import *
from shardlib.engine._torch.ops import *
from shardlib.engine._torch.optim import *
from shardlib.engine._torch.patches import *
from shardlib.engine._torch.tensor import *
from shardlib.engine._torch.trees import *
