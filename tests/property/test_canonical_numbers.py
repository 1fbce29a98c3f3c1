"""One number, one name: parsing the numbers in paths is the inverse of building them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arroyo_dagster.state import (
    Epoch,
    JobId,
    JobPaths,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.layout import (
    compaction_level,
    parse_checkpoint_dir,
    parse_data_file,
    parse_epoch_record,
    parse_manifest_path,
)
from tests.formats import ObjectKind, object_name

PROTOCOL = JobPaths(JobId("j"), PipelineId("p"))
LEGACY = JobPaths(JobId("j"))
LAYOUTS = pytest.mark.parametrize("paths", [PROTOCOL, LEGACY], ids=["protocol", "legacy"])
numbers = st.one_of(st.integers(0, 20), st.integers(0, 2**63 - 1))
DIGITS = "0123456789٠١٢𝟎𝟏²①"
looks = st.one_of(
    st.text(DIGITS, max_size=9),
    st.text("0", max_size=9).flatmap(lambda zeros: numbers.map(lambda n: f"{zeros}{n}")),
    st.sampled_from(["1_0", "+1", "-1", " 1", "1 ", "1\n", "1.0", "1e3", "0x1", "001"]),
    st.text(st.characters(exclude_characters="/\\\0", exclude_categories=["Cs"]), max_size=9),
)


def in_checkpoint(paths: JobPaths, generation: str, number: str, name: str) -> StatePath:
    top = f"{paths.root}/generations/{generation}" if paths.pipeline else paths.root
    return StatePath(f"{top}/checkpoints/checkpoint-{number}/{name}")


@LAYOUTS
@given(epoch=numbers, generation=numbers, subtask=st.integers(0, 2**31), unique=st.text("0aF-"))
def test_what_is_built_is_parsed_back(
    paths: JobPaths, epoch: int, generation: int, subtask: int, unique: str
) -> None:
    operator, table = OperatorId("o"), TableName("t")
    number = WorkerGeneration(generation) if paths.pipeline else None
    directory = paths.checkpoint(Epoch(epoch), number)
    file = paths.data_file(operator, table, subtask, Epoch(epoch), number, attempt=f"x{unique}")
    done = paths.subtask_metadata(operator, subtask, Epoch(epoch), number)
    assert parse_checkpoint_dir(directory.name) == epoch
    assert parse_data_file(file, table) == subtask
    for path, kind in ((file, ObjectKind.DATA), (done, ObjectKind.SUBTASK)):
        name = object_name(paths, path)
        assert (name.kind, name.epoch, name.worker_generation) == (kind, epoch, number)
    if number is not None:
        record, manifest = paths.epoch_record(Epoch(epoch)), paths.manifest(number, Epoch(epoch))
        assert parse_epoch_record(record.name) == epoch
        address = parse_manifest_path(manifest)
        assert address is not None
        assert (address.worker_generation, address.epoch) == (number, epoch)
        kinds = {object_name(paths, one).kind for one in (record, manifest)}
        assert kinds == {ObjectKind.RECORD, ObjectKind.MANIFEST}


@given(looks)
@example("00000003")
@example("٠٠٠٠٠٠٣")
@example("0000003\n")
@example("9" * 300)
def test_whatever_is_parsed_is_the_name_that_is_built(text: str) -> None:
    epoch = parse_checkpoint_dir(f"checkpoint-{text}")
    assert epoch is None or LEGACY.checkpoint(epoch).name == f"checkpoint-{text}"
    epoch = parse_epoch_record(f"epoch-{text}.record")
    assert epoch is None or PROTOCOL.epoch_record(epoch).name == f"epoch-{text}.record"
    subtask = parse_data_file(f"a/table-t-{text}", "t")
    assert subtask is None or text.startswith(f"{subtask:03}")
    assert compaction_level(f"a-l{text}-compacted") >= 1


@LAYOUTS
@given(generation=looks, epoch=looks, subtask=looks)
@example(generation="01", epoch="0000001", subtask="000")
@example(generation="1", epoch="00000001", subtask="000")
@example(generation="1", epoch="1", subtask="000")
@example(generation="1", epoch="0000001", subtask="0000")
@example(generation="١", epoch="0000001", subtask="000")
def test_only_the_canonical_form_of_every_number_is_ours(
    paths: JobPaths, generation: str, epoch: str, subtask: str
) -> None:
    try:
        file = in_checkpoint(paths, generation, epoch, f"operator-o/table-t-{subtask}")
        done = in_checkpoint(paths, generation, epoch, f"operator-o-{subtask}.metadata")
    except ValueError:
        return  # not a path at all
    name = object_name(paths, file)
    if name.kind is not ObjectKind.FOREIGN:
        number = parse_data_file(file, "t")
        assert name.epoch is not None
        built = paths.operator(OperatorId("o"), name.epoch, name.worker_generation)
        assert number is not None
        assert file == built / f"table-t-{number:03}" or file.startswith(
            f"{built}/table-t-{number:03}-"
        )
    name = object_name(paths, done)
    if name.kind is not ObjectKind.FOREIGN:
        assert name.epoch is not None
        at = subtask.rpartition("-")
        operator = OperatorId(f"o-{at[0]}" if at[1] else "o")
        assert done == paths.subtask_metadata(
            operator, int(at[2]), name.epoch, name.worker_generation
        )


@LAYOUTS
@pytest.mark.parametrize(
    "name",
    [
        "operator-totals/my-backup/table-t-000",
        "operator-totals/my-backup/table-t-000-x-compacted",
        "operator-totals/my-backup/metadata",
        "operator-totals/my-0.metadata",
        "operator-totals/table-t-000/",
        "operator-/table-t-000",
    ],
)
def test_a_placeholder_is_one_segment(paths: JobPaths, name: str) -> None:
    path = f"{in_checkpoint(paths, '1', '0000001', 'x')}"[:-1] + name
    assert object_name(paths, path).kind is ObjectKind.FOREIGN


@pytest.mark.parametrize("end", [".", " ", "x.", "x "])
def test_a_data_file_whose_name_ends_in_a_dot_or_space_is_a_user_s(end: str) -> None:
    """No attempt ends so, and some file systems drop such an end: it would name another file."""
    name = PROTOCOL.data_file(
        OperatorId("o"), TableName("t"), 0, Epoch(3), WorkerGeneration(1), attempt="0af3"
    )
    assert object_name(PROTOCOL, name).kind is ObjectKind.DATA
    assert object_name(PROTOCOL, f"{name}{end}").kind is ObjectKind.FOREIGN
