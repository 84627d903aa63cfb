"""How unevenly a router's choices load the ranks that share a layer's experts.

Nobody knows a router's choices before it has seen the jobs' tokens, so they are assumed: the shares
of a layer's experts in its rows are taken for those of independent exponential variables, in which
every division of the rows among the experts is equally likely. The most loaded of 128 experts then
has 5.4 times the mean, as real routers are said to have (4 to 8), and the most loaded of 8 has 2.7
times. A rank with several experts has their sum, and the more there are, the nearer it is to the
mean. No jobs' routing was recorded for this.
"""

from __future__ import annotations

import functools
import math

_STEPS = 1024


@functools.lru_cache(maxsize=4096)
def fullest_share(ranks: int, experts: int) -> float:
    """Returns the expected rows of the fullest of some ranks over those of the mean one.

    Sums of `experts` exponential variables are gamma variables, whose distribution is taken by
    Wilson and Hilferty's approximation (PNAS 17, 1931).

    Args:
        ranks: that share the rows.
        experts: of each rank; those of several layers where the sum over layers counts.
    """
    if ranks == 1:
        return 1.0
    most = 1 + (4 + math.sqrt(2 * math.log(ranks))) * max(1 / math.sqrt(experts), 2 / experts)
    step = most / _STEPS
    shares = ((n + 0.5) * step for n in range(_STEPS))
    return step * math.fsum(1 - math.pow(_below(share, experts), ranks) for share in shares)


def _below(share: float, experts: int) -> float:
    """Probability that a rank has less than a share of the mean rank's rows."""
    deviation = 3 * math.sqrt(experts) * (math.cbrt(share) - 1 + 1 / (9 * experts))
    return (1 + math.erf(deviation / math.sqrt(2))) / 2
