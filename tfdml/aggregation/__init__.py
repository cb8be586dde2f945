"""Robust sums of gradients, for strategies' `gradient_aggregation`: a few wrong ones do little.

```python
strategy = tfdml.HorovodStrategy(
    gradient_aggregation=tfdml.aggregation.TrimmedMean(num_byzantine=1)
)
```
"""

from tfdml.aggregation.centered_clipping import CenteredClipping
from tfdml.aggregation.robust_rule import CoordinateRule, RobustRule, VectorRule
from tfdml.aggregation.trimmed_mean import TrimmedMean

__all__ = ["CenteredClipping", "CoordinateRule", "RobustRule", "TrimmedMean", "VectorRule"]
