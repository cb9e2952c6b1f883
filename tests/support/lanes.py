"""Which tests run without `--all`."""

from collections.abc import Iterator

import pytest


def quick_lane(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """All but the thorough tests, and of each sampled one the fewest cases, about, that show every value."""
    cases: dict[str, dict[pytest.Item, set[tuple[str, int]]]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            values = {(name, id(value)) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]
            cases.setdefault(item.nodeid.partition("[")[0], {})[item] = values
        elif not item.get_closest_marker("thorough"):
            yield item
    for values_of in cases.values():
        missing = set().union(*values_of.values())
        while missing:
            best = max(values_of, key=lambda item: len(missing & values_of[item]))
            missing -= values_of[best]
            yield best
