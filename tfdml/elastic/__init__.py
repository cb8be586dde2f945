"""Elastic training that continues while processes join and leave, on Horovod Elastic.

```python
strategy = tfdml.HorovodStrategy()
with strategy.scope():
    model = build()
    model.compile(...)

@tfdml.elastic.run
def train(state):
    model.fit(x, y, batch_size=256, epochs=10, callbacks=[state.committer(steps=20)])

train(tfdml.elastic.KerasState(model))
```

Started by `horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script hosts.sh python
train.py`.
"""

from tfdml.elastic.run import run
from tfdml.elastic.state import KerasState

__all__ = ["KerasState", "run"]
