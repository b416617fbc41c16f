"""Keys of checkpoints: saving and retention."""

from __future__ import annotations

import attrs

import zckpt
from zengine.config.grammar.kinds import ANYTHING, COUNT, NAMES, TEXT, TRUTH, Mismatch, ValueKind, choice, whole
from zengine.config.grammar.table import Row, Section, idle_section, ignored, section, setting


def _read_best(value: object) -> tuple[zckpt.Best, ...]:
    try:
        return tuple(map(zckpt.Best.parse, NAMES.read([value] if isinstance(value, str) else value)))
    except zckpt.CheckpointInputError as error:
        raise Mismatch(str(error), 'Write "loss", "loss:min" or "accuracy:max:3".') from None


BEST = ValueKind(
    "a metric, as METRIC[:min|max[:N]], or a list of them",
    _read_best,
    {"anyOf": [{"type": "string"}, NAMES.json_schema]},
)


def _in_words(best: tuple[zckpt.Best, ...]) -> str:
    return ", ".join(f"{each.mode} {each.metric} ({each.count})" for each in best)


@attrs.frozen(kw_only=True)
class KeepSettings:
    """checkpoint.keep, ours: retention of old checkpoints after each save; without `last` all are kept."""

    last: int = setting(
        COUNT, 0, "number of newest checkpoints to keep; 0: all, and the other keys have no effect", empty="all"
    )
    every: int = setting(COUNT, 0, "also keep steps divisible by it; 0: none", empty="off")
    best: tuple[zckpt.Best, ...] = setting(
        BEST, (), 'also keep the best by a metric of client_state["metrics"]', empty="off", show=_in_words
    )
    tags: tuple[str, ...] = setting(NAMES, (), "also keep tags that match one of these shell patterns", empty="off")


@attrs.frozen(kw_only=True)
class CheckpointSettings:
    """checkpoint: saving and retention."""

    tag_validation: str = setting(
        choice("IGNORE", "WARN", "FAIL", fold=str.upper), "WARN", "reaction if ranks save under different tags"
    )
    async_save: bool = setting(TRUTH, False, "write in the background, from a copy in host memory")
    keep: KeepSettings = section(KeepSettings)


CHECKPOINT: dict[str, Row] = {
    "load_universal": ignored(TRUTH, False, why="every checkpoint loads at any world size"),
    "use_node_local_storage": ignored(
        TRUTH, False, why="every rank writes its own part into one folder, which all hosts must see"
    ),
    "parallel_write": Section(
        keys={"pipeline_stage": ignored(TRUTH, False, why="every rank always writes its own part")}
    ),
    "checkpoint_serialization": ignored(TRUTH, True, why="the format has one serialization"),
    "writer": idle_section(
        'there is one writer; "checkpoint": {"async_save": true} writes in the background',
        type=TEXT,
        decoupled=TRUTH,
        io_buffer_size=whole(1),
        io_buffer_double=TRUTH,
        show_statistics=TRUTH,
        data_parallel=TEXT,
        io_multiplier=whole(1),
    ),
}

_OWN_FORMAT = 'checkpoints are written to save_dir; "checkpoint": {"async_save": true} writes in the background'

NEBULA = Section(
    keys={"enabled": ignored(TRUTH, False, why=_OWN_FORMAT)},
    switch="enabled",
    is_open=True,
)

DATASTATES = ignored(ANYTHING, False, None, why=_OWN_FORMAT)


@attrs.frozen(kw_only=True, slots=False)
class CheckpointKeys:
    """Sections of the top level about checkpoints."""

    checkpoint: CheckpointSettings = section(CheckpointSettings, CHECKPOINT)


OTHERS: dict[str, Row] = {"nebula": NEBULA, "datastates_ckpt": DATASTATES}
