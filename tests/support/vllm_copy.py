"""A copy of the installed vLLM's touched sources, to be edited as a release would."""

from __future__ import annotations

import zipfile
from pathlib import Path

import vllm

from vllm_trie.compat.fingerprint import touched_parts
from vllm_trie.compat.sources import minor_vllm_version

INSTALLED = Path(vllm.__file__).parent.parent


class VllmCopy:
    """The sources, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        here = [
            piece.target
            for piece in touched_parts().values()
            if piece.only_in in ("", minor_vllm_version(vllm.__version__))
        ]
        for module in {"vllm._version", *(target.split(":")[0] for target in here)}:
            name = self.file(module).relative_to(folder)
            self.file(module).parent.mkdir(parents=True, exist_ok=True)
            self.file(module).write_text((INSTALLED / name).read_text())

    def file(self, module: str) -> Path:
        path = Path(*module.split("."))
        is_package = (INSTALLED / path).is_dir()
        return self.folder / (path / "__init__.py" if is_package else path.with_suffix(".py"))

    def edit(self, module: str, old: str, new: str) -> None:
        """Replace `old`, which must be there."""
        source = self.file(module).read_text()
        assert old in source, f"{module} has no {old!r}"
        self.file(module).write_text(source.replace(old, new))

    def wheel(self, path: Path) -> Path:
        """As a wheel holds them."""
        with zipfile.ZipFile(path, "w") as wheel:
            for file in sorted(self.folder.rglob("*.py")):
                wheel.write(file, file.relative_to(self.folder))
        return path
