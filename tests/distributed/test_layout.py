"""Groups as deployments have them: who runs in lock step, by hand for one layout, by its properties for others."""

from __future__ import annotations

import itertools

import pytest

from moe_dist.distributed.layout import Layout, Place
from moe_dist.errors import ConfigError


def test_two_replicas_of_two_stages_of_two_by_two() -> None:
    layout = Layout(tp=2, ep=2, pp=2, dp=2)
    assert layout.place(0) == Place(0, 0, 0, 0, (0, 1, 2, 3))
    assert layout.place(3) == Place(0, 0, 1, 1, (0, 1, 2, 3))
    assert layout.place(6) == Place(0, 1, 1, 0, (4, 5, 6, 7))
    assert layout.place(9) == Place(1, 0, 0, 1, (8, 9, 10, 11))
    assert layout.place(15) == Place(1, 1, 1, 1, (12, 13, 14, 15))


# One of each kind alone, all together, and sizes that are no powers of two.
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 3, 1, 1), (1, 1, 3, 1), (1, 1, 1, 2), (2, 4, 1, 2), (2, 3, 2, 2)])
def test_groups_cover_all_ranks_once_and_hold_every_share_once(sizes: tuple[int, int, int, int]) -> None:
    layout = Layout(tp=sizes[0], ep=sizes[1], pp=sizes[2], dp=sizes[3])
    places = [layout.place(rank) for rank in range(layout.world_size)]
    groups = {place.group for place in places}
    assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
    for group in groups:
        members = [places[rank] for rank in group]
        assert {(place.replica, place.stage) for place in members} == {(members[0].replica, members[0].stage)}
        shares = sorted((place.ep_rank, place.tp_rank) for place in members)
        assert shares == list(itertools.product(range(layout.ep), range(layout.tp)))


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="pp is 0; it must be at least 1"):
        Layout(pp=0)
    with pytest.raises(ConfigError, match="rank 8 is outside --tp 2 x --ep 2 x --dp 2, which has 8 ranks"):
        Layout(tp=2, ep=2, dp=2).place(8)
