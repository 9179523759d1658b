"""Print what SGLang answers after its stored KV was damaged or outdated: its own files beside KVBM, as a table.

    python scripts/sglang_table.py                     all ways
    python scripts/sglang_table.py file storage        some

Each row: 6 prompts are stored, something happens while no engine runs, and a new engine is asked all of them three
times, each time with empty pools of its own. Answers are compared with those of an engine that computes everything.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from venvs import ROOT

sys.path.append(str(ROOT / "tests"))

from kvbm.testing.tiny_model import make_model
from rigs.sglang import installation
from rigs.sglang.engine_process import Nursery
from rigs.sglang.keepers import WAYS, keeper
from rigs.sglang.prompts import HIT_TOKENS, PROMPTS
from rigs.sglang.scenarios import SCENARIOS, Outcome, Stage

NAMES = {
    "file": "SGLang's own files",
    "storage": "KVBM, HiCache storage",
    "generic": "KVBM, HiCache storage, generic calls",
    "linker": "KVBM, linker",
}


def cell(outcome: Outcome) -> str:
    """Right answers of all, and the share of tokens that the first round found."""
    share = outcome.found[0] / (PROMPTS * HIT_TOKENS)
    return f"{outcome.asked - outcome.wrong} of {outcome.asked} right, {share:.0%} found"


def main() -> int:
    """Run all scenarios on all ways; 1 when a way of ours gave a wrong answer."""
    if reason := installation.missing():
        raise SystemExit(reason)
    ways = sys.argv[1:] or [*NAMES]
    if unknown := set(ways) - {*NAMES}:
        raise SystemExit(f"unknown: {', '.join(unknown)}; accepted are {', '.join(NAMES)}")
    bad = 0
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        model = make_model(directory / "model", "tiny", "float32")
        nursery = Nursery(directory / "nursery.log")
        reference = Stage(nursery, model, directory).reference()
        print("| what happened | " + " | ".join(NAMES[way] for way in ways) + " |")
        print("| --- " * (len(ways) + 1) + "|")
        for number, (name, scenario) in enumerate(SCENARIOS.items()):
            cells = []
            for way in ways:
                place = directory / f"{way}-{number}"
                kept = keeper(way, place)
                try:
                    outcome = scenario(Stage(nursery, model, place), kept, reference)
                finally:
                    kept.close()
                bad += outcome.wrong if way in WAYS else 0
                cells.append(cell(outcome))
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        nursery.close()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
