"""The one entry: ``python -m experiments.run policy=tova budget=256``; ``-m`` sweeps; ``--help`` lists the choices.

``--plan`` says what would be run, how long it may take and how much memory, and runs nothing.

Exit codes: 0 done, 1 something unforeseen, 2 something asked for cannot be (one sentence says what), 3 cells failed,
130 or 143 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

CONF = Path(__file__).resolve().parent.parent / "conf"


class Terminated(KeyboardInterrupt):
    """SIGTERM, taken like Ctrl-C."""


def main() -> None:
    """Run what the command line asks for."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors reach us instead of Hydra's own printer
    from experiments import options
    from experiments.explain import explain
    from experiments.session import CellsFailedError

    failures: list[Exception] = []

    def terminated(signum: int, frame: Any) -> None:
        raise Terminated

    with_signals = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    # What is ignored stays so: nohup does that to SIGHUP.
    with_signals = [number for number in with_signals if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, terminated) for number in with_signals}
    typed = list(sys.argv)
    try:
        sys.argv[1:] = options.relaxed([word for word in sys.argv[1:] if word != "--plan"])
        _run(failures, plan="--plan" in typed, typed=typed)
        if failures:
            raise failures[0]
    except KeyboardInterrupt as e:
        sys.exit(143 if isinstance(e, Terminated) else 130)
    except CellsFailedError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(3)
    except Exception as e:
        sentence = explain(e)
        if sentence is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(2)
    finally:
        sys.argv[:] = typed
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(failures: list[Exception], *, plan: bool, typed: list[str]) -> None:
    import hydra

    from experiments import sweeper

    sweeper.register(plan=plan, typed=typed)

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def run(config: Any) -> Any:
        from omegaconf import DictConfig

        from experiments import launchers, session

        try:
            if isinstance(config.sweep, DictConfig) and config.sweep.get("worker") is not None:
                return launchers.work(Path(config.results_dir), config.sweep.id, config.sweep.worker)
            return session.run_alone(config, plan=plan, typed=typed)
        except Exception as e:  # an error that reaches Hydra is printed by Hydra, in its own way
            failures.append(e)
            return None

    run()


if __name__ == "__main__":
    main()
