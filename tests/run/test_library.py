"""The example of docs/library.md runs as it is printed there, without Hydra being imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_library_example_trains_without_hydra(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    assert "max_epochs=20" in code
    assert "steps=250" in code
    assert "Sort()" in code
    quick = code.replace("max_epochs=20", "max_epochs=1, num_threads=1").replace("steps=250", "steps=3")
    quick = quick.replace("Sort()", "Sort(train_size=64, test_size=16)")
    script = tmp_path / "sort.py"
    script.write_text(quick + "\nimport sys\nassert 'hydra' not in sys.modules\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warm start: 3 steps" in done.stdout
    assert "1 iterations, 4 optimizer steps" in done.stdout
    assert "run finished outputs/library" in done.stdout
