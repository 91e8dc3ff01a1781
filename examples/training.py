"""The training loop: iterations, evaluations, checkpoints, and when to stop."""

from __future__ import annotations

import contextlib
import time
from argparse import Namespace
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import arguments
import byte_text
import checkpoints
import gpt_model
import log_lines
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func


def run(args: Namespace, device: torch.device) -> None:
    """Train from the latest checkpoint below `--load`, or from the start, until it is over."""
    text = byte_text.read(args.data_path[0] if args.data_path else None)
    _say_text(args, text, device)
    train, valid = byte_text.split(text, args.split)
    training = byte_text.Samples(text=train, seq_length=args.seq_length, seed=args.seed)
    validation = (
        byte_text.Samples(text=valid, seq_length=args.seq_length, seed=args.seed) if args.eval_interval else None
    )
    trainee = gpt_model.build(args, device)
    iteration = checkpoints.load(args, trainee) if args.load else 0
    Run(args, device, trainee, training, validation, iteration).go()


class Run:
    """One training in progress."""

    def __init__(
        self,
        args: Namespace,
        device: torch.device,
        trainee: gpt_model.Trainee,
        training: byte_text.Samples,
        validation: byte_text.Samples | None,
        iteration: int,
    ) -> None:
        self.args = args
        self.device = device
        self.trainee = trainee
        self.training = training
        self.validation = validation
        self.iteration = self.first = iteration
        self.forward_backward = get_forward_backward_func()
        self.hooks = ParameterHooks(args, trainee)
        self.began_s = self._now_s()
        self.tally = log_lines.Tally(self.began_s)

    def go(self) -> None:
        """Iterate to the last iteration or an earlier exit, then evaluate and save what there is."""
        reason = ""
        while self.iteration < self.args.train_iters and not reason:
            self._iterate()
            reason = self._reason_to_stop()
            is_over = bool(reason) or self.iteration == self.args.train_iters
            evaluates = self._is_due(self.args.eval_interval) or (self.validation and is_over)
            saves = self.args.save and (self._is_due(self.args.save_interval) or is_over)
            if evaluates or saves:
                # Entering this block gathers all parameters, so it is entered only when needed.
                with self._aside():
                    if evaluates:
                        self._evaluate()
                    if saves:
                        checkpoints.save(self.args, self.trainee, self.iteration)
        if reason and self.args.rank == 0:
            print(f"exiting program {reason}", flush=True)

    def _iterate(self) -> None:
        loss, grad_norm, updated = self._step()
        self.iteration += 1
        if updated:
            self.hooks.start()
        self.tally.add(loss, skipped=not updated)
        # The first line shows that training has begun, and keeps the slow first iteration out of the next mean.
        if self._is_due(self.args.log_interval) or self.iteration == self.first + 1:
            self._log(grad_norm)

    def _step(self) -> tuple[float, float | None, bool]:
        """Train on one global batch; say its loss (0 before the last stage), its gradient norm, and if it counted."""
        trainee = self.trainee
        for chunk in trainee.chunks:
            chunk.zero_grad_buffer()
        trainee.optimizer.zero_grad()
        loss = self._pass(self.training, self.iteration * self.args.global_batch_size, forward_only=False)
        updated, grad_norm, _ = trainee.optimizer.step()
        if updated:
            trainee.scheduler.step(increment=self.args.global_batch_size)
        return loss, grad_norm, updated

    def _pass(self, samples: byte_text.Samples, first_sample: int, *, forward_only: bool) -> float:
        """Send one global batch through the pipeline; its mean loss on the last stage, 0 elsewhere."""
        batches = [self._batches(samples, first_sample) for _ in self.trainee.chunks]
        reports = self.forward_backward(
            forward_step_func=self._forward,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.trainee.chunks if len(batches) > 1 else self.trainee.chunks[0],
            num_microbatches=self.args.num_microbatches,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            forward_only=forward_only,
        )
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return 0.0
        loss_and_tokens = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
        torch.distributed.all_reduce(
            loss_and_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        loss, tokens = loss_and_tokens.tolist()
        return float(loss / tokens)

    def _batches(self, samples: byte_text.Samples, first_sample: int) -> Iterator[torch.Tensor]:
        """Cut this rank's micro-batches from the global batch at `first_sample`, in Megatron-LM's order."""
        size = self.args.micro_batch_size
        dp_rank = parallel_state.get_data_parallel_rank()
        for index in range(self.args.num_microbatches):
            start = first_sample + (index * self.args.data_parallel_size + dp_rank) * size
            yield torch.from_numpy(samples.batch(start, size)).to(self.device)

    def _forward(self, batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
        window = next(batches)
        positions = torch.arange(self.args.seq_length, device=self.device).repeat(len(window), 1)
        # Without a mask megatron-core's attention is causal.
        output = model(_own(window[:, :-1]), _own(positions), None, labels=_own(window[:, 1:]))
        return output, self._loss

    def _loss(self, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total = losses.float().sum()
        tokens = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
        if self.args.check_for_nan_in_loss_and_grad and not self.args.fp16 and not torch.isfinite(total):
            raise FloatingPointError(f"the loss of a micro-batch of iteration {self.iteration + 1} is {total.item()}")
        # The report is summed in double, so that it does not depend on how the batch was cut.
        report = torch.stack([losses.detach().double().sum(), tokens.double()])
        return total, tokens, {"lm loss": report}

    def _evaluate(self) -> None:
        """Print the mean loss over the first `--eval-iters` batches of the validation text."""
        assert self.validation is not None
        for chunk in self.trainee.chunks:
            chunk.eval()
        with torch.no_grad():
            starts = range(0, self.args.eval_iters * self.args.global_batch_size, self.args.global_batch_size)
            losses = [self._pass(self.validation, start, forward_only=True) for start in starts]
        for chunk in self.trainee.chunks:
            chunk.train()
        self._print_last(log_lines.validation(f"iteration {self.iteration}", sum(losses) / len(losses)))

    def _log(self, grad_norm: float | None) -> None:
        args, now_s = self.args, self._now_s()
        step_time_s = self.tally.step_time_s(now_s)
        flops = arguments.step_flops(args) / args.world_size / step_time_s
        line = log_lines.Iteration(
            iteration=self.iteration,
            train_iters=args.train_iters,
            consumed_samples=self.iteration * args.global_batch_size,
            step_time_s=step_time_s,
            tflops_per_device=flops / 1e12 if args.log_throughput else None,
            learning_rate=max(group["lr"] for group in self.trainee.optimizer.param_groups),
            global_batch_size=args.global_batch_size,
            loss=self.tally.loss,
            loss_scale=self.trainee.optimizer.get_loss_scale().item(),
            grad_norm=grad_norm,
            num_skipped=self.tally.num_skipped,
            num_nan=self.tally.num_nan,
        )
        self._print_last(line.line(datetime.now().astimezone()))
        is_early = self.iteration <= self.first + max(2, args.log_interval)
        if self.device.type == "cuda" and is_early and parallel_state.get_data_parallel_rank() == 0:
            print(log_lines.memory(args.rank, self.iteration, torch.cuda.memory_stats()), flush=True)
        self.tally = log_lines.Tally(now_s)

    def _reason_to_stop(self) -> str:
        """Decide together, as clocks differ: every rank stops after the same iteration."""
        if self._is_due(self.args.exit_interval):
            return f"at iteration {self.iteration}"
        if self.args.exit_duration_in_mins:
            minutes = torch.tensor((self._now_s() - self.began_s) / 60, device=self.device)
            torch.distributed.all_reduce(minutes, op=torch.distributed.ReduceOp.MAX)
            if minutes.item() > self.args.exit_duration_in_mins:
                return f"after {minutes.item():.1f} minutes"
        return ""

    def _is_due(self, interval: int | None) -> bool:
        return bool(interval) and self.iteration % interval == 0  # type: ignore[operator]

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Keep what happens between iterations out of the step time."""
        started_s = self._now_s()
        with self.hooks.off():
            yield
        self.tally.pause(self._now_s() - started_s)

    def _now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _print_last(self, text: str) -> None:
        if self.args.rank == self.args.world_size - 1:
            print(text, flush=True)


class ParameterHooks:
    """Gathers parameters during the forward pass (`--overlap-param-gather`), once there is something to gather."""

    def __init__(self, args: Namespace, trainee: gpt_model.Trainee) -> None:
        self._trainee = trainee
        # Megatron-FSDP gathers in hooks of its own.
        self._wanted = bool(args.overlap_param_gather) and not args.use_megatron_fsdp
        self._active = False
        self._param_sync_func = trainee.config.param_sync_func
        if self._wanted:
            # The first pass uses the weights as initialised or loaded: nothing to gather yet.
            trainee.config.param_sync_func = None
            for chunk in trainee.chunks:
                chunk.disable_forward_pre_hook(param_sync=False)

    def start(self) -> None:
        """Gather from now on; does nothing the second time."""
        if self._wanted and not self._active:
            self._active = True
            self._trainee.config.param_sync_func = self._param_sync_func
            for chunk in self._trainee.chunks:
                chunk.enable_forward_pre_hook()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Have all parameters gathered, and gather nothing meanwhile."""
        if not self._active:
            yield
            return
        for chunk in self._trainee.chunks:
            chunk.disable_forward_pre_hook()
        yield
        for chunk in self._trainee.chunks:
            chunk.enable_forward_pre_hook()


def _own(samples: torch.Tensor) -> torch.Tensor:
    """Cut this rank's part of (samples, sequence): an early and a late chunk, so that ranks attend to equally much."""
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    chunks = samples.chunk(2 * size, dim=1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim=1)


def _say_text(args: Namespace, text: byte_text.Bytes, device: torch.device) -> None:
    """Name the text, after making sure that all ranks have read the same."""
    checksum = byte_text.checksum(text)
    ends = torch.tensor([checksum, -checksum], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MAX)
    if ends.tolist() != [checksum, -checksum]:
        raise ValueError("the ranks have read different texts; give every host the same file as --data-path")
    if args.rank == 0:
        source = args.data_path[0] if args.data_path else "Python's standard library, as no --data-path was given"
        print(f" > text: {len(text)} bytes of {source}, checksum {checksum:08x}", flush=True)
