"""What runs without `--all` is enough of everything."""

import itertools
from types import SimpleNamespace

from tests.support.lanes import quick_lane


class Item(SimpleNamespace):
    def __hash__(self):
        return id(self)

    def get_closest_marker(self, name):
        return name in self.marks


def test_a_sampled_test_shows_each_value_and_not_each_pair():
    sizes, names = range(3), ["a", "b", "c", "d"]
    cases = [
        Item(nodeid=f"test.py::test[{x}-{y}]", marks={"sampled"}, callspec=SimpleNamespace(params={"x": x, "y": y}))
        for x, y in itertools.product(sizes, names)
    ]
    shown = [item.callspec.params for item in quick_lane(cases)]
    assert {params["x"] for params in shown} == set(sizes) and {params["y"] for params in shown} == set(names)
    assert len(shown) == 4


def test_a_thorough_test_is_left_out():
    items = [Item(nodeid=f"test.py::test_{i}", marks=marks) for i, marks in enumerate([{"row"}, {"row", "thorough"}])]
    assert list(quick_lane(items)) == items[:1]
