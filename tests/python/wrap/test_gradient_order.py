"""Tests of the order in which units are taken when gradients arrive, and of the counts of missed steps in a run's commits."""

import torch
from ballast.torch.parameters.units import UnitParameter
from ballast.torch.training.partition import GradientOrder
from ballast.torch.updates.commit_metadata import decode_missed_steps, encode_missed_steps, join_missed_steps


def order_of_three_passes():
    """Return the order of two units after three passes, of which the last one has one gradient."""
    order = GradientOrder(order=[1, 0], members=[1, 2])  # unit 0 has one parameter, unit 1 has two
    assert (order.arrived(1, 0), order.arrived(0, 0)) == ([], [])  # unit 0 is complete, but it is not its turn
    assert order.arrived(1, 1) == [1, 0]
    assert (order.ended_by(0, 0), order.arrived(0, 0)) == ([], [])  # the second pass
    assert order.ended_by(0, 0) == [1, 0]  # the third one: unit 1 has got nothing new
    assert (order.arrived(0, 0), order.passes) == ([], 3)
    return order


def test_units_are_taken_in_one_order_pass_after_pass():
    order = order_of_three_passes()
    assert order.rest(passes=4) == [1, 0, 1, 0]  # another rank has had one pass more
    assert order.ended_by(1, 0) == []
    order.held()  # it waits for the next one
    assert order.rest(passes=3) == [1, 0]
    assert order.arrived(1, 0) == []
    assert (order.next_unit, order.missing_of_begun(1), order.missing_of_begun(0)) == (1, [1], [])


def test_other_ranks_take_their_units():
    order = order_of_three_passes()
    order.arrived(1, 0)
    assert (order.turn(), order.turn(), order.turn(), order.rest(passes=3)) == (1, 0, None, [])
    order.complete(passes=3)
    assert (order.turn_for_others(), order.passes) == ((1, [0, 1]), 4)
    assert (order.has_arrived, order.arrived(0, 0), order.has_arrived) == (False, [0], False)


def test_units_that_others_took_are_of_the_pass_that_their_gradient_ends():
    order = GradientOrder(order=[1, 0], members=[1, 2])
    order.complete(passes=2)  # before any gradient has arrived here
    assert (order.next_unit, order.has_arrived, order.rest(passes=3)) == (None, False, [1, 0])
    assert (order.turn_for_others(), order.passes) == ((1, [0, 1]), 3)
    assert (order.ended_by(1, 0), order.passes) == ([0], 4)


def test_a_note_has_the_missed_steps_of_the_step_that_it_means():
    weight, bias = (UnitParameter(torch.nn.Parameter(torch.ones(2)), name, group=0) for name in ("weight", "bias"))
    assert encode_missed_steps([weight, bias]) == b""
    weight.missed = 5
    metadata = encode_missed_steps([weight, bias], [bias], step=9)
    assert decode_missed_steps(metadata, steps=9) == [5, 1]
    assert decode_missed_steps(metadata, steps=8) == [5, 0]
    assert decode_missed_steps(join_missed_steps([b"", metadata], [1, 0]), steps=9) == [1, 5]
