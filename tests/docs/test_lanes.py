"""What runs without `--all` is enough of everything."""

import itertools
from types import SimpleNamespace

from tests.support.lanes import all_lanes, quick_lane


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


def cases(**values):
    combinations = itertools.product(*values.values())
    return [
        Item(
            nodeid=f"test.py::test[{i}]",
            marks={"sampled"},
            callspec=SimpleNamespace(params=dict(zip(values, combination, strict=True))),
        )
        for i, combination in enumerate(combinations)
    ]


def pairs_of(items):
    return {pair for item in items for pair in itertools.combinations(item.callspec.params.items(), 2)}


def test_with_all_a_sampled_test_shows_each_pair_of_values():
    given = cases(x=range(5), y=["a", "b", "c"], z=["left", "right"], u=[None, 1.5, ()])
    shown = list(all_lanes(given))
    assert pairs_of(shown) == pairs_of(given)
    assert len(shown) == len({id(item) for item in shown}) <= 20 < len(given) == 90
    assert {*map(id, quick_lane(given))} <= {*map(id, shown)}
    # Cases that are not there are not asked for.
    some = [item for item in given if item.callspec.params["x"] != 3 or item.callspec.params["z"] == "left"]
    assert pairs_of(all_lanes(some)) == pairs_of(some)


def test_with_all_every_case_runs_where_there_are_two_parameters():
    given = [*cases(x=range(4), y="abc"), Item(nodeid="test.py::other", marks={"slow"})]
    assert {*map(id, all_lanes(given))} == {*map(id, given)}


def test_a_thorough_test_is_left_out():
    items = [Item(nodeid=f"test.py::test_{i}", marks=marks) for i, marks in enumerate([{"row"}, {"row", "slow"}])]
    assert list(quick_lane(items)) == items[:1]


def test_a_thorough_value_of_a_sampled_test_is_left_out():
    given = cases(x=range(3), y="ab")
    for item in given:
        item.marks |= {"slow"} if item.callspec.params["x"] == 1 else set()
    assert {item.callspec.params["x"] for item in quick_lane(given)} == {0, 2}
    assert {*map(id, all_lanes(given))} == {*map(id, given)}
