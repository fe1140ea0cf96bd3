"""Makes one call of ``SlurmClient`` on a node of the mini cluster, for a test: see slurm_places."""

from __future__ import annotations

import base64
import pickle
import sys

from deadpool_slurm import access
from deadpool_slurm.client import SlurmError

#: How soon Slurm answers is not what the contract is about.
PATIENCE_S = 120.0

method, arguments, options = pickle.loads(base64.b64decode(sys.argv[1]))
try:
    told = ("value", getattr(access.client(timeout_s=PATIENCE_S), method)(*arguments, **options))
except SlurmError as error:
    told = ("error", str(error))
print(base64.b64encode(pickle.dumps(told)).decode())
