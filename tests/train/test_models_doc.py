"""docs/models.md: the model that it begins with trains, on any mesh; what it quotes of GPT-2 is there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from simulated import xla_flags

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()
MINE, *QUOTED = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
(SIZES,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.S)


@pytest.mark.quick
@pytest.mark.parametrize("number", range(len(QUOTED)))
def test_what_it_quotes_is_there(number):
    assert QUOTED[number] in (ROOT / "gpt2.py").read_text()


@pytest.mark.quick
def test_it_begins_with_a_model_of_forty_lines():
    assert len([line for line in MINE.splitlines() if line.strip()]) <= 45
    for word in ("scan", "checkpoint", "unroll", "cache", "padd"):
        assert word not in MINE
    assert len(QUOTED) >= 4


def losses(directory: Path, *overrides: str) -> list[float]:
    """Losses of three steps of the page's model, by its own command, on eight simulated devices."""
    (directory / "model").mkdir(exist_ok=True)
    (directory / "mine.py").write_text(MINE)
    (directory / "model" / "mine.yaml").write_text(SIZES)
    settings = [f"--config-dir={directory}", "--config-name=local_test_synthetic", "model=mine", "model.vocab=1280"]
    settings += ["training.steps=3", "training.eval_batches=0", "training.batch_size=8", "training.seq_len=32"]
    settings += [f"paths.root_working_dir={directory}", "hardware.compilation_cache=null", *overrides]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(8),
        "PATH": "",
    }
    command = [sys.executable, "-m", "train", *settings]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = (path for path in directory.iterdir() if path.name.startswith("local_test_synthetic"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "event" not in line]


@pytest.mark.slow
def test_its_model_is_the_same_on_a_mesh_and_as_a_pipeline(tmp_path):
    found = []
    stages = ["mesh.p=2", "training.microbatches=2", "pipeline.layers_per_stage=[1,3]", "training.gather_weights=step"]
    for i, overrides in enumerate((["mesh.d=1", "mesh.t=8"], [*stages, "mesh.t=2"])):
        (tmp_path / str(i)).mkdir()
        found.append(losses(tmp_path / str(i), *overrides))
    assert len(found[0]) == 3
    np.testing.assert_allclose(found[1], found[0], rtol=2e-6)  # f32: sums in another order
