"""Reader of a job from a Megatron command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pipette_launch.errors import MegatronError, check_all
from pipette_launch.facts import Batch, Job, Layout
from pipette_launch.facts.devices import capability_named
from pipette_launch.megatron import flags
from pipette_launch.megatron.checkpoint import demands, unseen_note
from pipette_launch.megatron.checkpoint_files import checkpoint_folder, with_checkpoint_arguments
from pipette_launch.megatron.flags import Arguments, release_of
from pipette_launch.megatron.layout import read_batch, read_layout, read_stand_in
from pipette_launch.megatron.model import read_model, required_flags
from pipette_launch.megatron.performance import (
    allocator_config,
    options_of,
    performance_flags,
    unmodelled,
    unpriced_note,
)
from pipette_launch.megatron.pins import fixed_fields, foreign_pins, pins, refusals
from pipette_launch.megatron.rules.judge import check_formats, check_own, rule_faults
from pipette_launch.megatron.script import Foreign, foreign_model, trains_nothing
from pipette_launch.megatron.tokenizers import read_vocabulary

NO_TRAINING = "seems to train nothing"


def read_job(
    arguments: Sequence[str],
    *,
    world_size: int,
    megatron_version: str,
    device_kind: str,
    script: str = "",
    fix: Sequence[str] = (),
    for_prediction: bool = False,
    without_probes: bool = False,
    for_planning: bool = False,
    is_launched: bool = False,
    is_translated: bool = False,
    environment: Mapping[str, str] | None = None,
    device_name: str = "",
    capability: float | None = None,
) -> Job:
    """Read a job from the user's command line, with the layout fields that a plan must not change.

    If a checkpoint demands a layout, `Job.own` has the checkpoint's values instead of the flags' values. If the layers
    do not divide among the stages, `Job.own` is a substitute layout that splits the layers unevenly, and a note names
    it. Raise MegatronError if a flag is missing, contradicts another flag, or describes a job that is not planned.

    Args:
        arguments: the words after the script's name.
        world_size: ranks of the job.
        megatron_version: the release whose flags the script takes, such as `0.16.1`.
        device_kind: `cuda` or `cpu`.
        script: path of the script, which may not exist. Its name and imports reveal models that are not decoder-only.
        fix: names from `--pipette-fix`. Raise OptionError for a name that is not a layout field.
        for_prediction: if true, accept jobs that cannot be planned if memory and time can be predicted.
        without_probes: if true, accept jobs that a warm-up cannot time, for plans without a warm-up.
        for_planning: if true, replace a layout that Megatron refuses by a layout with other parallel degrees.
        is_launched: if true, a script starts and checks unknown flags itself.
        is_translated: if true, the flags stand for settings of another trainer, which has its own checks.
        environment: variables of the workers, which select an attention backend and sizes of buffers.
        device_name: name of the GPUs, on which the attention backend depends. Empty if unknown.
        capability: compute capability of the GPUs, such as 8.9. None = that of the known device `device_name`.

    """
    given, checkpoint_note, faults = _with_checkpoint(Arguments.cut(arguments, megatron_version))
    return _Reader(
        given=given,
        foreign=foreign_model(script, given),
        script=script,
        checkpoint_note=checkpoint_note,
        checkpoint_faults=faults,
        world_size=world_size,
        fixed=fixed_fields(fix),
        device_kind=device_kind,
        device_name=device_name,
        capability=capability or capability_named(device_name),
        environment=environment or {},
        for_prediction=for_prediction,
        for_planning=for_planning,
        is_launched=is_launched,
        is_translated=is_translated,
        without_probes=without_probes,
    ).job()


def _with_checkpoint(given: Arguments) -> tuple[Arguments, str, Sequence[MegatronError]]:
    """Return the flags together with the checkpoint's arguments, a note on the checkpoint, and errors about both."""
    try:
        return *with_checkpoint_arguments(given), ()
    except MegatronError as error:
        return given, "", (error,)


class _FlagsLayout(NamedTuple):
    """Layout from the user's flags, or a substitute if Megatron refuses the layout from the flags."""

    layout: Layout
    refusal: MegatronError | None = None
    changed: frozenset[str] = frozenset()
    """Layout fields in which the substitute differs from the flags."""


class _OwnLayout(NamedTuple):
    """The user's own layout with the values that a checkpoint sets."""

    layout: Layout
    pinned: frozenset[str]
    notes: tuple[str, ...]
    doubt: str
    """Reason why the checkpoint may fail to load on this number of ranks. The text is empty if no reason is known."""
    refusal: MegatronError | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    """The arguments of `read_job`, with the flags that `--use-checkpoint-args` reads from a checkpoint."""

    given: Arguments
    foreign: Foreign
    script: str
    checkpoint_note: str
    checkpoint_faults: Sequence[MegatronError]
    world_size: int
    fixed: tuple[str, ...]
    device_kind: str
    device_name: str
    capability: float | None
    environment: Mapping[str, str]
    for_prediction: bool
    for_planning: bool
    is_launched: bool
    is_translated: bool
    without_probes: bool

    @property
    def starts_nothing(self) -> bool:
        """True if no script runs, so that only this reader checks the words."""
        return (self.for_prediction or self.for_planning) and not self.is_launched

    def _check_flags(self) -> str:
        """Raise one MegatronError that lists all faults of the words alone.

        The returned note names flags that Megatron demands, although no figure depends on them.
        """
        given, prediction, unprobed = self.given, self.for_prediction, self.without_probes
        refused = [*refusals(given, self.foreign, for_prediction=prediction, without_probes=unprobed)]
        faults = [*given.faults(), *self.checkpoint_faults, *refused]
        if self.starts_nothing and not self.is_translated:
            faults += rule_faults(given)
        is_other = self.starts_nothing and trains_nothing(self.script)
        cause = self.checkpoint_note or (f"{self.script} {NO_TRAINING}" if is_other else "")
        required = required_flags(given, starts_nothing=self.starts_nothing, cause=cause)
        # Another kind of model may be the reason why flags are missing.
        is_result = bool(refused or self.checkpoint_faults)
        check_all(faults if required.fault is None or is_result else [*faults, required.fault])
        return required.note

    def job(self) -> Job:
        given, environment, kind, starts_nothing = self.given, self.environment, self.device_kind, self.starts_nothing
        needless = self._check_flags()
        vocabulary = read_vocabulary(given)
        model = read_model(given, vocabulary, device_kind=kind, environment=environment, capability=self.capability)
        model = replace(model, foreign=self.foreign.name)
        found = self._flags_layout()
        if starts_nothing and kind == "cuda":
            check_formats(given, found.layout, device_name=self.device_name, capability=self.capability)
        batch = read_batch(given, found.layout)
        own = self._own_layout(found, num_layers=model.num_layers)
        if own.doubt and self.for_planning and not self.is_launched:
            raise MegatronError(own.doubt)
        notes = [self.checkpoint_note, vocabulary.note, *own.notes]
        notes += _notes(given, own.layout, found.layout, own.refusal)
        notes += [needless, *flags.unknown_note(given), unpriced_note(given)] if starts_nothing else []
        if starts_nothing and trains_nothing(self.script):
            notes.append(f"{self.script} {NO_TRAINING}; the figures are those of a training step with these flags")
        notes += [unseen_note(given)] if starts_nothing and self.for_planning else []
        if self.fixed:
            notes.append(f"The plan keeps these parts of your layout, as you asked: {', '.join(self.fixed)}.")
        job = Job(
            model=model,
            batch=batch,
            own=own.layout,
            own_refusal=str(own.refusal or ""),
            allocator_config=allocator_config(environment) if kind == "cuda" else "",
            compute_capability=self.capability if kind == "cuda" else None,
            pinned=tuple(sorted(own.pinned)),
            notes=tuple(dict.fromkeys(filter(None, notes))),
            **_training(given, batch, environment),
            options=options_of(given),
            performance_flags=performance_flags(given, every=bool(self.foreign.name)),
        )
        if self.for_planning:
            return job
        try:
            faults = check_own(job, given, device_kind=kind)
        except MegatronError as error:
            raise own.refusal or error from None
        return replace(job, notes=(*job.notes, *faults))

    def _flags_layout(self) -> _FlagsLayout:
        """Return the layout of the flags, or a substitute if Megatron refuses the layout of the flags.

        For a job that will start, a substitute only splits the layers anew, because the degrees may suit other hosts.
        If flags name stages, Megatron itself checks the stages, because a later release may accept the stages.
        """
        given = self.given
        try:
            return _FlagsLayout(read_layout(given, world_size=self.world_size))
        except MegatronError as error:
            names_stages = given.get("pipeline_model_parallel_layout") is not None
            # Megatron reads the checkpoint's sizes before it checks any size.
            takes_sizes = given.get("use_mp_args_from_checkpoint_args") and checkpoint_folder(given)
            if not takes_sizes and (self.for_prediction or (names_stages and not self.for_planning)):
                raise
            # Without a global batch size, the parallel degrees decide the number of samples per step.
            keeps_degrees = not (self.for_planning or takes_sizes) or not given.is_given("global_batch_size")
            found = read_stand_in(given, world_size=self.world_size, fixed=self.fixed, keeps_degrees=keeps_degrees)
            if found is None:
                raise
            return _FlagsLayout(found[0], error, found[1])

    def _own_layout(self, found: _FlagsLayout, *, num_layers: int) -> _OwnLayout:
        """Apply the checkpoint's values.

        Raise Megatron's refusal if a substitute changed a field that must not change.
        """
        given = self.given
        demanded = demands(given, found.layout, num_layers=num_layers)
        takes_sizes = demanded.own and given.get("use_mp_args_from_checkpoint_args")
        refusal = None if takes_sizes else found.refusal
        own = demanded.applied(found.layout)
        # Megatron ignores --sequence-parallel at TP 1, and the checkpoint may have another TP than the flags.
        own = replace(own, sequence_parallel=bool(given.get("sequence_parallel")) and own.tp > 1)
        held = (*pins(given, own, self.device_kind), *foreign_pins(self.foreign), *demanded.pins)
        pinned = {*self.fixed, *(name for pin in held for name in pin.fields)}
        # On CPU cp is always 1, so a substitute with another cp changes nothing.
        may_differ = {*demanded.own, *(("cp",) if self.device_kind == "cpu" else ())}
        if refusal and (pinned & found.changed) - may_differ:
            raise refusal
        notes = (*demanded.notes, demanded.doubt, *(pin.note for pin in held))
        return _OwnLayout(own, frozenset(pinned), notes, demanded.doubt, refusal)


def global_batch_size(words: Sequence[str]) -> int | None:
    """Return the global batch size of a command line. Return None if the size depends on the layout."""
    given = Arguments.cut(words, flags.newest_release())
    is_stated = given.is_given("global_batch_size") or given.is_given("step_batch_size_schedule")
    return read_batch(given, Layout()).global_batch_size if is_stated else None


def _training(given: Arguments, batch: Batch, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a job that describe the training, without model and layout."""
    iterations, samples = given.get("train_iters"), given.get("train_samples")
    if iterations and samples:
        raise MegatronError(
            f"{given.shown('train_iters')} and {given.shown('train_samples')} exclude each other; remove one"
        )
    if given.get("rampup_batch_size") and iterations and release_of(given.version) < (0, 18):
        raise given.refusal("works only with --train-samples; remove one", "rampup_batch_size")
    return {
        "cublas_workspace_config": environment.get("CUBLAS_WORKSPACE_CONFIG", ""),
        "megatron_version": given.version,
        "grad_reduce_in_bf16": bool(given.get("grad_reduce_in_bf16")),
        "optimizer": given.get("optimizer"),
        "log_interval": given.size("log_interval"),
        "train_iters": int(iterations or 0) or -(-int(samples or 0) // batch.global_batch_size) or None,
    }


def _notes(given: Arguments, own: Layout, flags_layout: Layout, refusal: MegatronError | None) -> list[str]:
    notes = [] if refusal is None else [f"{refusal}; {own.words()} replaces your own layout"]
    if given.get("step_batch_size_schedule"):
        notes.append(f"{given.shown('step_batch_size_schedule')}: figures are for a step of the last batch size")
    elif not given.is_given("global_batch_size"):
        notes.append("--global-batch-size is not given: pinned to one micro-batch on each replica of your own layout")
    if given.get("freeze_all_layers") and release_of(given.version) < (0, 20) and own.pp > 1:
        reason = "before Megatron 0.20, pipeline ranks behind the first also run backwards, which are not counted"
        notes.append(f"{given.shown('freeze_all_layers')}: {reason}")
    if own != flags_layout:
        notes.append(f"your own configuration is taken as {own.words()}, as the checkpoint demands")
    notes += [
        f"{given.shown(dest)}: its layers are measured; memory and exchanges are predicted as for standard layers"
        for dest in unmodelled(given)
    ]
    newest = flags.known_release(given.version)
    if release_of(given.version) > release_of(newest):
        notes.append(f"Megatron {given.version} is newer than {newest}, the newest release whose flags are known")
    return notes
