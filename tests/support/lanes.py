"""Which tests run without `--all`, and which with it."""

import itertools
from collections.abc import Iterator, Sequence

import pytest

Combination = tuple[tuple[str, int], ...]


def quick_lane(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """All but the slow tests, and of each sampled one the fewest cases, about, that show every value."""
    for item in items:
        if not item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            yield item
    for cases in _sampled(items):
        yield from _quick_cases(cases)


def all_lanes(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """All but some cases of sampled tests with more than two parameters: of those the quick lane's, and then the
    fewest, about, that show every pair of values."""
    for item in items:
        if not item.get_closest_marker("sampled"):
            yield item
    for cases in _sampled(items):
        quick = list(_quick_cases(cases))
        yield from quick
        yield from _showing(cases, 2, quick)


def _sampled(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """The cases of each sampled test."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return list(cases.values())


def _quick_cases(cases: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of the cases of one sampled test, those of the quick lane."""
    return _showing([item for item in cases if not item.get_closest_marker("slow")], 1, [])


def _showing(cases: list[pytest.Item], size: int, shown: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of the cases of one test, those that show all that so many of their values are together, beside some others."""
    combinations = {item: _combinations(item, size) for item in cases}
    missing = set[Combination]().union(*combinations.values())
    missing.difference_update(*(combinations[item] for item in shown))
    while missing:
        best = max(cases, key=lambda item: len(missing & combinations[item]))
        missing -= combinations[best]
        yield best


def _combinations(item: pytest.Item, size: int) -> set[Combination]:
    values = [(name, id(value)) for name, value in item.callspec.params.items()]  # type: ignore[attr-defined]
    return set(itertools.combinations(values, min(size, len(values))))
