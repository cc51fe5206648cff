"""Compiles the Triton kernels for an H200 (sm_90) where there is none, by running what launches them.

Run by tests/test_gpu.py in a process of its own, since elsewhere the kernels are interpreted (``python -m
support.sm90``). A driver that knows no device stands in and nothing is launched, so decisions are the reference's, and
outputs nonsense.
"""

from __future__ import annotations

import sys
from collections import Counter

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from support.layers import Window, prompt_and_tokens
from support.own import Everything
from support.policies import small
from tova.policies import Policy
from tova.policies.contract import unwatched, watched
from tova.replay import Attention
from tova.scan import Chunk, Decision, Scan, gpu, reference

compiled: Counter[str] = Counter()
launch = JITFunction.run


class NoDevice:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(self, *arguments, grid, warmup, **options):
    kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
    assert kernel.asm["cubin"]
    compiled[self.__name__] += 1


def decide(policy: Policy, chunk: Chunk) -> Decision:
    """Every kernel of a scan compiled, and the reference's decision."""
    policy = unwatched(policy)
    gpu._Steps(policy, chunk).go(chunk.logits, given=False)
    rounds = gpu.KernelRounds(policy, chunk)
    rounds.compute_rows(torch.zeros_like(chunk.slots.positions), 0)
    if isinstance(policy, Everything):
        gpu._Steps(watched(policy), chunk).go(chunk.logits, given=False)
        rounds.choose_from_rows(0)
    return reference.decide(policy, chunk.scaled())


def main() -> None:
    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    plain = Attention(0.25)
    full = Attention(0.25, 2.0, torch.tensor([0.5, -1.0, 0.0, 2.0]))
    scan = Scan("gpu", decide, reads_products=True)
    own = Everything(budget=12)
    for policy, attention, more in (
        (small("tova"), plain, {}),
        (small("snapkv"), plain, {}),
        (own, full, dict(padding=[0, 5], visibility=Window(9), width=24, evict_every=2)),
    ):
        if len(sys.argv) > 1 and policy.name not in sys.argv[1:]:
            continue
        before = compiled.copy()
        tokens = 18 if policy is own else 17  # the first token of one's own is watched, in plain torch
        prompt_and_tokens(policy, scan, prompt=16, tokens=tokens, how=attention, **more)
        print(policy.name, dict(compiled - before))


if __name__ == "__main__":
    main()
