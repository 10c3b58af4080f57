"""Process sets: the object, its registration by all ranks, and what init() makes of bad ones."""

from __future__ import annotations

import pytest

from horovod.common.process_sets import ProcessSet, global_process_set


def test_the_object():
    ranks = iter([2, 0])
    process_set = ProcessSet(ranks)
    assert process_set.ranks == [0, 2]
    assert str(process_set) == "ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)"
    process_set.process_set_id = 1
    assert str(process_set) == "ProcessSet(process_set_id=1, ranks=[0, 2], mpi_comm=None)"
    assert process_set.size() == 2
    process_set._invalidate()
    assert (process_set.process_set_id, process_set.size(), process_set.rank()) == (
        None,
        None,
        None,
    )
    assert ProcessSet([0]) != ProcessSet([0])
    assert (ProcessSet.process_set_id, ProcessSet.ranks, ProcessSet.mpi_comm) == (None, None, None)
    with pytest.raises(ValueError, match="not initialized"):
        process_set.included()


@pytest.mark.parametrize("wrong", [5, None, object(), ["a"], [1.5], [[0]]])
def test_anything_but_ranks_is_refused(wrong):
    with pytest.raises(ValueError, match="process set is made of"):
        ProcessSet(wrong)


def test_the_global_set_is_always_0():
    assert global_process_set.process_set_id == 0
    global_process_set._invalidate()
    assert global_process_set.process_set_id == 0


def test_adding_and_removing(ranks):
    ranks.run(
        """
P = process_sets
basics.init()
me = basics.rank()
assert P.global_process_set.ranks == [0, 1, 2] and P.global_process_set.rank() == me
odd = P.add_process_set([2, 0])
assert (odd.process_set_id, odd.ranks, odd.size()) == (1, [0, 2], 2)
assert odd.included() == (me != 1)
if me != 1:
    assert odd.rank() == me // 2
    assert allreduce(1.0 + me, "x", odd.uid) == 4.0
else:
    try:
        odd.rank()
        raise SystemExit("rank() of an outsider")
    except ValueError as error:
        assert "rank 1 is not a member" in str(error)
for bad, words in [([0, 2], "are process set 1 already"),
                   ([0, 1, 2], "are process set 0 already"), ([0, 0], "twice"),
                   ([0, 3], "outside 0 to 2"), ([-1], "outside"), ([], "at least")]:
    try:
        P.add_process_set(bad)
        raise SystemExit("accepted " + str(bad))
    except ValueError as error:
        assert words in str(error), error
other = P.add_process_set(P.ProcessSet([1]))
assert P.ids_and_ranks() == {0: [0, 1, 2], 1: [0, 2], other.process_set_id: [1]}
assert P.remove_process_set(odd) is True
assert odd.process_set_id is None and odd.ranks == [0, 2]
assert P.remove_process_set(odd) is False
assert P.remove_process_set(P.global_process_set) is False
assert P.add_process_set(odd) is odd and odd.process_set_id is not None
barrier()
basics.shutdown()
assert odd.process_set_id is None and other.process_set_id is None
assert P.global_process_set.process_set_id == 0
""",
        3,
    )


def test_ranks_that_disagree_about_a_set_all_raise(ranks):
    ranks.run(
        """
basics.init()
try:
    process_sets.add_process_set([0] if basics.rank() == 0 else [1])
    raise SystemExit("accepted")
except ValueError as error:
    print(error)
assert allreduce(1.0) == 2.0
basics.shutdown()
""",
        2,
    )


def test_sets_given_to_init(ranks):
    ranks.run(
        """
P = process_sets
a, b, again, everyone = [P.ProcessSet(ranks) for ranks in ([0], [1], [0], [1, 0])]
try:
    basics.init(process_sets=[a, again, b, everyone])
    raise SystemExit("accepted")
except ValueError as error:
    assert "process_sets[1]" in str(error) and "process_sets[3]" in str(error), error
assert basics.is_initialized()
assert (again.process_set_id, everyone.process_set_id) == (None, None)
basics.init(process_sets=[b, a])
assert (a.process_set_id, b.process_set_id) == (1, 2)
one_more = P.ProcessSet([0])
basics.init(process_sets=[one_more])
assert one_more.process_set_id == 1
assert allreduce(3.0, "x", (a.uid, b.uid)[basics.rank()]) == 3.0
basics.shutdown()
assert (a.process_set_id, b.process_set_id, one_more.process_set_id) == (None, None, None)
basics.init(process_sets="Dynamic")
assert os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] == "1"
try:
    basics.init(process_sets=[a])
    raise SystemExit("accepted")
except ValueError as error:
    assert "process_sets[0]" in str(error) and "add_process_set" in str(error)
basics.shutdown()
""",
        2,
    )


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ("[[0]] if me == 0 else []", "rank 0 gave [[0]] and rank 1 gave []"),
        ("[[0], [1]] if me < 2 else [[1], [0]]", "[[0], [1]] and rank 2 gave [[1], [0]]"),
        ("[[0, 1]] * 500 + [[me]]", "501 sets, SHA-256"),
    ],
)
def test_ranks_that_give_init_different_sets_learn_of_it_at_once(ranks, sets, words):
    ranks.run(
        f"""
me = int(os.environ["HOROVOD_RANK"])
try:
    basics.init(process_sets=[process_sets.ProcessSet(each) for each in ({sets})])
    raise SystemExit("accepted")
except ValueError as error:
    assert {words!r} in str(error), error
assert not basics.is_initialized()
basics.init()
assert allreduce(1.0) == 3.0
basics.shutdown()
""",
        3,
    )


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("'static'", "dynamic"),
        ("[[0]]", "process_sets[0] is a list"),
        ("[process_sets.ProcessSet([0, 0])]", "twice"),
        ("[process_sets.ProcessSet([5])]", "outside 0 to 0"),
    ],
)
def test_sets_that_init_refuses_before_it_starts_anything(ranks, argument, words):
    ranks.run(
        f"""
try:
    basics.init(process_sets={argument})
    raise SystemExit("accepted")
except ValueError as error:
    assert {words!r} in str(error), error
assert not basics.is_initialized()
""",
        1,
    )
