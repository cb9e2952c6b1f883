"""The operations of each forward without a rule: a lower bound of the cost of an eager call."""

from __future__ import annotations

from benchmarks.functions import hand_written

relu = hand_written.relu.__wrapped__
swish = hand_written.swish.__wrapped__
straight_through = hand_written.straight_through.__wrapped__
linear = hand_written.linear.__wrapped__
