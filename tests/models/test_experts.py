from hessquant.models.experts import in_order, pattern, unreached


def experts(*numbers, block=0):
    return [f"blocks.{block}.mlp.expert_{number}.{part}" for number in numbers for part in ("up", "down")]


SHAPES = {
    name: (64, 64) for name in [*experts(0, 1, 2, 10), *experts(0, 1, block=1), "blocks.0.attn.o", "blocks.1.attn.o"]
}


def test_names_of_one_kind_differ_in_numbers_beyond_the_blocks():
    assert pattern("blocks.3.mlp.expert_12.up") == "blocks.3.mlp.expert_#.up"
    assert pattern("head.weight") == "head.weight"


def test_what_is_not_reached_is_known_by_what_is_like_it_in_its_block():
    found = unreached(experts(1), SHAPES)
    assert set(found) == {*experts(0, 2, 10)}
    assert found["blocks.0.mlp.expert_10.up"] == "blocks.0.mlp.expert_1.up"


def test_another_shape_is_not_alike():
    assert not unreached(experts(1), SHAPES | dict.fromkeys(experts(0, 2, 10), (32, 64)))


def test_they_come_in_the_order_of_their_numbers_where_the_first_was_reached():
    reached = ["blocks.0.attn.o", *experts(2), "blocks.1.attn.o"]
    assert in_order(reached, experts(0, 1, 10)) == ["blocks.0.attn.o", *experts(0, 1, 2, 10), "blocks.1.attn.o"]
