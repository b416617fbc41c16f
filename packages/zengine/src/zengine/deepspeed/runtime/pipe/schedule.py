"""`deepspeed.runtime.pipe.schedule`: DeepSpeed's schedules as lists of instructions, to inspect or to count.

The engine does not run these: `zpartition.pipeline` runs its own schedules (pipeline.schedule of the config), whose
actions need no buffer numbers.  `TrainSchedule` states DeepSpeed's 1F1B: at step t, stage s runs the forward of
micro-batch (t - s) / 2 if t - s is even, else the backward of micro-batch (t + s + 1) / 2 - stages; numbers outside
of the batch are idle steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from typing import Any

from zengine.deepspeed.runtime.utils import call_to_str

__all__ = [
    "BackwardPass",
    "BufferOpInstruction",
    "CommitP2P",
    "DataParallelSchedule",
    "DualPipeVSchedule",
    "ForwardPass",
    "InferenceSchedule",
    "LoadMicroBatch",
    "OptimizerStep",
    "PipeInstruction",
    "PipeSchedule",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "SendActivation",
    "SendGrad",
    "TrainSchedule",
]


class PipeInstruction:
    """One thing that a stage does; keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return call_to_str(self.name, **self.kwargs)


class OptimizerStep(PipeInstruction):
    """Update the weights."""


class ReduceGrads(PipeInstruction):
    """Reduce gradients over the replicas of a stage."""


class ReduceTiedGrads(PipeInstruction):
    """Reduce gradients of tied weights over the stages that use them."""


class BufferOpInstruction(PipeInstruction):
    """An instruction for the micro-batch in one buffer."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Read the next micro-batch: inputs on the first stage, labels on the last."""


class ForwardPass(BufferOpInstruction):
    """Run forward."""


class BackwardPass(BufferOpInstruction):
    """Run backward."""


class SendActivation(BufferOpInstruction):
    """Send the output to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the input from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of the input to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of the output from the next stage."""


class CommitP2P(PipeInstruction):
    """Start the sends and receives named since the last one, and wait for them."""


Step = list[PipeInstruction]


class PipeSchedule(ABC):
    """Steps of one stage for one batch; iterating yields a list of instructions for each step."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[Step]:
        """Yield the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """Return the number of micro-batches that a stage keeps at a time."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """Index of this stage."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """True on the stage that reads the inputs."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """True on the stage that computes the loss."""
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        assert self._valid_micro_batch(micro_batch_id)
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> Iterator[Step]:
        return self.steps()

    def _loads(self, buffer: int) -> Step:
        return [LoadMicroBatch(buffer)] if self.is_first_stage or self.is_last_stage else []


class InferenceSchedule(PipeSchedule):
    """Forward only, with two buffers: one receives while the other is sent."""

    def steps(self) -> Iterator[Step]:
        """Yield the instructions of each step."""
        for step in range(self.micro_batches + self.stages - 1):
            micro = step - self.stage_id
            now, before = (step + self.stage_id) % 2, (step + self.stage_id + 1) % 2
            is_active = self._valid_micro_batch(micro)
            sends: Step = [SendActivation(before)] * (
                self._valid_stage(self.next_stage) and self._valid_micro_batch(micro - 1)
            )
            receives: Step = [RecvActivation(now)] * (self._valid_stage(self.prev_stage) and is_active)
            exchange = [*sends, *receives] if self.stage_id % 2 == 0 else [*receives, *sends]
            yield [*self._loads(now), *exchange, ForwardPass(now)] if is_active else exchange

    def num_pipe_buffers(self) -> int:
        """Return 2."""
        return 2


class TrainSchedule(PipeSchedule):
    """1F1B: forwards and backwards alternate; at most stages - stage_id micro-batches are in flight."""

    def steps(self) -> Iterator[Step]:
        """Yield the instructions of each step."""
        last, before = 2 * (self.micro_batches + self.stages - 1) - 1, -1
        for step in range(last + 1):
            micro, is_forward = self._step_to_micro_batch(step)
            found = self._exchange(micro, before, is_forward=is_forward)
            if self._valid_micro_batch(micro):
                buffer = self._buffer_idx(micro)
                found += [*self._loads(buffer), ForwardPass(buffer)] if is_forward else [BackwardPass(buffer)]
            if step == last:
                found += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            before = micro
            yield found

    def num_pipe_buffers(self) -> int:
        """Return the number of forwards in flight, at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _exchange(self, micro: int, before: int, *, is_forward: bool) -> Step:
        """Return the messages around a step: what the previous step made, and what this one needs."""
        neighbour = self.prev_stage if is_forward else self.next_stage
        if not self._valid_stage(neighbour):
            return []
        sent: Step = []
        received: Step = []
        if self._valid_micro_batch(before):
            sent = [(SendGrad if is_forward else SendActivation)(self._buffer_idx(before))]
        if self._valid_micro_batch(micro):
            received = [(RecvActivation if is_forward else RecvGrad)(self._buffer_idx(micro))]
        return [*sent, *received] if is_forward else [*received, *sent]

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """Return the micro-batch of a step, and True for its forward."""
        if (step_id - self.stage_id) % 2 == 0:
            return (step_id - self.stage_id) // 2, True
        return (step_id + self.stage_id + 1) // 2 - self.stages, False


class DataParallelSchedule(PipeSchedule):
    """Gradient accumulation without a pipeline."""

    def steps(self) -> Iterator[Step]:
        """Yield the instructions of each step."""
        for step in range(self.micro_batches):
            found: Step = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            yield [*found, ReduceGrads(), OptimizerStep()] if step == self.micro_batches - 1 else found

    def num_pipe_buffers(self) -> int:
        """Return 1."""
        return 1


class DualPipeVSchedule(PipeSchedule):
    """DeepSeek's DualPipeV: a rank holds stages s and 2 * stages - 1 - s, phases 0 and 1; the first has the loss.

    A buffer is phase * micro_batches + micro-batch.  Backwards are not split, so the steps that would run gradients
    of weights only commit messages.

    Raises ValueError for fewer micro-batches than 2 * stages.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, forward_only: bool = False) -> None:
        super().__init__(micro_batches, stages, stage_id)
        if micro_batches < 2 * stages:
            raise ValueError(
                f"DualPipeV of {stages} stages needs {2 * stages} micro-batches or more, got {micro_batches}"
            )
        self.forward_only = forward_only

    def num_pipe_buffers(self) -> int:
        """Return one for each phase and micro-batch."""
        return 2 * self.micro_batches

    def steps(self) -> Iterator[Step]:
        """Yield the instructions of each step."""
        self._counts: Counter[tuple[type[PipeInstruction], int]] = Counter()
        before, after = self.stages - self.stage_id - 1, self.stage_id + 1  # ranks behind this one, and up to it
        for _ in range(2 * before):
            yield self._forward(0)
        yield self._message(RecvActivation, 0)
        for index in range(after):
            step = [CommitP2P(), *self._run(ForwardPass, 0), *self._message(RecvActivation, 0)]
            step += self._forward(1, sends=not self.is_last_stage or index < after - 1)
            yield [*step, *self._message(SendActivation, 0)]
        for _ in range(before):
            step = [*self._backward(1), *self._message(RecvActivation, 1), *self._weights()]
            yield [*step, CommitP2P(), *self._run(ForwardPass, 1), *self._message(SendActivation, 1)]
        for index in range(self.micro_batches - 2 * self.stages + after):
            yield [*self._first_both(is_first=index == 0), *self._both(1)]
        for _ in range(before):
            yield [*self._backward(1), *self._both(1)]
        for _ in range(after):
            yield [*self._backward(1), *self._backward(0)]
        for _ in range(before):
            yield [*self._weights(), *self._backward(0)]
        for _ in range(after):
            yield self._weights()
        yield [CommitP2P(), *([] if self.forward_only else [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()])]

    def _run(self, kind: type[BufferOpInstruction], phase: int) -> Step:
        """Return an instruction for the next buffer of a phase; inputs are loaded before their first forward."""
        if self.forward_only and kind in (BackwardPass, SendGrad, RecvGrad):
            return []
        buffer = phase * self.micro_batches + self._counts[kind, phase]
        self._counts[kind, phase] += 1
        is_input = kind is ForwardPass and self.is_first_stage and phase == 0
        return [*([LoadMicroBatch(buffer)] if is_input else []), kind(buffer, phase=phase)]

    def _message(self, kind: type[BufferOpInstruction], phase: int) -> Step:
        """Return a message, unless the phase begins or ends on this rank at that side."""
        is_upward = kind in (RecvActivation, SendGrad)  # to or from the stage before
        ends = (self.is_first_stage, self.is_last_stage)
        return [] if ends[phase if is_upward else 1 - phase] else self._run(kind, phase)

    def _forward(self, phase: int, *, sends: bool = True) -> Step:
        step = [*self._message(RecvActivation, phase), CommitP2P(), *self._run(ForwardPass, phase)]
        return [*step, *self._message(SendActivation, phase)] if sends else step

    def _backward(self, phase: int) -> Step:
        step = [*self._message(RecvGrad, phase), CommitP2P(), *self._run(BackwardPass, phase)]
        return [*step, *self._message(SendGrad, phase)]

    def _both(self, phase: int, *, receives: bool = True) -> Step:
        """Return a forward of one phase with a backward of the other."""
        step = self._message(RecvActivation, phase) if receives else []
        step += [*self._message(RecvGrad, 1 - phase), CommitP2P()]
        step += [*self._run(ForwardPass, phase), *self._run(BackwardPass, 1 - phase)]
        return [*step, *self._message(SendActivation, phase), *self._message(SendGrad, 1 - phase)]

    def _first_both(self, *, is_first: bool) -> Step:
        """Return `_both(0)`; the first one has received already, and on the last rank it turns around."""
        if not is_first or not self.is_last_stage:
            return self._both(0, receives=not is_first)
        step = [CommitP2P(), *self._run(ForwardPass, 0), *self._message(SendActivation, 1)]
        step += [*self._message(RecvGrad, 1), CommitP2P(), *self._run(BackwardPass, 1)]
        return [*step, *self._message(SendActivation, 0), *self._message(SendGrad, 1)]

    def _weights(self) -> Step:
        return [] if self.forward_only else [CommitP2P()]
