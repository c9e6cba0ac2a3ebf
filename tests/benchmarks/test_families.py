"""``benchmarks/families.py``: a few families again, and a table in the docs that leaves none out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import families
import pytest
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# One of each kind: plain, transposed matrices, fused experts, latent attention, sizes that differ between layers, layers
# before the head, layers with a state, one sample per row; and of each reason to refuse one.
PACKED = ("llama", "gpt2", "mixtral", "deepseek_v3", "gemma4_text", "modernbert-decoder", "hyperclovax", "qwen3_next")
ALONE = ("mamba", "falcon", "nemotron")
EXACT = (*PACKED, *ALONE)
REFUSED = ("bert", "electra", "dory", "emu3", "phimoe")
ROUNDING = 2e-6  # nats: matrices read from another address may be multiplied in another order
PAGE = Path(families.__file__).parents[1] / "docs" / "models.md"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"

pytestmark = pytest.mark.filterwarnings("ignore")


def listed() -> dict[str, str]:
    """Family -> exact, refused or not tried, as the docs have it."""
    _, _, rest = PAGE.read_text().partition(families.START)
    rows = re.findall(r"^\| ([\w.-]+) \| ([^|]+) \|", rest.partition(families.END)[0], re.MULTILINE)
    return {name: "exact" if what[0].isdecimal() else what for name, what in rows if name not in ("exact", "---")}


@pytest.mark.parametrize("family", [*EXACT, *REFUSED])
def test_the_docs_say_what_comes_out(family):
    found = families.compare_family(family)
    assert found.result == listed()[family] == ("exact" if family in EXACT else "refused")
    assert bool(found.worst) == (family in EXACT)
    assert found.is_alone == (family in ALONE)
    assert found.reason or family in EXACT
    if found.worst:
        assert found.worst["reload"] <= ROUNDING
        assert max(found.worst.values()) < 1e-3


def test_the_docs_leave_no_family_out():
    stated = re.search(r"with transformers ([\d.]+)", PAGE.read_text())
    assert stated is not None
    pinned = re.search(r"^transformers==([\d.]+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert pinned is not None and stated[1] == pinned[1], "a new version is pinned: make the table again"
    if transformers.__version__ != pinned[1]:
        pytest.skip(f"the table is of the pinned transformers {stated[1]}")
    assert set(listed()) == {family for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if family in CONFIG_MAPPING}


def test_a_page_gets_its_table_between_the_markers(monkeypatch, tmp_path, capsys):
    page = tmp_path / "models.md"
    page.write_text(f"before\n{families.START}\nold\n{families.END}\nafter\n")
    monkeypatch.setattr(
        "sys.argv", ["families.py", "qwen3", "bert", "--page", str(page), "--json", str(tmp_path / "found.json")]
    )
    families.main()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "2 families: 1 exact (1 of them with samples laid end to end), 1 refused, 0 not tried" in text
    assert "| bert | refused | BertLMHeadModel cannot be trained: more than a linear layer makes its logits" in text
    assert [row["family"] for row in json.loads((tmp_path / "found.json").read_text())] == ["qwen3", "bert"]
    assert "qwen3" in capsys.readouterr().out
