"""Is a micro-batch the next one, a repeat, or somebody else's?"""

from __future__ import annotations

import pytest

from arroyo_dagster.errors import ConflictError, ProtocolError
from arroyo_dagster.state.model.checkpoints import ROLLBACK, StreamProgress
from arroyo_dagster.state.planning.restore.batch_identity import BatchVerdict, batch_verdict

HERE = '{"row": 4}'


def recorded(query_id: str = "q", batch_id: int = 7, offsets: str = HERE) -> StreamProgress:
    return StreamProgress(query_id=query_id, batch_id=batch_id, offsets=offsets)


@pytest.mark.parametrize("adopt", [False, True])
def test_the_first_batch_of_a_job_without_state_is_the_next(adopt: bool) -> None:
    assert batch_verdict(None, "q", 0, HERE, adopt=adopt) is BatchVerdict.NEXT


@pytest.mark.parametrize("adopt", [False, True])
def test_a_later_batch_of_a_job_without_state_stops(adopt: bool) -> None:
    with pytest.raises(ConflictError, match="no state"):
        batch_verdict(None, "q", 3, HERE, adopt=adopt)


@pytest.mark.parametrize("adopt", [False, True])
def test_the_batch_behind_the_recorded_one_of_the_same_query_is_the_next(adopt: bool) -> None:
    assert batch_verdict(recorded(), "q", 8, '{"row": 9}', adopt=adopt) is BatchVerdict.NEXT


@pytest.mark.parametrize("adopt", [False, True])
def test_the_recorded_batch_of_the_same_query_is_a_repeat(adopt: bool) -> None:
    assert batch_verdict(recorded(), "q", 7, HERE, adopt=adopt) is BatchVerdict.REPEAT


def test_a_repeat_with_other_offsets_stops() -> None:
    with pytest.raises(ProtocolError, match="other offsets"):
        batch_verdict(recorded(), "q", 7, '{"row": 5}', adopt=False)


@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize(
    ("batch_id", "what"), [(9, "skipped"), (6, "duplicated"), (0, "duplicated")]
)
def test_a_batch_that_jumps_stops_and_says_what_would_happen(
    batch_id: int, what: str, adopt: bool
) -> None:
    with pytest.raises(ConflictError, match=what) as caught:
        batch_verdict(recorded(), "q", batch_id, HERE, adopt=adopt)
    assert "--adopt" in str(caught.value)


@pytest.mark.parametrize("batch_id", [0, 7, 8, 100])
def test_another_query_stops_whatever_its_batch(batch_id: int) -> None:
    with pytest.raises(ConflictError, match="another streaming query"):
        batch_verdict(recorded(), "other", batch_id, HERE, adopt=False)


def test_another_query_goes_on_if_it_is_adopted_at_its_first_batch() -> None:
    assert batch_verdict(recorded(), "other", 0, HERE, adopt=True) is BatchVerdict.NEXT


@pytest.mark.parametrize("batch_id", [1, 7, 8, 100])
def test_an_adopted_query_that_is_further_on_stops(batch_id: int) -> None:
    with pytest.raises(ConflictError, match="from its own"):
        batch_verdict(recorded(), "other", batch_id, HERE, adopt=True)


def test_behind_a_rollback_any_first_batch_is_next_and_any_other_is_refused() -> None:
    restored = recorded(query_id=ROLLBACK, batch_id=3)
    verdict = batch_verdict(restored, "any query", 0, '{"row": 9}', adopt=False)
    assert verdict is BatchVerdict.NEXT
    with pytest.raises(ConflictError, match="its own"):
        batch_verdict(restored, "any query", 4, '{"row": 9}', adopt=False)
