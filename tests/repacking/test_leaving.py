"""Workers that a scheduler takes away with a warning are left in time: layers move off them, and they end."""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings
from typing import Any

from dynpipe_ds.release import Constraints, ReleaseError
from dynpipe_ds.release.notice import Notice
from dynpipe_ds.repacking.leaving import merged, without
from dynpipe_ds.repacking.outcome import Repacking
from tests.distributed.configs import BY_HAND, ZERO
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.repacking.test_decision import granted, random_request, refused, request


def test_who_goes_on() -> None:
    rng = random.Random(31)
    left = 0
    for _ in range(100):
        case = random_request(rng)
        going = set(rng.sample(range(case.num_stages), rng.randint(1, case.num_stages - 1)))
        found = without(case, going)
        if 0 in going:
            assert "rank 0 can't leave a running job" in refused(found)
            continue
        left += 1
        assert isinstance(found, Repacking) and set(found.released_ranks) == going
        assert found.boundaries[0] == 0 and found.boundaries[-1] == len(case.profile.layers)
        assert len(found.boundaries) - 1 == case.num_stages - len(going) == found.num_stages
    assert left > 20


def test_what_the_back_end_allows_does_not_matter() -> None:
    """Nothing is given back by choice; nor does it help that others have no room."""
    rules = Constraints(lowest_stay=True, whole_nodes=True, nodes_stay=frozenset({"a"}))
    case = request([1.0] * 6, (0, 2, 4, 6), nodes=["a", "a", "b"], constraints=rules, memory_cap_bytes=30)
    found = granted(without(case, {1}))
    assert found.surviving_ranks == (0, 2) and found.boundaries == merged(case.current, (0, 2)) == (0, 4, 6)
    assert found.reason.startswith("ranks 1 are to be taken away; 3 -> 2 stages keep")


def test_replicas_go_together() -> None:
    case = request([1.0] * 6, (0, 2, 4, 6), nodes=["a", "b", "a", "b", "a", "b"])
    assert granted(without(case, {3})).released_ranks == (2, 3)
    assert "rank 0 can't leave" in refused(without(case, {1})), "its replica would go"


def test_layers_before_the_first_that_stays() -> None:
    assert merged((0, 1, 2, 5, 9), (1, 3)) == (0, 5, 9)
    assert merged((0, 1, 2, 5, 9), (0,)) == (0, 9)


def test_a_signal_is_heard_and_ends_nothing() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    notice = Notice("SIGUSR2")
    assert not notice.has_come
    os.kill(os.getpid(), signal.SIGUSR2)
    assert notice.has_come
    notice.stop()
    assert signal.getsignal(signal.SIGUSR2) == before


def test_only_the_main_thread_hears_signals() -> None:
    said: list[str] = []

    def listen() -> None:
        try:
            Notice("SIGUSR2")
        except ReleaseError as error:
            said.append(str(error))

    thread = threading.Thread(target=listen, name="elsewhere")
    thread.start()
    thread.join()
    assert "repack.leave_on = 'SIGUSR2': the engine was made in the thread 'elsewhere'" in said[0]


def warned(rank: int, run: Run, when: dict[int, tuple[int, ...]]) -> Any:
    """Train; before some batches some ranks get the signal."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = make_engine(run)
        events: list[Any] = []
        engine.on_repack(events.append)
        batches, losses = data(engine.grid.get_data_parallel_id(), run.micro_batches), []
        for batch in range(run.num_batches):
            if rank in when.get(batch, ()):
                os.kill(os.getpid(), signal.SIGTERM)
            losses.append(float(engine.train_batch(batches)))
    texts = [str(w.message) for w in caught if "in time" in str(w.message)]
    return losses, digest(engine), [(e.batch, e.released_ranks) for e in events], texts


def leaving(num_stages: int, **config: Any) -> Run:
    section = {**BY_HAND, "repack": {"leave_on": "SIGTERM"}}
    return Run(num_stages, num_batches=7, tied=True, config={**config, "dynamic_pipeline": section})


def test_two_leave_one_after_the_other() -> None:
    """The same bits as with all, one pause each; those that were warned end with exit code 0."""
    run = leaving(3, **ZERO)
    everyone = run_ranks(warned, 3, run, {})
    left = run_ranks(warned, 3, run, {2: (1,), 4: (2,)}, may_leave={1, 2})
    assert left[1] is None and left[2] is None
    assert left[0][0] == everyone[0][0]
    assert left[0][1] == {k: v for rank in everyone for k, v in rank[1].items()}
    assert left[0][2] == [(3, (1,)), (5, (1,))], "rank 2 was rank 1 by then"


def test_the_first_rank_can_not_be_left() -> None:
    """It is told once, and all train on for as long as they are there."""
    run = leaving(2)
    everyone = run_ranks(warned, 2, run, {})
    stayed = run_ranks(warned, 2, run, {2: (0,)})
    assert [rank[0] for rank in stayed] == [rank[0] for rank in everyone] and not stayed[0][2]
    (text,) = stayed[0][3]
    assert "ranks 0 are to be taken away: rank 0 can't leave a running job" in text
