"""`sdf generate`: write a new dataflow or package that runs, with a test that passes."""

from __future__ import annotations

import re
from pathlib import Path

import click

from arroyo_dagster.cli.sdf.group import sdf
from arroyo_dagster.dataflow.definition.grammar import schema_text
from arroyo_dagster.errors import InputError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

_HEAD = """\
# yaml-language-server: $schema={kind}.schema.json
apiVersion: 0.6.0
meta:
  name: {name}
  version: 0.1.0
  namespace: {namespace}
"""
_DATAFLOW = """
topics:
  sentences:
    schema: { value: { type: string, converter: raw } }

services:
  count-words:
    sources:
      - { type: topic, id: sentences }
    transforms:
      - operator: flat-map
        run: |
          def split_sentence(sentence):
              return sentence.lower().split()
    states:
      hits:
        type: keyed-state
        properties:
          key: { type: string }
          value: { type: u32 }
    partition:
      assign-key:
        run: |
          def by_word(word):
              return word
      update-state:
        run: |
          def count_word(word):
              hits().increment(1)

tests: # an extension of arroyo_dagster; SDF ignores it
  - name: words are counted
    records: { sentences: [to be or not, to be] }
    expect-states:
      hits: { to: 2, be: 2, or: 1, not: 1 }
"""
_PACKAGE = """
states:
  hits:
    type: keyed-state
    properties:
      key: { type: string }
      value: { type: u32 }

functions:
  count-word:
    operator: update-state
    states:
      - { name: hits }
    inputs:
      - { name: word, type: string }
    run: |
      def count_word(word):
          hits().increment(1)

tests: # an extension of arroyo_dagster; SDF ignores it
  - name: a word seen before is counted on
    function: count-word
    states: { hits: { be: 2 } }
    state-key: be
    value: be
    expect-states: { hits: { be: 3 } }
"""
_BODIES = {"dataflow": _DATAFLOW, "package": _PACKAGE}
_FILES = {"dataflow": "dataflow", "package": "sdf-package"}


@sdf.command()
@click.argument("kind", type=click.Choice(list(_BODIES)))
@click.argument("name")
@click.option("--namespace", default="local", show_default=True, help="meta.namespace of the file.")
@click.option("--folder", type=click.Path(), help="The folder to write to. Default: NAME.")
def generate(kind: str, name: str, namespace: str, folder: str | None) -> None:
    """Write a new dataflow or package with a state, a function and a test that passes.

    It writes the YAML, and beside it the JSON schema that editors complete it with. It never
    overwrites a file.

    \b
    Example:
      arroyo-state sdf generate dataflow word-count
    """
    for argument, text in (("NAME", name), ("--namespace", namespace)):
        if not _NAME.fullmatch(text):
            raise InputError(
                f"{argument} is not a name: expected small letters, digits and single dashes",
                given=text,
                next_step="for example `word-count`",
            )
    place = Path(folder or name)
    file = place / f"{_FILES[kind]}.yaml"
    head = _HEAD.format(kind=_FILES[kind], name=name, namespace=namespace)
    schema = file.with_suffix(".schema.json")
    _check_absent(file)
    if not (schema.is_file() and schema.read_bytes() == schema_text(_FILES[kind]).encode()):
        _write(schema, schema_text(_FILES[kind]))
    _write(file, head + _BODIES[kind])
    click.echo(f"written: {file}, {schema}")
    click.echo(f"Test it: arroyo-state sdf test {file}")


def _check_absent(file: Path) -> None:
    if file.exists():
        raise InputError(
            "the file exists already, and is not overwritten",
            path=str(file),
            next_step="choose another --folder, or move the file away",
        )


def _write(file: Path, text: str) -> None:
    _check_absent(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        _check_absent(file)  # somebody else has written it meanwhile
        raise InputError(
            f"the file cannot be written ({error.strerror})",
            path=str(file),
            next_step="choose another --folder",
        ) from error
