"""Training with fewer synchronizations: local SGD and DiLoCo, for strategies' `local_updates`.

```python
strategy = tfdml.HorovodStrategy(local_updates=tfdml.local_updates.LocalSGD(sync_every=16))
```
"""

from tfdml.local_updates.methods import DiLoCo, LocalSGD, LocalUpdates
from tfdml.local_updates.sync_rules import LinkSyncRule, QuadraticSyncRule, SyncRule

__all__ = [
    "DiLoCo",
    "LinkSyncRule",
    "LocalSGD",
    "LocalUpdates",
    "QuadraticSyncRule",
    "SyncRule",
]
