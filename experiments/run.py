"""The one entry: ``python -m experiments.run policy=tova budget=256``; ``-m`` sweeps; ``--help`` lists the choices.

Exit codes: 0 done, 1 a cell failed, 2 something asked for cannot be (one sentence says what), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

CONF = Path(__file__).resolve().parent.parent / "conf"


def main() -> None:
    """Run what the command line asks for."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors reach us instead of Hydra's own printer
    import hydra

    from experiments import sweeper

    sweeper.register()

    from experiments.explain import explain
    from experiments.session import CellsFailedError, Failed

    failures: list[Failed] = []

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def run(config: Any) -> Any:
        from experiments.session import run_cell

        try:
            return run_cell(config)
        except Exception as e:  # an error that reaches Hydra is printed by Hydra, in its own way
            failures.append(Failed(e))
            return failures[-1]

    try:
        run()
        if len(failures) == 1:
            raise failures[0].error
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        sys.exit(130)
    except CellsFailedError as e:
        print(f"error: {e}; the same command tries them again", file=sys.stderr)
        sys.exit(1)
    except Exception as e:
        sentence = explain(e)
        if sentence is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
