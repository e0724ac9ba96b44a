from llmservice_server.engine.swap_space import PreemptionCost, SwapSpace

COST = PreemptionCost(copy_block_s=1.0, compute_token_s=0.25)


def test_swapping_pays_where_both_copies_cost_less_than_computing_again() -> None:
    space = SwapSpace(10, COST)
    assert not space.pays(num_blocks=2, num_tokens=16)  # 4 s against 4 s
    assert space.pays(num_blocks=2, num_tokens=17)


def test_swapping_does_not_pay_where_there_is_no_room() -> None:
    space = SwapSpace(3, COST)
    assert space.pays(3, 1000)
    space.allocate(1)
    assert not space.pays(3, 1000)


def test_the_lowest_blocks_are_given_out_first_so_that_copies_lie_together() -> None:
    space = SwapSpace(6, COST)
    assert space.allocate(4) == [0, 1, 2, 3]
    space.free([2, 0])
    assert space.allocate(3) == [0, 2, 4]
    assert space.num_free == 1
